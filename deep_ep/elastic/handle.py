"""`EPHandle`: what a dispatch of `ElasticBuffer` leaves for combines and later dispatches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from deep_ep.elastic import slots as rows_by
from deep_ep.types.handles import NormalHandle

Tensor = torch.Tensor


@dataclass(eq=False)
class Return:
    """How rows find their way back to be summed where their tokens are, one unit a row.

    A unit is what is added to a sum: a pick, or all picks of a token on one rank. It goes back as though it were a token
    of its own, so it keeps its place, and the sum of a token is made of units in the order that the API promises.

    Attributes:
        handle: of the units.
        sources: [num_recv_units] int64, row of the caller's that each received unit is; `None`: rows are units already.
        is_unit: [num_tokens, num_topk] bool, which entries stand for a unit.
    """

    handle: NormalHandle
    sources: Tensor | None
    is_unit: Tensor


@dataclass(eq=False)
class EPHandle:
    """The handle of `ElasticBuffer.dispatch`. Tensors are int32 unless it says otherwise.

    T tokens of K picks were sent, R ranks may send M tokens each, this rank has L experts.

    Attributes:
        do_expand: whether rows are one for each pick (expanded), else one for each token and rank (compact).
        num_experts: in total.
        expert_alignment: rows of an expert are counted, and expanded begin, at multiples of it.
        expert_capacity: rows that each expert has room for in expanded layout; `None`: as many as it receives.
        num_max_tokens_per_rank: M of the dispatch.
        num_sms: SMs that it used; combine takes as many.
        topk_idx: [T, K] int64, as sent.
        num_recv_tokens: rows in compact layout, R * M where the host did not wait.
        num_expanded_tokens: rows in expanded layout, padding included; the most there can be where the host did not wait.
        num_recv_tokens_per_expert_list: L numbers, padding included; empty where the host did not wait.
        psum_num_recv_tokens_per_scaleup_rank: [scale-up ranks], rows of that scale-up index and all before it.
        psum_num_recv_tokens_per_expert: [L]. Compact: picks of that expert and all before it, padding included.
            Expanded: where the rows of that expert end, without its padding.
        num_unaligned_recv_tokens_per_expert: [L], picks.
        token_metadata_at_forward: `None`.
        channel_linked_list: `None`.
        cached_recv_src_metadata_before_sort: `None`: rows come in order.
        buffer_number: internal, of the buffer in its process.
        way: internal, handle of the normal dispatch.
        source_prefix: internal, [num_ranks], rows received from that rank and all before it; part of `way`.
        slots: internal, [num_recv_tokens, K], expanded row of each pick of this rank, -1 elsewhere; `None` if compact.
        recv_topk_idx: internal, [num_recv_tokens, K] int64, local experts or -1.
        relay_topk_idx: internal, as in `Received`.
        back: internal; `None` where the sums are made on the way.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    expert_capacity: int | None
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    buffer_number: int = field(repr=False)
    way: NormalHandle = field(repr=False)
    source_prefix: Tensor = field(repr=False)
    slots: Tensor | None = field(repr=False)
    recv_topk_idx: Tensor = field(repr=False)
    relay_topk_idx: Tensor | None = field(repr=False)
    back: Return | None = field(repr=False)
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    cached_recv_src_metadata_before_sort: Tensor | None = None

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """[num_recv_tokens, K + 2] int32, by compact row: source rank * M + source token, its source rank, and expanded rows
        of its picks; -1 where there is none. Made when it is first read."""
        num_ranks = self.way.is_token_in_rank.shape[1]
        sources = rows_by.source_ranks(self.source_prefix, self.num_recv_tokens)
        tokens = sources * self.num_max_tokens_per_rank + self.way.source_tokens()
        columns = torch.stack([tokens, sources], 1).int()
        slots = self.slots
        if slots is None:
            slots = torch.full_like(self.recv_topk_idx, -1, dtype=torch.int32)
        is_row = (sources < num_ranks).unsqueeze(1)
        return torch.cat([torch.where(is_row, columns, -1), slots], 1)

    @property
    def dst_buffer_slot_idx(self) -> Tensor:
        """[T, K] int32, which of the rows for the rank of a pick its token is; -1 where nothing was sent."""
        in_rank = self.way.is_token_in_rank
        owner = self.topk_idx // (self.num_experts // in_rank.shape[1])
        places = in_rank.cumsum(0, dtype=torch.int32) - 1
        return torch.where(owner < 0, -1, places.gather(1, owner.clamp_min(0)))

    def tensors(self) -> list[Tensor | None]:
        """All that it holds: a later call reads them, on whatever stream it runs."""
        held = [
            self.topk_idx,
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
            self.num_unaligned_recv_tokens_per_expert,
            self.recv_topk_idx,
            self.slots,
            self.relay_topk_idx,
            *self.way,
        ]
        if self.back is not None:
            held += [self.back.is_unit, self.back.sources, *self.back.handle]
        return held
