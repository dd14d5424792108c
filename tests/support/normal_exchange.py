"""One normal exchange over small made-up shapes, and its comparison with the reference.

Layout, dispatch, cached dispatch of other rows, combine. `Shape` (of exchange.py) says what is
exchanged, `Mode` says how; both print as the Python that makes them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

import deep_ep
from deep_ep.types.config import largest_hints
from support import normal_reference as reference
from support.exchange import Shape, assert_same_bytes, make_routing
from support.launch import DEVICE, Ranks

Tensor = torch.Tensor

# Queues of two slots that are filled one by one: everything has to wait for everything.
TINY = deep_ep.Config(2, 1, 2, 1, 2)
SMALL = deep_ep.Config(4, 3, 8, 2, 5)


@dataclass(frozen=True)
class Rows:
    """What is exchanged, here and by `ElasticBuffer`.

    dtype, cached_dtype: of the rows of the dispatch, and of the cached dispatch. scales: dtype of the
    scales that go with them, "" for none. scale_strides: "rows", "columns" (as transposing makes
    them), "sparse" (neither stride is 1) or "same" (one row for all tokens).
    previous: "none", "empty" (an event that holds none), or how an event is given.
    """

    dtype: str = "bfloat16"
    cached_dtype: str = "bfloat16"
    cached_hidden: int = 64
    scales: str = ""
    num_scales: int = 3
    scale_strides: str = "rows"
    combine_hidden: int = 24
    num_biases: int = 0
    previous: str = "none"
    allocate_on_comm_stream: bool = False


@dataclass(frozen=True)
class Mode(Rows):
    """How to exchange.

    has_topk: pass top-k with the dispatch. spare_rows: of the worst-case mode, beyond what comes;
    None for exact sizes. weights: of combine, [n, num_topk], where True. previous: an "event", too.
    """

    has_topk: bool = True
    spare_rows: int | None = None
    expert_alignment: int = 1
    weights: bool = True
    async_finish: bool = False


class Inputs(NamedTuple):
    """What one rank sends."""

    x: Tensor  # [T, hidden], random bytes
    scales: Tensor | None  # [T, num_scales]
    topk_idx: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] float32
    cached_x: Tensor  # [T, cached_hidden], random bytes
    cached_weights: Tensor  # [T, K] float32
    values: Tensor  # [T, combine_hidden] bfloat16; experts make their rows of them
    biases: tuple[Tensor, ...]  # [T, combine_hidden] bfloat16


class Outputs(NamedTuple):
    """What one rank got from all calls, without events."""

    layout: tuple[Any, ...]
    recv_x: Any
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    counts: Any
    handle: tuple[Tensor, ...]
    cached: tuple[Any, ...]
    combined: Tensor
    combined_weights: Tensor | None


def shape_of(num_tokens: Sequence[int], hidden: int, experts: int, topk: int, **more: Any) -> Shape:
    """A shape without the limit that low latency puts on an expert's rows."""
    limit = max(1, *num_tokens) * topk
    return Shape(tuple(num_tokens), limit, hidden, experts, topk, **more)


def hidden_bytes_of(shape: Shape, mode: Mode) -> int:
    """Bytes of the largest row of any call."""
    dispatched = shape.hidden * getattr(torch, mode.dtype).itemsize
    cached = mode.cached_hidden * getattr(torch, mode.cached_dtype).itemsize
    return max(dispatched, cached, 2 * mode.combine_hidden)


@contextmanager
def nodes_of(ranks_per_node: int) -> Iterator[None]:
    """Buffers and size hints that are made within know nodes of that size."""
    with mock.patch.dict(os.environ, DEEP_EP_RANKS_PER_NODE=str(ranks_per_node)):
        yield


