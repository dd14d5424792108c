"""What a GPU is and does before ranks share it: its timer's step, what a copy moves, streams that take turns, and what
an allocation waits for.

Ranks that are threads of one process wait for each other in kernels. Where streams of two ranks share a hardware
queue, the one's kernel waits for the end of the other's, which waits for it; and so does a rank whose allocation waits
for all kernels. Both are tried here with kernels that end by themselves.

On the cpu backend the rest runs, to be tried out; its figures mean nothing.

    python benchmarks/gpu_facts.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _gpu_rounds import copy_us
from rich.console import Console

from deep_ep.native import backend
from support.launch import DEVICE, Ranks, sleep_kernel

NUM_RANKS = 8
# Long for a host that queues a small kernel on each of sixteen streams.
_BUSY_NS = 100_000_000
_ALLOCATED_BYTES = 256 << 20


def shared_queues(
    streams: Mapping[str, Any],
    occupy: Callable[[Any], Any],
    mark: Callable[[Any], Any],
    pause: Callable[[], None],
    followers: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Pairs of streams of which the second waits for kernels of the first.

    Args:
        streams: by name.
        followers: by name of a stream, of the one that waits for its kernels, as the stream of a rank does for its
            communication; what shares a queue with that one waits as well.
        occupy: queues a kernel that takes long; returns an event behind it.
        mark: queues a kernel that takes no time; returns an event behind it.
        pause: waits for what is not held up, and for less than `occupy` takes.
    """
    pairs = []
    for name, stream in streams.items():
        end = occupy(stream)
        follower = followers.get(name)
        if follower is not None:
            streams[follower].wait_event(end)
        marks = {other: mark(streams[other]) for other in streams if other not in (name, follower)}
        pause()
        if not end.query():  # else the host was too slow for this to tell anything
            pairs += [(name, other) for other, event in marks.items() if not event.query()]
        end.synchronize()
    return pairs


def _event(stream: Any, duration_ns: int) -> torch.cuda.Event:
    """An event behind a kernel of that duration."""
    with torch.cuda.stream(stream):
        sleep_kernel(duration_ns)
        event = torch.cuda.Event()
        event.record()
    return event


def _streams_of_ranks() -> dict[str, Any]:
    """As `Ranks` and `Buffer` make them."""
    streams: dict[str, Any] = {}
    for rank in range(NUM_RANKS):
        streams[f"rank {rank}"] = torch.cuda.Stream()
        streams[f"rank {rank}, communication"] = backend.get().create_comm_stream()
    for stream in streams.values():
        _event(stream, 1).synchronize()
    return streams


def _allocation_ms(allocate: Callable[[], Any]) -> float:
    """What an allocation takes beside a kernel of 100 ms."""
    stream = torch.cuda.Stream()
    end = _event(stream, _BUSY_NS)
    begin = time.perf_counter()
    allocate()
    passed = time.perf_counter() - begin
    end.synchronize()
    return passed * 1e3


def _alone() -> dict[str, Any]:
    """What must be known before kernels wait for each other."""
    queues = shared_queues(
        _streams_of_ranks(),
        lambda stream: _event(stream, _BUSY_NS),
        lambda stream: _event(stream, 1),
        lambda: time.sleep(_BUSY_NS / 2e9),
        {f"rank {rank}, communication": f"rank {rank}" for rank in range(NUM_RANKS)},
    )
    torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
        "streams_that_share_a_queue": queues,
        "allocation_ms": _allocation_ms(
            lambda: torch.empty(_ALLOCATED_BYTES, dtype=torch.uint8, device=DEVICE)
        ),
        "pinned_allocation_ms": _allocation_ms(
            lambda: torch.empty(_ALLOCATED_BYTES, dtype=torch.uint8, pin_memory=True)
        ),
    }


def timer_step_ns() -> int:
    """Of the device's timer, as two ranks find it that exchange."""
    with Ranks(2, 4, 512, 4) as ranks:

        def step(rank: int, buffer: Any) -> int:
            buffer.enable_counters()
            x = torch.zeros(4, 512, dtype=torch.bfloat16, device=DEVICE)
            topk_idx = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
            buffer.low_latency_dispatch(x, topk_idx, 4, 4)
            snapshot = buffer.dispatch_counters.snapshot()
            (slot,) = snapshot.operations()
            return int(slot[-1, snapshot.ring_own_fields.index("timer_step")])

        return max(ranks.run(step))


def facts() -> dict[str, Any]:
    """All of it."""
    num_bytes = 1 << (30 if DEVICE == "cuda" else 22)
    found = {"backend": DEVICE, "torch": torch.__version__, "cuda": torch.version.cuda}
    if DEVICE == "cuda":
        found |= _alone()
    return {
        **found,
        "timer_step_ns": timer_step_ns(),
        "copy_gb_per_s": num_bytes / 1e3 / copy_us(num_bytes),
        "copy_bytes": num_bytes,
    }


def sentences(found: Mapping[str, Any]) -> str:
    """A line for people."""
    said = [
        f"{found.get('device', 'the cpu backend, whose figures mean nothing')}: timer's step "
        f"{found['timer_step_ns']} ns, a copy moves {found['copy_gb_per_s']:.0f} GB/s"
    ]
    if "device" in found:
        pairs = found["streams_that_share_a_queue"]
        said += [
            "; ".join(f"{second} waits for kernels of {first}" for first, second in pairs)
            or f"no two of {2 * NUM_RANKS} streams share a queue",
            f"beside a kernel of {_BUSY_NS / 1e6:.0f} ms an allocation takes {found['allocation_ms']:.1f} ms, "
            f"of pinned memory {found['pinned_allocation_ms']:.1f} ms",
        ]
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = facts()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    Console(width=1000).print(sentences(found), highlight=False)


if __name__ == "__main__":
    main()
