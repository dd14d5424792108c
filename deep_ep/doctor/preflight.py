"""`python -m deep_ep.doctor.preflight STORE RANK SIZE LOCAL_RANK SECONDS`: one rank of a small exchange.

A program of its own, because what it tries may hang or crash. Every rank sends rows to every rank, each row saying
whose it is; then a few more operations are counted and judged. The last line that it prints is JSON: an `exchange.Tried`.
STORE is where the ranks meet: tcp://ADDRESS:PORT of a store that is served, or file://PATH.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from deep_ep import diagnose
from deep_ep.base import codec
from deep_ep.buffer import Buffer
from deep_ep.diagnose.render import wording
from deep_ep.doctor.exchange import Job, Tried
from deep_ep.errors import EPTimeoutError
from deep_ep.native import backend
from deep_ep.testing import identity

# How long ranks may need to start, whatever they are to wait for in operations.
_MEETING_S = 60
# Enough operations for a verdict.
_ROUNDS = 40


def main(arguments: Sequence[str]) -> None:
    """Runs the program."""
    where, *numbers = arguments
    rank, size, local_rank, seconds = map(int, numbers)
    torch.set_num_threads(1)
    if backend.get().name == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    patience = timedelta(seconds=max(seconds, _MEETING_S))
    store = Job(rank, size, where).open_store(patience.total_seconds(), "deep_ep.doctor.preflight")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    tried = Tried(operation=0)
    try:
        _try_all(tried, rank, size)
    except EPTimeoutError as error:
        tried.error = str(error)
        tried.missing, tried.awaited = list(error.missing_ranks), sorted(error.last_seen)
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
        tried.verdicts = [_sentence(verdict) for verdict in diagnosis.verdicts]
    buffer.destroy()


def _sentence(verdict: diagnose.Verdict) -> str:
    return (
        f"{verdict.operation}: {wording.subject(verdict)}, {verdict.cause} ({verdict.kind}), "
        f"{verdict.effect_us:.0f} us per operation"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
