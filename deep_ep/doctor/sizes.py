"""What a model needs: bytes of buffers, queue pairs, memory of a GPU, and the recommended configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deep_ep.base import env
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host
from deep_ep.doctor.package import chain
from deep_ep.errors import EPError

_MIB = 1 << 20
_BF16_BYTES = 2


@dataclass(frozen=True)
class ExchangeSizes:
    """Sizes of an exchange.

    Attributes:
        tokens: most tokens that a rank dispatches at once (num_max_dispatch_tokens_per_rank).
        hidden: channels of a token.
        experts: in total.
        topk: experts of a token.
        ranks: size of the group.
        ranks_per_node: ranks of an NVLink domain.
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    ranks: int
    ranks_per_node: int = 8

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return max(1, self.experts // self.ranks)


def check(host: Host, model: ExchangeSizes) -> list[Finding]:
    """All findings on sizes."""
    # The hints count the same on every backend, and the CPU's is there without a GPU.
    asked = {env.BACKEND.name: "cpu", env.RANKS_PER_NODE.name: str(model.ranks_per_node)}
    with env.read_from({**host.environment, **asked}):
        try:
            return _findings(host, model)
        except (EPError, ImportError, OSError) as error:
            why = "the calls of the model raise the same error"
            repair = "correct --tokens, --hidden, --experts, --topk or --ranks, or what does not load above"
            return [Finding("sizes", FAIL, chain(error), why, repair)]


def _findings(host: Host, model: ExchangeSizes) -> list[Finding]:
    from deep_ep.buffers.model_sizes import sizes
    from deep_ep.native import backend

    most_topk = backend.get().binding.MAX_TOPK
    needed = sizes(
        hidden=model.hidden,
        tokens=model.tokens,
        topk=model.topk,
        experts=model.experts,
        ranks=model.ranks,
    )
    low_latency, nvl, rdma = (
        needed.low_latency_rdma_bytes,
        needed.num_nvl_bytes,
        needed.num_rdma_bytes,
    )
    findings = [
        Finding(
            "low-latency buffer",
            OK,
            f"num_rdma_bytes={low_latency} ({_mib(low_latency)}) on each rank, "
            f"num_qps_per_rank={needed.num_qps_per_rank}",
            f"it fits {model.tokens} tokens of a rank to any experts; a call with more tokens is refused, "
            "so all ranks must count the largest batch of any of them, also while graphs are captured",
        ),
        Finding(
            "normal buffers",
            OK,
            f"num_nvl_bytes={nvl} ({_mib(nvl)}), num_rdma_bytes={rdma} ({_mib(rdma)}) on each rank",
            f"queues for rows of {model.hidden * _BF16_BYTES} bytes with the recommended configurations, in nodes of "
            f"{model.ranks_per_node} ranks",
        ),
        Finding(
            "Config of dispatch",
            OK,
            repr(needed.dispatch_config),
            "Buffer.get_dispatch_config returns it",
        ),
        Finding(
            "Config of combine",
            OK,
            repr(needed.combine_config),
            "Buffer.get_combine_config returns it",
        ),
        _queue_pairs(model),
        _queue_depth(model),
        _memory(host, low_latency, nvl + rdma, needed.num_recv_bytes),
    ]
    if model.topk > most_topk:
        why = f"low-latency kernels take at most {most_topk} entries of a token"
        findings.append(
            Finding("top-k", FAIL, f"{model.topk}", why, "select fewer experts per token")
        )
    return findings


def _queue_pairs(model: ExchangeSizes) -> Finding:
    remote = max(0, model.ranks - model.ranks_per_node)
    return Finding(
        "queue pairs",
        OK,
        f"{model.local_experts} to each of {remote} ranks out of NVLink's reach: "
        f"{model.local_experts * remote} of a GPU's NIC",
        "each is memory of the NIC and of the GPU; a NIC that is shared by several GPUs has to hold those of all",
    )


def _queue_depth(model: ExchangeSizes) -> Finding:
    depth, needed = env.nvshmem_qp_depth(), 2 * (model.tokens + 1)
    found = f"NVSHMEM_QP_DEPTH={depth}; {model.tokens} tokens to one expert take {needed}"
    why = "where all tokens go to one expert, a shallower queue is full before it is emptied"
    if model.ranks > model.ranks_per_node and depth < needed:
        power = 1 << (needed - 1).bit_length()
        return Finding("queue depth", FAIL, found, why, f"export NVSHMEM_QP_DEPTH={power}")
    return Finding("queue depth", OK, found, why)


def _memory(host: Host, low_latency: int, normal: int, received: int) -> Finding:
    total = low_latency + normal + received
    found = (
        f"{_mib(total)}: {_mib(low_latency)} and {_mib(normal)} of buffers, {_mib(received)} for what a "
        "low-latency dispatch in BF16 returns"
    )
    why = "buffers are allocated once, outside of torch's allocator, and stay"
    ran = host.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"])
    free = (
        [int(text) * _MIB for text in re.findall(r"^\d+$", ran.text, re.M)]
        if ran.status == 0
        else []
    )
    if free and min(free) < total:
        found += f"; a GPU has {_mib(min(free))} free"
        repair = "build fewer buffers, allocate them before the weights, or lower the share that the engine takes"
        return Finding("memory per GPU", WARN, found, why, repair)
    return Finding("memory per GPU", OK, found, why)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
