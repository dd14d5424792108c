"""`sizes`: bytes of buffers, queue pairs and configurations for the exchanges of a model."""

from __future__ import annotations

from dataclasses import dataclass

from deep_ep.buffer import Buffer
from deep_ep.errors import EPArgumentError
from deep_ep.types import config
from deep_ep.types.bounds import integer
from deep_ep.types.config import Config


@dataclass(frozen=True)
class Sizes:
    """What a model needs, each on every rank.

    Attributes:
        num_nvl_bytes: of a `Buffer` for normal operations.
        num_rdma_bytes: of a `Buffer` for normal operations; 0 on one node.
        low_latency_rdma_bytes: `num_rdma_bytes` of a `Buffer` for low latency. One for both modes takes the larger.
        num_qps_per_rank: for low latency, the experts of a rank.
        num_recv_bytes: what a low-latency dispatch in BF16 returns.
        dispatch_config: recommended.
        combine_config: recommended.
    """

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_rdma_bytes: int
    num_qps_per_rank: int
    num_recv_bytes: int
    dispatch_config: Config
    combine_config: Config


def sizes(*, hidden: int, tokens: int, topk: int, experts: int, ranks: int) -> Sizes:
    """Sizes for a model, as `python -m deep_ep.doctor --tokens ...` prints them.

        needed = deep_ep.sizes(hidden=7168, tokens=4096, topk=8, experts=256, ranks=64)
        buffer = deep_ep.Buffer(group, needed.num_nvl_bytes, needed.num_rdma_bytes)

    How many ranks a node has is as in `Config.get_rdma_buffer_size_hint`.

    Args:
        hidden: channels of a token.
        tokens: most tokens that a rank dispatches at once. Only sizes for low latency grow with it.
        topk: experts of a token.
        experts: in total.
        ranks: size of the group.

    Raises:
        EPArgumentError: a value below 1, or too many top-k entries or experts for the kernels.
    """
    largest = config.MAX_TOPK
    given = {"hidden": hidden, "tokens": tokens, "topk": topk, "experts": experts, "ranks": ranks}
    for name, value in given.items():
        integer("deep_ep.sizes", name, value, least=1)
    if topk > largest:
        raise EPArgumentError(
            f"deep_ep.sizes: topk is {topk}; it must be from 1 to {largest}. Select fewer experts per token."
        )
    dispatch, combine = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    row_bytes = hidden * config.ELEMENT_BYTES
    local_experts = max(1, experts // ranks)
    return Sizes(
        *config.largest_hints((dispatch, combine), row_bytes, ranks),
        Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts),
        local_experts,
        local_experts * ranks * tokens * row_bytes,
        dispatch,
        combine,
    )
