"""How an `ElasticBuffer` is built, what it says of itself, what it counts, and how it ends."""

from __future__ import annotations

import gc
import inspect
import os
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.errors import EPArgumentError, EPUnsupportedError, EPUsageError
from deep_ep.group import thread_groups
from support.elastic_exchange import MAX_TOKENS, Setup, elastic_ranks
from support.elastic_groups import (
    DIRECT,
    ONE_NODE,
    TWO_NODES,
    SharedGroups,
    assert_works,
    good_call,
)
from support.launch import DEVICE
from support.normal_exchange import nodes_of

Tensor = torch.Tensor


MIB = 1 << 20


SIGNATURES = {
    "__init__": "group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 "
    "use_fp8_dispatch=False deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
    "prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 "
    "num_gpu_timeout_secs=100 explicitly_destroy=False",
    "dispatch": "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None "
    "num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False "
    "handle=None do_handle_copy=True do_cpu_sync=None do_expand=None do_zero_padding=False "
    "use_tma_aligned_col_major_sf=False",
    "combine": "x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False",
    "barrier": "use_comm_stream=True with_cpu_sync=False sequential=True",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False "
    "allow_hybrid_mode=True allow_multiple_reduction=True",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 "
    "sm_read_gbs=200 sm_write_gbs=50",
    "get_theoretical_num_qps": "num_sms",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments_are_those_of_the_original(name: str) -> None:
    """But for `do_expand`, whose default is None here, so that a handle can be contradicted."""
    parameters = inspect.signature(getattr(deep_ep.ElasticBuffer, name)).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    got = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.kind in kinds and p.name != "self"
    ]
    assert got == SIGNATURES[name].split()


@pytest.mark.parametrize("setup", [ONE_NODE, TWO_NODES, DIRECT], ids=["one", "two", "direct"])
def test_domains_are_nodes_unless_hybrid_mode_is_not_allowed(
    groups: SharedGroups, setup: Setup
) -> None:
    nodes = setup.num_ranks // setup.ranks_per_node, setup.ranks_per_node
    domains = setup.num_domains, setup.num_scaleup_ranks

    def run(rank: int, buffer: Any) -> None:
        assert tuple(buffer.get_physical_domain_size()) == nodes
        assert tuple(buffer.get_logical_domain_size()) == domains
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == nodes
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == domains
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, domains[1])
        assert tuple(deep_ep.get_physical_domain_size(buffer.group)) == nodes
        assert tuple(deep_ep.get_logical_domain_size(buffer.group)) == nodes
        of_direct = deep_ep.get_logical_domain_size(buffer.group, allow_hybrid_mode=False)
        assert tuple(of_direct) == (1, setup.num_ranks)

    with nodes_of(setup.ranks_per_node):
        groups.run(setup, run)


def test_attributes_say_what_the_buffer_is(groups: SharedGroups) -> None:
    setup = replace(TWO_NODES, allow_multiple_reduction=False)

    def run(rank: int, buffer: Any) -> None:
        assert (buffer.rank_idx, buffer.num_ranks) == (rank, 4)
        assert buffer.group.rank == rank
        assert buffer.allow_hybrid_mode is True
        assert buffer.allow_multiple_reduction is False
        assert buffer.prefer_overlap_with_compute is True
        assert buffer.deterministic is False
        assert buffer.explicitly_destroy is True
        assert buffer.num_max_tokens_per_rank == MAX_TOKENS
        assert buffer.num_allocated_qps >= 0
        assert buffer.runtime is not None
        assert hasattr(buffer, "nccl_comm_handle")
        assert buffer.num_bytes > 0
        assert isinstance(buffer.buffer, deep_ep.Buffer)
        buffer.get_comm_stream()
        assert isinstance(buffer.capture(), deep_ep.EventHandle)
        assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)

    groups.run(setup, run)


def test_size_hints_are_what_the_buffer_takes() -> None:
    """Multiples of 2 MiB that grow with each size, and fit what programs compare them with."""
    (group,) = thread_groups(1)
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint
    for sizes in ((8, 512), (8, 512, 3), (100, 7168, 8, True), (64, 512, 2, False, False, False)):
        size = hint(group, *sizes)
        assert type(size) is int
        assert size > 0
        assert size % (2 * MIB) == 0
        assert size == hint(group, *sizes)
        names = ("num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch",
                 "allow_hybrid_mode", "allow_multiple_reduction")  # fmt: skip
        arguments = dict(zip(names, sizes))
        for more in ({}, {"num_bytes": size}):
            buffer = deep_ep.ElasticBuffer(group, **arguments, **more, explicitly_destroy=True)
            assert buffer.num_bytes == size
            buffer.destroy()
        for larger in ((sizes[0] * 3, *sizes[1:]), (sizes[0], sizes[1] * 3, *sizes[2:])):
            assert hint(group, *larger) >= size
    by_topk = [hint(group, 512, 1024, topk) for topk in (1, 2, 8, 16)]
    assert by_topk == sorted(by_topk)


