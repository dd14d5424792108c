"""What a model needs: bytes of buffers, queue pairs, memory of a GPU, and the recommended configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deep_ep.base import env
from deep_ep.doctor.checks import Check, Finding, chain, fail, ok, warn
from deep_ep.doctor.host import Host
from deep_ep.errors import EPError

_MIB = 1 << 20
_BF16_BYTES = 2


def check(model: Mapping[str, int], per_node: int) -> Check:
    """The check that counts what a model needs, in nodes of so many ranks; a line for each need.

    Args:
        model: the arguments of `deep_ep.sizes`.
        per_node: ranks of a node.
    """

    def look(host: Host) -> list[Finding]:
        # The hints count the same on every backend, and the CPU's is there without a GPU.
        asked = {env.backend.name: "cpu", env.ranks_per_node.name: str(per_node)}
        with env.read_from({**host.environment, **asked}):
            try:
                return list(_needs(host, model, per_node))
            except (EPError, ImportError, OSError) as error:
                return [fail(chain(error))]

    return Check(
        "sizes",
        why="the calls of the model raise the same error",
        repair="correct --tokens, --hidden, --experts, --topk or --ranks, or what does not load above",
        look=look,
    )


def _needs(host: Host, model: Mapping[str, int], per_node: int) -> Iterator[Finding]:
    from deep_ep.buffers.model_sizes import sizes
    from deep_ep.native import backend

    needed, tokens = sizes(**model), model["tokens"]
    low_latency, nvl = needed.low_latency_rdma_bytes, needed.num_nvl_bytes
    rdma = needed.num_rdma_bytes
    yield ok(
        f"num_rdma_bytes={low_latency} ({_mib(low_latency)}) on each rank, "
        f"num_qps_per_rank={needed.num_qps_per_rank}",
        f"it fits {tokens} tokens of a rank to any experts; a call with more tokens is refused, "
        "so all ranks must count the largest batch of any of them, also while graphs are captured",
        name="low-latency buffer",
    )
    yield ok(
        f"num_nvl_bytes={nvl} ({_mib(nvl)}), num_rdma_bytes={rdma} ({_mib(rdma)}) on each rank",
        f"queues for rows of {model['hidden'] * _BF16_BYTES} bytes with the recommended configurations, in nodes of "
        f"{per_node} ranks",
        name="normal buffers",
    )
    for kind, config in (("dispatch", needed.dispatch_config), ("combine", needed.combine_config)):
        why = f"Buffer.get_{kind}_config returns it"
        yield ok(repr(config), why, name=f"Config of {kind}")
    remote = max(0, model["ranks"] - per_node)
    yield ok(
        f"{needed.num_qps_per_rank} to each of {remote} ranks out of NVLink's reach: "
        f"{needed.num_qps_per_rank * remote} of a GPU's NIC",
        "each is memory of the NIC and of the GPU; a NIC that is shared by several GPUs has to hold those of all",
        name="queue pairs",
    )
    depth, rows = env.nvshmem_qp_depth(), 2 * (tokens + 1)
    found = f"NVSHMEM_QP_DEPTH={depth}; {tokens} tokens to one expert take {rows}"
    why = "where all tokens go to one expert, a shallower queue is full before it is emptied"
    if remote and depth < rows:
        repair = f"export NVSHMEM_QP_DEPTH={1 << (rows - 1).bit_length()}"
        yield fail(found, why, repair, name="queue depth")
    else:
        yield ok(found, why, name="queue depth")
    yield _memory(host, low_latency, nvl + rdma, needed.num_recv_bytes)
    most_topk = backend.get().binding.MAX_TOPK
    if model["topk"] > most_topk:
        why = f"low-latency kernels take at most {most_topk} entries of a token"
        yield fail(str(model["topk"]), why, "select fewer experts per token", name="top-k")


def _memory(host: Host, low_latency: int, normal: int, received: int) -> Finding:
    total = low_latency + normal + received
    found = (
        f"{_mib(total)}: {_mib(low_latency)} and {_mib(normal)} of buffers, {_mib(received)} for what a "
        "low-latency dispatch in BF16 returns"
    )
    why = "buffers are allocated once, outside of torch's allocator, and stay"
    text = host.output("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    free = min((int(row) * _MIB for row in text.split() if row.isdecimal()), default=total)
    if free < total:
        found += f"; a GPU has {_mib(free)} free"
        repair = "build fewer buffers, allocate them before the weights, or lower the share that the engine takes"
        return warn(found, why, repair, name="memory per GPU")
    return ok(found, why, name="memory per GPU")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
