"""`python -m deep_ep.doctor.preflight JOB`: one rank of a small exchange.

A program of its own, because what it tries may hang or crash. Every rank sends rows to every rank, each row saying
whose it is; then a few more operations are counted and judged. JOB is the fields of `job.Job` as JSON; the last line
that is printed is an `exchange.Tried`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from deep_ep import diagnose
from deep_ep.base import codec, env
from deep_ep.buffer import Buffer
from deep_ep.diagnose.render import wording
from deep_ep.doctor.exchange import Tried
from deep_ep.doctor.job import Job
from deep_ep.errors import EPTimeoutError
from deep_ep.native import backend
from deep_ep.testing import identity

# How long ranks may need to start, whatever they are to wait for in operations.
_MEETING_S = 60
# Enough operations for a verdict.
_ROUNDS = 40


def main(arguments: Sequence[str]) -> None:
    """Runs the program."""
    job = Job(*json.loads(arguments[0]))
    rank, size = job.rank, job.size
    torch.set_num_threads(1)
    if backend.get().name == "cuda":
        torch.cuda.set_device(job.local_rank % torch.cuda.device_count())
    patience_s = max(env.timeout_s(), _MEETING_S)
    dist.init_process_group(
        "gloo",
        store=job.open_store(patience_s, "deep_ep.doctor.preflight"),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience_s),
    )
    tried = Tried(operation=0)
    try:
        _try_all(tried, rank, size)
    except EPTimeoutError as error:
        tried.error = str(error)
        tried.awaited = sorted(error.last_seen)
        tried.bad_pairs += error.broken_paths
    except RuntimeError as error:
        tried.error = str(error)
    sys.stdout.write(f"{codec.encode(tried).decode()}\n")


def _try_all(tried: Tried, rank: int, size: int) -> None:
    x, topk_idx = identity.rows_of(rank, size), identity.routing_of(rank, size)
    num_tokens, hidden = x.shape
    hint = Buffer.get_low_latency_rdma_size_hint(num_tokens, hidden, size, size)
    group = dist.new_group(list(range(size)))
    buffer = Buffer(
        group, 0, hint, low_latency_mode=True, num_qps_per_rank=1, explicitly_destroy=True
    )
    device = buffer.communicator.backend.device()
    x, topk_idx = x.to(device), topk_idx.to(device)
    weights = torch.ones_like(topk_idx, dtype=torch.float32)

    def exchange() -> tuple[torch.Tensor, torch.Tensor]:
        tried.operation += 1
        received, count, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, num_tokens, size, use_fp8=False
        )
        assert isinstance(received, torch.Tensor)
        tried.operation += 1
        combined, _, _ = buffer.low_latency_combine(received, topk_idx, weights, handle)
        return received[0, : int(count[0])].cpu(), combined.cpu()

    received, combined = exchange()
    tried.bad_pairs += identity.wrong_pairs(rank, size, received, combined)
    buffer.enable_counters()
    for _ in range(_ROUNDS):
        exchange()
    diagnosis = diagnose.run(buffer)
    if diagnosis is not None:
        causes = wording.causes(diagnosis)
        tried.verdicts = [wording.sentence(diagnosis, same) for same in causes]
    buffer.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
