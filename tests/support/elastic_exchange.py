"""One exchange of `ElasticBuffer` over small made-up shapes, and its comparison with the reference.

Dispatch, cached dispatch of other rows, combine. `Shape` (of exchange.py) says what is exchanged,
`Mode` how, `Setup` by which buffers; all print as the Python that makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import deep_ep
from support import elastic_reference as reference
from support.exchange import Shape, assert_same_bytes
from support.launch import DEVICE, RankThreads
from support.normal_exchange import Inputs, Rows, make_inputs, nodes_of, summands
from support.normal_reference import Received, rows_of

Tensor = torch.Tensor

# What all buffers are made for. Calls may have more tokens and more top-k.
MAX_TOKENS, HIDDEN, TOPK = 8, 512, 3
# Names of `EPHandle` that hold tensors no program looks into.
OPAQUE = ("dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list")


@dataclass(frozen=True)
class Setup:
    """Which buffers: ranks, how many of them are a node, and two arguments of the constructor."""

    num_ranks: int
    ranks_per_node: int
    allow_hybrid_mode: bool = True
    allow_multiple_reduction: bool = True

    @property
    def num_scaleup_ranks(self) -> int:
        return self.ranks_per_node if self.allow_hybrid_mode else self.num_ranks

    @property
    def num_domains(self) -> int:
        return self.num_ranks // self.num_scaleup_ranks


@dataclass(frozen=True)
class Mode(Rows):
    """How to exchange.

    spare_tokens: what `num_max_tokens_per_rank` is larger than the most tokens of a rank; None leaves it
    to the constructor's, which then must do. spare_capacity: what `expert_capacity` is larger than it must be;
    None leaves it out. cached_expand: say `do_expand` in the cached dispatch as well. previous,
    previous_before_epilogue: an "overlap" or a "handle", too.
    """

    do_expand: bool = False
    do_cpu_sync: bool | None = None
    expert_alignment: int | None = None
    spare_capacity: int | None = None
    spare_tokens: int | None = None
    is_tma_aligned: bool = False
    has_weights: bool = True
    do_zero_padding: bool = False
    do_handle_copy: bool = True
    has_stats: bool = False
    cached_expand: bool = True
    cached_weights: bool = False
    combine_weights: bool = True
    list_of_biases: bool = False
    previous_before_epilogue: str = "none"
    is_async: bool = False

    @property
    def alignment(self) -> int:
        return self.expert_alignment or 1


class Exchange(NamedTuple):
    """What all ranks exchange and how, the reference's answer, and what they put into combine."""

    setup: Setup
    shape: Shape
    mode: Mode
    inputs: Sequence[Inputs]
    num_max_tokens: int
    capacity: int | None
    arrivals: list[Received]
    slots: list[Tensor]  # [n, K] int64
    num_rows: list[int]  # rows that recv_x must have
    num_slots: list[int]  # what handle.num_expanded_tokens must say
    ys: list[Tensor]  # [num_rows, combine_hidden] bfloat16, NaN where nobody may read
    weights: list[Tensor]  # [num_rows, K] or expanded [num_rows] float32, NaN where nobody may read


class Outputs(NamedTuple):
    """What one rank got from all calls, without events."""

    recv_x: Any
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    handle: Any
    stats: Tensor | None
    cached_x: Tensor
    cached_topk_idx: Tensor | None
    cached_weights: Tensor | None
    combined: Tensor
    combined_weights: Tensor | None


# --- what goes in, and what must come out ---------------------------------------------------------


def elastic_ranks(setup: Setup, **arguments: Any) -> RankThreads:
    """Ranks that are threads, with buffers for small shapes."""
    with nodes_of(setup.ranks_per_node):
        return RankThreads(
            setup.num_ranks,
            lambda group: deep_ep.ElasticBuffer(
                group,
                **{
                    "num_max_tokens_per_rank": MAX_TOKENS,
                    "hidden": HIDDEN,
                    "num_topk": TOPK,
                    "allow_hybrid_mode": setup.allow_hybrid_mode,
                    "allow_multiple_reduction": setup.allow_multiple_reduction,
                    "explicitly_destroy": True,
                    **arguments,
                },
            ),
        )


def max_tokens_of(shape: Shape, mode: Mode) -> int:
    """`num_max_tokens_per_rank` of the call."""
    if mode.spare_tokens is None:
        return MAX_TOKENS
    return max(1, max(shape.num_tokens) + mode.spare_tokens)


