"""What dispatch hands to combine: named tuples that unpack like DeepEP's plain ones."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Union

import torch

from deep_ep.base.topology import Topology

# A tensor of that shape and dtype; sizes are symbols where a program is traced.
Empty = Callable[[tuple[Any, ...], torch.dtype], torch.Tensor]


class LowLatencyHandle(NamedTuple):
    """The handle of `low_latency_dispatch`. A plain tuple of the same five values serves as well.

    Attributes:
        src_info: [num_local_experts, num_recv_rows] int32, source token of each valid row.
        layout_range: [num_local_experts, num_ranks] int64, low 32 bits: rows from that source; high 32
            bits: its first row.
        num_max_dispatch_tokens_per_rank: as passed to dispatch.
        hidden: channels of a row.
        num_experts: experts in total.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class OneNodeHandle(NamedTuple):
    """The handle of `dispatch` on one node; `Buffer` returns it as a plain tuple.

    Tokens are divided into channels: channel c has tokens `c * q` to `(c + 1) * q - 1`, where q is
    `ceil(num_tokens / num_channels)`. All tensors but two are int32.

    Attributes:
        rank_prefix: [num_ranks, num_ranks], column of this rank: rows received from that source and all
            before it. The other columns are undefined.
        channel_prefix: [num_ranks, num_channels], tokens sent to that rank in that channel and all before
            it. Behind it in its storage is the hidden word, see `hidden_word`.
        recv_channel_prefix: [num_ranks, num_channels], first received row of that source and channel.
        recv_src_idx: [num_recv_rows], source token of each row.
        is_token_in_rank: [num_tokens, num_ranks] bool, as passed to dispatch.
        nvl_head: [num_tokens, num_ranks], which of its channel's tokens for that rank it is, or negative.
    """

    rank_prefix: torch.Tensor
    channel_prefix: torch.Tensor
    recv_channel_prefix: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    nvl_head: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Received rows that it has room for."""
        return self.recv_src_idx.shape[0]

    def with_rows(self, num_rows: Any, num_sent: Any, empty: Empty) -> OneNodeHandle:
        """The same with memory for so many received rows."""
        return self._replace(recv_src_idx=empty((num_rows,), torch.int32))

    @property
    def num_relay_rows(self) -> int:
        """Rows for other ranks that it has room for."""
        return 0

    def source_prefix(self, rank: int) -> torch.Tensor:
        """[num_ranks], rows received from that source and all before it, on this rank."""
        return self.rank_prefix[:, rank]

    def source_tokens(self) -> torch.Tensor:
        """[num_rows] int32, source token of each received row."""
        return self.recv_src_idx

    def source_pointers(self, is_fresh: bool) -> dict[str, int]:
        """Where a fresh dispatch writes the source of each row, as the native dispatch takes it."""
        return {"recv_src_idx": self.recv_src_idx.data_ptr() if is_fresh else 0, "recv_src_meta": 0}

    def token_pointers(self) -> dict[str, int]:
        """Of the source token of each received row, as the native combine takes them."""
        return {"recv_tokens": self.recv_src_idx.data_ptr(), "recv_token_stride": 1}

    def pointers(self, rank: int) -> dict[str, int]:
        """What the native calls on this rank take."""
        return {**_pointers(self, rank), **_NO_NODES}


class SeveralNodesHandle(NamedTuple):
    """The handle of `dispatch` on several nodes; `Buffer` returns it as a plain tuple.

    A row for a rank of another node goes to the gateway there first, the rank of this rank's place in
    its node, which relays it. Channels are as in `OneNodeHandle`, and so are the types.

    Attributes:
        is_token_in_rank: [num_tokens, num_ranks] bool, as passed to dispatch.
        node_channel_prefix: [num_nodes, num_channels], tokens sent to that node in that channel and all
            before it.
        channel_prefix: [num_ranks, num_channels], as in `OneNodeHandle`, with the hidden word.
        recv_node_channel_prefix: [num_nodes, num_channels], rows this gateway relays of the rank of its
            place on that node, in that channel and all before it; 0 for its own node.
        recv_node_prefix: [num_nodes], the same in all channels, of that node and all before it.
        recv_channel_prefix: [num_ranks, num_channels], first received row of that source and channel.
        source_prefixes: [num_ranks], rows received from that source and all before it.
        recv_src_meta: [num_recv_rows, 8] uint8, two int32: source node and source token of each row.
        node_head: [num_tokens, num_nodes], which of its channel's tokens for that node it is, or negative.
        nvl_head: [num_sent_rows, ranks_per_node], the same for the ranks of this node: first of this
            rank's tokens, then of the rows that it relays.
    """

    is_token_in_rank: torch.Tensor
    node_channel_prefix: torch.Tensor
    channel_prefix: torch.Tensor
    recv_node_channel_prefix: torch.Tensor
    recv_node_prefix: torch.Tensor
    recv_channel_prefix: torch.Tensor
    source_prefixes: torch.Tensor
    recv_src_meta: torch.Tensor
    node_head: torch.Tensor
    nvl_head: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Received rows that it has room for."""
        return self.recv_src_meta.shape[0]

    def with_rows(self, num_rows: Any, num_sent: Any, empty: Empty) -> SeveralNodesHandle:
        """The same with memory for so many received rows, and for the heads of what is sent and relayed."""
        nvl_head = empty((num_sent, self.nvl_head.shape[1]), torch.int32).fill_(-1)
        return self._replace(recv_src_meta=empty((num_rows, 8), torch.uint8), nvl_head=nvl_head)

    @property
    def num_relay_rows(self) -> int:
        """Rows for other ranks that it has room for."""
        return self.nvl_head.shape[0] - self.is_token_in_rank.shape[0]

    def source_prefix(self, rank: int) -> torch.Tensor:
        """[num_ranks], rows received from that source and all before it, on this rank."""
        return self.source_prefixes

    def source_tokens(self) -> torch.Tensor:
        """[num_rows] int32, source token of each received row."""
        return self.recv_src_meta.view(torch.int32)[:, 1]

    def source_pointers(self, is_fresh: bool) -> dict[str, int]:
        """Where a fresh dispatch writes the source of each row, as the native dispatch takes it."""
        return {
            "recv_src_idx": 0,
            "recv_src_meta": self.recv_src_meta.data_ptr() if is_fresh else 0,
        }

    def token_pointers(self) -> dict[str, int]:
        """Of the source token of each received row, as the native combine takes them."""
        meta = self.recv_src_meta
        return {"recv_tokens": meta.data_ptr() + meta.shape[1] // 2, "recv_token_stride": 2}

    def pointers(self, rank: int) -> dict[str, int]:
        """What the native calls on this rank take."""
        of_nodes = {name: getattr(self, name).data_ptr() for name in _OF_NODES}
        return {**_pointers(self, rank), **of_nodes}


NormalHandle = Union[OneNodeHandle, SeveralNodesHandle]


def name_of(handle: NormalHandle, field: str) -> str:
    """`handle[1]`: what a caller calls it."""
    return f"handle[{handle._fields.index(field)}]"


_WORD = torch.int64.itemsize
# What the native calls take of several nodes alone; 0 on one.
_OF_NODES = ("node_channel_prefix", "recv_node_channel_prefix", "recv_node_prefix", "node_head")
_NO_NODES = dict.fromkeys(_OF_NODES, 0)


def _pointers(handle: NormalHandle, rank: int) -> dict[str, int]:
    """What the native calls take of every handle."""
    source_prefix, prefix = handle.source_prefix(rank), handle.channel_prefix
    return {
        "is_token_in_rank": handle.is_token_in_rank.data_ptr(),
        "channel_prefix": prefix.data_ptr(),
        "recv_channel_prefix": handle.recv_channel_prefix.data_ptr(),
        "nvl_head": handle.nvl_head.data_ptr(),
        "source_prefix": source_prefix.data_ptr(),
        "source_stride": source_prefix.stride(0),
        "dispatch_op": prefix.data_ptr() + _hidden_offset(prefix.numel()),
    }


def new_channel_prefix(num_ranks: int, num_channels: int, device: torch.device) -> torch.Tensor:
    """[num_ranks, num_channels] int32 of a handle, zeros, and the hidden word behind it."""
    num_bytes = _hidden_offset(num_ranks * num_channels) + _WORD
    storage = torch.zeros(num_bytes // torch.int32.itemsize, dtype=torch.int32, device=device)
    return storage.as_strided((num_ranks, num_channels), (num_channels, 1))


def new_handle(
    place: Topology,
    num_channels: int,
    is_token_in_rank: torch.Tensor,
    empty: Empty,
) -> NormalHandle:
    """The handle of a fresh dispatch, without what has a row per received or relayed row (`with_rows`).

    Args:
        place: of this rank.
        num_channels: of the dispatch.
        is_token_in_rank: [num_tokens, num_ranks] bool.
        empty: allocates a tensor.
    """

    def new(*size: int) -> torch.Tensor:
        return empty(size, torch.int32)

    channel_prefix = new_channel_prefix(place.num_ranks, num_channels, is_token_in_rank.device)
    if place.num_nodes == 1:
        return OneNodeHandle(
            rank_prefix=new(place.num_ranks, place.num_ranks),
            channel_prefix=channel_prefix,
            recv_channel_prefix=new(place.num_ranks, num_channels),
            recv_src_idx=new(0),
            is_token_in_rank=is_token_in_rank,
            nvl_head=new(is_token_in_rank.shape[0], place.num_ranks).fill_(-1),
        )
    return SeveralNodesHandle(
        is_token_in_rank=is_token_in_rank,
        node_channel_prefix=new(place.num_nodes, num_channels),
        channel_prefix=channel_prefix,
        recv_node_channel_prefix=new(place.num_nodes, num_channels),
        recv_node_prefix=new(place.num_nodes),
        recv_channel_prefix=new(place.num_ranks, num_channels),
        source_prefixes=new(place.num_ranks),
        recv_src_meta=empty((0, 8), torch.uint8),
        node_head=new(is_token_in_rank.shape[0], place.num_nodes).fill_(-1),
        nvl_head=new(0, place.ranks_per_node),
    )


def hidden_word(channel_prefix: torch.Tensor) -> torch.Tensor | None:
    """[1] int64: which dispatch the handle is of, 0 before it has succeeded; `None` if this is a copy.

    It lies behind `channel_prefix` in the same storage, so that a handle that is taken apart and put
    together again keeps it, and a copied one does not.
    """
    offset = _hidden_offset(channel_prefix.numel())
    if channel_prefix.storage_offset() != 0:
        return None
    if channel_prefix.untyped_storage().nbytes() < offset + _WORD:
        return None
    words = channel_prefix.as_strided((2,), (1,), offset // torch.int32.itemsize)
    return words.view(torch.int64)


def _hidden_offset(num_elements: int) -> int:
    """Bytes from the first element of `channel_prefix` to the hidden word."""
    return -(-num_elements * torch.int32.itemsize // _WORD) * _WORD
