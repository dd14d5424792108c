"""What attaching adds to a call on the host, for a class of DeepEP's interface whose methods do nothing.

Calls with and without take turns; times are medians. Beside them stands one `torch.empty` of the same run.

    python benchmarks/attach_time.py [--rounds 100000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from deep_ep.diagnose import attach  # noqa: E402
from deep_ep.group import thread_groups  # noqa: E402
from support import wheels  # noqa: E402

_NEVER_S = 1e4
_CALLS = ("low_latency_dispatch", "low_latency_combine")
_ARGUMENTS: dict[str, tuple[Any, ...]] = {_CALLS[0]: (None, None, 128, 256), _CALLS[1]: (None,) * 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    rounds = parser.parse_args().rounds
    (group,) = thread_groups(1)
    # Two classes, because methods of a class are patched.
    plain, attached = (wheels.as_of("deep_ep.buffer", _Idle, "Buffer")(group) for _ in range(2))
    attach(attached, interval_s=_NEVER_S)
    for call in _CALLS:
        ways = [getattr(buffer, call) for buffer in (plain, attached)]
        times: list[list[int]] = [[], [], []]
        for _ in range(rounds):
            for taken, way in zip(times, ways):
                begin = time.perf_counter_ns()
                way(*_ARGUMENTS[call])
                taken.append(time.perf_counter_ns() - begin)
            begin = time.perf_counter_ns()
            torch.empty((256,), dtype=torch.int32)
            times[2].append(time.perf_counter_ns() - begin)
        without, with_it, empty = (statistics.median(taken) / 1e3 for taken in times)
        print(
            f"{call}: {without:.2f} us without, {with_it:.2f} us attached, so {with_it - without:.2f} us more; "
            f"one torch.empty {empty:.2f} us"
        )


class _Idle(wheels.Buffer):
    """Adds nothing."""

    def _add_cycles(self, method: str, tensor: Any, experts: int) -> None:
        """Takes no time of its own."""


if __name__ == "__main__":
    main()
