"""Messages between watching ranks: what was sent is read, and no bytes whatever do anything else."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import EPArgumentError, diagnose
from deep_ep.base import codec
from deep_ep.diagnose.collect.rank_summary import summarize
from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.diagnose.live import wire
from deep_ep.diagnose.live.monitor import _Call
from deep_ep.diagnose.live.window_judge import Share, ShareLimits
from fixtures import comparable
from generator import simulate
from generator.machines import GPU

NUM_RANKS = 4
SHARES = [
    Share(summarize(snapshot), (f"rank {rank} is here",))
    for rank, snapshot in enumerate(simulate(GPU, NUM_RANKS, 20, seed=1))
]
MESSAGE = codec.encode(SHARES[2])


def decode(cls: Any, data: bytes, num_ranks: int = NUM_RANKS) -> Any:
    return wire.decode(cls, data, "here", {"num_ranks": num_ranks})


STOPPED = Share(None, ("stopped", "really"))
WITHOUT_RING = Share(summarize(simulate(GPU, NUM_RANKS, 20, seed=1, capacity=0)[0]))
CALLS = [_Call(None, True), _Call(2**40, False)]


@pytest.mark.parametrize("message", [*SHARES, STOPPED, WITHOUT_RING, *CALLS])
def test_a_message_is_read_as_it_was_sent(message: Any) -> None:
    assert comparable(decode(type(message), codec.encode(message))) == comparable(message)


def test_texts_are_made_printable_and_cut() -> None:
    share = Share(None, ("\x1b]0;title\x07 \ud800 \u202e", "x" * 10**6))
    first, second = decode(Share, codec.encode(share)).remarks
    assert first == r"\x1b]0;title\x07 \ud800 \u202e"
    assert second == "x" * 4096


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes is no Share: it is not JSON"),
        (pickle.dumps(SHARES[2]), "it is not JSON .*can't decode"),
        (MESSAGE[:-1], r"kinds.combine.ops has \d+ bytes; expected \d+, for int64 of shape"),
        (MESSAGE + b"\0", r"it has \d+ bytes of arrays; expected \d+"),
        (MESSAGE + bytes(codec.LARGEST_MESSAGE), "expected at most 8388608"),
        (MESSAGE.replace(b'"rank":2', b'"rank":2,"new":0'), "summary.new is no field of Summary"),
    ],
)
def test_what_is_no_share_is_refused_with_what_to_do(data: bytes, said: str) -> None:
    with pytest.raises(EPArgumentError, match=said) as caught:
        decode(Share, data)
    assert str(caught.value).startswith("here: the message of ")
    assert "let nobody else write to the store" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_ranks": 5}, r"wait_parts is \[3, 4\]; expected float64 of shape \[3, 5\]"),
        ({"rank": 2}, "the share is of rank 2 of 4; it must be of rank 1 of 4"),
        # Ranks of a rail are counted by it.
        ({"device_index": -1}, "device_index is -1; expected an integer of at least 0"),
        ({"device_index": 2**56}, "device_index is 72057594037927936; expected"),
    ],
)
def test_a_share_of_another_group_rank_or_device_is_refused(
    changes: dict[str, int], said: str
) -> None:
    summary = replace(SHARES[1].summary, **changes)  # type: ignore[type-var]
    with pytest.raises(EPArgumentError, match=said):
        ShareLimits(SHARES[0]).share_of(1, codec.encode(Share(summary)), "here")


@dataclass(frozen=True)
class Series:
    values: Annotated[FloatArray, ("n", "m")]


def test_an_array_larger_than_its_message_is_refused_before_it_is_allocated() -> None:
    data = codec.encode(Series(np.zeros((1, 1))))
    with pytest.raises(
        EPArgumentError, match=r"values has 8 bytes; expected 147573952520956936200"
    ):
        decode(Series, data.replace(b"[1,1]", b"[4294967295,4294967295]"))
    for shape in (b"[-1,1]", b"[1]", b"1", b"[1.5,1]", b'["x",4]', b"[true,1]"):
        with pytest.raises(
            EPArgumentError, match="values is .*; expected float64 of shape .any, any"
        ):
            decode(Series, data.replace(b"[1,1]", shape))


def test_a_share_of_1024_ranks_with_all_kinds_fits_a_message() -> None:
    """As long as the ring holds no more than a thousand operations."""
    kinds = SHARES[1].summary.kinds["dispatch"]  # type: ignore[union-attr]
    sides = {NUM_RANKS: 1024, kinds.ops.size: 1000}

    def widened(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: widened(item) for name, item in value.items()}
        if isinstance(value, np.ndarray):
            return np.resize(value, [sides.get(side, side) for side in value.shape])
        return value

    wide = replace(
        kinds, **{f.name: widened(getattr(kinds, f.name)) for f in dataclasses.fields(kinds)}
    )
    summary = replace(
        SHARES[1].summary,  # type: ignore[type-var]
        num_ranks=1024,
        kinds=dict.fromkeys((f"kind {i}" for i in range(6)), wide),
    )
    assert len(codec.encode(Share(summary))) < codec.LARGEST_MESSAGE / 4


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_spoilt_messages_are_refused_or_judged(data: st.DataObject) -> None:
    spoilt = bytearray(MESSAGE)
    places = st.integers(0, len(MESSAGE) - 1) | st.integers(0, 400)
    for at in data.draw(st.lists(places, min_size=1, max_size=20)):
        some = data.draw(st.binary(min_size=1, max_size=8))
        spoilt[at : at + len(some)] = some
    limits = ShareLimits(SHARES[0])
    try:
        share = limits.share_of(2, bytes(spoilt), "here")
    except EPArgumentError:
        return
    summaries = [s.summary for s in (SHARES[0], SHARES[1], share) if s.summary is not None]
    diagnose.judge(diagnose.gather(summaries))
