"""Facts about the machine code of the kernels: every source line that orders memory became what it says.

The lines are those of the litmus tests (sources.py). NVSHMEM's own code is not ours to judge: instructions
that were inlined through queue_pairs.cuh, and functions that come from its library.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile

from .expectations import OTHER_LINE, WIDE_LOADS, WIDE_STORES
from .litmus import inner, order_of
from .ptx import SCOPES, Order
from .sass import BULK, LOADS, SHARED, STORES, UPDATES, Instruction
from .sources import (
    ATOMICS,
    DEVICE,
    FENCE,
    ROOT,
    ROW_COPIES,
    ROW_COPY,
    Source,
    functions,
    without_comments,
)

QUEUE_PAIRS = "csrc/transport/cuda/queue_pairs.cuh"
# What the transport promises, whatever its source says: (acquires, releases, scope).
CONTRACT = {
    "poll": Order(acquires=True, scope="sys"),
    "signal": Order(scope="sys"),
    "put_word": Order(scope="sys"),
    "fence": Order(acquires=True, releases=True, scope="sys"),
    "quiet": Order(acquires=True, releases=True, scope="sys"),
}
# A warp's barrier is an instruction only where its lanes may have parted, so it is not among these.
BARRIER_OPCODES = {"block_sync": "BAR.SYNC", "block_any": "BAR.RED.OR"}


@dataclass
class Findings:
    """How many facts were checked, by rule, and which do not hold."""

    facts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    instructions: int = 0
    functions: set[str] = field(default_factory=set)

    def check(self, rule: str, holds: bool, otherwise: str) -> None:
        self.facts[rule] += 1
        if not holds:
            self.faults.append(f"{rule}: {otherwise}")


Frames = tuple[tuple[str, int], ...]


class Places:
    """From an instruction's frames to the site that it was compiled from."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.by_line = {
            (site.path, site.line, site.primitive): site for site in source.sites.values()
        }
        self.texts: dict[str, str] = {}
        self.function = cache(self.find_function)
        self.site_at = cache(self.find_site)
        self.order_of = cache(lambda name: order_of(source, name))

    def text(self, path: str) -> str:
        """A source file without comments."""
        if path not in self.texts:
            changed = self.source.changed.get(path)
            file = ROOT / path
            text = changed or (file.read_text() if file.exists() else "")
            self.texts[path] = without_comments(text)
        return self.texts[path]

    def find_function(self, path: str, line: int) -> str:
        """Name of the device function at a line."""
        heads = functions(self.text(path))
        return next((name for first, name in reversed(heads) if first <= line), "")

    def find_site(self, frames: Frames) -> str:
        """Name of the site, or nothing, from frames of ours.

        Equal instructions of several lines become one, with a frame of another line or without one. Then
        the calls that lead to it say which function has the atomic.
        """
        path, line = frames[0]
        primitive = FENCE
        callers = frames
        if path in (DEVICE, ROW_COPY) and len(frames) > 1:
            primitive = self.function(path, line).rpartition(".")[2]
            callers = frames[1:]
        site = self.by_line.get((*callers[0], primitive))
        if site is not None or primitive == FENCE:
            return site.name if site else ""
        for path, line in callers:
            text = "".join(self.text(path).splitlines()[line - 1 : line])
            called = [
                site.name
                for site in self.source.sites.values()
                if site.primitive == primitive
                and site.name.rpartition(".")[0].rpartition(".")[2] + "(" in text
            ]
            if len(called) == 1:
                return called[0]
        return ""

    def own_frames(self, instruction: Instruction) -> Frames:
        return tuple(frame for frame in instruction.frames if frame[0].startswith("csrc/"))

    def innermost(self, instruction: Instruction) -> str:
        """Name of the innermost function of ours."""
        frames = self.own_frames(instruction)
        return self.function(*frames[0]) if frames else ""

    def is_nvshmem(self, instruction: Instruction) -> bool:
        return any(path == QUEUE_PAIRS or "nvshmem" in path for path, _ in instruction.frames)

    def site(self, instruction: Instruction) -> str:
        """Name of the site, or nothing."""
        frames = self.own_frames(instruction)
        name = self.site_at(frames) if frames else ""
        if name or not frames or not (instruction.is_strong or instruction.name == "BAR"):
            return name
        # nvcc drops the primitive's frame where its line and the caller's have the same number.
        here = [
            site.name for site in self.source.sites.values() if (site.path, site.line) == frames[0]
        ]
        return here[0] if len(here) == 1 else ""


def includes(scope: str, wanted: str) -> bool:
    return bool(scope) and SCOPES.index(scope) >= SCOPES.index(wanted)


