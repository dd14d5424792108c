"""How often waiting that other kernels count names healthy ranks, and misses late ones, over all families of noise.

Generated groups fill tensors as kernels of DeepEP V1 do: cycles of each rank's own clock, for each local expert. They are
read, scaled and judged as `diagnose.attach` does. Ranks are read some operations apart.

    python benchmarks/attach_verdicts.py [--runs 11] [--ranks 8] [--late-us 50]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "diagnose")]

from _scenarios import FAMILIES  # noqa: E402

from deep_ep.diagnose.analyze.waits_only.lasting import LEAST_WINDOWS  # noqa: E402
from deep_ep.diagnose.core.causes import COMP_SLOW  # noqa: E402
from deep_ep.diagnose.core.diagnosis import Diagnosis  # noqa: E402
from deep_ep.diagnose.live.wait_sampler import Window  # noqa: E402
from deep_ep.diagnose.other_kernels.judge import Judge  # noqa: E402
from deep_ep.diagnose.other_kernels.waiting import CountedWait, take  # noqa: E402
from deep_ep.diagnose.other_kernels.wheels import COUNTERS  # noqa: E402
from deep_ep.diagnose.other_kernels.wheels import Counter as Tensor  # noqa: E402
from generator import Window as Generated  # noqa: E402
from generator import simulate_windows  # noqa: E402
from generator.faults import SlowRank  # noqa: E402
from generator.machines import CLUSTER, GPU  # noqa: E402

_LATE, _SEED = 3, 2000
_RANKS_PER_NODE = 8
_WINDOWS, _ROUNDS = 10, 64
# Of the reading of a rank: rounds that it may be apart from the others. Of its clock: MHz.
_APART, _CLOCKS = 4, (1200, 1980)
_EXPERTS_PER_RANK = 32
_TENSORS = {one.operation: one for one in COUNTERS if one.unit == "cycles"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11, help="of each family")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--late-us", type=float, default=50.0)
    args = parser.parse_args()
    for late_us in (0.0, args.late_us):
        of_way: dict[str, Counter[str]] = {"operations counted": Counter(), "graphs": Counter()}
        for family in FAMILIES:
            for way, found in of_way.items():
                outcome = outcomes(family, args, late_us, in_graphs=way == "graphs")
                found.update(outcome)
                if outcome["right"] < outcome["runs"]:
                    print(f"  {family}, {way}: {dict(outcome)}", flush=True)
        for way, found in of_way.items():
            what = f"rank {_LATE} late by {late_us:g} us" if late_us else "healthy"
            print(f"{args.ranks} ranks, {what}, {way}: {dict(found)}", flush=True)


def outcomes(
    family: str, args: argparse.Namespace, late_us: float, *, in_graphs: bool
) -> Counter[str]:
    """Of so many runs of a family: who was named at the end, and whether anybody else was at any time."""
    faults = [[SlowRank(_LATE, late_us / 1e6)] if late_us else []] * args.runs
    machine = FAMILIES[family](GPU if args.ranks <= _RANKS_PER_NODE else CLUSTER)
    late = {(COMP_SLOW, _LATE)} if late_us else set()
    rounds = (_WINDOWS + 1) * _ROUNDS + _APART
    found: Counter[str] = Counter()
    for generated in simulate_windows(
        machine, args.ranks, rounds, faults, seed=_SEED, capacity=2 * rounds
    ):
        diagnoses = list(judged(generated, args.ranks, in_graphs))[LEAST_WINDOWS - 1 :]
        named = [diagnosis.keys for diagnosis in diagnoses]
        found["runs"] += 1
        found["right"] += named[-1] == late
        found["others named"] += any(keys - late for keys in named)
        found["undecided"] += any("undecided" in remark for remark in diagnoses[-1].remarks)
    return found


def judged(generated: Generated, num_ranks: int, in_graphs: bool) -> Iterator[Diagnosis]:
    """What is said after each window."""
    draw = np.random.default_rng(generated.seed)
    clocks = draw.integers(*_CLOCKS, num_ranks)
    ranks = [[_counted(kind, num_ranks, in_graphs) for kind in _TENSORS.values()] for _ in clocks]
    before = np.zeros(num_ranks, np.int64)
    judge = Judge(list(_TENSORS), None)
    seconds = _ROUNDS * 2 * generated.period_us / 1e6
    hosts = [f"host{rank // _RANKS_PER_NODE}" for rank in range(num_ranks)]
    for number in range(_WINDOWS + 1):
        ends = (number + 1) * _ROUNDS + draw.integers(0, _APART + 1, num_ranks)
        taken = []
        for rank, of_rank in enumerate(ranks):
            until = generated.first(2 * int(ends[rank]))
            for one, kind in zip(of_rank, _TENSORS):
                cycles = until.wait_matrix(kind)[rank] * clocks[rank] / 1e3
                one.ours.copy_(torch.from_numpy(cycles * _EXPERTS_PER_RANK))
                one.calls += 0 if in_graphs else int(ends[rank] - before[rank])
            taken.append(take(of_rank, lambda mhz=clocks[rank]: 1e3 / mhz))
        before = ends
        waits = np.stack([one.waits for one in taken], axis=1).astype(np.float64)
        counts = np.median([one.operations for one in taken], axis=0)
        operations = np.full(len(counts), np.nan) if in_graphs else counts
        # The first one ends the time of warming up.
        if number:
            window = Window(number, waits, operations, hosts, {}, [])
            yield judge.judge(window, seconds)


def _counted(kind: Tensor, num_ranks: int, in_graphs: bool) -> CountedWait:
    zeros = torch.zeros(num_ranks, dtype=torch.int64)
    return CountedWait(kind, num_ranks, zeros, num_ranks, _EXPERTS_PER_RANK, replays=in_graphs)


if __name__ == "__main__":
    main()