def places_of(
    setup: Setup, shape: Shape, mode: Mode, inputs: Sequence[Inputs] | None = None
) -> Exchange:
    """Where rows are; without what is put into combine. Inputs are random unless given."""
    inputs = inputs or make_inputs(shape, mode)
    num_max_tokens = max_tokens_of(shape, mode)
    arrivals = reference.route(
        [one.topk_idx for one in inputs], [one.topk_weights for one in inputs], shape.num_experts
    )
    num_rows = [len(one.tokens) for one in arrivals]
    if mode.do_cpu_sync is False:
        num_rows = [shape.num_ranks * num_max_tokens] * shape.num_ranks
    capacity = None
    if mode.spare_capacity is not None:
        most = [max(one.counts) for one in arrivals]
        capacity = max(1, *(num_rows if mode.do_cpu_sync is False else most)) + mode.spare_capacity
    slots = [reference.slots_of(one, mode.alignment, capacity) for one in arrivals]
    if capacity is None and mode.do_cpu_sync is False:
        worst = reference.num_worst_slots(
            *(shape.num_ranks, num_max_tokens, shape.num_topk),
            *(shape.num_local_experts, mode.alignment),
        )
        num_slots = [worst] * shape.num_ranks
    else:
        num_slots = [reference.expert_starts(one, mode.alignment, capacity)[-1] for one in arrivals]
    if mode.do_expand:
        num_rows = num_slots
    given = setup, shape, mode, inputs, num_max_tokens, capacity
    return Exchange(*given, arrivals, slots, num_rows, num_slots, [], [])


def exchange_of(
    setup: Setup, shape: Shape, mode: Mode, inputs: Sequence[Inputs] | None = None
) -> Exchange:
    """The same, with random rows and weights that all ranks return."""
    of = places_of(setup, shape, mode, inputs)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    for arrival, slots, rows in zip(of.arrivals, of.slots, of.num_rows):
        y = summands(rows, mode.combine_hidden, generator)
        size = (rows,) if mode.do_expand else (rows, shape.num_topk)
        weights = torch.randn(size, generator=generator)
        unread = torch.ones(rows, dtype=torch.bool)
        unread[slots[slots >= 0] if mode.do_expand else slice(len(arrival.tokens))] = False
        y[unread] = torch.nan
        weights[unread] = torch.nan
        if not mode.do_expand:
            weights[: len(arrival.tokens)][arrival.topk_idx < 0] = torch.nan
        of.ys.append(y)
        of.weights.append(weights)
    return of


# --- the calls ------------------------------------------------------------------------------------


def run_exchange(of: Exchange, buffer: Any) -> Outputs:
    """All calls of one rank. What is dispatched is not awaited before it is checked, but combine
    takes what the reference expects."""
    stats = None
    if of.mode.has_stats:
        stats = torch.arange(of.shape.num_local_experts, dtype=torch.int32, device=DEVICE)
    soil_memory()
    *received, handle = run_dispatch(
        of, buffer, cumulative_local_expert_recv_stats=stats, expert_capacity=of.capacity
    )
    stats = None if stats is None else stats.clone()
    soil_memory()
    cached = run_cached_dispatch(of, buffer, handle)
    soil_memory()
    weights = of.weights[buffer.rank_idx] if of.mode.combine_weights else None
    combined = run_combine(of, buffer, handle, of.ys[buffer.rank_idx], weights)
    return Outputs(*received, handle, stats, *cached, *combined)


def run_dispatch(of: Exchange, buffer: Any, **arguments: Any) -> tuple[Any, ...]:
    """What dispatch returned, without its event, finished. With spare_capacity, `expert_capacity` is to be given."""
    mode, inputs = of.mode, of.inputs[buffer.rank_idx]
    x, topk_idx = inputs.x.to(DEVICE), inputs.topk_idx.to(DEVICE)
    *received, handle, event = buffer.dispatch(
        x if inputs.scales is None else (x, inputs.scales.to(DEVICE)),
        topk_idx=topk_idx,
        topk_weights=inputs.topk_weights.to(DEVICE) if mode.has_weights else None,
        num_experts=of.shape.num_experts,
        num_max_tokens_per_rank=None if mode.spare_tokens is None else of.num_max_tokens,
        expert_alignment=mode.expert_alignment,
        do_handle_copy=mode.do_handle_copy,
        do_cpu_sync=mode.do_cpu_sync,
        do_expand=mode.do_expand,
        do_zero_padding=mode.do_zero_padding,
        use_tma_aligned_col_major_sf=mode.is_tma_aligned,
        **timing(buffer, mode),
        **arguments,
    )
    finish(event, mode)
    if len(topk_idx):
        is_same = handle.topk_idx.data_ptr() == topk_idx.data_ptr()
        assert is_same != mode.do_handle_copy, "do_handle_copy"
    return *received, handle


