"""The words for faults, and what they do to routing and buffers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import EPArgumentError
from deep_ep.base.topology import Topology
from deep_ep.testing import faults
from deep_ep.testing.faults import (
    ClockFault,
    Fault,
    HotRank,
    SlowNic,
    SlowPath,
    SlowRank,
    SlowReceiver,
)
from support.hot_routing import skew_routing


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow-rank=3:2ms", SlowRank(3, 2e-3)),
        ("slow-rank=0:1.5us", SlowRank(0, 1.5e-6)),
        (" slow-rank=12:.5s ", SlowRank(12, 0.5)),
        ("slow-path=2>5:1ms", SlowPath(2, 5, 1e-3)),
        ("slow-path=2>5:1ms,10GB/s", SlowPath(2, 5, 1e-3, 10e9)),
        ("slow-path=2>5:250MB/s", SlowPath(2, 5, 0.0, 250e6)),
        ("slow-nic=2:1ms", SlowNic(2, 1e-3)),
        ("slow-nic=2:1ms,10GB/s", SlowNic(2, 1e-3, 10e9)),
        ("slow-receiver=4:1ms", SlowReceiver(4, 1e-3)),
        ("hot-rank=6", HotRank(6, 4.0)),
        ("hot-rank=6:2.5x", HotRank(6, 2.5)),
        ("clock=3:1.5s,20ppm", ClockFault(3, 1.5, 20.0)),
        ("clock=3:-20us,-5ppm", ClockFault(3, -20e-6, -5.0)),
        ("clock=3:1ms", ClockFault(3, 1e-3, 0.0)),
        ("slow-rank=3:0.9ms", SlowRank(3, 0.0009)),  # 0.9 * 1e-3 is another number
        ("clock=3:0s,1e-13ppm", ClockFault(3, 0.0, 1e-13)),
        ("slow-path=2>5:1e-13B/s", SlowPath(2, 5, 0.0, 1e-13)),
        ("hot-rank=6:1.0000000000001x", HotRank(6, 1.0000000000001)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert faults.parse(text) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow=3:2ms", "'slow=3:2ms' is not a fault; the faults are slow-rank="),
        ("", "is not a fault"),
        ("slow-rank", "is not a fault"),
        ("slow-rank=3", "the form is slow-rank=RANK:TIME"),
        ("slow-rank=3:2", "times in us, ms or s"),
        ("slow-rank=-1:2ms", "cannot be read"),
        ("slow-rank=3:-2ms", "a delay cannot be negative"),
        ("slow-rank=3:1e400s", "a time must be below 1e[+]09 s"),
        ("clock=3:-1e10s", "a time must be below 1e[+]09 s"),
        pytest.param(f"slow-rank={'9' * 5000}:2ms", "cannot be read", id="a rank of many digits"),
        ("slow-path=2:1ms", r"the form is slow-path=SRC>DST:TIME\[,RATE\]"),
        ("slow-path=2>5:", "cannot be read"),
        ("slow-path=2>5:1ms,", "cannot be read"),
        ("slow-path=2>5:1ms10GB/s", "cannot be read"),
        ("slow-path=2>5:,10GB/s", "cannot be read"),
        ("slow-path=2>5:0GB/s", "a throttle must be above 0"),
        ("slow-nic=2", r"the form is slow-nic=RANK:TIME\[,RATE\]"),
        ("slow-nic=2>5:1ms", "the form is slow-nic="),
        ("slow-receiver=4", "the form is slow-receiver=RANK:TIME"),
        ("hot-rank=6:4", "the form is hot-rank="),
        ("slow-nic=2:1e400GB/s", "a number that is too large"),
        ("hot-rank=6:1e400x", "a number that is too large"),
        ("clock=3:1s,-1e400ppm", "a number that is too large"),
        ("hot-rank=6:0.5x", "a hot rank has more than 1"),
        ("clock=3:20ppm", "the form is clock="),
        ("slow-rank=\N{ARABIC-INDIC DIGIT THREE}:2ms", "cannot be read"),
        ("slow-rank=3:\N{FULLWIDTH DIGIT TWO}ms", "cannot be read"),
    ],
)
def test_what_is_no_fault_is_refused_with_advice(text: str, message: str) -> None:
    with pytest.raises(EPArgumentError, match=message):
        faults.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "slow-rank=8:1ms",
        "slow-path=1>8:1ms",
        "slow-nic=8:1s",
        "slow-receiver=8:1s",
        "hot-rank=9",
        "clock=8:1s",
    ],
)
def test_ranks_outside_of_the_group_are_refused(text: str) -> None:
    fault = faults.parse(text)
    with pytest.raises(EPArgumentError, match="ranks of this group are 0 to 7"):
        faults.validate(fault, num_ranks=8)


def test_a_path_to_itself_is_refused() -> None:
    with pytest.raises(EPArgumentError, match="source and destination must differ"):
        faults.validate(SlowPath(2, 2, 1e-3), num_ranks=8)


def test_a_list_is_split_at_faults_not_at_their_dials() -> None:
    text = "slow-rank=3:2ms,slow-path=2>5:1ms,10GB/s; hot-rank=6 clock=1:1s,20ppm,"
    assert faults.parse_list(text) == [
        SlowRank(3, 2e-3),
        SlowPath(2, 5, 1e-3, 10e9),
        HotRank(6),
        ClockFault(1, 1.0, 20.0),
    ]
    assert faults.parse_list("  ") == []


@pytest.mark.parametrize(
    "fault",
    [
        SlowRank(3, 2e-3),
        SlowPath(2, 5, 1e-6),
        SlowPath(2, 5, 1e-3, 10e9),
        SlowPath(2, 5, 0.0, 5e8),
        SlowNic(1, 2e-3, 1e9),
        SlowReceiver(4, 1e-3),
        HotRank(6, 2.5),
        ClockFault(1, -1.5, 20.0),
        *faults.parse_list(
            "slow-rank=3:1.2345678ms slow-rank=3:999.123456789ms slow-path=2>5:1e-13B/s hot-rank=6:1.0000000000001x "
            "slow-nic=1:0.123456us,1.2345678901234567GB/s clock=3:123456789.12345678s,20.123456789ppm"
        ),
    ],
)
def test_a_fault_prints_as_it_is_written(fault: Fault) -> None:
    assert faults.parse(str(fault)) == fault


def test_expected_verdicts() -> None:
    injected = faults.parse_list(
        "slow-rank=3:2ms slow-path=2>5:1ms hot-rank=6 slow-rank=6:1ms clock=1:1s slow-nic=0:1ms slow-receiver=7:1ms"
    )
    assert faults.expected_verdicts(injected) == {
        ("comp-slow", 3),
        ("comm-slow", (2, 5)),
        ("mixed-slow", 6),
        ("comm-slow", 0),
        ("mixed-slow", 7),
    }
    assert faults.expected_verdicts([]) == set()


@given(
    num_ranks=st.integers(1, 9),
    num_local=st.integers(1, 9),
    num_topk=st.integers(1, 9),
    num_tokens=st.integers(0, 40),
    share=st.floats(1.01, 20.0),
    seed=st.integers(0, 2**31),
)
def test_skewed_rows_keep_distinct_experts(
    num_ranks: int, num_local: int, num_topk: int, num_tokens: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts = num_ranks * num_local
    num_topk = min(num_topk, num_experts)
    scores = torch.rand((num_tokens, num_experts), generator=generator)
    topk_idx = scores.topk(num_topk, dim=1).indices
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
    fault = HotRank(seed % num_ranks, share)
    skewed = skew_routing(topk_idx, fault, num_experts, num_ranks, generator)

    assert skewed.dtype == topk_idx.dtype
    assert torch.equal(skewed == -1, topk_idx == -1)
    assert not (skewed >= num_experts).any()
    first = fault.rank * num_local
    for before, after in zip(topk_idx.tolist(), skewed.tolist()):
        chosen = [expert for expert in after if expert >= 0]
        assert len(set(chosen)) == len(chosen)
        hot = [expert for expert in chosen if first <= expert < first + num_local]
        already = [expert for expert in before if first <= expert < first + num_local]
        assert set(already) <= set(hot)
        attainable = min(num_local, len(chosen))
        assert len(hot) >= min(int(share * len(chosen) / num_ranks), attainable)


def test_the_hot_rank_gets_its_share() -> None:
    generator = torch.Generator().manual_seed(1)
    topk_idx = torch.rand((4000, 256), generator=generator).topk(6, dim=1).indices
    skewed = skew_routing(topk_idx, HotRank(5, 3.0), 256, 8, generator)
    per_rank = torch.bincount(skewed.flatten() // 32, minlength=8) / skewed.numel()
    assert per_rank[5].item() == pytest.approx(3 / 8, rel=0.03)
    others = [share for rank, share in enumerate(per_rank.tolist()) if rank != 5]
    assert others == pytest.approx([(1 - 3 / 8) / 7] * 7, rel=0.1)


def test_the_input_of_skew_routing_is_kept() -> None:
    topk_idx = torch.arange(16).reshape(2, 8)
    skew_routing(topk_idx, HotRank(1), 16, 2)
    assert torch.equal(topk_idx, torch.arange(16).reshape(2, 8))


class RecordingBuffer:
    """What `apply` needs of a Buffer; writes down what it is told."""

    def __init__(self, rank: int, ranks_per_node: int = 2) -> None:
        self.rank = rank
        self.group_size = 4
        self.topology = Topology(rank, 4, ranks_per_node)
        self.runtime = self
        self.calls: list[tuple[str, Any]] = []
        self.communicator = SimpleNamespace(before_operation=[])

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((name, args or kwargs))


INJECTED = [
    SlowRank(0, 2e-3),
    SlowPath(1, 2, 1e-3, 1e9),
    ClockFault(2, 1.5, 20.0),
    HotRank(3),
    SlowReceiver(3, 1e-3),
    SlowNic(3, 2e-3),
]
NIC_OF_3: tuple[str, Any] = (
    "set_path_fault",
    {"dst": 3, "delay_ns": 2_000_000, "bytes_per_s": 0.0},
)


@pytest.mark.parametrize(
    ("rank", "calls"),
    [
        (0, [NIC_OF_3, ("measure_clock_offsets", {}), ("delay", (2_000_000,))]),
        (
            1,
            [
                ("set_path_fault", {"dst": 2, "delay_ns": 1_000_000, "bytes_per_s": 1e9}),
                NIC_OF_3,
                ("measure_clock_offsets", {}),
            ],
        ),
        (
            2,
            [
                ("set_clock_fault", {"offset_ns": 1_500_000_000, "drift_ppm": 20.0}),
                ("measure_clock_offsets", {}),
            ],
        ),
        (
            3,
            [
                ("set_receive_fault", {"delay_ns": 1_000_000}),
                *(
                    ("set_path_fault", {"dst": dst, "delay_ns": 2_000_000, "bytes_per_s": 0.0})
                    for dst in (0, 1)
                ),
                ("measure_clock_offsets", {}),
            ],
        ),
    ],
)
def test_each_rank_takes_the_faults_that_concern_it(
    rank: int, calls: list[tuple[str, Any]]
) -> None:
    buffer = RecordingBuffer(rank)
    faults.apply(buffer, INJECTED)
    for before in buffer.communicator.before_operation:
        before("low_latency_dispatch")
    assert buffer.calls == calls


def test_a_nic_is_no_fault_of_a_single_node() -> None:
    with pytest.raises(EPArgumentError, match="all ranks of this group are on one node"):
        faults.apply(RecordingBuffer(0, ranks_per_node=4), [SlowNic(1, 1e-3)])


def test_faults_of_one_path_add_up() -> None:
    buffer = RecordingBuffer(0)
    remove = faults.apply(
        buffer, [SlowPath(0, 2, 5e-3, 2e9), SlowNic(0, 1e-3, 1e9), SlowNic(2, 0.0, 3e9)]
    )
    assert buffer.calls == [
        ("set_path_fault", {"dst": 2, "delay_ns": 6_000_000, "bytes_per_s": 1e9}),
        ("set_path_fault", {"dst": 3, "delay_ns": 1_000_000, "bytes_per_s": 1e9}),
    ]
    buffer.calls.clear()
    remove()
    assert sorted(told["dst"] for _, told in buffer.calls) == [2, 3]
    assert all(told["delay_ns"] == told["bytes_per_s"] == 0 for _, told in buffer.calls)


def test_faults_that_fail_leave_nothing_behind() -> None:
    buffer = RecordingBuffer(0, ranks_per_node=4)
    with pytest.raises(EPArgumentError, match="on one node"):
        faults.apply(buffer, [SlowRank(0, 1e-3), SlowReceiver(0, 1e-3), SlowNic(0, 1e-3)])
    assert buffer.communicator.before_operation == []
    assert buffer.calls == [("set_receive_fault", {"delay_ns": ns}) for ns in (1_000_000, 0)]


def test_faults_are_taken_back() -> None:
    for rank in range(4):
        buffer = RecordingBuffer(rank)
        remove = faults.apply(buffer, INJECTED)
        buffer.calls.clear()
        remove()
        assert buffer.communicator.before_operation == []
        assert buffer.calls[-1] == ("measure_clock_offsets", {})
    with pytest.raises(EPArgumentError, match="names rank 4"):
        faults.apply(RecordingBuffer(0), [SlowRank(4, 1e-3)])
