"""How often verdicts from traces name healthy ranks, and miss late ones, over all families of noise of generated groups.

Generated operations become kernels of DeepEP V1, with and without a notify, which are read as traces are.

    python benchmarks/trace_verdicts.py [--runs 11] [--rounds 64] [--ranks 8] [--late-us 50]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "diagnose")]

from _scenarios import FAMILIES  # noqa: E402

from deep_ep.diagnose.core.causes import COMP_SLOW  # noqa: E402
from deep_ep.diagnose.trace import late_ranks, rank_trace  # noqa: E402
from deep_ep.diagnose.trace.arrivals import arrivals  # noqa: E402
from generator import simulate_windows  # noqa: E402
from generator.faults import SlowRank  # noqa: E402
from generator.machines import GPU  # noqa: E402
from support.library_traces import LIBRARIES, events_of  # noqa: E402

_LATE = 3
_SEED = 1000
# Kernels with a notify have no hooks.
_NOT_WITH_NOTIFY = "long hook"


def outcomes(library: str, family: str, args: argparse.Namespace, late_us: float) -> Counter[str]:
    """Of so many runs of a family: who was named."""
    faults = [[SlowRank(_LATE, late_us / 1e6)] if late_us else []] * args.runs
    machine = FAMILIES[family](GPU)
    found: Counter[str] = Counter()
    for window in simulate_windows(
        machine, args.ranks, args.rounds, faults, seed=_SEED, capacity=2 * args.rounds
    ):
        traces = [
            rank_trace.condense(
                Path("trace"),
                events_of(snapshot, LIBRARIES[library]),
                {"distributedInfo": {"rank": snapshot.rank}},
            )
            for snapshot in window.snapshots
        ]
        diagnosis = late_ranks.judge(arrivals(traces), traces)
        right = {(COMP_SLOW, _LATE)} if late_us else set()
        found["runs"] += 1
        found["right"] += diagnosis.keys == right
        found["others named"] += bool(diagnosis.keys - right)
        found["undecided"] += any("undecided" in remark for remark in diagnosis.remarks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11, help="of each family")
    parser.add_argument("--rounds", type=int, default=64, help="of a dispatch and a combine")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--late-us", type=float, default=50.0)
    args = parser.parse_args()
    for library in ("DeepEP V1", "DeepEP V1, low latency"):
        families = [f for f in FAMILIES if "low latency" in library or f != _NOT_WITH_NOTIFY]
        for late_us in (0.0, args.late_us):
            total: Counter[str] = Counter()
            for family in families:
                total.update(outcomes(library, family, args, late_us))
            what = f"rank {_LATE} late by {late_us:g} us" if late_us else "healthy"
            print(f"{library}, {what}: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
