"""What a model needs: what `deep_ep.sizes` says, and whether queues and the memory of a GPU are large enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deep_ep.base import env
from deep_ep.doctor.checks import Check, Finding, fail, ok, warn
from deep_ep.doctor.host import Host

_MIB = 1 << 20


def check(model: Mapping[str, int], per_node: int) -> Check:
    """The check that counts what a model needs: the arguments of `deep_ep.sizes`, in nodes of so many ranks."""

    def look(host: Host) -> list[Finding]:
        # The hints count the same on every backend, and the CPU's is there without a GPU.
        asked = {env.backend.name: "cpu", env.ranks_per_node.name: str(per_node)}
        with env.read_from({**host.environment, **asked}):
            return list(_needs(host, model, per_node))

    return Check(
        "sizes",
        look,
        "the calls of the model raise the same error",
        "correct --tokens, --hidden, --experts, --topk or --ranks, or what does not load above",
    )


def _needs(host: Host, model: Mapping[str, int], per_node: int) -> Iterator[Finding]:
    from deep_ep.buffers.model_sizes import sizes
    from deep_ep.native import backend

    needed = sizes(**model)
    yield ok(
        ", ".join(f"{name}={value}" for name, value in vars(needed).items()),
        "deep_ep.sizes returns them; a call with more tokens is refused, so all ranks must count the largest batch of "
        "any of them, also while graphs are captured",
    )
    depth, rows = env.nvshmem_qp_depth(), 2 * (model["tokens"] + 1)
    is_shallow = model["ranks"] > per_node and depth < rows
    yield (fail if is_shallow else ok)(
        f"NVSHMEM_QP_DEPTH={depth}; {model['tokens']} tokens to one expert take {rows}",
        "where all tokens go to one expert, a shallower queue is full before it is emptied",
        f"export NVSHMEM_QP_DEPTH={1 << (rows - 1).bit_length()}" if is_shallow else "",
        name="queue depth",
    )
    buffers = needed.low_latency_rdma_bytes + needed.num_nvl_bytes + needed.num_rdma_bytes
    total_mib = (buffers + needed.num_recv_bytes) / _MIB
    found = f"{total_mib:,.0f} MiB of buffers for both modes, and of what a low-latency dispatch in BF16 returns"
    why = "buffers are allocated once, outside of torch's allocator, and stay"
    text = host.output("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    free_mib = min((int(row) for row in text.split() if row.isdecimal()), default=None)
    if free_mib is not None and free_mib < total_mib:
        found += f"; a GPU has {free_mib:,} MiB free"
        repair = "build fewer buffers, allocate them before the weights, or lower the share that the engine takes"
        yield warn(found, why, repair, name="memory per GPU")
    else:
        yield ok(found, why, name="memory per GPU")
    most_topk = backend.get().binding.MAX_TOPK
    if model["topk"] > most_topk:
        why = f"low-latency kernels take at most {most_topk} entries of a token"
        yield fail(str(model["topk"]), why, "select fewer experts per token", name="top-k")
