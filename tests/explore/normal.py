"""Normal operations of a program: what is drawn for them, how a rank calls them, what they had to return."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import deep_ep
from support import normal_reference as reference
from support.exchange import Shape, assert_same_bytes
from support.normal_exchange import (
    Inputs,
    Mode,
    assert_received_rows,
    hidden_bytes_of,
    make_inputs,
    shape_of,
)


@dataclass(frozen=True)
class Sizes:
    """What is exchanged, how, and through which queues (the arguments of `Config`)."""

    shape: Shape
    mode: Mode
    config: tuple[int, int, int, int, int]
    ranks_per_node: int

    def __str__(self) -> str:
        shape = self.shape
        return f"{shape.num_tokens} {shape.hidden} {shape.num_experts} {self.config}"

    @property
    def row_bytes(self) -> dict[str, int]:
        """By kind of operation."""
        mode = self.mode
        return {
            "normal dispatch": self.shape.hidden * getattr(torch, mode.dtype).itemsize,
            "cached dispatch": mode.cached_hidden * getattr(torch, mode.cached_dtype).itemsize,
            "normal combine": 2 * mode.combine_hidden,
        }

    @property
    def num_worst_tokens(self) -> int:
        """0: the host waits for the counts."""
        if self.mode.spare_rows is None:
            return 0
        return max(1, sum(self.shape.num_tokens) + self.mode.spare_rows)

    def agreed(self, kind: str) -> tuple[Any, ...]:
        """What all ranks must agree on; how much a rank sends in a step is its own affair."""
        channels, _, nvl, rdma_send, rdma = self.config
        rdma = -(-rdma // rdma_send) * rdma_send
        mode, fresh = self.mode, kind == "normal dispatch"
        has_topk = mode.has_topk if fresh else kind == "normal combine" and mode.weights
        return (
            *(self.row_bytes[kind], channels, nvl, rdma),
            self.shape.num_experts if fresh else 0,
            self.shape.num_topk if has_topk else 0,
            mode.num_scales if fresh and mode.scales else 0,
        )

    def buffer_bytes(self) -> tuple[int, int]:
        """The hints: NVLink, RDMA."""
        config, num_ranks = deep_ep.Config(*self.config), self.shape.num_ranks
        row_bytes = hidden_bytes_of(self.shape, self.mode)
        return (
            config.get_nvl_buffer_size_hint(row_bytes, num_ranks),
            config.get_rdma_buffer_size_hint(row_bytes, num_ranks),
        )


def draw_sizes(draw: random.Random, num_ranks: int, ranks_per_node: int) -> Sizes:
    """Few rows and queues that are mostly full."""
    num_nodes = num_ranks // ranks_per_node
    dtype = draw.choice(("bfloat16", "bfloat16", "float32", "uint8", "float8_e4m3fn"))
    itemsize = getattr(torch, dtype).itemsize
    has_topk = draw.random() < 0.8
    shape = shape_of(
        [draw.choice((0, 1, 2, 3, 5, 9)) for _ in range(num_ranks)],
        16 // itemsize * draw.choice((1, 2, 9)),
        num_ranks * draw.choice((1, 2, 3)),
        draw.choice((1, 2, 3, 9)),
        routing=draw.choice(("random", "random", "random", "repeats", "one-expert", "nowhere")),
        dropped=draw.choice((0.0, 0.1, 0.9)),
    )
    mode = Mode(
        dtype=dtype,
        cached_dtype=draw.choice(("bfloat16", "uint8")),
        cached_hidden=16 * draw.choice((1, 5)),
        scales=draw.choice(("float32", "int32", "")) if itemsize == 1 else "",
        num_scales=draw.choice((1, 7)),
        scale_strides=draw.choice(("rows", "columns", "sparse", "same")),
        has_topk=has_topk,
        spare_rows=draw.choice((None, None, 0, 5)) if has_topk else None,
        expert_alignment=draw.choice((1, 4)),
        combine_hidden=8 * draw.choice((1, 3)),
        weights=draw.random() < 0.5,
        num_biases=draw.choice((0, 0, 1, 2)),
        async_finish=draw.random() < 0.3,
    )
    nvl_send, rdma_send = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    nvl = max(nvl_send + draw.choice((1, 2, 5)), num_nodes * draw.choice((1, 2)))
    rdma = 2 * rdma_send + draw.choice((0, 1, 5))
    channels = 2 * draw.choice((1, 1, 2, 3))
    return Sizes(shape, mode, (channels, nvl_send, nvl, rdma_send, rdma), ranks_per_node)


def inputs_of(sizes: Sizes, rank: int, seed: int) -> Inputs:
    """What one rank sends, other things for each seed."""
    shape = replace(sizes.shape, num_tokens=(sizes.shape.num_tokens[rank],), seed=seed)
    return make_inputs(shape, sizes.mode)[0]


def num_rows_of(handle: tuple[Any, ...]) -> int:
    """Received rows that a handle has room for: what a combine takes."""
    return len(handle[3] if len(handle) == 6 else handle[7])


class Rows:
    """What a combine returns: rows and weights of one rank, and its biases."""

    def __init__(self, sizes: Sizes, num_rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randn(num_rows, sizes.mode.combine_hidden, generator=generator).bfloat16()
        self.weights = None
        if sizes.mode.weights:
            self.weights = torch.randn(num_rows, sizes.shape.num_topk, generator=generator)


# --- what had to come of it -----------------------------------------------------------------------


def expected_dispatch(
    inputs: Sequence[Inputs], sizes: Sequence[Sizes], is_fresh: bool, routed: Sequence[Inputs]
) -> list[reference.Received]:
    """Of all ranks. routed: what the dispatch was given that made the handle."""
    mode, shape = sizes[0].mode, sizes[0].shape
    layouts = [
        reference.layout(one.topk_idx, shape.num_experts, shape.num_ranks, sizes[0].ranks_per_node)
        for one in routed
    ]
    if not is_fresh:
        return reference.dispatch([one.cached_x for one in inputs], layouts)
    scales = [one.scales for one in inputs if one.scales is not None]
    return reference.dispatch(
        [one.x for one in inputs],
        layouts,
        scales or None,
        [one.topk_idx for one in inputs] if mode.has_topk else None,
        [one.topk_weights for one in inputs] if mode.has_topk else None,
    )


def check_dispatch(result: Any, want: reference.Received, sizes: Sizes, where: str) -> None:
    """Of a fresh one: rows, their order, what goes with them, and counts."""
    recv_x, topk_idx, topk_weights, counts = result[:4]
    total = sizes.num_worst_tokens or len(want.x)
    assert_received_rows(recv_x, topk_idx, topk_weights, counts, want, total, sizes.mode, where)


def check_cached(recv_x: torch.Tensor, want: reference.Received, where: str) -> None:
    """Of a dispatch with a handle: the rows; there may be more of them."""
    assert_same_bytes(recv_x[: len(want.x)], want.x, where)


def check_combine(
    result: tuple[torch.Tensor, torch.Tensor | None],
    rows: Sequence[Rows],
    received: Sequence[reference.Received],
    rank: int,
    inputs: Inputs,
    sizes: Sizes,
    where: str,
) -> None:
    """Bit for bit."""
    combined, weights = result
    num_tokens, per_node = len(inputs.x), sizes.ranks_per_node
    ys = [one.y[: len(got.x)] for one, got in zip(rows, received)]
    want = reference.combine(ys, received, rank, num_tokens, inputs.biases, per_node)
    assert_same_bytes(combined, want, where)
    assert (weights is None) == (rows[rank].weights is None), where
    if weights is not None:
        returned = [
            one.weights[: len(got.x)] for one, got in zip(rows, received) if one.weights is not None
        ]
        want = reference.combine(returned, received, rank, num_tokens, ranks_per_node=per_node)
        assert_same_bytes(weights, want, f"{where}, weights")
