"""Every way in which a program may give calls to streams: results are right, and waits order all uses of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deep_ep
from deep_ep.native import backend
from support.launch import Ranks
from support.normal_exchange import (
    SMALL,
    Expected,
    Inputs,
    Mode,
    Outputs,
    assert_outputs,
    expect,
    hidden_bytes_of,
    make_inputs,
    normal_ranks,
    padded,
    shape_of,
)
from support.stream_tracker import (
    Program,
    Stream,
    TrackedBackend,
    Tracker,
    Way,
    tracked,
    use_tracked,
)

pytestmark = pytest.mark.skipif(backend.get().name != "cpu", reason="runs on the host target")

Tensor = torch.Tensor
SHAPE = shape_of((5, 0), 64, 4, 3)
MODES = [Mode(), Mode(spare_rows=1, scales="float32", dtype="float8_e4m3fn", num_biases=2)]


WAYS = [
    Way(previous, is_async, on_comm)
    for previous, is_async, on_comm in itertools.product((False, True), repeat=3)
    if not on_comm or (previous and is_async)
]


def apart(tensor: Tensor) -> Tensor:
    """A copy whose values are not adjacent."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def begin(
    program: Program, buffer: deep_ep.Buffer, inputs: Inputs, mode: Mode, ways: Sequence[Way]
) -> tuple[Any, Any]:
    """Layout and dispatch, and what they return. Nothing else is kept longer than it is needed."""
    program.go_to(ways[0])
    copy = apart if mode.scales else torch.clone
    x, scales, topk_weights = program.copies([inputs.x, inputs.scales, inputs.topk_weights], copy)
    topk_idx, same = program.copies([inputs.topk_idx, inputs.topk_idx])
    layout_of = partial(buffer.get_dispatch_layout, same, SHAPE.num_experts)
    layout = program.call(ways[0], layout_of, same)
    del same, layout_of
    program.go_to(ways[1])
    per_rank, per_node, per_expert, in_rank = layout
    dispatch = partial(
        buffer.dispatch,
        x if scales is None else (x, scales),
        *(None, per_rank, per_node, in_rank, per_expert, topk_idx, topk_weights),
        num_worst_tokens=num_worst_tokens(mode),
        config=SMALL,
    )
    dispatched = program.call(ways[1], dispatch, [x, scales, layout, topk_idx, topk_weights])
    return layout, dispatched


def exchange(
    program: Program, buffer: deep_ep.Buffer, expected: Expected, ways: Sequence[Way]
) -> Outputs:
    """Layout, dispatch, dispatch with its handle, combine. Nothing is kept longer than it is needed."""
    inputs, mode = expected.inputs[buffer.rank], expected.mode
    copy = apart if mode.scales else torch.clone
    layout, (recv_x, recv_idx, recv_weights, counts, handle) = begin(
        program, buffer, inputs, mode, ways
    )
    program.go_to(ways[2])
    program.wait()
    kept = program.copies([tuple(layout), recv_x, recv_idx, recv_weights, handle])
    del layout, recv_x, recv_idx, recv_weights
    x = program.copies(inputs.cached_x, copy)
    cached = program.call(
        ways[2], partial(buffer.dispatch, x, handle=handle, config=SMALL), [x, handle]
    )
    del x
    program.go_to(ways[3])
    program.wait()
    kept_of_cached = program.copies(cached)
    del cached
    y, weights = expected.ys[buffer.rank], expected.weights[buffer.rank]
    if num_worst_tokens(mode):
        y, weights = (padded(rows, num_worst_tokens(mode)) for rows in (y, weights))
    given = program.copies([y, weights, tuple(inputs.biases)], copy)
    combine = partial(buffer.combine, given[0], handle, given[1], given[2] or None, config=SMALL)
    combined = program.call(ways[3], combine, [given, handle])
    del given, handle, combine
    program.wait()
    layout, *received, handle = kept
    results = program.copies(combined)
    return Outputs(layout, *received, counts, handle, tuple(kept_of_cached), *results)


def num_worst_tokens(mode: Mode) -> int:
    return 0 if mode.spare_rows is None else sum(SHAPE.num_tokens) + mode.spare_rows


@pytest.fixture(params=[2, 1], ids=["one node", "two nodes"])
def group(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Ranks, TrackedBackend, int]]:
    """Ranks in such streams, and how many are on a node."""
    selected = use_tracked(monkeypatch)
    row_bytes = max(hidden_bytes_of(SHAPE, mode) for mode in MODES)
    with normal_ranks(SHAPE.num_ranks, request.param, [SMALL], row_bytes) as ranks:
        yield ranks, selected, request.param


def check(group: tuple[Ranks, TrackedBackend, int], mode: Mode, ways: Sequence[Way]) -> None:
    ranks, selected, ranks_per_node = group
    expected = expect(make_inputs(SHAPE, mode), SHAPE, mode, ranks_per_node)

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[Outputs, list[str]]:
        with tracked(selected, buffer) as tracker:
            outputs = exchange(Program(selected, tracker), buffer, expected, ways)
        return outputs, tracker.races

    for rank, (outputs, races) in enumerate(ranks.run(run)):
        assert not races
        assert_outputs(outputs, rank, expected, SMALL)


@pytest.mark.parametrize(
    ("waits", "keeps", "found"),
    [
        (True, True, []),
        (False, True, ["add.Tensor reads, written"]),
        (True, False, ["memory ends, read"]),
    ],
)
def test_the_tracker_finds_what_nothing_orders(waits: bool, keeps: bool, found: list[str]) -> None:
    tracker = Tracker()
    one, other = tracker.current, Stream()
    with tracker:
        tensor = torch.ones(3)
        if waits:
            tracker.waits(other, one.clock)
        tracker.current = other
        tensor + 1
        if keeps:
            tracker.keep_for(tensor, other)
        del tensor
    tracker.look_for_ends()
    assert [race.split(" on ")[0] for race in tracker.races] == found


@pytest.mark.parametrize("mode", MODES, ids=["exact", "worst case"])
def test_calls_that_are_all_made_alike(
    group: tuple[Ranks, TrackedBackend, int], mode: Mode
) -> None:
    for way in WAYS:
        for elsewhere in itertools.product((False, True), repeat=4):
            check(group, mode, [way._replace(elsewhere=other) for other in elsewhere])


@pytest.mark.parametrize("mode", MODES, ids=["exact", "worst case"])
def test_results_that_nobody_waits_for(
    group: tuple[Ranks, TrackedBackend, int], mode: Mode
) -> None:
    ranks, selected, _ = group
    inputs = make_inputs(SHAPE, mode)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        for ways in itertools.product(WAYS, WAYS):
            with tracked(selected, buffer) as tracker:
                begin(Program(selected, tracker), buffer, inputs[rank], mode, ways)
            assert not tracker.races

    ranks.run(run)


ANY_WAY = st.builds(
    lambda way, other: way._replace(elsewhere=other), st.sampled_from(WAYS), st.booleans()
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mode=st.sampled_from(MODES), ways=st.tuples(*[ANY_WAY] * 4))
def test_calls_in_any_mixture(
    group: tuple[Ranks, TrackedBackend, int], mode: Mode, ways: tuple[Way, ...]
) -> None:
    check(group, mode, ways)
