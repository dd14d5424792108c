"""However a program gives the calls of `ElasticBuffer` to streams: results are right, and waits order all uses of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deep_ep
from deep_ep.native import backend
from support.elastic_exchange import (
    Exchange,
    Mode,
    Outputs,
    Setup,
    assert_outputs,
    assert_sums,
    elastic_ranks,
    exchange_of,
    run_dispatch,
)
from support.launch import RankThreads
from support.normal_exchange import shape_of
from support.stream_tracker import Program, TrackedBackend, Way, tracked, use_tracked

pytestmark = pytest.mark.skipif(backend.get().name != "cpu", reason="runs on the host target")

Tensor = torch.Tensor
Group = tuple[RankThreads, TrackedBackend, Setup]

SHAPE = shape_of((5, 0), 64, 4, 3)
COMPACT = Mode(combine_hidden=64, num_biases=1, has_stats=True, cached_weights=True)
EXPANDED = replace(COMPACT, do_expand=True, expert_alignment=4, num_biases=2)
MODES = [
    COMPACT,
    EXPANDED,
    replace(
        EXPANDED,
        do_cpu_sync=False,
        dtype="float8_e4m3fn",
        scales="float32",
        is_tma_aligned=True,
        do_zero_padding=True,
    ),
]
SETUPS = [Setup(2, 2), Setup(2, 1), Setup(2, 1, allow_multiple_reduction=False)]
WAYS = [
    Way(previous, is_async, on_comm)
    for previous, is_async, on_comm in itertools.product((False, True), repeat=3)
    if on_comm or not previous
]


def in_v2_s_words(call: Callable[..., Any]) -> Callable[..., Any]:
    """For `Program.call`, which says `async_finish`; sometimes the epilogue waits for an event as well."""

    def named(async_finish: bool, previous_event: Any, allocate_on_comm_stream: bool) -> Any:
        return call(
            previous_event=previous_event,
            previous_event_before_epilogue=deep_ep.ElasticBuffer.capture(),
            async_with_compute_stream=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    return named


def exchange(program: Program, buffer: Any, of: Exchange, ways: Sequence[Way]) -> Outputs:
    """Dispatch, dispatch with its handle, combine. Nothing is kept longer than it is needed."""
    mode, inputs = of.mode, of.inputs[buffer.rank_idx]
    program.go_to(ways[0])
    x, scales, topk_idx, weights = program.copies(
        [inputs.x, inputs.scales, inputs.topk_idx, inputs.topk_weights]
    )
    stats = program.copies(torch.arange(SHAPE.num_local_experts, dtype=torch.int32))
    dispatch = partial(
        buffer.dispatch,
        x if scales is None else (x, scales),
        *(topk_idx, weights, stats, SHAPE.num_experts, of.num_max_tokens),
        mode.alignment,
        do_cpu_sync=mode.do_cpu_sync,
        do_expand=mode.do_expand,
        do_zero_padding=mode.do_zero_padding,
        use_tma_aligned_col_major_sf=mode.is_tma_aligned,
    )
    *received, handle = program.call(
        ways[0], in_v2_s_words(dispatch), [x, scales, topk_idx, weights, stats]
    )
    del x, scales, topk_idx, weights, dispatch
    program.go_to(ways[1])
    program.wait()
    received, stats = program.copies([tuple(received), stats])
    x, weights = program.copies([inputs.cached_x, inputs.cached_weights])
    again = partial(
        buffer.dispatch,
        x,
        topk_weights=weights,
        handle=handle,
        do_zero_padding=mode.do_zero_padding,
    )
    *cached, same = program.call(ways[1], in_v2_s_words(again), [x, weights])
    assert same is handle
    del x, weights, again, same
    program.go_to(ways[2])
    program.wait()
    cached = program.copies(tuple(cached))
    y, weights, biases = program.copies(
        [of.ys[buffer.rank_idx], of.weights[buffer.rank_idx], inputs.biases]
    )
    combine = partial(
        buffer.combine, y, handle, weights, biases[0] if len(biases) == 1 else tuple(biases)
    )
    combined = program.call(ways[2], in_v2_s_words(combine), [y, weights, biases])
    del y, weights, biases, combine
    program.wait()
    return Outputs(*received, handle, stats, *cached, *program.copies(combined))


def give_up(
    program: Program, buffer: Any, of: Exchange, ways: Sequence[Way], combines: bool
) -> None:
    """Dispatch, then combine or cached dispatch, by a program that waits for nothing."""
    mode, inputs = of.mode, of.inputs[buffer.rank_idx]
    program.go_to(ways[0])
    x, topk_idx, weights, again = program.copies(
        [
            inputs.x,
            inputs.topk_idx,
            inputs.topk_weights,
            of.ys[buffer.rank_idx] if combines else inputs.cached_x,
        ]
    )
    dispatch = partial(
        buffer.dispatch,
        *(x, topk_idx, weights, None, SHAPE.num_experts),
        do_cpu_sync=mode.do_cpu_sync,
        do_expand=mode.do_expand,
    )
    *_, handle = program.call(ways[0], in_v2_s_words(dispatch), [x, topk_idx, weights])
    del x, topk_idx, weights, dispatch, _
    program.go_to(ways[1])
    call = partial(buffer.combine if combines else buffer.dispatch, again, handle=handle)
    del handle
    program.call(ways[1], in_v2_s_words(call), again)


@pytest.fixture(
    params=SETUPS, ids=["one node", "two nodes", "two nodes, one rounding"], scope="module"
)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Ranks in such streams."""
    with pytest.MonkeyPatch.context() as patched:
        selected = use_tracked(patched)
        # Only memory of the host is looked into by checks, and the host would wait for the stream there.
        patched.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        with elastic_ranks(request.param) as ranks:
            yield ranks, selected, request.param