@pytest.mark.parametrize("setup", [Setup(1, 1), Setup(2, 1)], ids=["one-rank", "two-nodes"])
def test_a_buffer_fits_the_rows_that_it_was_made_for(setup: Setup) -> None:
    """Whatever their size: BF16, FP8 with a scale for every 32 channels, weights of cached dispatches, combine."""
    generator = random.Random(1)
    for number in range(100 if setup.num_ranks == 1 else 12):
        hidden, num_topk = 16 * generator.randrange(1, 256), generator.randrange(1, 20)
        scales = torch.ones(1, max(1, hidden // 32), device=DEVICE)
        x = torch.ones(1, hidden, dtype=torch.bfloat16, device=DEVICE)
        weights = torch.ones(1, num_topk, device=DEVICE)

        def run(rank: int, buffer: Any, sent: Any = (x, scales, weights)) -> None:
            x, scales, weights = sent
            num_experts = setup.num_ranks * weights.shape[1]
            idx = torch.arange(weights.shape[1], device=DEVICE)[None] * setup.num_ranks
            recv_x, _, recv_weights, handle, _ = buffer.dispatch(
                x, idx, weights, num_experts=num_experts
            )
            buffer.dispatch((x.byte(), scales), idx, weights, num_experts=num_experts)
            buffer.dispatch((x.byte(), scales), topk_weights=weights, handle=handle)
            buffer.dispatch(x, topk_weights=weights, handle=handle)
            buffer.combine(recv_x, handle, topk_weights=recv_weights)

        sizes = {"num_max_tokens_per_rank": 1, "hidden": hidden, "num_topk": num_topk}
        with elastic_ranks(setup, **sizes) as ranks:
            ranks.run(run)
            num_bytes = ranks.buffers[0].num_bytes
        if number < 4:  # the same of a program that says how many bytes
            with elastic_ranks(setup, **sizes, num_bytes=num_bytes) as ranks:
                assert {buffer.num_bytes for buffer in ranks.buffers} == {num_bytes}
                ranks.run(run)


def test_rows_that_are_too_large_for_the_buffer_are_refused(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        with pytest.raises(EPArgumentError, match="Build ElasticBuffer with the hidden"):
            buffer.dispatch(**{**call, "x": call["x"].repeat(1, 1 << 11)})
        recv_x, _, _, handle, _ = buffer.dispatch(**call)
        with pytest.raises(EPArgumentError, match="Build ElasticBuffer with the hidden"):
            buffer.combine(recv_x.repeat(1, 1 << 11), handle)
        assert_works(buffer)

    groups.run(ONE_NODE, run)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_max_tokens_per_rank": 8},
        {"hidden": 512},
        {"num_bytes": 2 * MIB + 1},
        {"num_bytes": 0},
    ],
    ids=str,
)
def test_a_buffer_without_a_size_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="get_buffer_size_hint|num_bytes"):
        deep_ep.ElasticBuffer(thread_groups(1)[0], **arguments)


def test_a_part_of_the_buffer_in_cpu_memory_is_refused() -> None:
    with pytest.raises(EPUnsupportedError, match="num_cpu_bytes"):
        deep_ep.ElasticBuffer(thread_groups(1)[0], num_bytes=4 * MIB, num_cpu_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("argument", "ours", "theirs"),
    [
        ("allow_hybrid_mode", True, False),
        ("allow_multiple_reduction", True, False),
        ("num_topk", 2, -1),
        ("num_topk", 2, 3),
    ],
)
def test_ranks_that_build_different_buffers_all_learn_it(
    argument: str, ours: Any, theirs: Any
) -> None:
    """Also where one of them is refused before it talks to the others."""

    def build(group: Any) -> str:
        given = {argument: theirs if group.rank == 1 else ours}
        with pytest.raises(EPArgumentError, match=argument) as refused:
            deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=512, **given)
        return str(refused.value)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(build, thread_groups(2, timeout_s=20)))
    assert len(said) == 2


