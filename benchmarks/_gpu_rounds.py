"""Rounds of dispatch and combine of ranks that share one GPU: how they are timed, and the copy that they are
compared with.

Ranks are threads with a stream each. Before a measured batch each keeps its stream busy until all calls are
queued, so the host's time is not in the figures. A round's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch  # noqa: E402

import deep_ep  # noqa: E402
from deep_ep.native import backend  # noqa: E402
from support import reference  # noqa: E402
from support.launch import DEVICE, Ranks, keep_busy, sleep_kernel  # noqa: E402

# Ranks are threads already, and torch's own pools would fight them.
torch.set_num_threads(1)

_WARM_UP_ROUNDS = 3
# Batches alternate between counters off and on, so that what else changes hits both.
_NUM_BATCHES = 3
# What one rank's round may take to be queued, by a host that queues for one rank at a time; if it takes longer, ranks are
# kept busy for twice as long, at most so often.
_QUEUE_NS = 400_000
_MOST_DOUBLINGS = 6
_NUM_COPIES = 20
# Options that say of what a figure is.
SIZES = ("num_tokens", "hidden", "num_topk", "num_experts")


class Mark:
    """A moment of the current stream: an event on a GPU, the time of day on the cpu backend."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if DEVICE == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.at_s = time.perf_counter()

    def is_ahead(self) -> bool:
        """Whether the device has not reached it; on the cpu backend, where nothing is queued, as good as that."""
        return self.event is None or not self.event.query()

    def us_until(self, later: Mark) -> float:
        """Both have been reached."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) * 1e3
        return (later.at_s - self.at_s) * 1e6


@dataclass(frozen=True)
class Figures:
    """Microseconds of one operation: median, quartiles and least, per round the slowest rank's."""

    median: float
    lower: float
    upper: float
    least: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Figures:
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, lower, upper, min(times))


@dataclass(frozen=True)
class Measured:
    """One operation: figures by whether counters were on ("off", "on"), payload of all ranks, and its copy."""

    figures: dict[str, Figures]
    num_bytes: int
    copy_us: float

    @property
    def speed(self) -> list[str]:
        """Without counters: GB/s, and the share of a copy's speed."""
        median = self.figures["off"].median
        return [f"{self.num_bytes / 1e3 / median:.0f}", f"{self.copy_us / median:.0%}"]


class Round(NamedTuple):
    """The two calls of one rank; `combine` takes the handle that `dispatch` returns."""

    dispatch: Callable[[], Any]
    combine: Callable[[Any], None]


def measure(
    ranks: Ranks,
    round_of: Callable[[int, deep_ep.Buffer], Round],
    num_rounds: int,
    num_rows: int,
    hidden: int,
) -> tuple[Measured, Measured]:
    """All batches: dispatch and combine.

    Args:
        num_rows: rows that all ranks receive together, FP8 with scales in dispatch and BF16 in combine.
    """
    times: dict[str, tuple[list[float], list[float]]] = {"off": ([], []), "on": ([], [])}
    busy_ns = _QUEUE_NS * len(ranks.buffers) * (num_rounds + _WARM_UP_ROUNDS)
    for batch in range(2 * _NUM_BATCHES):
        counters = "on" if batch % 2 else "off"
        for buffer in ranks.buffers:
            if counters == "on":
                buffer.enable_counters()
            else:
                buffer.disable_counters()
        by_rank, busy_ns = _run_all(ranks, round_of, num_rounds, busy_ns)
        for of_ranks in zip(*by_rank):
            for seen, values in zip(times[counters], zip(*of_ranks)):
                seen.append(max(values))
    row_bytes = (hidden + 4 * (hidden // reference.FP8_GROUP), 2 * hidden)
    dispatch, combine = (
        Measured(
            {counters: Figures.of(seen[i]) for counters, seen in times.items()},
            num_rows * row_bytes[i],
            copy_us(num_rows * row_bytes[i]),
        )
        for i in range(2)
    )
    return dispatch, combine


def _run_all(
    ranks: Ranks, round_of: Callable[[int, deep_ep.Buffer], Round], num_rounds: int, busy_ns: int
) -> tuple[list[list[tuple[float, float]]], int]:
    """A batch of all ranks, and for how long they had to be kept busy until everything was queued."""
    for _ in range(_MOST_DOUBLINGS):
        batch = functools.partial(_run_batch, num_rounds=num_rounds, busy_ns=busy_ns)
        by_rank = ranks.run(lambda rank, buffer, run=batch: run(buffer, round_of(rank, buffer)))
        if all(was_ahead for _, was_ahead in by_rank):
            return [rounds for rounds, _ in by_rank], busy_ns
        busy_ns *= 2
    raise RuntimeError(f"{num_rounds} rounds are not queued within {busy_ns / 2e9:.1f} s")


def _run_batch(
    buffer: deep_ep.Buffer, of_rank: Round, num_rounds: int, busy_ns: int
) -> tuple[list[tuple[float, float]], bool]:
    """(dispatch, combine) in us of each round of one rank, warm-up left out, and whether the host was fast enough.

    Collective.
    """
    if DEVICE == "cuda":
        keep_busy(buffer, busy_ns)
    marks = []
    for _ in range(num_rounds + _WARM_UP_ROUNDS):
        begin = Mark()
        handle = of_rank.dispatch()
        between = Mark()
        of_rank.combine(handle)
        marks.append((begin, between, Mark()))
    was_ahead = marks[0][0].is_ahead()
    finish(buffer)
    return [(a.us_until(b), b.us_until(c)) for a, b, c in marks[_WARM_UP_ROUNDS:]], was_ahead


def finish(buffer: deep_ep.Buffer) -> None:
    """Waits for what this rank has called; raises what went wrong in it."""
    backend.get().current_stream().synchronize()
    buffer.raise_failure()


def copy_us(num_bytes: int) -> float:
    """Median time of a copy within the device, queued before the first one begins."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    if DEVICE == "cuda":
        sleep_kernel(_QUEUE_NS * (_WARM_UP_ROUNDS + _NUM_COPIES))
    marks = []
    for _ in range(_WARM_UP_ROUNDS + _NUM_COPIES):
        begin = Mark()
        target.copy_(source)
        marks.append((begin, Mark()))
    backend.get().synchronize()
    return statistics.median(begin.us_until(end) for begin, end in marks[_WARM_UP_ROUNDS:])


def num_multiprocessors() -> int:
    """How many blocks may wait for each other at once; without limit on the cpu backend."""
    if DEVICE != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def device_name() -> str:
    """Of the GPU."""
    if DEVICE != "cuda":
        return "the cpu backend, whose figures mean nothing"
    return torch.cuda.get_device_name()


def options(
    about: str | None, num_ranks: Sequence[int], num_tokens: int, rounds: int
) -> argparse.ArgumentParser:
    """The options that both commands have, with these defaults."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, nargs="+", default=list(num_ranks))
    parser.add_argument("--num-tokens", type=int, default=num_tokens)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"of a batch ({rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser


def title(args: argparse.Namespace, device: str) -> str:
    """Of a table."""
    return (
        f"{args.num_tokens} x {args.hidden} x top-{args.num_topk} of {args.num_experts}, FP8 dispatch, "
        f"BF16 combine, {device}"
    )


def write_rows(args: argparse.Namespace, rows: Sequence[Any]) -> None:
    """Sizes and all figures, as JSON."""
    sizes = {name: getattr(args, name) for name in SIZES}
    found = {"device": device_name(), **sizes, "rows": [asdict(row) for row in rows]}
    args.json.write_text(json.dumps(found, indent=1))