class Audit:
    """Checks the code of one module."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.places = Places(source)
        self.findings = Findings()
        self.compiled: set[str] = set()

    def contract(self) -> None:
        """The transport's source against what its callers rely on."""
        for call, wanted in CONTRACT.items():
            try:
                order = order_of(self.source, inner(self.source, call))
            except (KeyError, ValueError) as error:
                self.findings.check("transport", False, str(error))
                continue
            holds = (
                order.acquires >= wanted.acquires
                and order.releases >= wanted.releases
                and includes(order.scope, wanted.scope)
            )
            self.findings.check("transport", holds, f"Transport::{call} is {order}, not {wanted}")

    def run(self, instructions: Iterable[Instruction]) -> Findings:
        """The rules for all functions of ours in some code."""
        by_function: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in instructions:
            by_function[instruction.function].append(instruction)
        for function, code in by_function.items():
            if not any(self.places.own_frames(instruction) for instruction in code):
                continue  # NVSHMEM's, or the compiler's
            self.findings.functions.add(function)
            self.findings.instructions += len(code)
            self.compiled |= self.judge(code)
        return self.findings

    def complete(self) -> None:
        """After all code of a module: every source line is in it, and the transport is what it promises."""
        self.contract()
        for name, site in self.source.sites.items():
            ours = "queue_pairs" not in name and not name.startswith("QueuePairs")
            if ours and site.primitive in (*ATOMICS, FENCE, *BARRIER_OPCODES, *ROW_COPIES):
                # Neighbours of one kind may get one line.
                near = {
                    other.name
                    for other in self.source.sites.values()
                    if other.path == site.path
                    and other.primitive == site.primitive
                    and abs(other.line - site.line) <= 1
                }
                holds = bool(near & self.compiled) or name in OTHER_LINE
                self.findings.check(
                    "compiled", holds, f"{name} is in no kernel; is -lineinfo there?"
                )

    def judge(self, code: list[Instruction]) -> set[str]:
        """The rules for one function; returns the sites that are in it."""
        sites = [self.places.site(instruction) for instruction in code]
        for index, instruction in enumerate(code):
            if self.places.is_nvshmem(instruction):
                continue
            where = f"{instruction.function} at {instruction.address:#x}: {instruction.opcode}"
            self.paths(instruction, where)
            self.widths(instruction, where)
            self.bulk_copies(code, index, where)
            name = sites[index]
            if instruction.is_strong or instruction.name in ("MEMBAR", *UPDATES):
                # Its proxy fence for the mbarrier is compiled with a MEMBAR.
                is_known = bool(name) or self.places.innermost(instruction) == "RowCopy.RowCopy"
                self.findings.check("known lines", is_known, f"{where} is at no known line")
            if not name:
                continue
            site = self.source.sites[name]
            if site.primitive in BARRIER_OPCODES:
                if instruction.name == "BAR":
                    wanted = BARRIER_OPCODES[site.primitive]
                    holds = instruction.opcode.startswith(wanted)
                    self.findings.check("barriers", holds, f"{where}, {name} is a {wanted}")
            elif instruction.touches_global:
                self.access(code, sites, index, where)
            elif instruction.name == "MEMBAR" and site.primitive == FENCE:
                self.fence(code, sites, index, where)
        self.releases(code, sites)
        return self.present(code, sites)

    def releases(self, code: list[Instruction], sites: list[str]) -> None:
        """Wherever a release was inlined to, a fence stands right before its store."""
        by_call: dict[tuple[str, Frames], list[int]] = defaultdict(list)
        for index, name in enumerate(sites):
            if name and code[index].touches_global and self.places.order_of(name).releases:
                by_call[name, self.places.own_frames(code[index])[1:]].append(index)
        for (name, frames), indices in by_call.items():
            scope = self.places.order_of(name).scope
            fences = [self.fence_before(code, sites, index, name) for index in indices]
            holds = any(fence is not None and includes(fence.scope, scope) for fence in fences)
            path, line = frames[-1] if frames else ("", 0)
            where = f"{code[indices[0]].function} by {path}:{line}"
            self.findings.check("releases", holds, f"{where}: {name} has no fence before its store")

    def present(self, code: list[Instruction], sites: list[str]) -> set[str]:
        """Sites with an instruction that does what they say."""
        return {
            name
            for instruction, name in zip(code, sites)
            if name
            and (instruction.is_strong or instruction.name in ("MEMBAR", "BAR", *SHARED, *BULK))
        }

    def paths(self, instruction: Instruction, where: str) -> None:
        """Peers write, so no load may go through a path that is not coherent."""
        if instruction.name in LOADS:
            coherent = not {"CONSTANT", "NC"} & set(instruction.modifiers)
            self.findings.check("coherent loads", coherent, f"{where} is a non-coherent load")
        elif instruction.name in ("TEX", "TLD", "TLD4", "SULD"):
            self.findings.check("coherent loads", False, f"{where} reads through a texture")

    def widths(self, instruction: Instruction, where: str) -> None:
        """Copies and payload move 16 bytes at a time."""
        function = self.places.innermost(instruction)
        wide = WIDE_LOADS if instruction.name in LOADS else WIDE_STORES
        if instruction.name in (*LOADS, *STORES) and function in wide:
            holds = "128" in instruction.modifiers
            self.findings.check(
                "16 bytes", holds, f"{where} in {function}() moves less than 16 bytes"
            )

    def bulk_copies(self, code: list[Instruction], index: int, where: str) -> None:
        """What orders the async proxy stands where RowCopy has it: see row_copy.cuh."""
        function = self.places.innermost(code[index])
        if code[index].opcode == "SYNCS.EXCH.64":
            behind = {one.opcode for one in self.since_bulk_copy(code[index + 1 :])}
            holds = function == "RowCopy.RowCopy" and "FENCE.VIEW.ASYNC.S" in behind
            self.findings.check("bulk copies", holds, f"{where}: no proxy fence of its mbarrier")
        elif code[index].opcode == "UBLKCP.S.G":
            has_fence = any(
                one.opcode == "FENCE.VIEW.ASYNC.G" and self.places.innermost(one) == "RowCopy.take"
                for one in self.since_bulk_copy(code[:index][::-1])
            )
            holds = function == "RowCopy.take" and has_fence
            self.findings.check("bulk copies", holds, f"{where} has no proxy fence before it")
        elif code[index].opcode == "UBLKCP.G.S":
            before = {
                one.opcode.partition(".TRANS")[0]
                for one in self.since_bulk_copy(code[:index][::-1])
            }
            behind = {one.name for one in self.since_bulk_copy(code[index + 1 :])}
            holds = function == "RowCopy.give" and "SYNCS.PHASECHK" in before
            self.findings.check("bulk copies", holds, f"{where} does not wait for the row")
            self.findings.check("bulk copies", "UTMACMDFLUSH" in behind, f"{where} is in no group")
        elif code[index].name == "UBLKCP":
            self.findings.check("bulk copies", False, f"{where} is none of RowCopy's")
        elif code[index].name == "DEPBAR" and function == "RowCopy.finish":
            after = self.next_of(code, index)
            holds = after is not None and after.opcode == "CCTL.IVALL"
            self.findings.check("bulk copies", holds, f"{where} waits for reads only")

    def since_bulk_copy(self, code: Iterable[Instruction]) -> Iterable[Instruction]:
        """Instructions up to the next bulk copy."""
        return takewhile(lambda one: one.name != "UBLKCP", code)

    def access(self, code: list[Instruction], sites: list[str], index: int, where: str) -> None:
        """An atomic access: strong, wide enough, ordered as its line says."""
        instruction, name = code[index], sites[index]
        order = self.places.order_of(name)
        updates = self.source.sites[name].primitive.split("_")[0] not in ("load", "store")
        if updates and instruction.name not in UPDATES:
            return  # for addresses of local memory, which nobody else has
        holds = instruction.is_strong and includes(instruction.scope, order.scope)
        self.findings.check("atomics", holds, f"{where}, {name} asks for the scope {order.scope}")
        if order.acquires:
            after = self.next_of(code, index)
            holds = after is not None and after.opcode == "CCTL.IVALL"
            self.findings.check("acquires", holds, f"{where}, {name}: what was cached stays")
        if name == inner(self.source, "signal"):
            self.signal(code, sites, index, where)

    def next_of(self, code: list[Instruction], index: int) -> Instruction | None:
        """The first instruction behind an access that touches memory or caches, or leaves the path."""
        for instruction in code[index + 1 :]:
            if instruction.touches_global or instruction.name in ("CCTL", "BRA", "EXIT", "CALL"):
                return instruction
        return None

    def fence_before(
        self, code: list[Instruction], sites: list[str], index: int, name: str
    ) -> Instruction | None:
        """The last fence of a site ahead of an access, if no other store stands between."""
        for instruction, site in zip(reversed(code[:index]), reversed(sites[:index])):
            if instruction.name == "MEMBAR" and site == name:
                return instruction
            writes = instruction.name in (*STORES, *UPDATES) and site != name
            if writes and not self.places.is_nvshmem(instruction):
                return None
        return None

    def fence(self, code: list[Instruction], sites: list[str], index: int, where: str) -> None:
        """A fence; ptxas may put a narrower one right before it."""
        order = self.places.order_of(sites[index])
        follows = code[index + 1] if index + 1 < len(code) else code[index]
        if follows.name == "MEMBAR" and sites[index + 1] == sites[index]:
            return
        holds = includes(code[index].scope, order.scope)
        self.findings.check("fences", holds, f"{where}, asked for the scope {order.scope}")

    def signal(self, code: list[Instruction], sites: list[str], index: int, where: str) -> None:
        """Where the source has a fence before a signal, the code has it too."""
        frames = self.places.own_frames(code[index])
        caller = self.places.function(*frames[2]) if len(frames) > 2 else ""
        fences = [
            (site.path, site.line)
            for site in self.source.sites.values()
            if site.name.startswith(f"{caller}.fence") and site.line < frames[2][1]
        ]
        if not fences:
            return
        fence = self.fence_before(code, sites, index, inner(self.source, "fence"))
        holds = fence is not None and self.places.own_frames(fence)[1] == fences[-1]
        self.findings.check("signals", holds, f"{where}: no fence of {caller}() before its signal")
