"""Whether a handle of `dispatch` can be right, where the host can read its values.

The kernels go by these numbers. One that is wrong would have ranks wait for rows that nobody sends, so
it is refused before anything is sent. On a GPU a look at them would stall the stream; there the kernels
keep within their memory.
"""

from __future__ import annotations

import torch

from deep_ep.base.rules import fail
from deep_ep.base.topology import Topology
from deep_ep.errors import EPUsageError
from deep_ep.types.handles import NormalHandle, SeveralNodesHandle, hidden_word, name_of

Tensor = torch.Tensor


def check(
    call: str, handle: NormalHandle, place: Topology, num_tokens: int, num_channels: int
) -> None:
    """Refuses a handle whose numbers contradict each other, and names the place; its shapes are right already."""
    word = hidden_word(handle.channel_prefix)
    if word is None or int(word) == 0:
        fail(call, "handle is empty", "handle_not_received", EPUsageError)
    values = _Values(call, handle)
    in_rank = handle.is_token_in_rank
    begins = _channel_begins(num_tokens, num_channels)
    values.same("channel_prefix", _per_channel(in_rank, begins))
    _check_received(values, handle, place)
    own = slice(place.node * place.ranks_per_node, (place.node + 1) * place.ranks_per_node)
    values.heads("nvl_head", handle.nvl_head[:num_tokens], in_rank[:, own], begins)
    if isinstance(handle, SeveralNodesHandle):
        _check_nodes(values, handle, place, begins)


class _Values:
    """Compares the tensors of a handle with what they must hold."""

    def __init__(self, call: str, handle: NormalHandle) -> None:
        self._call = call
        self._handle = handle

    def all(self, field: str, given: Tensor, is_right: Tensor, row: int = 0) -> None:
        """`is_right` for each element of `given`, the tensor of `field` from `row` on."""
        if is_right.all():
            return
        place = (~is_right).nonzero()[0].tolist()
        value = int(given[tuple(place)])
        place[0] += row
        got = f"{name_of(self._handle, field)}{place} is {value}"
        fail(self._call, got, "normal_handle_values")

    def same(self, field: str, wanted: Tensor) -> None:
        """The tensor of `field` is `wanted`."""
        given: Tensor = getattr(self._handle, field)
        self.all(field, given, given == wanted)

    def heads(self, field: str, given: Tensor, sent: Tensor, begins: Tensor, row: int = 0) -> None:
        """`given` numbers the rows that were sent within each channel, and is negative for others.

        `given` and `sent` are [n, m], the tensor of `field` from `row` on; `begins` is the first row of each channel.
        """
        before = sent.cumsum(0) - sent.int()
        lengths = torch.diff(begins, append=begins.new_tensor([len(sent)]))
        in_channel = before - before[begins.repeat_interleave(lengths)]
        self.all(field, given, torch.where(sent, given == in_channel, given < 0), row)


def _check_received(values: _Values, handle: NormalHandle, place: Topology) -> None:
    """Where rows lie that this rank received: by source, then by channel."""
    field = "source_prefixes" if isinstance(handle, SeveralNodesHandle) else "rank_prefix"
    ends = handle.source_prefix(place.rank)
    is_right = (torch.diff(ends, prepend=ends.new_zeros(1)) >= 0) & (ends <= handle.num_rows)
    if isinstance(handle, SeveralNodesHandle):
        values.all(field, ends, is_right)
    else:
        # Its other columns mean nothing.
        whole = is_right.new_ones(handle.rank_prefix.shape)
        whole[:, place.rank] = is_right
        values.all(field, handle.rank_prefix, whole)
    bounds = _row_bounds(handle, place)
    is_right = torch.diff(bounds, dim=1) >= 0
    is_right[:, 0] &= bounds[:, 0] == torch.cat([ends.new_zeros(1), ends[:-1]])
    values.all("recv_channel_prefix", handle.recv_channel_prefix, is_right)


def _row_bounds(handle: NormalHandle, place: Topology) -> Tensor:
    """[num_ranks, num_channels + 1], first row of that source and channel, and the end of the last."""
    return torch.cat([handle.recv_channel_prefix, handle.source_prefix(place.rank)[:, None]], 1)


def _check_nodes(
    values: _Values, handle: SeveralNodesHandle, place: Topology, begins: Tensor
) -> None:
    """What goes to other nodes, and what is relayed from them."""
    num_tokens = len(handle.is_token_in_rank)
    in_node = handle.is_token_in_rank.view(num_tokens, place.num_nodes, place.ranks_per_node).any(2)
    values.same("node_channel_prefix", _per_channel(in_node, begins))
    # Tokens for the own node go straight to its ranks.
    in_node[:, place.node] = False
    values.heads("node_head", handle.node_head, in_node, begins)
    relayed = handle.recv_node_channel_prefix
    per_channel = torch.diff(relayed, dim=1, prepend=relayed.new_zeros(place.num_nodes, 1))
    is_right = per_channel >= 0
    is_right[place.node] &= relayed[place.node] == 0
    values.all("recv_node_channel_prefix", relayed, is_right)
    values.same("recv_node_prefix", relayed[:, -1].cumsum(0))
    num_relayed = int(handle.recv_node_prefix[-1])
    values.all(
        "recv_node_prefix",
        handle.recv_node_prefix,
        handle.recv_node_prefix <= handle.num_relay_rows,
    )
    relay_begins = per_channel.flatten().cumsum(0) - per_channel.flatten()
    heads = handle.nvl_head[num_tokens : num_tokens + num_relayed]
    sent = heads >= 0
    values.heads("nvl_head", heads, sent, relay_begins, num_tokens)
    # Each was relayed to somebody; those for this rank lie where its rows from the same source do.
    is_right = sent.any(1, keepdim=True).expand(heads.shape).clone()
    begins = torch.cat([relay_begins, relay_begins.new_tensor([num_relayed])])
    before = torch.cat([sent.new_zeros(1, dtype=torch.int64), sent[:, place.local_rank].cumsum(0)])
    to_own = torch.diff(before[begins]).view(place.num_nodes, -1)
    received = torch.diff(_row_bounds(handle, place), dim=1)
    gateways = (
        torch.arange(place.num_nodes, device=relayed.device) * place.ranks_per_node
        + place.local_rank
    )
    is_wrong = to_own != received[gateways]
    is_wrong[place.node] = False
    rows = is_wrong.flatten().repeat_interleave(per_channel.flatten())
    is_right[rows, place.local_rank] = False
    values.all("nvl_head", heads, is_right, num_tokens)


def _channel_begins(num_tokens: int, num_channels: int) -> Tensor:
    """[num_channels], first token of each."""
    size = -(-num_tokens // num_channels)
    return (torch.arange(num_channels, device="cpu") * size).clamp(max=num_tokens)


def _per_channel(sent: Tensor, begins: Tensor) -> Tensor:
    """[m, num_channels], how many of `sent` [n, m] are true in that channel and all before it."""
    ends = torch.cat([begins[1:], begins.new_tensor([len(sent)])])
    before = torch.cat([begins.new_zeros(1, sent.shape[1]), sent.cumsum(0)])
    return before[ends].T
