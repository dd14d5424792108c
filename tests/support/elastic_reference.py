"""`ElasticBuffer`'s dispatch and combine in plain torch, for all ranks at once.

Written from the API specification alone; the judge of the tests. It moves no bytes and knows no
protocol: top-k of all ranks goes in, what every rank must hold afterwards comes out. Rows are in
ascending order of their source rank and source token, within each expert too. Sums have one order and
one rounding per level, so that every result has one right value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from support import normal_reference
from support.normal_reference import Received

Tensor = torch.Tensor


def align(number: int, alignment: int) -> int:
    """Rounded up to a multiple."""
    return -(-number // alignment) * alignment


def route(
    topk_idxs: Sequence[Tensor], topk_weights: Sequence[Tensor], num_experts: int
) -> list[Received]:
    """Per rank topk_idx [T, K] int64 (-1 for none) and topk_weights [T, K] -> per rank what comes to it."""
    num_ranks = len(topk_idxs)
    layouts = [
        normal_reference.layout(topk_idx, num_experts, num_ranks, num_ranks)
        for topk_idx in topk_idxs
    ]
    return normal_reference.dispatch(topk_idxs, layouts, None, topk_idxs, topk_weights)


def rows_of(tensors: Sequence[Tensor], arrival: Received) -> Tensor:
    """Per rank [T, ...] of its tokens -> [n, ...] of those that come."""
    tokens = [arrival.tokens[arrival.sources == source] for source in range(len(tensors))]
    return normal_reference.rows_of(tensors, tokens)


def sources_of(arrival: Received, num_max_tokens: int) -> Tensor:
    """[n] int64: source_rank * num_max_tokens + source_token."""
    return arrival.sources * num_max_tokens + arrival.tokens


# --- counts and places ----------------------------------------------------------------------------


def aligned_counts(arrival: Received, alignment: int) -> list[int]:
    """Rows that each expert of an expanded output takes, its gap included."""
    return [align(count, alignment) for count in arrival.counts]


def expert_starts(arrival: Received, alignment: int, capacity: int | None = None) -> list[int]:
    """First expanded row of each expert, and behind the last one how many rows there are.

    capacity: rows that each expert has room for, whatever comes; None: as many as it receives, aligned.
    """
    rows = aligned_counts(arrival, alignment)
    if capacity is not None:
        rows = [capacity] * len(rows)
    return [0, *itertools.accumulate(rows)]


def expert_ends(arrival: Received, alignment: int, capacity: int | None = None) -> list[int]:
    """Of expanded rows: where the real ones of each expert end."""
    starts = expert_starts(arrival, alignment, capacity)
    return [start + count for start, count in zip(starts, arrival.counts)]


def scaleup_prefix(arrival: Received, num_scaleup_ranks: int) -> list[int]:
    """Inclusive sums of the rows of all sources that have the same index within their domain."""
    index = arrival.sources % num_scaleup_ranks
    rows: list[int] = torch.bincount(index, minlength=num_scaleup_ranks).cumsum(0).tolist()
    return rows


def num_worst_slots(
    num_ranks: int, num_max_tokens: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """Rows of an expanded output whose counts nobody waits for."""
    picks = num_ranks * num_max_tokens * min(num_topk, num_local_experts)
    return align(picks + (alignment - 1) * num_local_experts, alignment)


def slots_of(arrival: Received, alignment: int, capacity: int | None = None) -> Tensor:
    """[n, K] int64: the row of each pick in the expanded output; -1 where topk_idx is."""
    slots = torch.full_like(arrival.topk_idx, -1)
    starts = expert_starts(arrival, alignment, capacity)
    for expert, count in enumerate(arrival.counts):
        places = torch.arange(count, device=slots.device) + starts[expert]
        slots[arrival.topk_idx == expert] = places
    return slots


# --- combine --------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """Which levels round before the last one does.

    per_rank: what the experts of a rank return is one bfloat16 row (compact: always, the caller made it).
    per_domain: what the ranks of a scale-up domain return is one bfloat16 row.
    """

    per_rank: bool
    per_domain: bool


def reduction(do_expand: bool, allow_multiple_reduction: bool, num_domains: int) -> Reduction:
    """num_domains: 1 in direct mode."""
    return Reduction(
        allow_multiple_reduction or not do_expand, allow_multiple_reduction and num_domains > 1
    )


def combine(
    ys: Sequence[Tensor],
    arrivals: Sequence[Received],
    slots: Sequence[Tensor] | None,
    rank: int,
    num_tokens: int,
    how: Reduction,
    ranks_per_domain: int,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """What `rank` gets back: [num_tokens, hidden] bfloat16.

    ys[r]: [rows, hidden] bfloat16 of rank r, rows as arrivals[r], or with `slots` at these of each rank.
    """
    num_topk, hidden = arrivals[0].topk_idx.shape[1], ys[0].shape[1]
    values = ys[0].new_zeros((num_tokens, num_topk, hidden))
    owners = torch.full((num_tokens, num_topk), -1, device=values.device)
    for owner, (y, arrival) in enumerate(zip(ys, arrivals)):
        rows = (arrival.sources == rank).nonzero()[:, 0]
        picks = arrival.topk_idx[rows] >= 0
        if slots is None:
            picks = is_last(picks)
        row, column = picks.nonzero(as_tuple=True)
        token = arrival.tokens[rows[row]]
        values[token, column] = y[rows[row] if slots is None else slots[owner][rows[row], column]]
        owners[token, column] = owner
    return add_up(values, owners, how, ranks_per_domain, biases)


def add_up(
    values: Tensor,
    owners: Tensor,
    how: Reduction,
    ranks_per_domain: int,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """The sums of one rank's tokens.

    values: [T, K, hidden] bfloat16, what each pick contributes. owners: [T, K], which rank does; -1 where
    nothing is. In float32: biases first, then contributions by their column, and one rounding at the end.
    """
    if how.per_rank:
        values, owners = _add_groups(values, owners)
    if how.per_domain:
        values, owners = _add_groups(values, owners.div(ranks_per_domain, rounding_mode="floor"))
    total = values.new_zeros((values.shape[0], values.shape[2]), dtype=torch.float32)
    for bias in biases:
        total += bias
    for column in range(values.shape[1]):
        total += values[:, column].float().where(owners[:, column, None] >= 0, 0)
    return total.bfloat16()


def _add_groups(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """One level: contributions of one group become one, rounded, at the column of the last of them."""
    added, at = torch.zeros_like(values), torch.full_like(groups, -1)
    for column in range(groups.shape[1]):
        same = (groups == groups[:, column, None]) & (groups >= 0)
        last = same[:, column] & ~same[:, column + 1 :].any(1)
        total = torch.zeros_like(values[:, column], dtype=torch.float32)
        for other in range(column + 1):
            total += values[:, other].float().where(same[:, other, None], 0)
        added[last, column] = total[last].bfloat16()
        at[last, column] = groups[last, column]
    return added, at


def is_last(picks: Tensor) -> Tensor:
    """[n, K] bool -> the same with all but the last of each row cleared."""
    behind = picks.flip(1).cumsum(1).flip(1)
    return picks & (behind == 1)


def combine_weights(
    weights: Sequence[Tensor],
    arrivals: Sequence[Received],
    slots: Sequence[Tensor] | None,
    rank: int,
    num_tokens: int,
) -> Tensor:
    """[num_tokens, K] float32: of each pick what its owner supplies, [n, K], or with `slots` [rows]."""
    back = weights[0].new_zeros((num_tokens, arrivals[0].topk_idx.shape[1]))
    for owner, (given, arrival) in enumerate(zip(weights, arrivals)):
        rows = (arrival.sources == rank).nonzero()[:, 0]
        row, column = (arrival.topk_idx[rows] >= 0).nonzero(as_tuple=True)
        mine = rows[row], column
        back[arrival.tokens[rows[row]], column] = given[
            mine if slots is None else slots[owner][mine]
        ]
    return back
