"""Clock offsets: artificial skew and drift are recovered within the measured round trip."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from launch import Ranks

SECOND_NS = 1_000_000_000
# While a drift acts, the time that calls take besides the delay is not known to better than this.
UNKNOWN_ELAPSED_NS = SECOND_NS // 5

pytestmark = pytest.mark.skipif(
    deep_ep.backend.get().name != "cpu", reason="clocks are bent on the cpu backend only"
)

skews = st.lists(st.integers(-5 * SECOND_NS, 5 * SECOND_NS), min_size=2, max_size=6)


def make_ranks(num_ranks: int) -> Ranks:
    """A small group."""
    return Ranks(num_ranks, num_max_tokens=1, hidden=128, num_experts=num_ranks)


def measured_offsets(ranks: Ranks, samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """offset_ns [rank, other] and round_trip_ns [rank, other] as each rank measures them."""
    results = ranks.run(lambda _, buffer: buffer.measure_clock_offsets(samples=samples))
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])


@given(offsets=skews)
def test_a_skew_of_seconds_is_recovered_within_the_round_trip(offsets: list[int]) -> None:
    with make_ranks(len(offsets)) as ranks:
        ranks.run(
            lambda rank, buffer: buffer.runtime.set_clock_fault(
                offset_ns=offsets[rank], drift_ppm=0.0
            )
        )
        found, round_trips = measured_offsets(ranks)
    skew = torch.tensor(offsets)
    expected = skew[None, :] - skew[:, None]
    assert ((found - expected).abs() <= round_trips).all(), (found - expected, round_trips)
    assert (round_trips < SECOND_NS // 10).all(), "a round trip of that length says nothing"


@given(
    offsets=skews,
    drifts=st.lists(st.sampled_from([-200.0, -20.0, 0.0, 20.0, 200.0]), min_size=6, max_size=6),
)
def test_a_drift_is_followed_by_measuring_again(offsets: list[int], drifts: list[float]) -> None:
    elapsed_ns = 10 * SECOND_NS

    def bend_and_let_time_pass(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.runtime.set_clock_fault(offset_ns=offsets[rank], drift_ppm=drifts[rank])
        buffer.runtime.delay(elapsed_ns)

    with make_ranks(len(offsets)) as ranks:
        ranks.run(bend_and_let_time_pass)
        found, round_trips = measured_offsets(ranks)
    gained = [o + round(d * 1e-6 * elapsed_ns) for o, d in zip(offsets, drifts)]
    clock = torch.tensor(gained)
    unknown = 2 * max(abs(d) for d in drifts) * 1e-6 * UNKNOWN_ELAPSED_NS
    error = (found - (clock[None, :] - clock[:, None])).abs()
    assert (error <= round_trips + unknown).all(), (error, round_trips, unknown)


def test_both_sides_of_a_pair_agree() -> None:
    with make_ranks(4) as ranks:
        found, round_trips = measured_offsets(ranks)
    assert ((found + found.T).abs() <= round_trips + round_trips.T).all()
    assert (found.diagonal() == 0).all()
    assert (round_trips.diagonal() == 0).all()


def test_offsets_are_measured_with_the_buffer() -> None:
    """A buffer can count at once: nobody has to measure clocks first."""
    with make_ranks(3) as ranks:
        found, round_trips = measured_offsets(ranks, samples=1)
    assert (round_trips + torch.eye(3, dtype=torch.int64) > 0).all()
    assert (found.abs() <= SECOND_NS).all()


def test_the_machines_own_clock_shows_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """In wall mode all ranks read one clock, so every offset found is error."""
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")
    with make_ranks(3) as ranks:
        found, round_trips = measured_offsets(ranks)
        assert (found.abs() <= round_trips).all()
        ranks.run(
            lambda rank, buffer: buffer.runtime.set_clock_fault(
                offset_ns=rank * 2 * SECOND_NS, drift_ppm=0.0
            )
        )
        found, round_trips = measured_offsets(ranks)
    skew = torch.arange(3) * 2 * SECOND_NS
    assert ((found - (skew[None, :] - skew[:, None])).abs() <= round_trips).all()