@contextmanager
def normal_ranks(
    num_ranks: int,
    ranks_per_node: int,
    configs: Sequence[deep_ep.Config],
    hidden_bytes: int,
    **buffer_arguments: Any,
) -> Iterator[Ranks]:
    """Ranks that are threads, on nodes of that size, with buffers exactly as large as the hints say."""
    with nodes_of(ranks_per_node):
        nvl_bytes, rdma_bytes = largest_hints(configs, hidden_bytes, num_ranks)
        arguments = {
            "num_nvl_bytes": nvl_bytes,
            "num_rdma_bytes": rdma_bytes,
            "low_latency_mode": False,
            "num_qps_per_rank": max(2, *(c.num_sms for c in configs)),
            **buffer_arguments,
        }
        with Ranks(num_ranks, 1, 128, num_ranks, **arguments) as ranks:
            yield ranks


def random_bytes(rows: int, columns: int, dtype: str, generator: torch.Generator) -> Tensor:
    """[rows, columns] whose bytes are random: dispatch copies whatever they mean."""
    kind = getattr(torch, dtype)
    raw = torch.randint(256, (rows, columns * kind.itemsize), generator=generator).to(torch.uint8)
    return raw.view(kind) if rows else torch.empty((0, columns), dtype=kind)


def with_strides(rows: Tensor, strides: str) -> Tensor:
    """The same [T, num_scales], differently laid out."""
    if strides == "columns":
        return rows.t().contiguous().t()
    if strides == "sparse":
        wide = rows.new_zeros((rows.shape[0] * 2, rows.shape[1] * 3))
        wide[::2, ::3] = rows
        return wide[::2, ::3]
    if strides == "same":
        return rows[:1].expand_as(rows)
    return rows


def summands(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] bfloat16 whose sums depend on their order: half of them are 2^30 or its negative, beside
    which float32 loses the others."""
    size = rows, columns
    small, large = (torch.randn(size, generator=generator) for _ in range(2))
    is_large = torch.rand(size, generator=generator) < 0.5
    return torch.where(is_large, large.sign() * 2**30, small).bfloat16()


def make_inputs(shape: Shape, mode: Rows) -> list[Inputs]:
    """Inputs of all ranks. Equal shapes and modes give equal inputs."""
    generator = torch.Generator().manual_seed(shape.seed)
    inputs = []
    for tokens in shape.num_tokens:
        topk_idx, topk_weights = make_routing(shape, tokens, generator)
        scales = None
        if mode.scales:
            scales = random_bytes(tokens, mode.num_scales, mode.scales, generator)
            scales = with_strides(scales, mode.scale_strides)
        inputs.append(
            Inputs(
                random_bytes(tokens, shape.hidden, mode.dtype, generator),
                scales,
                topk_idx,
                topk_weights,
                random_bytes(tokens, mode.cached_hidden, mode.cached_dtype, generator),
                torch.randn(topk_idx.shape, generator=generator),
                summands(tokens, mode.combine_hidden, generator),
                tuple(
                    summands(tokens, mode.combine_hidden, generator) for _ in range(mode.num_biases)
                ),
            )
        )
    return inputs


class Expected(NamedTuple):
    """What all ranks exchange and how, the reference's answer, and what they put into combine."""

    inputs: Sequence[Inputs]
    shape: Shape
    mode: Mode
    ranks_per_node: int
    layouts: list[reference.Layout]
    received: list[reference.Received]
    cached: list[reference.Received]
    ys: list[Tensor]  # [n, combine_hidden] bfloat16
    weights: list[Tensor]  # [n, num_topk] float32


def expect(inputs: Sequence[Inputs], shape: Shape, mode: Mode, ranks_per_node: int) -> Expected:
    """What all ranks must get, and what their experts make of it."""
    layouts = [
        reference.layout(one.topk_idx, shape.num_experts, shape.num_ranks, ranks_per_node)
        for one in inputs
    ]
    received = reference.dispatch(
        [one.x for one in inputs],
        layouts,
        [one.scales for one in inputs] if mode.scales else None,
        [one.topk_idx for one in inputs] if mode.has_topk else None,
        [one.topk_weights for one in inputs] if mode.has_topk else None,
    )
    generator = torch.Generator().manual_seed(shape.seed + 1)
    return Expected(
        *(inputs, shape, mode, ranks_per_node, layouts, received),
        reference.dispatch([one.cached_x for one in inputs], layouts),
        [
            (one.x.float() * (1 + rank % 7 / 8)).bfloat16()
            for rank, one in enumerate(reference.dispatch([one.values for one in inputs], layouts))
        ],
        [torch.randn(len(one.x), shape.num_topk, generator=generator) for one in received],
    )