def check(group: Group, mode: Mode, ways: Sequence[Way]) -> None:
    ranks, selected, setup = group
    of = exchange_of(setup, SHAPE, mode)

    def run(rank: int, buffer: Any) -> tuple[Outputs, list[str]]:
        with tracked(selected, buffer.buffer) as tracker:
            outputs = exchange(Program(selected, tracker), buffer, of, ways)
        return outputs, tracker.races

    for rank, (outputs, races) in enumerate(ranks.run(run)):
        assert not races
        assert_outputs(of, outputs, rank)


modes = pytest.mark.parametrize("mode", MODES, ids=["compact", "expanded", "expanded, worst case"])


@modes
def test_calls_that_are_all_made_alike(group: Group, mode: Mode) -> None:
    for way in WAYS:
        for elsewhere in ((False, False, False), (False, True, False), (True, False, True)):
            check(group, mode, [way._replace(elsewhere=other) for other in elsewhere])


@modes
def test_results_that_nobody_waits_for(group: Group, mode: Mode) -> None:
    ranks, selected, setup = group
    of = exchange_of(setup, SHAPE, replace(mode, expert_alignment=None, spare_tokens=None))

    def run(rank: int, buffer: Any) -> list[str]:
        races = []
        for first, second, combines in itertools.product(WAYS[::2], WAYS, (False, True)):
            with tracked(selected, buffer.buffer) as tracker:
                ways = first, second._replace(elsewhere=True)
                give_up(Program(selected, tracker), buffer, of, ways, combines)
            races += [f"{ways}: {race}" for race in tracker.races]
        return races

    for races in ranks.run(run):
        assert not races


@modes
def test_a_bias_may_be_ready_for_the_epilogue_alone(group: Group, mode: Mode) -> None:
    """As that of an expert whose rows a program computes while the others' are on their way."""
    ranks, selected, setup = group
    of = exchange_of(setup, SHAPE, replace(mode, num_biases=1))

    def run(rank: int, buffer: Any) -> tuple[Tensor, list[str]]:
        with tracked(selected, buffer.buffer) as tracker:
            *_, handle = run_dispatch(of, buffer)
            y = of.ys[rank].clone()
            before = buffer.capture()
            bias = of.inputs[rank].biases[0].clone()
            combined, _, event = buffer.combine(
                y,
                handle,
                bias=bias,
                previous_event=before,
                previous_event_before_epilogue=buffer.capture(),
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            event.current_stream_wait()
            combined = combined.clone()
            del y, bias, handle, _
        return combined, tracker.races

    for rank, (combined, races) in enumerate(ranks.run(run)):
        assert not races
        assert_sums(of, combined, rank)


ANY_WAY = st.builds(
    lambda way, other: way._replace(elsewhere=other), st.sampled_from(WAYS), st.booleans()
)


@pytest.mark.exhaustive
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mode=st.sampled_from(MODES), ways=st.tuples(*[ANY_WAY] * 3))
def test_calls_in_any_mixture(group: Group, mode: Mode, ways: tuple[Way, ...]) -> None:
    check(group, mode, ways)
