"""The audit of machine code: what it reads, and that code which is weaker than its source turns it red."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import system_tools

system_tools.package("z3")

import machine_code  # noqa: E402
from disassembly import find_tool  # noqa: E402
from memory_order.audit import Audit, Findings  # noqa: E402
from memory_order.sass import read  # noqa: E402
from memory_order.sources import (  # noqa: E402
    DEVICE,
    ROOT,
    ROW_COPY,
    Source,
    functions,
    working_tree,
)

SOURCE = working_tree()


def has_tools() -> bool:
    try:
        return bool(shutil.which("nvcc") and find_tool("nvdisasm"))
    except FileNotFoundError:
        return False


def place(name: str) -> tuple[str, int]:
    site = SOURCE.site(name)
    return site.path, site.line


def wrapper(name: str, path: str = DEVICE) -> tuple[str, int]:
    """The first line of a function of the device interface."""
    head = next(line for line, found in functions((ROOT / path).read_text()) if found == name)
    return path, head


def disassembly(*code: tuple[str, list[tuple[str, int]]]) -> str:
    """What nvdisasm prints for instructions with their frames, the innermost first."""
    lines = [".text.kernel:"]
    for number, (text, frames) in enumerate(code):
        for inner, outer in zip(frames, [*frames[1:], None]):
            end = f' inlined at "/tree/{outer[0]}", line {outer[1]}' if outer else ""
            lines.append(f'\t//## File "/tree/{inner[0]}", line {inner[1]}{end}')
        lines.append(f"        /*{number * 16:04x}*/                   {text} ;")
    return "\n".join(lines)


POLL = [wrapper("load_acquire"), place("Transport.poll.load_acquire"), place("find_header.poll")]
FENCE = [place("Transport.fence.atomic_thread_fence"), place("send_headers.fence")]
SIGNAL = [
    wrapper("store_relaxed"),
    place("Transport.signal.store_relaxed"),
    place("send_headers.signal"),
]
RECORD = [wrapper("store_release"), place("leave_record.store_release")]
DONE = [wrapper("add_acq_rel"), place("close_operation.add_acq_rel")]
BARRIER = [wrapper("block_sync"), place("close_operation.block_sync#1")]
COPY = [wrapper("copy")]
MADE = [wrapper("RowCopy.RowCopy", ROW_COPY), place("deliver_row.take")]
TAKE = [wrapper("RowCopy.take", ROW_COPY), place("deliver_row.take")]
WAIT = [wrapper("RowCopy.await_row", ROW_COPY), wrapper("RowCopy.give", ROW_COPY)]
GIVE = [wrapper("RowCopy.give", ROW_COPY)]
FINISH = [wrapper("RowCopy.finish", ROW_COPY), place("run_tasks.finish")]

# As ptxas writes them for sm_90a.
GOOD = [
    ("LD.E.64.STRONG.SYS R8, desc[UR12][R8.64]", POLL),
    ("CCTL.IVALL", POLL),
    ("MEMBAR.ALL.SYS", FENCE),
    ("ERRBAR", FENCE),
    ("CCTL.IVALL", FENCE),
    ("ST.E.64.STRONG.SYS desc[UR12][R4.64], R6", SIGNAL),
    ("MEMBAR.ALL.SYS", RECORD),
    ("@!P0 ST.E.STRONG.SYS desc[UR12][R14.64], R5", RECORD),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", BARRIER),
    ("MEMBAR.ALL.GPU", DONE),
    ("ATOM.E.ADD.STRONG.GPU PT, R4, desc[UR12][R4.64], R5", DONE),
    ("CCTL.IVALL", DONE),
    ("LD.E.128 R4, desc[UR12][R2.64]", COPY),
    ("ST.E.128 desc[UR12][R2.64], R4", COPY),
    ("FENCE.VIEW.ASYNC.G", TAKE),
    ("DEPBAR.LE SB0, 0x0", TAKE),
    ("UBLKCP.S.G [UR26], [UR10], UR6", TAKE),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R11+URZ], R129", WAIT),
    ("UBLKCP.G.S [UR10], [UR7], UR6", GIVE),
    ("UTMACMDFLUSH", GIVE),
    ("DEPBAR.LE SB0, 0x0", FINISH),
    ("CCTL.IVALL", FINISH),
    ("SYNCS.EXCH.64 URZ, [UR7], UR4", MADE),
    ("MEMBAR.ALL.CTA", MADE),
    ("FENCE.VIEW.ASYNC.S", MADE),
]


def audit(code: list[tuple[str, list[tuple[str, int]]]]) -> Findings:
    return Audit(SOURCE).run(read(disassembly(*code).splitlines()))


def test_code_that_does_what_its_lines_say_has_no_fault() -> None:
    findings = audit(GOOD)
    assert findings.faults == []
    assert findings.functions == {"kernel"}
    rules = (
        "atomics",
        "acquires",
        "releases",
        "fences",
        "signals",
        "barriers",
        "16 bytes",
        "bulk copies",
    )
    assert all(findings.facts[rule] > 0 for rule in rules), findings.facts


@pytest.mark.parametrize(
    ("index", "instead", "rule"),
    [
        (0, "LD.E.64 R8, desc[UR12][R8.64]", "atomics"),
        (0, "LD.E.64.STRONG.GPU R8, desc[UR12][R8.64]", "atomics"),
        (1, "BRA `(.L_x_1)", "acquires"),
        (2, "MEMBAR.ALL.GPU", "fences"),
        (2, "NOP", "signals"),
        (5, "ST.E.64 desc[UR12][R4.64], R6", "atomics"),
        (5, "ST.E.64.STRONG.GPU desc[UR12][R4.64], R6", "atomics"),
        (6, "NOP", "releases"),
        (6, "MEMBAR.ALL.GPU", "releases"),
        (8, "BAR.ARV 0x0", "barriers"),
        (9, "MEMBAR.ALL.CTA", "releases"),
        (10, "ATOM.E.ADD.STRONG.SM PT, R4, desc[UR12][R4.64], R5", "atomics"),
        (11, "NOP", "acquires"),
        (12, "LD.E R4, desc[UR12][R2.64]", "16 bytes"),
        (12, "LDG.E.128.CONSTANT R4, desc[UR12][R2.64]", "coherent loads"),
        (13, "ST.E.64 desc[UR12][R2.64], R4", "16 bytes"),
        (13, "ST.E.128.STRONG.SYS desc[UR12][R2.64], R4", "known lines"),
        (14, "NOP", "bulk copies"),
        (14, "FENCE.VIEW.ASYNC.S", "bulk copies"),
        (17, "NOP", "bulk copies"),
        (18, "UBLKCP.S.S [UR10], [UR7], UR6", "bulk copies"),
        (19, "NOP", "bulk copies"),
        (21, "NOP", "bulk copies"),
        (24, "NOP", "bulk copies"),
    ],
)
def test_weaker_code_is_found(index: int, instead: str, rule: str) -> None:
    code = list(GOOD)
    code[index] = (instead, GOOD[index][1])
    assert {fault.split(":")[0] for fault in audit(code).faults} == {rule}


def test_a_store_between_fence_and_signal_is_found() -> None:
    code = [*GOOD[:5], ("ST.E.64 desc[UR12][R2.64], R4", [place("send_headers.block_sync")])]
    faults = audit([*code, *GOOD[5:]]).faults
    assert [fault.split(":")[0] for fault in faults] == ["signals"]


def test_code_of_nvshmem_is_not_judged() -> None:
    frames = [("csrc/transport/cuda/queue_pairs.cuh", 30), place("send_headers.signal")]
    assert audit([("LDG.E.64.CONSTANT R4, desc[UR12][R2.64]", frames)]).faults == []


def test_a_line_that_is_in_no_kernel_is_found() -> None:
    check = Audit(SOURCE)
    check.run(read(disassembly(*GOOD).splitlines()))
    check.complete()
    missing = [fault for fault in check.findings.faults if fault.startswith("compiled")]
    assert any("hand_over.store_release is in no kernel" in fault for fault in missing)
    assert not any("Transport.poll.load_acquire" in fault for fault in missing)


@pytest.mark.parametrize(
    ("original", "replacement", "call"),
    [
        ("load_acquire<Scope::kSystem>(word)", "load_relaxed<Scope::kSystem>(word)", "poll"),
        ("load_acquire<Scope::kSystem>(word)", "load_acquire<Scope::kDevice>(word)", "poll"),
        ("load_acquire<Scope::kSystem>(word)", "*word", "poll"),
    ],
)
def test_a_transport_that_promises_less_is_found(
    original: str, replacement: str, call: str
) -> None:
    path = "csrc/transport/cuda/transport.cuh"
    check = Audit(Source({path: (ROOT / path).read_text().replace(original, replacement)}))
    check.contract()
    assert len(check.findings.faults) == 1
    assert call in check.findings.faults[0]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not has_tools(), reason="needs nvcc and nvdisasm")
@pytest.mark.parametrize(
    ("path", "original", "replacement", "rule"),
    [
        (
            "csrc/transport/cuda/transport.cuh",
            "load_acquire<Scope::kSystem>(word)",
            "load_acquire<Scope::kDevice>(word)",
            "atomics",
        ),
        (
            "csrc/transport/cuda/transport.cuh",
            "cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system)",
            "cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device)",
            "fences",
        ),
        (
            "csrc/kernels/protocol/clocks.cuh",
            "= message->delay_ns;",
            "= __ldg(&message->delay_ns);",
            "coherent loads",
        ),
        ("", "", "", ""),
    ],
    ids=["poll-of-the-device", "fence-of-the-device", "read-only-path", "as-it-is"],
)
def test_a_fault_in_a_kernel_shows_in_its_machine_code(
    tmp_path: Path, path: str, original: str, replacement: str, rule: str
) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    if path:
        text = (ROOT / path).read_text()
        assert original in text
        (tmp_path / path).write_text(text.replace(original, replacement))
    kernels = tmp_path / "kernels.cu"
    kernels.write_text(
        '#include "kernels/protocol/barrier.cuh"\n#include "kernels/protocol/clock_offset.cuh"\n'
    )
    cubin = tmp_path / "kernels.cubin"
    command = ["nvcc", "-std=c++20", "-O3", "-cubin", "-lineinfo", "-arch=sm_90a"]
    command += [f"-I{tmp_path / 'csrc'}", str(kernels), "-o", str(cubin)]
    subprocess.run(command, check=True, capture_output=True)
    faults = machine_code.audit(cubin, SOURCE, whole=False).faults
    assert {fault.split(":")[0] for fault in faults} == ({rule} if rule else set())


def test_the_command_says_what_to_do_without_a_module(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/machine_code.py"), "--help"]
    assert "make cuda" in subprocess.run(command, capture_output=True, text=True).stdout
