"""What the links of a job carry, as `--links` of `deep_ep.diagnose` takes it: measured with collectives of torch.

Kernels of this package take no part, so that they can be held against it.
"""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deep_ep.base import env, topology
from deep_ep.native import backend

# Of each rank and round; large enough for any link to reach its speed.
NUM_BYTES = 256 << 20
# GB/s to give for links that are not there: of any number, since nothing crosses them.
NONE = 1.0
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Speeds:
    """GB/s (1e9 bytes) one way, of the slowest rank; `None` where there is no such link.

    Attributes:
        nvlink: of each rank to all others of its node together.
        nic: of each rank to those of its place on the other nodes.
    """

    nvlink: float | None
    nic: float | None


def measure(num_bytes: int, rounds: int) -> Speeds:
    """Exchanges memory within nodes, then between them. Collective over all ranks of the job.

    Each rank sends `num_bytes` in a round; the median of the rounds counts.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    size = topology.ranks_per_node(hosts, env.ranks_per_node())
    ranks = list(range(len(hosts)))
    nodes = [ranks[first : first + size] for first in ranks[::size]]
    places = [ranks[place::size] for place in range(size)]
    return Speeds(_speed(nodes, num_bytes, rounds), _speed(places, num_bytes, rounds))


def _speed(groups: list[list[int]], num_bytes: int, rounds: int) -> float | None:
    """Of exchanges in all of these groups at once; every rank is in one of them."""
    if max(map(len, groups)) == 1:
        return None
    device = backend.get().device()
    own, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    num_others = own.size() - 1
    part = num_bytes // max(num_others, 1)
    sent = torch.zeros(part * own.size(), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(_WARM_UP_ROUNDS + rounds):
        dist.barrier()
        backend.get().synchronize()
        begin = time.perf_counter()
        if num_others:
            dist.all_to_all_single(received, sent, group=own)
        backend.get().synchronize()
        times.append(time.perf_counter() - begin)
    median_s = statistics.median(times[_WARM_UP_ROUNDS:])
    speed = part * num_others / median_s / 1e9 if num_others else float("inf")
    slowest = torch.tensor([speed], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return float(slowest)