# --- the calls ------------------------------------------------------------------------------------


# What `get_dispatch_layout` returns, by the names that dispatch has for it.
LAYOUT = (
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank"),
    *("num_tokens_per_expert", "is_token_in_rank"),
)


def layout_of(buffer: deep_ep.Buffer, *args: Any, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """What a program passes on from the layout to its dispatch, and the event."""
    *layout, event = buffer.get_dispatch_layout(*args, **arguments)
    return dict(zip(LAYOUT, layout)), event


def run_exchange(
    buffer: deep_ep.Buffer, expected: Expected, config: deep_ep.Config | None
) -> Outputs:
    """All calls of one rank. What is dispatched is not awaited before it is checked, but combine
    takes what the reference expects."""
    inputs, mode = expected.inputs[buffer.rank], expected.mode
    layout, dispatched, num_worst_tokens = run_dispatch(
        buffer, inputs, expected.shape, mode, config
    )
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = dispatched
    x = inputs.cached_x.to(DEVICE)
    *cached, event = buffer.dispatch(x, handle=handle, config=config, **timing(buffer, mode))
    finish(event, mode)
    y, weights = expected.ys[buffer.rank], expected.weights[buffer.rank]
    if num_worst_tokens:
        y, weights = padded(y, num_worst_tokens), padded(weights, num_worst_tokens)
    combined, combined_weights = run_combine(
        buffer, y, handle, inputs.biases, weights if mode.weights else None, mode, config
    )
    received = recv_x, recv_topk_idx, recv_topk_weights, counts
    return Outputs(layout, *received, handle, tuple(cached), combined, combined_weights)


def run_dispatch(
    buffer: deep_ep.Buffer,
    inputs: Inputs,
    shape: Shape,
    mode: Mode,
    config: deep_ep.Config | None,
    **arguments: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """What get_dispatch_layout and dispatch returned, and num_worst_tokens."""
    topk_idx = inputs.topk_idx.to(DEVICE)
    layout, event = layout_of(buffer, topk_idx, shape.num_experts)
    assert event.event is None
    num_worst_tokens = 0
    if mode.spare_rows is not None:
        num_worst_tokens = max(1, sum(shape.num_tokens) + mode.spare_rows)
    x = inputs.x.to(DEVICE)
    dispatched = buffer.dispatch(
        x if inputs.scales is None else (x, inputs.scales.to(DEVICE)),
        **layout,
        topk_idx=topk_idx if mode.has_topk else None,
        topk_weights=inputs.topk_weights.to(DEVICE) if mode.has_topk else None,
        expert_alignment=mode.expert_alignment,
        num_worst_tokens=num_worst_tokens,
        config=config,
        **timing(buffer, mode),
        **arguments,
    )
    finish(dispatched[-1], mode)
    return tuple(layout.values()), dispatched, num_worst_tokens


def run_combine(
    buffer: deep_ep.Buffer,
    y: Tensor,
    handle: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    weights: Tensor | None,
    mode: Mode,
    config: deep_ep.Config | None,
) -> tuple[Tensor, Tensor | None]:
    """One combine, finished when this returns."""
    forms: list[Any] = [None, *biases, tuple(bias.to(DEVICE) for bias in biases)]
    combined, combined_weights, event = buffer.combine(
        y.to(DEVICE),
        handle,
        topk_weights=None if weights is None else weights.to(DEVICE),
        bias=forms[len(biases) if len(biases) < 2 else -1],
        config=config,
        **timing(buffer, mode),
    )
    finish(event, mode)
    return combined, combined_weights


def timing(buffer: deep_ep.Buffer, mode: Mode) -> dict[str, Any]:
    """The keywords about streams and events."""
    previous = {
        "none": lambda: None,
        "empty": lambda: deep_ep.EventOverlap(None),
        "event": buffer.capture,
    }
    return {
        "previous_event": previous[mode.previous](),
        "async_finish": mode.async_finish,
        "allocate_on_comm_stream": mode.allocate_on_comm_stream,
    }


def finish(event: deep_ep.EventOverlap, mode: Mode) -> None:
    """Waits for a call, where it is not yet waited for."""
    assert (event.event is not None) == mode.async_finish
    if mode.async_finish:
        event.current_stream_wait()


def padded(rows: Tensor, num_rows: int) -> Tensor:
    """With NaN below, which nobody may read."""
    tail = rows.new_full((num_rows - len(rows), *rows.shape[1:]), torch.nan)
    return torch.cat([rows, tail])


# --- the comparison -------------------------------------------------------------------------------


def exchange_and_check(
    ranks: Ranks, shape: Shape, mode: Mode, config: deep_ep.Config, ranks_per_node: int
) -> list[Outputs]:
    """All calls on all ranks; all results are the reference's."""
    expected = expect(make_inputs(shape, mode), shape, mode, ranks_per_node)
    outputs = ranks.run(lambda _, buffer: run_exchange(buffer, expected, config))
    for rank, got in enumerate(outputs):
        assert_outputs(got, rank, expected, config)
    return outputs


def assert_outputs(got: Outputs, rank: int, expected: Expected, config: deep_ep.Config) -> None:
    """All results of one rank are the reference's."""
    assert_layout(got.layout, expected.layouts[rank], f"rank {rank}")
    assert_dispatched(got, rank, expected)
    assert_handle(got.handle, rank, expected, config.num_sms // 2)
    assert_cached(got, expected.cached[rank], f"rank {rank}, cached")
    assert_combined(got, rank, expected)


def assert_layout(got: tuple[Any, ...], want: reference.Layout, where: str) -> None:
    for mine, other in zip(got, want):
        if other is None:
            assert mine is None, where
        else:
            assert mine.dtype == other.dtype, where
            assert mine.tolist() == other.tolist(), where


def assert_dispatched(got: Outputs, rank: int, expected: Expected) -> None:
    """Of all that a rank got, what its fresh dispatch returned."""
    want, mode = expected.received[rank], expected.mode
    total = len(want.x)
    if mode.spare_rows is not None:
        total = max(1, sum(expected.shape.num_tokens) + mode.spare_rows)
    assert_received_rows(
        *(got.recv_x, got.recv_topk_idx, got.recv_topk_weights, got.counts),
        *(want, total, mode, f"rank {rank}"),
    )


def assert_received_rows(
    got_x: Any,
    recv_topk_idx: Tensor | None,
    recv_topk_weights: Tensor | None,
    got_counts: Any,
    want: reference.Received,
    total: int,
    mode: Mode,
    where: str,
) -> None:
    """Rows, their order, what goes with them, counts. Behind them, in the worst-case mode, -1."""
    num_rows = len(want.x)
    recv_x, recv_scales = got_x if mode.scales else (got_x, None)
    if mode.scales:
        assert isinstance(got_x, tuple), where
        assert_rows(recv_scales, want.scales, total, f"{where}, scales")
    assert_rows(recv_x, want.x, total, f"{where}, rows")
    if mode.has_topk:
        assert_rows(recv_topk_idx, want.topk_idx, total, f"{where}, experts")
        assert_rows(recv_topk_weights, want.topk_weights, total, f"{where}, weights")
        assert recv_topk_idx is not None
        assert (recv_topk_idx[num_rows:] == -1).all(), where
    else:
        assert recv_topk_idx is None, where
        assert recv_topk_weights is None, where
    if mode.spare_rows is None:
        alignment = mode.expert_alignment
        counts = [-(-count // alignment) * alignment for count in want.counts]
        assert got_counts == counts, where
        assert all(type(count) is int for count in got_counts), where
    else:
        assert got_counts == [], where


def assert_rows(got: Any, want: Tensor | None, total: int, where: str) -> None:
    """[total, ...], contiguous, of which the first rows are the reference's."""
    assert want is not None
    assert got.dtype == want.dtype, where
    assert got.shape == (total, *want.shape[1:]), where
    assert got.is_contiguous(), where
    assert not got.requires_grad, where
    assert_same_bytes(got[: len(want)], want, where)


def source_prefix(handle: tuple[Tensor, ...], rank: int) -> list[int]:
    """Rows received from the ranks up to each, as programs read them from a handle."""
    prefix = handle[0][:, rank] if len(handle) == 6 else handle[-4]
    return [int(rows) for rows in prefix]


def assert_handle(
    handle: tuple[Tensor, ...], rank: int, expected: Expected, num_channels: int
) -> None:
    """What programs read from a handle."""
    num_tokens, num_ranks = expected.layouts[rank].is_token_in_rank.shape
    several_nodes = expected.ranks_per_node < num_ranks
    where = f"rank {rank}, handle"
    assert type(handle) is tuple, where
    assert len(handle) == (10 if several_nodes else 6), where
    assert all(isinstance(item, Tensor) for item in handle), where
    want = expected.received[rank]
    assert source_prefix(handle, rank) == want.prefix.tolist(), where
    in_rank = expected.layouts[rank].is_token_in_rank
    assert torch.equal(handle[0 if several_nodes else 4].cpu(), in_rank), where
    step = max(1, -(-num_tokens // num_channels))
    ends = [min((channel + 1) * step, num_tokens) for channel in range(num_channels)]
    sent = torch.stack([in_rank[:end].sum(0) for end in ends], dim=1)
    assert handle[2 if several_nodes else 1].tolist() == sent.tolist(), where
    if several_nodes:
        num_nodes = num_ranks // expected.ranks_per_node
        per_node = in_rank.view(num_tokens, num_nodes, expected.ranks_per_node).any(2)
        sent = torch.stack([per_node[:end].sum(0) for end in ends], dim=1)
        assert handle[1].tolist() == sent.tolist(), where
        assert handle[7].dtype == torch.uint8, where
    else:
        assert handle[3][: len(want.x)].tolist() == want.tokens.tolist(), where


def assert_cached(got: Outputs, want: reference.Received, where: str) -> None:
    recv_x, *nothing = got.cached
    assert nothing == [None] * 4, where
    total = len(got.recv_x[0] if isinstance(got.recv_x, tuple) else got.recv_x)
    assert_rows(recv_x, want.x, total, where)


def assert_combined(got: Outputs, rank: int, expected: Expected) -> None:
    assert_sums(got.combined, rank, expected, f"rank {rank}, combine")
    if not expected.mode.weights:
        assert got.combined_weights is None
        return
    assert got.combined_weights is not None
    assert got.combined_weights.dtype == torch.float32
    given = expected.weights, expected.received, rank, len(expected.inputs[rank].x)
    want = reference.combine(*given, ranks_per_node=expected.ranks_per_node)
    assert_same_bytes(got.combined_weights, want, f"rank {rank}, weights")


def assert_sums(combined: Tensor, rank: int, expected: Expected, where: str) -> None:
    """Bit for bit, because the order of the additions and their roundings are promised."""
    inputs = expected.inputs[rank]
    assert combined.dtype == torch.bfloat16, where
    assert combined.shape == inputs.values.shape, where
    given = expected.ys, expected.received, rank, len(inputs.x)
    want = reference.combine(*given, inputs.biases, expected.ranks_per_node)
    assert_same_bytes(combined, want, where)
