"""`deep_ep.utils.envs`: how tests and benchmarks written for DeepEP start and print."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deep_ep.base import env
from deep_ep.native import backend

# Of the last `init_dist` of this process.
_local_rank = 0


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Joins the ranks, by nccl where Buffers run on a GPU, else by gloo.

    `MASTER_ADDR` and `MASTER_PORT` (127.0.0.1, 8361) say where they meet, `WORLD_SIZE` (1) how many nodes
    there are, not ranks, and `RANK` (0) which this is. bfloat16 becomes the default dtype, and the backend's
    device the default device.

    Args:
        local_rank: of this process in its node; the number of its GPU.
        num_local_ranks: of every node.
        seed: torch is seeded with it plus the rank.

    Returns:
        This rank, the number of ranks, and a group of all.
    """
    global _local_rank
    _local_rank = local_rank
    device = backend.get().name
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    meet_at, num_nodes, node = env.nodes()
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=meet_at,
        world_size=num_nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)
    return rank, num_ranks, dist.new_group(list(range(num_ranks)))


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, and waits for all of them.

    Args:
        text: a line.
        once_in_node: only the first rank of each node prints.
    """
    if not once_in_node or _local_rank == 0:
        print(text, flush=True)  # noqa: T201
    dist.barrier()
