"""Ways through machine code: what they cost, and that a count above its bound is red."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import instruction_counts
from control_flow import Flow, lines_of
from instruction_counts import COUNTS, Count
from memory_order.sass import read
from memory_order.sources import ROOT

TASKS = "csrc/kernels/normal/tasks.cuh"
ROW_SUM = "csrc/kernels/normal/row_sum.cuh"


def frame(path: str, part: str) -> str:
    """The frame of the one line that has some text."""
    (line,) = [number for number, text in enumerate(lines_of(path), 1) if part in text]
    return f'\t//## File "/tree/{path}", line {line}'


def disassembly(*lines: str, kernel: str = "normal_combine") -> str:
    """What nvdisasm prints for frames, labels and instructions."""
    printed = [f".text._ZN2ep{len(kernel)}{kernel}EN:"]
    for number, line in enumerate(lines):
        is_code = not line.startswith((".L", "\t//"))
        printed.append(f"        /*{number * 16:04x}*/    {line} ;" if is_code else line)
    return "\n".join(printed)


LOOK = frame(TASKS, "look: const int rows")
OTHER = frame(TASKS, "tell: tasks.tell(")
SUM = frame(ROW_SUM, "sums[j][i] += values[i]")
# A look that costs 5 or 6, a call between; behind it a loop over sums, two in a round.
CODE = (
    ".L_x_0:",
    LOOK,
    "LDS R1, [R2]",
    OTHER,
    "@P0 BRA `(.L_x_1)",
    "@!P1 BRA `(.L_x_2)",
    "CALL.REL.NOINC `($__internal_0)",
    "BRA `(.L_x_3)",
    ".L_x_2:",
    "IADD3 R1, R1, R1, RZ",
    ".L_x_1:",
    "IMAD R1, R1, R1, RZ",
    ".L_x_3:",
    "LD.E.64.STRONG.SYS R4, desc[UR4][R4.64]",
    "BRA P2, `(.L_x_0)",
    ".L_x_4:",
    "LDG.E R8, desc[UR4][R8.64]",
    SUM,
    "FADD R1, R1, R1",
    "FADD R2, R2, R2",
    OTHER,
    "LDG.E R9, desc[UR4][R8.64+0x4]",
    "@P3 BRA `(.L_x_4)",
    "@P4 EXIT",
    "BRA `(.L_x_0)",
)
TASK = ("LDS", "TaskSearch.look: const int rows")
POLL = ("LD.E.64.STRONG.SYS",)
LOADED = ("LDG",)


def flow(*free: str) -> Flow:
    return Flow(list(read(disassembly(*CODE).splitlines())), free)


def test_the_cheapest_way_is_counted() -> None:
    assert flow().round((TASK, POLL)) == 5
    assert flow().round((TASK, ("IADD3",), POLL)) == 7
    assert flow().round((("I",), POLL)) == 5  # IMAD, not IADD3


def test_each_pass_counts_whatever_the_compiler_unrolled() -> None:
    once_round = 5 - 1 + 1 + 7  # the look, whose branch is not taken, and the loop
    assert flow().round((TASK, *(LOADED,) * 2)) == once_round
    assert flow().round((TASK, *(LOADED,) * 6)) == once_round + 2 * 5
    assert flow().round((TASK, *(LOADED,) * 5)) == once_round + 2 * 5


def test_what_is_free_costs_nothing() -> None:
    assert flow("sum_tile").round((TASK, LOADED)) == flow().round((TASK, LOADED)) - 2


def test_a_longer_way_that_is_free_is_taken() -> None:
    short = ("@P0 BRA `(.L_x_1)", "FADD R1, R1, R1", "BRA `(.L_x_2)")
    long = (".L_x_1:", SUM, *("FADD R1, R1, R1",) * 4, ".L_x_2:")
    code = (".L_x_0:", LOOK, "LDS R1, [R2]", *short, *long, OTHER, "BRA `(.L_x_0)")
    instructions = list(read(disassembly(*code).splitlines()))
    assert Flow(instructions, ("sum_tile",)).round((TASK,)) == 3
    assert Flow(instructions).round((TASK,)) == 5


def test_a_predicate_or_an_operand_makes_a_branch_go_on() -> None:
    assert flow().round((TASK, ("EXIT",), POLL)) == flow().round((TASK, LOADED)) + 5


def test_a_way_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no"):
        flow().round(((*TASK, "TaskSearch.is_over"),))
    with pytest.raises(ValueError, match="no way"):
        flow().round((TASK, ("CALL",), POLL))


@pytest.mark.parametrize(("bound", "status"), [(2.5, 0), (2.4, 1)])
def test_a_count_above_its_bound_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: float, status: int
) -> None:
    count = Count("look", "normal_combine", (TASK, POLL), bound, rows=2)
    monkeypatch.setattr(instruction_counts, "COUNTS", (count,))
    monkeypatch.setattr(
        instruction_counts, "disassembled", lambda module: read(module.read_text().splitlines())
    )
    module = tmp_path / "module"
    module.write_text(disassembly(*CODE) + "\n" + disassembly("EXIT", kernel="normal_notify"))
    monkeypatch.setattr(sys, "argv", ["instruction_counts.py", str(module)])
    assert instruction_counts.main() == status


def test_every_place_is_in_the_source() -> None:
    lines = [line for file in ROOT.glob("csrc/**/*.cuh") for line in lines_of(str(file))]
    for count in COUNTS:
        for _, *parts in count.places:
            for part in parts:
                assert any(part in line for line in lines), f"{count.name}: {part}"


def test_the_document_has_the_bounds() -> None:
    document = (ROOT / "docs/cost_model.md").read_text()
    for count in COUNTS:
        assert re.search(rf"^\| {count.name} \| \d+ \| {count.bound} \|", document, re.M), (
            count.name
        )