def run_cached_dispatch(of: Exchange, buffer: Any, handle: Any) -> tuple[Any, ...]:
    """Rows, top-k and weights of a second dispatch, which has a handle."""
    mode, inputs = of.mode, of.inputs[buffer.rank_idx]
    recv_x, recv_topk_idx, recv_weights, same, event = buffer.dispatch(
        inputs.cached_x.to(DEVICE),
        topk_weights=inputs.cached_weights.to(DEVICE) if mode.cached_weights else None,
        handle=handle,
        do_expand=True if mode.do_expand and mode.cached_expand else None,
        do_zero_padding=mode.do_zero_padding,
        **timing(buffer, mode),
    )
    finish(event, mode)
    assert same is handle
    return recv_x, recv_topk_idx, recv_weights


def run_combine(
    of: Exchange, buffer: Any, handle: Any, y: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """One combine, finished when this returns."""
    mode, inputs = of.mode, of.inputs[buffer.rank_idx]
    there = tuple(bias.to(DEVICE) for bias in inputs.biases)
    bias: Any = there
    if len(there) < 2:
        bias = there[0] if there else None
    elif mode.list_of_biases:
        bias = list(there)
    combined, combined_weights, event = buffer.combine(
        y.to(DEVICE),
        handle,
        topk_weights=None if weights is None else weights.to(DEVICE),
        bias=bias,
        **timing(buffer, mode),
    )
    finish(event, mode)
    return combined, combined_weights


def timing(buffer: Any, mode: Mode) -> dict[str, Any]:
    """The keywords about streams and events."""
    return {
        "previous_event": event_of(buffer, mode.previous),
        "previous_event_before_epilogue": event_of(buffer, mode.previous_before_epilogue),
        "async_with_compute_stream": mode.is_async,
        "allocate_on_comm_stream": mode.allocate_on_comm_stream,
    }


def event_of(buffer: Any, kind: str) -> Any:
    """An event in one of the forms that calls take."""
    if kind == "none":
        return None
    if kind == "empty":
        return deep_ep.EventOverlap(None)
    captured = buffer.capture()
    return deep_ep.EventOverlap(captured) if kind == "overlap" else captured


def finish(event: Any, mode: Mode) -> None:
    """Waits for a call, where it is not yet waited for."""
    assert isinstance(event, deep_ep.EventOverlap)
    assert (event.event is not None) == mode.is_async
    if mode.is_async:
        event.current_stream_wait()


def soil_memory() -> None:
    """So that what a call does not write is seldom zero or -1: the allocator gives this memory again."""
    for size in (64, 512, 4096, 1 << 15, 1 << 18):
        _ = [torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(8)]


# --- the comparison -------------------------------------------------------------------------------


def exchange_and_check(
    ranks: RankThreads,
    setup: Setup,
    shape: Shape,
    mode: Mode,
    inputs: Sequence[Inputs] | None = None,
) -> None:
    """All calls on all ranks; all results are the reference's. Inputs are random unless given."""
    of = exchange_of(setup, shape, mode, inputs)
    for rank, got in enumerate(ranks.run(lambda _, buffer: run_exchange(of, buffer))):
        assert_outputs(of, got, rank)


def assert_outputs(of: Exchange, got: Outputs, rank: int) -> None:
    """All results of one rank are the reference's."""
    assert_dispatched(of, got, rank)
    assert_combined(of, got, rank)


def assert_dispatched(of: Exchange, got: Outputs, rank: int) -> None:
    """All but what combine returned."""
    assert_received(of, got, rank)
    assert_handle(of, got.handle, rank)
    assert_cached(of, got, rank)
    if of.mode.has_stats:  # unaligned counts were added to what was there
        assert got.stats is not None
        assert got.stats.tolist() == [n + i for i, n in enumerate(of.arrivals[rank].counts)]


def assert_received(of: Exchange, got: Outputs, rank: int) -> None:
    """What a fresh dispatch returned."""
    where, mode = f"rank {rank}", of.mode
    recv_x, recv_scales = got.recv_x if mode.scales else (got.recv_x, None)
    assert isinstance(got.recv_x, tuple) == bool(mode.scales), where
    assert_rows(of, recv_x, [one.x for one in of.inputs], rank, f"{where}, rows")
    assert recv_x.is_contiguous(), where
    if mode.scales:
        scales = [one.scales for one in of.inputs]
        assert_rows(of, recv_scales, scales, rank, f"{where}, scales")
        assert_scale_strides(recv_scales, mode, where)
    assert_topk_idx(of, got.recv_topk_idx, rank, where)
    weights = [one.topk_weights for one in of.inputs] if mode.has_weights else None
    assert_weights(of, got.recv_topk_weights, weights, rank, f"{where}, weights")


def assert_rows(of: Exchange, got: Tensor, sent: Sequence[Any], rank: int, where: str) -> None:
    """[rows, ...] whose real rows are those that were sent, compact in front, expanded at their slots; with
    do_zero_padding gaps are zero bytes."""
    assert got.dtype == sent[0].dtype, where
    assert got.shape == (of.num_rows[rank], sent[0].shape[1]), where
    assert not got.requires_grad, where
    rows = reference.rows_of(sent, of.arrivals[rank])
    if not of.mode.do_expand:
        assert_same_bytes(got[: len(rows)], rows, where)
        return
    slots = of.slots[rank]
    row, column = (slots >= 0).nonzero(as_tuple=True)
    placed = rows_of([got], [slots[row, column].to(got.device)])
    assert_same_bytes(placed, rows_of([rows], [row]), where)
    if of.mode.do_zero_padding:
        gap = got[gaps_of(of, rank).to(got.device)]
        assert_same_bytes(gap, torch.zeros_like(gap), f"{where}, gaps")


def gaps_of(of: Exchange, rank: int) -> Tensor:
    """[rows] int64: the slots between the real rows of an expert and the next expert."""
    place = of.arrivals[rank], of.mode.alignment, of.capacity
    starts, ends = reference.expert_starts(*place), reference.expert_ends(*place)
    return torch.cat([torch.arange(end, start) for end, start in zip(ends, starts[1:])])


def assert_scale_strides(scales: Tensor, mode: Mode, where: str) -> None:
    rows, num_scales = scales.shape
    if rows:
        want = (1, reference.align(rows, 4)) if mode.is_tma_aligned else (num_scales, 1)
        assert scales.stride() == want, where


def assert_topk_idx(of: Exchange, got: Tensor | None, rank: int, where: str) -> None:
    """Local experts, and -1 in rows that are nobody's."""
    if of.mode.do_expand:
        assert got is None, where
        return
    want = of.arrivals[rank].topk_idx
    assert got is not None, where
    assert got.dtype == deep_ep.topk_idx_t, where
    assert got.shape == (of.num_rows[rank], want.shape[1]), where
    assert got[: len(want)].tolist() == want.tolist(), where
    assert (got[len(want) :] == -1).all(), f"{where}, tail"


def assert_weights(
    of: Exchange, got: Tensor | None, sent: Sequence[Tensor] | None, rank: int, where: str
) -> None:
    """Compact [rows, K], 0 where no local expert is; expanded [rows]."""
    if sent is None:
        assert got is None, where
        return
    arrival = of.arrivals[rank]
    want = reference.rows_of(sent, arrival).masked_fill(arrival.topk_idx < 0, 0)
    assert got is not None, where
    assert got.dtype == torch.float32, where
    if not of.mode.do_expand:
        assert got.shape == (of.num_rows[rank], want.shape[1]), where
        assert_same_bytes(got[: len(want)], want, where)
        assert (got[len(want) :] == 0).all(), f"{where}, tail"
        return
    slots = of.slots[rank]
    assert got.shape == (of.num_rows[rank],), where
    assert_same_bytes(got[slots[slots >= 0].to(got.device)], want[slots >= 0], where)
    if of.mode.do_zero_padding:
        gaps = gaps_of(of, rank).to(got.device)
        assert (got[gaps] == 0).all(), f"{where}, gaps"


def assert_handle(of: Exchange, handle: Any, rank: int) -> None:
    """What programs read from a handle."""
    where = f"rank {rank}, handle"
    setup, shape, mode, arrival = of.setup, of.shape, of.mode, of.arrivals[rank]
    is_exact = mode.do_cpu_sync is not False
    assert isinstance(handle, deep_ep.EPHandle), where
    assert handle.do_expand is mode.do_expand, where
    assert handle.num_experts == shape.num_experts, where
    assert handle.expert_alignment == mode.alignment, where
    assert handle.num_max_tokens_per_rank == of.num_max_tokens, where
    assert type(handle.num_sms) is int, where
    assert handle.num_sms > 0, where
    num_rows = len(arrival.tokens) if is_exact else setup.num_ranks * of.num_max_tokens
    assert handle.num_recv_tokens == num_rows, where
    assert handle.num_expanded_tokens == of.num_slots[rank], where
    counts = reference.aligned_counts(arrival, mode.alignment) if is_exact else []
    assert handle.num_recv_tokens_per_expert_list == counts, where
    assert all(type(count) is int for count in handle.num_recv_tokens_per_expert_list), where
    assert handle.topk_idx.dtype == deep_ep.topk_idx_t, where
    assert handle.topk_idx.tolist() == of.inputs[rank].topk_idx.tolist(), where
    per_expert = reference.expert_starts(arrival, mode.alignment)[1:]
    if mode.do_expand:
        per_expert = reference.expert_ends(arrival, mode.alignment, of.capacity)
    for name, want in (
        ("per_scaleup_rank", reference.scaleup_prefix(arrival, setup.num_scaleup_ranks)),
        ("per_expert", per_expert),
    ):
        prefix = getattr(handle, f"psum_num_recv_tokens_{name}")
        assert prefix.dtype == torch.int32, (where, name)
        assert prefix.tolist() == want, (where, name)
    assert handle.num_unaligned_recv_tokens_per_expert.dtype == torch.int32, where
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == arrival.counts, where
    assert_metadata(of, handle.recv_src_metadata, num_rows, rank, where)
    assert all(hasattr(handle, name) for name in OPAQUE), where


def assert_metadata(of: Exchange, metadata: Tensor, num_rows: int, rank: int, where: str) -> None:
    """Where each row is from, and where its picks are; compact rows in both layouts."""
    arrival = of.arrivals[rank]
    num_real = len(arrival.tokens)
    sources = reference.sources_of(arrival, of.num_max_tokens)
    assert metadata.dtype == torch.int32, where
    assert metadata.shape == (num_rows, arrival.topk_idx.shape[1] + 2), where
    assert metadata[:num_real, 0].tolist() == sources.tolist(), where
    assert (metadata[num_real:, 0] == -1).all(), f"{where}, tail"
    if of.mode.do_expand:
        assert metadata[:num_real, 2:].tolist() == of.slots[rank].tolist(), where
    else:
        assert (metadata[:, 2:] == -1).all(), where


def assert_cached(of: Exchange, got: Outputs, rank: int) -> None:
    """Each row is in the place that the first dispatch gave it."""
    where = f"rank {rank}, cached"
    assert_rows(of, got.cached_x, [one.cached_x for one in of.inputs], rank, where)
    assert_topk_idx(of, got.cached_topk_idx, rank, where)
    weights = [one.cached_weights for one in of.inputs] if of.mode.cached_weights else None
    assert_weights(of, got.cached_weights, weights, rank, f"{where}, weights")


def assert_combined(of: Exchange, got: Outputs, rank: int) -> None:
    """What combine returned."""
    assert_sums(of, got.combined, rank)
    where = f"rank {rank}, combined weights"
    if not of.mode.combine_weights:
        assert got.combined_weights is None, where
        return
    assert got.combined_weights is not None, where
    assert got.combined_weights.dtype == torch.float32, where
    slots = of.slots if of.mode.do_expand else None
    num_tokens = len(of.inputs[rank].topk_idx)
    back = reference.combine_weights(of.weights, of.arrivals, slots, rank, num_tokens)
    assert_same_bytes(got.combined_weights, back, where)


def assert_sums(of: Exchange, combined: Tensor, rank: int) -> None:
    """Bit for bit, because the order of the additions and their roundings are promised."""
    setup, inputs = of.setup, of.inputs[rank]
    want = reference.combine(
        of.ys,
        of.arrivals,
        of.slots if of.mode.do_expand else None,
        rank,
        len(inputs.topk_idx),
        reference.reduction(of.mode.do_expand, setup.allow_multiple_reduction, setup.num_domains),
        setup.num_scaleup_ranks,
        inputs.biases,
    )
    assert combined.dtype == torch.bfloat16
    assert_same_bytes(combined, want, f"rank {rank}, combine")
