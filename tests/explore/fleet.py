"""Many seeds in worker processes, so that a crash of one is a finding like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# Of real time, for one seed; they take a fraction of a second.
HANG_S = 60.0


@dataclass
class Summary:
    """What came of many seeds; `failures` is by seed."""

    num_seeds: int = 0
    num_operations: int = 0
    num_errors: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    failures: dict[int, list[str]] = field(default_factory=dict)

    def add(self, seed: int, explored: dict[str, object]) -> None:
        """Takes in what a worker said about a seed."""
        self.num_seeds += 1
        self.num_operations += int(explored.get("num_operations", 0))  # type: ignore[call-overload]
        self.num_errors += int(explored.get("num_errors", 0))  # type: ignore[call-overload]
        self.injected.update(explored.get("injected", {}))  # type: ignore[arg-type]
        failures = explored.get("failures")
        if failures:
            self.failures[seed] = failures  # type: ignore[assignment]


class Seeds:
    """Hands out seeds to several workers, until there are none or the time is over."""

    def __init__(self, seeds: Iterable[int], until: float = float("inf")) -> None:
        self._seeds: Iterator[int] = iter(seeds)
        self._until = until
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The next seed, if there is one."""
        with self._lock:
            return next(self._seeds, None) if time.monotonic() < self._until else None


def explore_all(seeds: Seeds, names: tuple[str, ...], jobs: int) -> Summary:
    """Explores all seeds in `jobs` worker processes."""
    summary = Summary()
    lock = threading.Lock()

    def serve() -> None:
        worker = None
        while (seed := seeds.take()) is not None:
            worker = worker or _Worker(names)
            explored, is_alive = worker.explore(seed)
            if not is_alive:
                worker = None
            with lock:
                summary.add(seed, explored)
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary


class _Worker:
    """A process that explores the seeds it is given, one after the other."""

    def __init__(self, names: tuple[str, ...]) -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "explore.fleet", ",".join(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def explore(self, seed: int) -> tuple[dict[str, object], bool]:
        """What came of a seed, and whether the worker can go on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        hang = threading.Timer(HANG_S, self._process.kill)
        hang.start()
        line = self._process.stdout.readline()
        hang.cancel()
        if line:
            return json.loads(line), True
        code = self._process.wait()
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            why = f"still running after {HANG_S:g} s"
        return {"failures": [f"the process ended: {why}"]}, False

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """A worker: reads seeds, writes a line of JSON for each."""
    from explore.explorer import explore

    names = tuple(name for name in sys.argv[1].split(",") if name)
    for line in sys.stdin:
        explored = explore(int(line), names)
        explored.calls.clear()
        print(json.dumps(vars(explored)), flush=True)


if __name__ == "__main__":
    main()
