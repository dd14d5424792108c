"""Breaks the source in one place at a time and finds out which test notices.

The faults are listed in tests/mutants/*.txt, each with the tests that should notice it:

    [counts-overtake-rows] csrc/kernels/protocol/operation.cuh
    A count is there before its rows are.
    - args.transport.fence(dst, qp);
    + (what stands there instead; nothing: the line is left out)
    > plain protocol many_rounds_under_random_orders
    > pytest ops/test_interleavings.py -k 18
    = (only where no test can notice: why it makes no difference)

The line must occur exactly once in the file, white space aside. Where only a part of it is replaced,
that stands in «» and may be an expression; the rest says which place is meant. A list's lines that
begin with > before its first mutant are its own tests: they are built and run only for mutants that name
none, or that survive those they name.

All mutants are compiled at once into a copy of the tree (build/mutants/tree), as branches on a
number that a run takes from the environment. Those that overlap with others get a copy of their own.
Every mutant runs its tests until one is red, two mutants at a time; too long is red.

Usage: python tools/mutants.py [--list] [--quick] [part of a name ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
FOLDER = ROOT / "build" / "mutants"
VARIABLE = "EP_MUTANT"
# Long enough for healthy ranks on a busy machine; the rest of a hang is the test's own patience.
PATIENCE_S = "15"
LEAST_LIMIT_S = 50.0
# Enough for a few checks of everything in CI: in C++, without a sanitizer and without whole operations, whose kernels
# would be built as well.
QUICK_MARK = "quick"

HEADER = f"""\
#pragma once
#pragma GCC diagnostic ignored "-Wmisleading-indentation"
#include <cstdlib>
inline const int ep_chosen_mutant = [] {{
    const char* text = std::getenv("{VARIABLE}");
    return text == nullptr ? 0 : std::atoi(text);
}}();
inline bool ep_mutant(int number) {{ return ep_chosen_mutant == number; }}
"""


class ListError(Exception):
    """Something in the list is wrong, or no longer fits the source."""


@dataclass(frozen=True)
class Killer:
    """A test that may notice a mutant: the words after `>`."""

    runner: str  # "plain" and "thread": a program of tests/cpp; "pytest"
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join((self.runner, *self.arguments))


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    file: str
    why: str
    original: str
    mutated: str
    killers: tuple[Killer, ...]
    equivalent: str = ""
    quick: bool = False
    number: int = 0
    others: tuple[Killer, ...] = ()  # its list's

    def span(self, text: str) -> tuple[int, int]:
        """Where what it replaces stands in its file."""
        before, marked, rest = self.original.partition("«")
        part, _, after = rest.partition("»")
        if not marked:
            before, part = "", before
        joined = [pattern_of(piece) for piece in (before, part, after)]
        pattern = rf"{joined[0]}\s*({joined[1]})\s*{joined[2]}"
        if re.match(r"\w", before or part):
            pattern = r"(?<!\w)" + pattern
        found = [match.span(1) for match in re.finditer(pattern, text)]
        if len(found) != 1:
            raise ListError(
                f"{self.name}: what it replaces occurs {len(found)} times in {self.file}; it must "
                f"occur once. Repair its snippet in {LISTS.relative_to(ROOT)}:\n{self.original}"
            )
        return found[0]


def pattern_of(code: str) -> str:
    """A regular expression for code with any white space between its tokens."""
    pattern, before = "", ""
    for token in re.findall(r"\w+|[^\w\s]", code):
        words = re.match(r"\w", before) and re.match(r"\w", token)
        pattern += (r"\s+" if words else r"\s*" if before else "") + re.escape(token)
        before = token
    return pattern


@dataclass
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    killer: Killer | None
    evidence: str = ""
    seconds: float = 0.0


# ---- the list


def read_list(path: Path) -> Iterator[Mutant]:
    """The mutants of one file of the list."""
    defaults: list[Killer] = []
    entry: dict[str, Any] = {}

    def finished() -> Iterator[Mutant]:
        if not entry:
            return
        name, file = entry["name"], entry["file"]
        if not entry["-"] or not entry["why"]:
            raise ListError(f"{path.name}: {name} says not what is replaced, or not why")
        yield Mutant(
            name,
            file,
            " ".join(entry["why"]),
            "\n".join(entry["-"]),
            textwrap.dedent("\n".join(entry["+"])).strip("\n"),
            tuple(entry[">"]),
            " ".join(entry["="]),
            entry["quick"],
            others=tuple(defaults),
        )

    for line in path.read_text().splitlines():
        head = re.match(r"\[([\w-]+)\] (\S+)( quick)?$", line)
        if head:
            yield from finished()
            entry = {"name": head[1], "file": head[2], "quick": bool(head[3])}
            entry.update({key: [] for key in ("why", "-", "+", ">", "=")})
        elif line.startswith("> "):
            runner, *arguments = shlex.split(line[2:])
            (entry[">"] if entry else defaults).append(Killer(runner, tuple(arguments)))
        elif entry and line[:1] in ("-", "+", "="):
            entry[line[0]].append(line[2:])
        elif entry and line.strip() and not line.startswith("#"):
            entry["why"].append(line.strip())
    yield from finished()


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """The whole list, numbered from 1."""
    found = [mutant for path in sorted(LISTS.glob("*.txt")) for mutant in read_list(path)]
    names = [mutant.name for mutant in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ListError(f"names that occur twice: {', '.join(sorted(twice))}")
    return tuple(replace(mutant, number=i) for i, mutant in enumerate(found, 1))


def misfits() -> list[str]:
    """What in the list no longer fits the source."""
    found = []
    for mutant in all_mutants():
        try:
            mutated_source(mutant.file, (ROOT / mutant.file).read_text(), [mutant])
        except SyntaxError as error:
            found.append(f"{mutant.name}: with it {mutant.file} is no Python: {error}")
        except (ListError, FileNotFoundError) as error:
            found.append(str(error))
    return found


# ---- sources with all mutants in them


@dataclass
class Place:
    """A part of a file that one or several mutants replace."""

    begin: int
    end: int
    mutants: list[Mutant] = field(default_factory=list)


def places(text: str, mutants: Iterable[Mutant]) -> list[Place]:
    """Where the mutants of a file stand, in the order of the file."""
    found: dict[tuple[int, int], Place] = {}
    for mutant in mutants:
        span = mutant.span(text)
        found.setdefault(span, Place(*span)).mutants.append(mutant)
    return sorted(found.values(), key=lambda place: place.begin)


def layers(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants that can share a copy of the tree: no two of them overlap without being the same place."""
    result: list[list[Mutant]] = []
    taken: list[dict[str, list[tuple[int, int]]]] = []
    for mutant in mutants:
        begin, end = mutant.span((ROOT / mutant.file).read_text())
        for layer, spans in zip(result, taken):
            others = spans.setdefault(mutant.file, [])
            if all(
                (begin, end) == other or end <= other[0] or begin >= other[1] for other in others
            ):
                layer.append(mutant)
                others.append((begin, end))
                break
        else:
            result.append([mutant])
            taken.append({mutant.file: [(begin, end)]})
    return result


