"""A seed from beginning to end: its program on simulated ranks, judged by the model."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import torch

from deep_ep._cpu import RankDied
from deep_ep.errors import EPError
from explore.machine import Machine
from explore.model import Model, Record
from explore.program import DISTURBANCES, TIMEOUT_NS, TIMEOUT_S, Program, draw_program, draw_steps
from explore.rank import Rank
from support.exchange import Shape

# Ranks that meet between steps are all right again in the second one after a disturbance.
STEPS_TO_RECOVER = 2


@dataclass
class Explored:
    """What came of one seed; without `failures` all went as it should."""

    seed: int
    num_operations: int
    num_errors: int
    injected: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # in the order in which they began


def explore(seed: int, names: tuple[str, ...] = DISTURBANCES) -> Explored:
    """Runs a seed's program, with disturbances of these names only. Every third has steps."""
    torch.set_num_threads(1)
    has_steps = seed % 3 == 2
    program = draw_steps(seed, names) if has_steps else draw_program(seed, names)
    machine = Machine(program.num_ranks, program.ranks_per_node, program.pace, seed)
    model = Model(program.num_ranks)
    ranks = [Rank(program, machine, model, rank) for rank in range(program.num_ranks)]
    run = Rank.run_steps if has_steps else Rank.run
    with mock.patch.dict(os.environ, environment(program)):
        outcomes = machine.run(lambda rank: run(ranks[rank]))
    explored = Explored(seed, len(model.calls), 0)
    for rank in ranks:
        explored.injected.update(one.name for one in rank.disturbed)
    if machine.has_hung():
        explored.failures.append("somebody waited for ever")
    explored.failures += [
        f"rank {rank} raised {type(outcome).__name__}: {outcome}"
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and not isinstance(outcome, RankDied)
    ]
    explored.failures += judge(program, model, ranks)
    explored.num_errors = sum(record.error is not None for record in model.calls)
    explored.calls = [describe(record, machine.began_ns) for record in model.calls]
    return explored


def environment(program: Program) -> dict[str, str]:
    """What the buffers of a program are made with."""
    return {
        "DEEP_EP_TIMEOUT_S": f"{TIMEOUT_S:g}",
        "DEEP_EP_CLOCK_INTERVAL_S": f"{program.clock_interval_s:g}",
        "DEEP_EP_VERIFY": f"{program.verifies:d}",
        **({"DEEP_EP_RANKS_PER_NODE": f"{program.ranks_per_node}"} if program.normal_sizes else {}),
    }


def describe(record: Record, from_ns: int) -> str:
    """A call in a line."""
    ended = "returned"
    if record.error is not None:
        ended = f"{type(record.error).__name__}: {record.error}"
    lie = f" with another {record.lie}" if record.lie else ""
    sizes = record.sizes
    if isinstance(sizes, Shape):
        sizes_text = f"{sizes.num_max_tokens} {sizes.hidden} {sizes.num_experts}"
    else:
        sizes_text = str(sizes)
    return (
        f"{(record.began_ns - from_ns) / 1e6:10.3f} to {(record.ended_ns - from_ns) / 1e6:10.3f} ms  "
        f"{record}{lie}, sizes {sizes_text}: {ended}"
    )


def judge(program: Program, model: Model, ranks: list[Rank]) -> list[str]:
    """Everything that should not have come of a program."""
    found = []
    disturbed_from = min(
        (one.began_ns for rank in ranks for one in rank.disturbed if one.name != "pause"),
        default=None,
    )
    settled = settled_operations(ranks)
    for record in model.calls:
        if record.error is None:
            wrong = model.check(record)
            if wrong is not None:
                found.append(wrong)
        elif isinstance(record.error, EPError) and record.op:
            raised = f"{record}: {type(record.error).__name__}: {record.error}"
            if disturbed_from is None or record.ended_ns < disturbed_from:
                found.append(f"{raised} (nothing had been disturbed)")
            elif record.op in settled:
                found.append(f"{raised} (all ranks had called again for long)")
            elif "not what was sent" in str(record.error):
                found.append(f"{raised} (nobody had overwritten memory)")
            elif wronged := named_without_fault(record, model, ranks):
                found.append(f"{raised} (ranks {wronged} had done nothing wrong)")
    for op in sorted(settled):
        calls = model.records.get(op, {})
        if len(calls) < program.num_ranks:
            found.append(f"operation {op}: only ranks {sorted(calls)} called it, after recovery")
    return found


def settled_operations(ranks: list[Rank]) -> set[int]:
    """Operations that must succeed: all ranks have called again for long, or two steps have gone by."""
    disturbed = [one.number for rank in ranks for one in rank.disturbed]
    first = max(disturbed, default=-STEPS_TO_RECOVER) + STEPS_TO_RECOVER
    in_steps = {op for rank in ranks for ops in rank.steps[first:] for op in ops}
    return in_steps.union(*(ops for rank in ranks for ops in rank.settled))


def named_without_fault(record: Record, model: Model, ranks: list[Rank]) -> list[int]:
    """Ranks that an error calls missing, though nothing had happened to them and no call of theirs had failed."""
    named = set(getattr(record.error, "missing_ranks", ()))
    for rank in ranks:
        for one in rank.disturbed:
            if one.name != "pause" and one.began_ns <= record.ended_ns:
                named.difference_update(one.ranks)
    for other in model.calls:
        if other.error is not None and other.ended_ns <= record.ended_ns:
            named.discard(other.rank)
    return sorted(rank for rank in named if not has_just_come(rank, record, model))


def has_just_come(rank: int, record: Record, model: Model) -> bool:
    """Whether the operation before held the rank up nearly as long as the others wait in this one, which it has not called yet."""
    before, here = (model.records.get(op, {}).get(rank) for op in (record.op - 1, record.op))
    if before is None or (here is not None and here.began_ns <= record.ended_ns):
        return False
    was_held_up = before.ended_ns - before.began_ns > TIMEOUT_NS // 2
    return was_held_up and 0 <= record.ended_ns - before.ended_ns < TIMEOUT_NS // 10
