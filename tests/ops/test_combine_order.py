"""Sums of a combine by the top-k columns of each token: bit by bit what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from deep_ep.checks.calls import NormalCombine, NormalDispatch
from deep_ep.errors import EPArgumentError
from deep_ep.ops.normal import CombineOrder
from support import normal_reference as reference
from support.exchange import Shape, assert_same_bytes
from support.launch import DEVICE, Ranks
from support.normal_exchange import (
    SMALL,
    TINY,
    Mode,
    layout_of,
    make_inputs,
    normal_ranks,
    shape_of,
)

Tensor = torch.Tensor

HIDDEN = 24


def by_last_column(columns: list[int], groups: Sequence[int]) -> list[int]:
    """Of a token: the groups (ranks or nodes) that are added up, of those that it has rows of.

    columns: the group that each of its columns names; -1: none.
    """
    last = {group: k for k, group in enumerate(columns)}
    return sorted((group for group in groups if group in last), key=lambda group: last[group])


def ranks_named(topk_idx: Tensor, shape: Shape) -> list[list[int]]:
    """Of each token and column: the rank of the expert; -1 where there is no expert."""
    per_rank = shape.num_experts // shape.num_ranks
    is_expert = (topk_idx >= 0) & (topk_idx < shape.num_experts)
    named: list[list[int]] = torch.where(is_expert, topk_idx // per_rank, -1).tolist()
    return named


def values(received: list[reference.Received], columns: int, seed: int) -> list[Tensor]:
    """Of each rank, a row per received one. First half of the columns: large ones of which two of a sign in turn are
    infinite, and small ones; the others are random, so that hardly a sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    base = 1 + torch.randint(0, 128, (columns,), generator=generator) / 128
    ys = []
    for one in received:
        is_large = torch.rand(len(one.x), 1, generator=generator) < 0.8
        signs = torch.randint(0, 2, (len(one.x), 1), generator=generator) * 2 - 1
        y = (base * signs).ldexp(is_large * 127)
        y[:, columns // 2 :] = torch.randn(y[:, columns // 2 :].shape, generator=generator)
        ys.append(y)
    return ys


def sums(
    ys: list[Tensor],
    received: list[reference.Received],
    rank: int,
    columns: tuple[list[list[int]], list[list[int]]],
    biases: Sequence[Tensor],
    ranks_per_node: int,
    rounds_own: bool,
) -> Tensor:
    """Of the tokens of `rank`, in float32: biases, then the sums of nodes, each rounded if there are several.

    columns: of each token the ranks that they name, for `rank` and for the gateways of other nodes.
    rounds_own: whether the source rounds the sum of its own node as well.
    """
    dtype, own = ys[0].dtype, rank // ranks_per_node
    rows_of = []
    for one in received:
        mine = (one.sources == rank).nonzero()[:, 0].tolist()
        rows_of.append({int(one.tokens[row]): row for row in mine})
    total = torch.zeros(len(columns[0]), ys[0].shape[1])
    for token, (named, named_there) in enumerate(zip(*columns)):
        for bias in biases:
            total[token] += bias[token]
        ranks_of: dict[int, list[int]] = {}
        for other, rows in enumerate(rows_of):
            if token in rows:
                ranks_of.setdefault(other // ranks_per_node, []).append(other)
        named_nodes = [other // ranks_per_node for other in named]
        for node in by_last_column(named_nodes, list(ranks_of)):
            ranks = by_last_column(named if node == own else named_there, ranks_of[node])
            parts = [ys[other][rows_of[other][token]].float() for other in ranks]
            is_sum = len(ys) > ranks_per_node and (node != own or rounds_own)
            for part in [sum(parts, torch.zeros(())).to(dtype).float()] if is_sum else parts:
                total[token] += part
    return total.to(dtype)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Bit by bit, but for the kind of NaN that the sum of two infinite ones is."""
    nan = float("nan")
    assert_same_bytes(got.masked_fill(got.isnan(), nan), want.masked_fill(want.isnan(), nan), what)


class Combine:
    """One shape, dispatched on all ranks; and combines of it."""

    def __init__(
        self,
        ranks: Ranks,
        shape: Shape,
        num_biases: int,
        config: deep_ep.Config,
        ranks_per_node: int | None = None,
    ) -> None:
        self.ranks, self.shape, self.config = ranks, shape, config
        self.ranks_per_node = ranks_per_node or shape.num_ranks
        mode = Mode(combine_hidden=HIDDEN, num_biases=num_biases)
        self.inputs = make_inputs(shape, mode)
        layouts = [
            reference.layout(one.topk_idx, shape.num_experts, shape.num_ranks, self.ranks_per_node)
            for one in self.inputs
        ]
        self.received = reference.dispatch([one.x for one in self.inputs], layouts)
        self.ys = [y.bfloat16() for y in values(self.received, HIDDEN, shape.seed)]
        self.weights = values(self.received, shape.num_topk, shape.seed + 1)
        self.dispatched = ranks.run(self._dispatch)

    def check(self, topk_idxs: Sequence[Tensor] | None) -> None:
        """All ranks get the sums in the order of these columns; or by rank."""
        results = self.ranks.run(
            lambda rank, buffer: self.run(
                rank, buffer, None if topk_idxs is None else topk_idxs[rank]
            )
        )
        for rank, (combined, combined_weights) in enumerate(results):
            biases = self.inputs[rank].biases
            want = self.want(self.ys, rank, biases, topk_idxs)
            assert_same(combined, want, f"rank {rank}")
            # Nothing is rounded, so weights of the own node need no sum of their own.
            want = self.want(self.weights, rank, (), topk_idxs, rounds_own=False)
            assert_same(combined_weights, want, f"rank {rank}, weights")

    def want(
        self,
        ys: list[Tensor],
        rank: int,
        biases: Sequence[Tensor],
        topk_idxs: Sequence[Tensor] | None,
        rounds_own: bool = True,
    ) -> Tensor:
        num_tokens = self.shape.num_tokens[rank]
        given = ys, self.received, rank
        if topk_idxs is None:
            return reference.combine(*given, num_tokens, biases, self.ranks_per_node)
        columns = (
            ranks_named(topk_idxs[rank], self.shape),
            ranks_named(self.routing[rank], self.shape),
        )
        return sums(*given, columns, biases, self.ranks_per_node, rounds_own)

    @property
    def routing(self) -> list[Tensor]:
        return [one.topk_idx for one in self.inputs]

    def order(self, rank: int, topk_idx: Tensor) -> CombineOrder:
        per_rank = self.shape.num_experts // self.shape.num_ranks
        return CombineOrder(topk_idx.to(DEVICE), per_rank, self.dispatched[rank][1])

    def run(
        self, rank: int, buffer: deep_ep.Buffer, topk_idx: Tensor | CombineOrder | None
    ) -> tuple[Any, Any]:
        biases = tuple(bias.to(DEVICE) for bias in self.inputs[rank].biases)
        call = NormalCombine.of(
            x=self.ys[rank].to(DEVICE),
            handle=self.dispatched[rank][0],
            topk_weights=self.weights[rank].to(DEVICE),
            bias=(*biases, None, None)[:2],
            config=self.config,
        )
        order = self.order(rank, topk_idx) if isinstance(topk_idx, Tensor) else topk_idx
        combined, combined_weights, _ = buffer.normal.combine(call, order)
        return combined, combined_weights

    def _dispatch(self, rank: int, buffer: deep_ep.Buffer) -> tuple[Any, Tensor | None]:
        """The handle, and what the order of sums needs to know of relayed rows."""
        inputs = self.inputs[rank]
        topk_idx = inputs.topk_idx.to(DEVICE)
        layout, _ = layout_of(buffer, topk_idx, self.shape.num_experts)
        call = NormalDispatch.of(
            x=inputs.x.to(DEVICE),
            **layout,
            topk_idx=topk_idx,
            topk_weights=inputs.topk_weights.to(DEVICE),
            expert_alignment=1,
            num_worst_tokens=0,
            config=self.config,
        )
        received, _, handle, _ = buffer.normal.dispatch(call, keeps_experts=True)
        return handle, received.relay_topk_idx


@given(
    place=st.sampled_from([(2, 2), (3, 3), (8, 8), (2, 1), (4, 2), (8, 4), (6, 2), (5, 1)]),
    per_rank=st.integers(1, 4),
    topk=st.sampled_from([1, 2, 4, 8, 33]),
    routing=st.sampled_from(["random", "random", "repeats", "one-expert"]),
    dropped=st.sampled_from([0.0, 0.3]),
    num_biases=st.integers(0, 2),
    config=st.sampled_from([TINY, SMALL]),
    seed=st.integers(0, 2**20),
)
def test_sums_are_in_the_order_of_last_columns(
    place: tuple[int, int],
    per_rank: int,
    topk: int,
    routing: str,
    dropped: float,
    num_biases: int,
    config: deep_ep.Config,
    seed: int,
) -> None:
    """And by rank without an order, before and afterwards."""
    num_ranks, ranks_per_node = place
    if num_ranks // ranks_per_node > 2:
        config = SMALL  # a queue has a place for each node
    tokens = [(7 * rank + seed) % 12 for rank in range(num_ranks)]
    shape = shape_of(
        tokens, 16, num_ranks * per_rank, topk, routing=routing, dropped=dropped, seed=seed
    )
    with normal_ranks(num_ranks, ranks_per_node, [config], 2 * HIDDEN) as ranks:
        combine = Combine(ranks, shape, num_biases, config, ranks_per_node)
        combine.check(None)
        combine.check(combine.routing)
        combine.check(None)


def test_ranks_without_tokens_relay_in_order() -> None:
    shape = shape_of((0,) * 4 + (12,) * 4, 16, 16, 8)
    with normal_ranks(8, 4, [SMALL], 2 * HIDDEN) as ranks:
        combine = Combine(ranks, shape, 0, SMALL, 4)
        combine.check(combine.routing)


EIGHT = shape_of((12,) * 8, 16, 16, 8)
nodes = pytest.mark.parametrize("ranks_per_node", [8, 4, 2])


@nodes
def test_columns_may_hold_anything(ranks_per_node: int) -> None:
    """What is no expert is skipped, who has no row has none, and whom nobody names is left out."""
    generator = torch.Generator().manual_seed(5)
    with normal_ranks(8, ranks_per_node, [SMALL], 2 * HIDDEN) as ranks:
        combine = Combine(ranks, EIGHT, 1, SMALL, ranks_per_node)
        edges = torch.tensor([-1, -2, 16, 2**31, 2**32 + 3, -(2**63), 2**63 - 1])
        noise = [edges[torch.randint(0, 7, (12, 8), generator=generator)] for _ in range(8)]
        is_noise = [torch.rand(12, 8, generator=generator) < 0.4 for _ in range(8)]
        routing = combine.routing
        combine.check(
            [torch.where(where, one, real) for where, one, real in zip(is_noise, noise, routing)]
        )
        combine.check(noise)
        combine.check([torch.randint(0, 16, (12, 8), generator=generator) for _ in range(8)])
        if ranks_per_node == 8:
            combine.check([torch.randint(0, 16, (12, 3), generator=generator) for _ in range(8)])
        combine.check(routing)


def test_columns_of_relayed_rows_may_hold_anything() -> None:
    """They are the caller's as well: what they name wrongly is not added, and nothing else changes."""
    edges = torch.tensor([-1, -2, 16, 3, 4, 2**31 - 1, -(2**31)], dtype=torch.int32)
    with normal_ranks(8, 4, [SMALL], 2 * HIDDEN) as ranks:
        combine = Combine(ranks, EIGHT, 0, SMALL, 4)

        def run(rank: int, buffer: deep_ep.Buffer) -> Tensor:
            right = combine.order(rank, combine.routing[rank])
            assert right.relay_topk_idx is not None
            generator = torch.Generator().manual_seed(rank)
            noise = edges[torch.randint(0, 7, right.relay_topk_idx.shape, generator=generator)]
            damaged = right._replace(relay_topk_idx=noise.to(DEVICE))
            combined: Tensor = combine.run(rank, buffer, damaged)[0]
            return combined

        ranks.run(run)
        combine.check(combine.routing)


@pytest.mark.parametrize(
    "damage",
    [
        lambda order: order._replace(topk_idx=order.topk_idx[1:]),
        lambda order: order._replace(topk_idx=order.topk_idx.flatten()),
        lambda order: order._replace(topk_idx=order.topk_idx[:, 1:].contiguous()),
        lambda order: order._replace(relay_topk_idx=None),
        lambda order: order._replace(relay_topk_idx=order.relay_topk_idx[1:]),
    ],
    ids=["tokens", "dimensions", "columns", "no-relayed", "relayed"],
)
def test_columns_of_other_tokens_are_refused(
    damage: Callable[[CombineOrder], CombineOrder],
) -> None:
    """Before anything is sent: afterwards all combine."""
    with normal_ranks(8, 4, [SMALL], 2 * HIDDEN) as ranks:
        combine = Combine(ranks, EIGHT, 0, SMALL, 4)

        def run(rank: int, buffer: deep_ep.Buffer) -> None:
            order = damage(combine.order(rank, combine.routing[rank]))
            with pytest.raises(EPArgumentError, match="Leave the handle as dispatch returned it"):
                combine.run(rank, buffer, order)

        ranks.run(run)
        combine.check(combine.routing)