def test_a_communicator_without_weak_references_will_do() -> None:
    class Communicator:
        """As mpi4py's; asked for its place each time, because nobody knows how long it lives."""

        __slots__ = ("asked",)

        def __init__(self) -> None:
            self.asked = 0

        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 1

        def allgather(self, mine: Any) -> list[Any]:
            self.asked += 1
            return [mine]

        def Barrier(self) -> None:
            pass

    ranks = Communicator()
    buffer = deep_ep.ElasticBuffer(ranks, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
    asked = ranks.asked
    assert deep_ep.ElasticBuffer.get_buffer_size_hint(ranks, 8, 64, 2) == buffer.num_bytes
    assert ranks.asked == asked + 1


def test_only_explicit_buffers_are_destroyed_and_only_once() -> None:
    sizes = {"num_max_tokens_per_rank": 8, "hidden": 512}
    implicit = deep_ep.ElasticBuffer(thread_groups(1)[0], **sizes)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        implicit.destroy()
    assert implicit.runtime is not None
    explicit = deep_ep.ElasticBuffer(thread_groups(1)[0], **sizes, explicitly_destroy=True)
    explicit.destroy()
    assert explicit.runtime is None
    explicit.destroy()
    with pytest.raises(EPUsageError):
        explicit.dispatch(**good_call(0))


def test_a_dropped_explicit_buffer_is_told_and_another_is_not() -> None:
    sizes = {"num_max_tokens_per_rank": 8, "hidden": 512}
    for is_explicit in (True, False):
        made = [deep_ep.ElasticBuffer(thread_groups(1)[0], **sizes, explicitly_destroy=is_explicit)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made.clear()
            gc.collect()
        leaks = [str(w.message) for w in told if w.category is ResourceWarning]
        assert any("destroy" in text for text in leaks) == is_explicit, leaks


def test_barriers_return_nothing(groups: SharedGroups) -> None:
    def run(_: int, buffer: Any) -> None:
        for arguments in (
            {},
            {"with_cpu_sync": True},
            {"use_comm_stream": False, "sequential": False},
        ):
            assert buffer.barrier(**arguments) is None
        assert_works(buffer)

    groups.run(TWO_NODES, run)


def test_numbers_of_sms_and_queue_pairs_are_advice(groups: SharedGroups) -> None:
    def run(_: int, buffer: Any) -> None:
        num_sms = buffer.get_theoretical_num_sms(num_experts=8, num_topk=2)
        assert type(num_sms) is int
        assert num_sms > 0
        assert buffer.get_theoretical_num_sms(8, 2) == num_sms
        num_qps = buffer.get_theoretical_num_qps(num_sms)
        assert type(num_qps) is int
        assert num_qps > 0
        call = good_call(buffer.rank_idx)
        for other in (num_sms, 12, 1, 64):
            recv_x, _, _, handle, _ = buffer.dispatch(
                **call, do_expand=True, num_sms=other, num_qps=num_qps
            )
            assert 0 < handle.num_sms <= max(2, other)
            for later in (0, handle.num_sms, 12):  # what a handle has is of its own number
                combined, _, _ = buffer.combine(recv_x, handle, num_sms=later, num_qps=num_qps)
                assert torch.equal(combined, 2 * call["x"])

    for setup in (ONE_NODE, TWO_NODES):
        groups.run(setup, run)


def test_waits_are_counted_on_demand(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        waits = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        recv_x, _, _, handle, _ = buffer.dispatch(**call, dispatch_wait_recv_cost_stats=waits[0])
        buffer.combine(recv_x, handle, combine_wait_recv_cost_stats=waits[1])
        assert all((each >= 0).all() and each.sum() > 0 for each in waits)
        own = [deep_ep.RecvCounters(4, device=DEVICE) for _ in range(2)]
        recv_x, _, _, handle, _ = buffer.dispatch(**call, recv_counters=own[0])
        buffer.combine(recv_x, handle, recv_counters=own[1])
        assert all(each.snapshot().ops > 0 for each in own)

    groups.run(ONE_NODE, run)


def test_what_is_done_to_rows_on_their_rank_is_no_waiting() -> None:
    """What a report shows of the time of each operation."""

    def run(_: int, buffer: Any) -> dict[str, int]:
        buffer.buffer.enable_counters()
        for _ in range(3):
            assert_works(buffer)
        assert buffer.buffer.normal_dispatch_counters is not None
        total: dict[str, int] = buffer.buffer.phases().total()
        return total

    for setup in (ONE_NODE, replace(TWO_NODES, allow_multiple_reduction=False)):
        with elastic_ranks(setup) as ranks:
            for total in ranks.run(run):
                assert total["permute"] > 0
                assert total["unpermute"] > 0


@pytest.mark.exhaustive
def test_names_of_v2_can_be_hidden() -> None:
    """As a program that prefers them wherever it finds them may need."""
    names = {"ElasticBuffer", "EPHandle", "get_physical_domain_size", "get_logical_domain_size"}
    program = f"import deep_ep; print(*({names!r} & {{*dir(deep_ep), *deep_ep.__all__}}))"
    for setting, found in (("0", set()), ("1", names)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "DEEP_EP_EXPORT_V2": setting},
            capture_output=True,
            text=True,
            check=True,
        )
        assert set(done.stdout.split()) == found
