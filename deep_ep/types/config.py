"""Settings of the normal kernels: `Config`, its size hints, and the recommended values as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from deep_ep.base import env
from deep_ep.base.rules import topk_idx_t
from deep_ep.errors import EPArgumentError
from deep_ep.types.bounds import integer

# Ranks per NVLink domain that the hints allow for where nobody says how many there are: DeepEP's.
DEFAULT_RANKS_PER_NODE = 8
# The hints cover rows with this many top-k entries and scales.
MAX_TOPK = 128
# Of a row as combine sends it, bfloat16, the larger of the two ways.
ELEMENT_BYTES = 2
# Of a row beside its channels: where it comes from, 128 scales, and the top-k entries with their weights.
_METADATA_BYTES = 8 + 128 * 4 + MAX_TOPK * (topk_idx_t.itemsize + 4)
_ALIGNMENT = 128


@dataclass(frozen=True)
class Config:
    """Settings of normal dispatch and combine. They change speed, never results.

    Args:
        num_sms: SMs used; two make one channel. >= 0.
        num_max_nvl_chunked_send_tokens: tokens pushed per step over NVLink, > 0.
        num_max_nvl_chunked_recv_tokens: capacity in tokens of an NVLink queue, > the send value. The
            queues that lead to different nodes share it.
        num_max_rdma_chunked_send_tokens: tokens per RDMA request, > 0.
        num_max_rdma_chunked_recv_tokens: capacity in tokens of an RDMA queue, at least twice the send
            value; rounded up to a multiple of it.

    Queues of 16 tokens or fewer are slow; rank 0 logs it where many rows go through them (docs/training.md).

    Raises:
        EPArgumentError: a value outside of these bounds.
        EPTypeError: a value that is no integer.
        TypeError: an unknown keyword.

    Compatibility: same as DeepEP, whose object has no readable attributes.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = integer("Config", field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        nvl_send = self.num_max_nvl_chunked_send_tokens
        nvl_recv = self.num_max_nvl_chunked_recv_tokens
        rdma_send = self.num_max_rdma_chunked_send_tokens
        rdma_recv = self.num_max_rdma_chunked_recv_tokens
        nvl_rule = f"above num_max_nvl_chunked_send_tokens ({nvl_send})"
        rdma_rule = f"at least twice num_max_rdma_chunked_send_tokens ({rdma_send})"
        for name, is_allowed, rule in (
            ("num_sms", self.num_sms >= 0, "at least 0"),
            *((field.name, getattr(self, field.name) > 0, "above 0") for field in fields(self)[1:]),
            ("num_max_nvl_chunked_recv_tokens", nvl_recv > nvl_send, nvl_rule),
            ("num_max_rdma_chunked_recv_tokens", rdma_recv // 2 >= rdma_send, rdma_rule),
        ):
            if not is_allowed:
                raise EPArgumentError(
                    f"Config: {name} is {getattr(self, name)}; it must be {rule}. "
                    "Take Buffer.get_dispatch_config(num_ranks) for values that fit together."
                )
        rounded = _round_up(rdma_recv, rdma_send)
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rounded)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes of NVLink buffer with which every normal call with this configuration fits.

        Nodes are as in `get_rdma_buffer_size_hint`.

        Args:
            hidden_bytes: bytes of one row, at the larger of its size in dispatch and combine.
            num_ranks: size of the group.

        Returns:
            A multiple of 128.

        Raises:
            EPArgumentError: a value below 1, or odd `num_sms` with more than one node.

        Source: DeepEP's formula, so that numbers can be compared.
        Compatibility: any group size is accepted.
        """
        sizes = []
        for num_local_ranks, num_nodes in self._topologies(hidden_bytes, num_ranks):
            per_token = hidden_bytes + _METADATA_BYTES
            per_channel = 4 * (2 * num_nodes + 3) + self.num_max_nvl_chunked_recv_tokens * per_token
            sizes.append(self.num_sms // 2 * num_local_ranks * per_channel)
        return _round_up(max(sizes), _ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes of RDMA buffer with which every normal call with this configuration fits; 0 on one node.

        Unless DEEP_EP_RANKS_PER_NODE says how many ranks a node has, it is enough for 8, and for as many
        as the launcher put on this host (LOCAL_WORLD_SIZE). All else is as of `get_nvl_buffer_size_hint`.
        """
        num_nodes = max(nodes for _, nodes in self._topologies(hidden_bytes, num_ranks))
        if num_nodes == 1:
            return 0
        per_token = hidden_bytes + _METADATA_BYTES + 16
        per_channel = 4 * 18 + self.num_max_rdma_chunked_recv_tokens * per_token
        return _round_up(self.num_sms // 2 * 2 * num_nodes * per_channel, _ALIGNMENT)

    def _topologies(self, hidden_bytes: int, num_ranks: int) -> list[tuple[int, int]]:
        """Ranks of a node and number of nodes, for each way in which the ranks may lie.

        Programs ask for the hints before there is a buffer that knows the hosts. With nobody's word it
        may be nodes of 8, and where a launcher says how many ranks this host has, nodes of that size.
        """
        for name, value in (("hidden_bytes", hidden_bytes), ("num_ranks", num_ranks)):
            integer("Config size hint", name, value, least=1)
        asked = env.ranks_per_node()
        sizes = [asked] if asked else [DEFAULT_RANKS_PER_NODE, env.local_world_size()]
        nodes = [min(num_ranks, size) for size in sizes if size is not None]
        topologies = [(size, -(-num_ranks // size)) for size in nodes]
        if self.num_sms % 2 and any(num_nodes > 1 for _, num_nodes in topologies):
            raise EPArgumentError(
                f"Config size hint: num_sms is {self.num_sms}; it must be even with more than one node. "
                f"Use {self.num_sms + 1}."
            )
        return topologies


def largest_hints(configs: Iterable[Config], hidden_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Bytes of NVLink and of RDMA buffer with which calls with any of these configurations fit."""
    given, sizes = [*configs], (hidden_bytes, num_ranks)
    return (
        max(config.get_nvl_buffer_size_hint(*sizes) for config in given),
        max(config.get_rdma_buffer_size_hint(*sizes) for config in given),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# Per group size: tokens that dispatch and that combine pushes per step over NVLink, tokens of an NVLink queue, tokens per RDMA
# request of dispatch and of combine; an RDMA queue always holds 128. The values DeepEP recommends for H800 nodes of 8 GPUs; not
# tuned by us.
_TOKENS = {
    2: (24, 10, 256, 6, 6),
    4: (6, 9, 256, 6, 6),
    8: (6, 4, 256, 6, 6),
    16: (36, 4, 288, 20, 12),
    24: (32, 1, 288, 8, 8),
    32: (32, 1, 288, 8, 8),
    48: (32, 1, 288, 8, 8),
    64: (32, 1, 288, 8, 8),
    96: (20, 1, 480, 12, 8),
    128: (20, 1, 560, 12, 8),
    144: (32, 2, 720, 12, 8),
    160: (28, 2, 720, 12, 8),
}


def recommended_dispatch(num_ranks: int, num_sms: int) -> Config:
    """The recommended dispatch configuration for the tabulated group size nearest to `num_ranks`."""
    nvl_send, _, nvl_recv, rdma_send, _ = _nearest(num_ranks)
    return Config(num_sms, nvl_send, nvl_recv, rdma_send, 128)


def recommended_combine(num_ranks: int, num_sms: int) -> Config:
    """The recommended combine configuration for the tabulated group size nearest to `num_ranks`."""
    _, nvl_send, nvl_recv, _, rdma_send = _nearest(num_ranks)
    return Config(num_sms, nvl_send, nvl_recv, rdma_send, 128)


def _nearest(num_ranks: int) -> tuple[int, int, int, int, int]:
    integer("recommended Config", "num_ranks", num_ranks, least=1)
    # Of two equally near sizes the larger one: its queues are deeper.
    return _TOKENS[min(_TOKENS, key=lambda size: (abs(size - num_ranks), -size))]
