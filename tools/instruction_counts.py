"""Counts instructions of one thread of normal mode in its machine code: docs/cost_model.md says which.

Reads what `make cuda` has built; builds nothing. Exit status 1 if a count is above its bound, or without a module.

Usage: python tools/instruction_counts.py [module.so | code.cubin]    default: deep_ep/_cuda.*.so
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from control_flow import Flow, Place
from disassembly import disassembled
from memory_order.sass import Instruction
from memory_order.sources import ROOT

STEP_ROWS = 16  # of a gateway's step at least: kLeastStep
STEP_TOKENS = 32  # of a step of sums: kMaxStep
WARPS = 8
LOCAL_RANKS = 8

POLL = "LD.E.64.STRONG.SYS"
TASK = ("LDS", "TaskSearch.look: const int rows")
CHOSEN = ("STS", "*shared.step = {shared.left[chosen], prepared}")
FAILED = ("LD.E.STRONG.GPU", "TaskSearch.is_over")
IN_DISPATCH, IN_COMBINE = "DispatchTasks.movable", "CombineTasks.movable"
PREPARE, TELL = "CombineTasks.prepare", "CombineTasks.tell"
FILLED = (POLL, "filled_slots", IN_DISPATCH)
RELAYED = ("LDG", "NormalArgs.relayed", IN_DISPATCH)


def relay(destinations: int) -> tuple[Place, ...]:
    """A gateway's step of rows that are for so many of the local ranks each, by the lane of one of these."""
    mine = STEP_ROWS * destinations // LOCAL_RANKS
    passed = ("LDS", "relay_row: const uint32_t passed")
    row = (
        ("I2F", "relay_row: copy.take(relayed_row("),
        *(passed, ("POPC", "relay_row: const int place")) * destinations,
        *(passed,) * (LOCAL_RANKS - destinations),
    )
    return (
        *(TASK, RELAYED, FILLED, ("STS", "shared.marks[i] = mark_in(")),
        *(("LDS", "shared.marks[i].local_ranks >> local"),) * STEP_ROWS,
        ("STS", "shared.places[local] = "),
        *(("LOP3", "passed &= passed - 1"),) * mine,
        ("STS", "shared.passed[local] &= kept"),
        *(("STG", "args.nvl_head[head * ranks_per_node + local] = place++"),) * mine,
        CHOSEN,
        *row * STEP_ROWS,
        ("ST.E.64.STRONG.SYS", "Transport.signal", "DispatchTasks.tell_relayed"),
        ("STG", "give_back: state.moved += count", "DispatchTasks.tell:"),
    )


def slot(step: str) -> Place:
    """Looks up where a token of a sum stands in a queue."""
    return "LDG", "args.nvl_head[", step


def queue(step: str) -> Place:
    return "", "nvl_queue", "CombineTasks.queue_of", step


SUM_POLL = (queue("CombineTasks.prepare: const Queue queue"), (POLL, "filled_slots", PREPARE))
HAS_COME = (slot(PREPARE), queue(PREPARE), ("LDG", "state_of(args, queue, false).seen)", PREPARE))


def sums(ranks: int) -> tuple[Place, ...]:
    """A step of tokens with rows of so many of a node's ranks, by a lane of the warp that leads the block."""
    listed = (*HAS_COME, ("STS", "RowList.add:", PREPARE))
    others = LOCAL_RANKS - ranks
    return (
        *(TASK, *SUM_POLL, *listed * ranks, *(slot(PREPARE),) * others, CHOSEN),
        *(("IMAD", "sum_token: const RowList", "move: sum_token("),) * (STEP_TOKENS // WARPS),
        *(("STG", "CombineTasks.tell: state.cursor = "), slot(TELL), queue(TELL)),
        ("STG", "give_back: state.moved += count", TELL),
    )


RECEIVE = (
    ("LDG", "NormalArgs.from_rank", IN_DISPATCH),
    ("", "nvl_queue", "DispatchTasks.inbound", IN_DISPATCH),
    FILLED,
)
SEND = (
    ("LDG", "NormalArgs.to_rank", IN_DISPATCH),
    ("", "nvl_queue", "DispatchTasks.outbound", IN_DISPATCH),
    (POLL, "free_slots", IN_DISPATCH),
)
RETURN = (
    ("LDG", "NormalArgs.from_rank", IN_COMBINE),
    ("", "nvl_queue", "CombineTasks.outbound", IN_COMBINE),
    (POLL, "free_slots", IN_COMBINE),
)


@dataclass(frozen=True)
class Count:
    """What one thread executes on a way, divided by the rows of it. `free`: as in Flow."""

    name: str
    kernel: str
    places: tuple[Place, ...]
    bound: float
    rows: int = 1
    free: tuple[str, ...] = ("RowCopy.", "add_up", "sum_weights")


DISPATCH, COMBINE = "normal_dispatch", "normal_combine"
MOVE = ("DispatchTasks.move:",)
COUNTS = (
    Count("look for rows to receive", DISPATCH, (TASK, *RECEIVE, FAILED), 170),
    Count("look for rows to relay", DISPATCH, (TASK, RELAYED, FILLED, FAILED), 158),
    Count("look for slots to a rank", DISPATCH, (TASK, *SEND, FAILED), 165),
    Count("look for slots to return rows", COMBINE, (TASK, *RETURN, FAILED), 182),
    Count("look for rows to add up", COMBINE, (TASK, *SUM_POLL, *HAS_COME, FAILED), 360),
    Count("row for 8 local ranks, decided and told", DISPATCH, relay(8), 79, STEP_ROWS, MOVE),
    Count("row relayed to 1 local rank", DISPATCH, relay(1), 282, STEP_ROWS),
    Count("row relayed to 8 local ranks", DISPATCH, relay(8), 500, STEP_ROWS),
    Count("token summed over 1 rank", COMBINE, sums(1), 35, STEP_TOKENS),
    Count("token summed over 8 ranks", COMBINE, sums(8), 55, STEP_TOKENS),
)


def evaluate(code: Iterable[Instruction]) -> list[tuple[Count, float]]:
    """Instructions of each count in the code of a module."""
    kernels = {f"{len(count.kernel)}{count.kernel}E": count.kernel for count in COUNTS}
    flows = {}
    for function, group in groupby(code, lambda one: one.function):
        instructions = list(group)
        for mangled, kernel in kernels.items():
            if mangled in function:
                for free in {count.free for count in COUNTS if count.kernel == kernel}:
                    flows[kernel, free] = Flow(instructions, free)
    return [
        (count, flows[count.kernel, count.free].round(count.places) / count.rows)
        for count in COUNTS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("module", nargs="?", type=Path)
    module = parser.parse_args().module or next((ROOT / "deep_ep").glob("_cuda.*.so"), None)
    if module is None:
        print("no CUDA module found; build first: make cuda")
        return 1
    found = evaluate(disassembled(module))
    for count, value in found:
        print(f"{count.name:40} {value:7.1f} instructions, at most {count.bound}")
    above = [count for count, value in found if value > count.bound]
    print(f"instruction counts: {len(above)} of {len(found)} above their bounds")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
