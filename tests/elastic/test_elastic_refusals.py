"""What calls of `ElasticBuffer` refuse: by name, before anything is sent, and so that the next call works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.errors import EPArgumentError, EPTimeoutError, EPUnsupportedError
from support.elastic_exchange import Setup, elastic_ranks
from support.elastic_groups import ONE_NODE, TWO_NODES, SharedGroups, assert_works, good_call
from support.launch import DEVICE, HANG_S

Tensor = torch.Tensor


BAD_DISPATCHES = {
    "more-tokens-than-allowed": ({"num_max_tokens_per_rank": 2}, EPArgumentError, "num_max_tokens_per_rank"),
    "no-experts-said": ({"num_experts": None}, AssertionError, "num_experts"),
    "experts-not-divisible": ({"num_experts": 7}, EPArgumentError, "num_experts"),
    "no-topk": ({"topk_idx": None}, AssertionError, "topk_idx"),
    "expert-out-of-range": ({"topk_idx": torch.full((3, 2), 8)}, EPArgumentError, "topk_idx"),
    "topk-dtype": ({"topk_idx": torch.zeros(3, 2)}, EPArgumentError, "topk_idx"),
    "topk-rows": ({"topk_idx": torch.full((4, 2), -1)}, EPArgumentError, "topk_idx"),
    "weights-shape": ({"topk_weights": torch.ones(3, 3)}, EPArgumentError, "topk_weights"),
    "weights-dtype": ({"topk_weights": torch.ones(3, 2).double()}, EPArgumentError, "topk_weights"),
    "row-bytes": ({"x": torch.ones(3, 4, dtype=torch.bfloat16)}, EPArgumentError, "x"),
    "rows-of-what": ({"x": "rows"}, EPArgumentError, "x"),
    "scales-rows": ({"x": (torch.ones(3, 32).char(), torch.ones(2, 1))}, EPArgumentError, "scales"),
    "alignment": ({"expert_alignment": -1}, EPArgumentError, "expert_alignment"),
    "stats-shape": (
        {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)},
        EPArgumentError,
        "cumulative_local_expert_recv_stats",
    ),
    "padding-of-compact": ({"do_zero_padding": True}, AssertionError, "do_zero_padding"),
    "event-without-stream": ({"previous_event": "captured"}, AssertionError, "allocate_on_comm_stream"),
    "handle-of-what": ({"handle": (1, 2)}, EPArgumentError, "handle"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_a_wrong_dispatch_is_refused_before_anything_is_sent(
    groups: SharedGroups, name: str
) -> None:
    changed, error, word = BAD_DISPATCHES[name]

    def run(rank: int, buffer: Any) -> None:
        call = {**good_call(rank), **{k: moved(v) for k, v in changed.items()}}
        if call.get("previous_event") == "captured":
            call["previous_event"] = buffer.capture()
        with pytest.raises(error, match=word) as raised:
            buffer.dispatch(**call)
        assert isinstance(raised.value, deep_ep.EPError)
        assert_works(buffer)

    groups.run(ONE_NODE, run)


def moved(value: Any) -> Any:
    """On the device under test."""
    if isinstance(value, tuple):
        return tuple(moved(each) for each in value)
    return value.to(DEVICE) if isinstance(value, Tensor) else value


BAD_COMBINES: dict[str, tuple[Callable[[Tensor], dict[str, Any]], type[Exception], str]] = {
    "rows-in-float": (lambda y: {"x": y.float()}, EPArgumentError, "x"),
    "too-few-rows": (lambda y: {"x": y[:-1]}, EPArgumentError, "x"),
    "weights-dimension": (
        lambda y: {"topk_weights": torch.ones(len(y), device=DEVICE)}, EPArgumentError, "topk_weights",
    ),
    "weights-rows": (
        lambda y: {"topk_weights": torch.ones(len(y) + 1, 2, device=DEVICE)},
        EPArgumentError,
        "topk_weights",
    ),
    "one-bias-in-a-tuple": (lambda y: {"bias": (y[:3],)}, AssertionError, "bias"),
    "three-biases": (lambda y: {"bias": (y[:3],) * 3}, AssertionError, "bias"),
    "bias-shape": (lambda y: {"bias": torch.cat([y, y, y, y])[:4]}, EPArgumentError, "bias"),
    "bias-dtype": (lambda y: {"bias": torch.ones(3, 32, device=DEVICE)}, EPArgumentError, "bias"),
    "no-handle": (lambda y: {"handle": None}, EPArgumentError, "handle"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_a_wrong_combine_is_refused_before_anything_is_sent(
    groups: SharedGroups, name: str
) -> None:
    changed, error, word = BAD_COMBINES[name]

    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        call["topk_idx"] = torch.tensor([[0, 2], [4, 6], [0, 4]], device=DEVICE)  # all get rows
        recv_x, _, _, handle, _ = buffer.dispatch(**call)
        with pytest.raises(error, match=word) as raised:
            buffer.combine(**{"x": recv_x, "handle": handle, **changed(recv_x)})
        assert isinstance(raised.value, deep_ep.EPError)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, 2 * call["x"])

    groups.run(ONE_NODE, run)


def test_expanded_rows_that_a_slot_lies_behind_are_refused(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        recv_x, _, weights, handle, _ = buffer.dispatch(**call, do_expand=True)
        for wrong in ({"x": recv_x[:-1]}, {"topk_weights": weights[:-1]}):
            with pytest.raises(EPArgumentError):
                buffer.combine(**{"x": recv_x, "handle": handle, **wrong})
        assert_works(buffer)

    groups.run(ONE_NODE, run)


def test_a_handle_of_another_buffer_is_refused(groups: SharedGroups) -> None:
    (other,) = groups.run(Setup(1, 1), lambda rank, buffer: buffer.dispatch(**good_call(rank)))

    def run(rank: int, buffer: Any) -> None:
        x = good_call(rank)["x"]
        with pytest.raises(EPArgumentError, match="another buffer"):
            buffer.dispatch(x, handle=other[3])
        with pytest.raises(EPArgumentError, match="another buffer"):
            buffer.combine(other[0], other[3])
        assert_works(buffer)

    groups.run(ONE_NODE, run)


def test_a_rank_that_was_refused_calls_again_while_the_others_wait(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        if rank == 2:
            with pytest.raises(EPArgumentError, match="num_max_tokens_per_rank"):
                buffer.dispatch(**call, num_max_tokens_per_rank=2)
        recv_x, _, _, handle, _ = buffer.dispatch(**call, do_expand=True)
        if rank == 2:
            with pytest.raises(EPArgumentError, match="x"):
                buffer.combine(recv_x.float(), handle)
        assert torch.equal(buffer.combine(recv_x, handle)[0], 2 * call["x"])

    groups.run(ONE_NODE, run)


@pytest.mark.parametrize("setup", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])
def test_ranks_that_disagree_on_the_most_tokens_all_learn_it(
    groups: SharedGroups, setup: Setup
) -> None:
    """As of a program that passes the tokens of each rank."""

    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        with pytest.raises(EPArgumentError, match="num_max_tokens_per_rank"):
            buffer.dispatch(**call, num_max_tokens_per_rank=16 if rank == 2 else 8)
        assert_works(buffer)

    groups.run(setup, run)


def test_a_rank_that_does_not_come_is_named_and_the_next_call_works() -> None:
    meet = threading.Barrier(4)

    def run(rank: int, buffer: Any) -> tuple[int, ...]:
        assert_works(buffer)
        told: tuple[int, ...] = ()
        if rank != 3:
            with pytest.raises(EPTimeoutError, match="rank 3") as raised:
                buffer.dispatch(**good_call(rank))
            # No more than that: who hears of it from another rank has waited less than its own timeout.
            assert 0 < raised.value.waited_s < HANG_S
            told = raised.value.missing_ranks
        meet.wait(HANG_S)
        assert_works(buffer)
        return told

    with elastic_ranks(ONE_NODE, num_cpu_timeout_secs=3, num_gpu_timeout_secs=5) as ranks:
        assert ranks.run(run) == [(3,)] * 3 + [()]


ABSENT = (
    "get_engram_storage_size_hint engram_write engram_fetch get_pp_buffer_size_hint pp_set_config pp_send pp_recv "
    "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint agrs_set_config create_agrs_session destroy_agrs_session "
    "agrs_new_session agrs_get_inplace_tensor all_gather"
)


@pytest.mark.parametrize("name", ABSENT.split())
def test_what_is_not_there_says_so(groups: SharedGroups, name: str) -> None:
    (buffer,) = groups.run(Setup(1, 1), lambda _, buffer: buffer)
    for owner in (buffer, deep_ep.ElasticBuffer):
        with pytest.raises(EPUnsupportedError, match=name) as raised:
            getattr(owner, name)(torch.zeros(4), enabled=True)
        assert isinstance(raised.value, NotImplementedError)