def cpp_branch(original: str, mutants: list[Mutant]) -> str:
    """C++ that is one of the mutants, or the original."""
    if original.rstrip().endswith((";", "}")):
        branches = [f"if (ep_mutant({m.number})) {{\n{m.mutated}\n}} else " for m in mutants]
        return "{" + "".join(branches) + f"{{\n{original}\n}}}}"
    branches = [f"ep_mutant({m.number}) ? ({m.mutated}) : " for m in mutants]
    return "(" + "".join(branches) + f"({original}))"


def is_python(text: str) -> bool:
    """Whether it can be parsed."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def python_branch(text: str, place: Place) -> str:
    """The whole file with a branch at `place`."""
    original = text[place.begin : place.end]

    def chosen(mutant: Mutant) -> str:
        return f'__import__("os").environ.get("{VARIABLE}") == "{mutant.number}"'

    line_begin = text.rfind("\n", 0, place.begin) + 1
    indent = text[line_begin : place.begin]
    if not indent.strip():
        branch = ""
        for mutant in place.mutants:
            mutated = textwrap.indent(mutant.mutated or "pass", indent + "    ")
            branch += f"{indent}{'el' if branch else ''}if {chosen(mutant)}:\n{mutated}\n"
        branch += f"{indent}else:\n{textwrap.indent(indent + original, '    ')}"
        result = text[:line_begin] + branch + text[place.end :]
        if is_python(result):  # Otherwise it is an expression that begins a line.
            return result
    branch = f"({original})"
    for mutant in place.mutants:
        branch = f"(({mutant.mutated}) if {chosen(mutant)} else {branch})"
    return text[: place.begin] + branch + text[place.end :]


def mutated_source(file: str, text: str, mutants: list[Mutant]) -> str:
    """A source with all its mutants as branches."""
    for place in reversed(places(text, mutants)):
        if file.endswith(".py"):
            text = python_branch(text, place)
        else:
            branch = cpp_branch(text[place.begin : place.end], place.mutants)
            text = text[: place.begin] + branch + text[place.end :]
    if file.endswith(".py"):
        ast.parse(text)
        return text
    return '#include "device/mutant.h"\n' + text


# ---- trees


def write(path: Path, content: bytes) -> None:
    """Only if it is new, so that builds compile what has changed."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_tree(tree: Path, mutants: list[Mutant]) -> None:
    """A copy of the working tree with these mutants in it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    for name in sorted(files):
        mine = [mutant for mutant in mutants if mutant.file == name]
        content = (ROOT / name).read_bytes()
        if mine:
            content = mutated_source(name, content.decode(), mine).encode()
        write(tree / name, content)
        shutil.copymode(ROOT / name, tree / name)
    write(tree / "csrc" / "device" / "mutant.h", HEADER.encode())
    for folder in ("csrc", "deep_ep", "tests"):
        for path in (tree / folder).rglob("*"):
            name = str(path.relative_to(tree))
            is_source = path.suffix in (".py", ".cpp", ".h", ".cuh", ".txt")
            if is_source and name not in files and path.name != "mutant.h":
                path.unlink()  # It has gone from the tree, or was renamed.


def load_sanitize(tree: Path) -> Any:
    """tools/sanitize.py of a tree, which builds and runs the C++ programs of that tree."""
    name = f"sanitize_of_{tree.name}"
    spec = importlib.util.spec_from_file_location(name, tree / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


def program_of(tool: Any, killer: Killer) -> Any:
    """The C++ program that a killer runs."""
    source = tool.TESTS / f"test_{killer.arguments[0]}.cpp"
    return tool.Program(source, killer.runner, "", must_fail=False)


def build(tree: Path, killers: Iterable[Killer]) -> Any:
    """Builds what the killers need; the tree's tools/sanitize.py."""
    tool = load_sanitize(tree)
    used = set(killers)
    programs = {program_of(tool, killer) for killer in used if killer.runner != "pytest"}
    if programs:
        tool.build(sorted(programs, key=lambda program: program.path))
    if any(killer.runner == "pytest" for killer in used):
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tree,
            env={**os.environ, "DEEP_EP_CUDA": "0"},
            check=True,
        )
    return tool


# ---- runs


def command_of(tree: Path, tool: Any, killer: Killer) -> list[str]:
    if killer.runner == "pytest":
        file, *rest = killer.arguments
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", *options, f"tests/{file}", *rest]
    path = tree / "build" / "sanitize" / str(program_of(tool, killer).path)
    prefix = ["setarch", "-R"] if killer.runner == "thread" and shutil.which("setarch") else []
    return [*prefix, str(path), "--stop", *killer.arguments[1:]]


def run(tree: Path, tool: Any, killer: Killer, number: int, limit_s: float) -> tuple[bool, str]:
    """Whether a killer is green on a mutant (0: on none), and what it wrote that tells why not."""
    environment = {
        **os.environ,
        **tool.OPTIONS,
        VARIABLE: str(number),
        "DEEP_EP_TIMEOUT_S": PATIENCE_S,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # A session of its own, so that its children end with it.
    with subprocess.Popen(
        command_of(tree, tool, killer),
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return False, f"no end within {limit_s:.0f} s"
    if process.returncode == 0:
        return True, ""
    return False, evidence(output) or f"status {process.returncode}"


def evidence(output: str) -> str:
    """The line of an output that tells most."""
    lines = output.splitlines()
    for pattern in (r"ThreadSanitizer: .*", r"^test_\w+\.cpp:\d+: .*", r"^E  +\S.*", r"^FAILED.*"):
        for line in lines:
            match = re.search(pattern, line)
            if match:
                return re.sub(r" \(pid=\d+\)|^E +", "", match.group())[:140]
    return lines[-1][:140] if lines else ""


def limit_of(tree: Path, tool: Any, killer: Killer) -> float:
    """How many seconds a killer may take: some times what it takes without a fault, when it must be green."""
    start = time.monotonic()
    green, text = run(tree, tool, killer, 0, 600.0)
    if not green:
        raise ListError(f"without any fault, `{killer}` is red: {text}")
    return max(LEAST_LIMIT_S, 4 * (time.monotonic() - start))


def judge(
    tree: Path,
    tool: Any,
    mutant: Mutant,
    killers: Iterable[Killer],
    limit_s: Callable[[Killer], float],
) -> Outcome:
    """Runs killers on a mutant until one is red."""
    start = time.monotonic()
    for killer in killers:
        green, text = run(tree, tool, killer, mutant.number, limit_s(killer))
        if not green and not text.startswith(("ThreadSanitizer", "no end")):
            # Twice, lest a busy machine be taken for a test that notices.
            green, text = run(tree, tool, killer, mutant.number, limit_s(killer))
        if not green:
            return Outcome(mutant, killer, text, time.monotonic() - start)
    return Outcome(mutant, None, seconds=time.monotonic() - start)


def judge_all(tree: Path, tests: dict[Mutant, tuple[Killer, ...]]) -> Iterator[Outcome]:
    """Builds what these tests need in a copy of the tree, and judges each mutant by its own."""
    tool = build(tree, (killer for killers in tests.values() for killer in killers))
    limit_s = cache(partial(limit_of, tree, tool))
    with ThreadPoolExecutor(2) as pool:
        judged = [
            pool.submit(judge, tree, tool, mutant, killers, limit_s)
            for mutant, killers in tests.items()
        ]
        for outcome in as_completed(judged):
            yield outcome.result()


def judge_layer(tree: Path, mutants: list[Mutant]) -> Iterator[Outcome]:
    """Judges the mutants of a tree by the tests they name, and who survives by those of the lists."""
    left = []
    for outcome in judge_all(tree, {mutant: mutant.killers for mutant in mutants}):
        if outcome.killer is None:
            left.append(outcome.mutant)
        else:
            yield outcome
    if left:
        yield from judge_all(tree, {mutant: mutant.others for mutant in left})


def report(outcome: Outcome) -> str:
    """One line of the table."""
    mutant = outcome.mutant
    if outcome.killer is not None:
        verdict = f"killed by `{outcome.killer}`: {outcome.evidence}"
    elif mutant.equivalent:
        verdict = f"equivalent: {mutant.equivalent}"
    else:
        verdict = "**survived**"
    return f"| {mutant.name} | {mutant.file} | {mutant.why} | {verdict} |"


def check(words: list[str], *, quick: bool = False) -> tuple[list[Outcome], list[str]]:
    """Judge the mutants that are selected; their outcomes, and what is wrong with them."""
    everything = all_mutants()
    outcomes = []
    for i, layer in enumerate(layers(everything)):
        selected = [
            mutant
            for mutant in layer
            if (mutant.quick or not quick) and (not words or any(w in mutant.name for w in words))
        ]
        if not selected:
            continue
        tree = FOLDER / f"tree{i or ''}"
        make_tree(tree, layer)
        for outcome in judge_layer(tree, selected):
            print(f"{outcome.seconds:6.1f} s  {report(outcome)}", flush=True)
            outcomes.append(outcome)
    wrong = [
        f"{o.mutant.name} survived" for o in outcomes if not o.killer and not o.mutant.equivalent
    ]
    wrong += [
        f"{o.mutant.name} is listed as equivalent, and {o.killer} was red"
        for o in outcomes
        if o.killer and o.mutant.equivalent
    ]
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument(
        "--quick", action="store_true", help="those that CI runs, which need one build"
    )
    parser.add_argument("words", nargs="*", help="parts of names")
    arguments = parser.parse_args()
    if arguments.list:
        for mutant in all_mutants():
            print(f"{mutant.number:3}  {mutant.name}  {mutant.file}")
    if unfit := misfits():
        print("\n".join(unfit))
        return 1
    if arguments.list:
        return 0
    outcomes, wrong = check(arguments.words, quick=arguments.quick)
    outcomes.sort(key=lambda outcome: outcome.mutant.number)
    head = "| mutant | file | fault | |\n|---|---|---|---|\n"
    table = head + "\n".join(report(outcome) for outcome in outcomes) + "\n"
    (FOLDER / "table.md").write_text(table)
    faults = [outcome for outcome in outcomes if not outcome.mutant.equivalent]
    killed = sum(outcome.killer is not None for outcome in faults)
    print(f"{killed} of {len(faults)} killed, {len(outcomes) - len(faults)} equivalent")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ListError as error:
        sys.exit(str(error))
