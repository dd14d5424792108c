"""Proves the CUDA target on a machine with a GPU, in one command: `make gpu`, or python3 tools/gpu.py.

Builds the modules for the torch of this interpreter, compares every mode with the reference, tries streams, graphs,
late ranks and failures, measures, and has compute-sanitizer look. Ranks are threads of one process with a stream
each, in the last part also processes. It needs torch with CUDA, nvcc and one GPU of compute capability 9.0 or newer; no network, no virtual
environment. Each step is a process with a limit of its own: what fails or hangs is named, and the rest goes on. Where
a machine is lent for ten minutes at a time, --part 1 to --part 5 run a fifth each, the most important first; the build
of the first serves the others. The folder OUT then holds three files: summary.txt with the tables, results.json, and
details.tar.gz with what every step printed and wrote. The exit status is 0 only if all steps passed.

Packages that this interpreter lacks can travel as a folder of wheels; without it, the runner says how to make one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What the steps import besides torch, by the name of the package.
PACKAGES = {
    "numpy": "numpy",
    "pybind11": "pybind11",
    "setuptools": "setuptools>=77",  # for the licence in pyproject.toml
    "ninja": "ninja",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "rich": "rich",
}
PASSED, SHOWN = "passed", "shown"
FAILED, OUT_OF_TIME, LEFT_OUT = "FAILED", "OUT OF TIME", "left out"
# What a step that was told to end may take to say where it hangs.
GRACE_S = 3.0
# With less time than this no step is begun.
LEAST_S = 10.0
PARTS = 5
PART_S = 570.0  # for the steps of a part
LINES_SHOWN = 25
# What the README may take over.
TABLE, NORMAL_TABLE, PUBLISHED_TABLE = "latency.md", "normal.md", "published.md"
# What benchmarks/time_model.py takes with --costs.
COSTS = "costs.json"

Judge = Callable[[str], "tuple[bool, str]"]


# --- what output means ----------------------------------------------------------------------------


def last_line(output: str) -> tuple[bool, str]:
    """Any output will do; its last line says how it went."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return True, lines[-1] if lines else "no output"


def tests_passed(output: str) -> tuple[bool, str]:
    """pytest's last line; tests that were all skipped have shown nothing."""
    counts = (
        r"\d+(?:/\d+)? (?:passed|failed|skipped|deselected|errors?|tests? collected)\b.* in [\d.]+s"
    )
    found = re.findall(counts, output)
    if not found:
        return False, "pytest said nothing of tests"
    good = re.search(r"\b[1-9]\d*(/\d+)? (passed|tests? collected)", found[-1])
    return good is not None, found[-1]


def nothing_found(output: str) -> tuple[bool, str]:
    """compute-sanitizer's summaries, one per process."""
    found = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    if not found:
        return False, "compute-sanitizer printed no summary"
    clean = all(re.search(r"SUMMARY: 0 ", line) for line in found)
    return clean, found[-1]


def read(path: Path) -> dict[str, Any]:
    """By its name, the JSON object in a file; of other files, that they are there.

    Raises:
        ValueError: what ought to be there is not; says what.
    """
    if not path.exists():
        raise ValueError(f"{path.name} was not written")
    if path.suffix != ".json":
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path.name} holds no JSON object")
    return {path.name: found}


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: one word.
        shows: what it shows if it passes.
        commands: run in turn until one fails; none: the step is only shown.
        limit_s: for all of them together, seconds.
        needs: steps that must have passed.
        programs: that must be on PATH.
        judge: what the output means.
        writes: files in the folder of results that it must write; those in JSON hold an object.
        environment: besides that of all steps.
        only_shown: a line for a step that is not run here.
        part: of the run, from 1.
    """

    name: str
    shows: str
    commands: Sequence[Sequence[str]]
    limit_s: float
    needs: Sequence[str] = ()
    programs: Sequence[str] = ()
    judge: Judge = last_line
    writes: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    only_shown: str = ""
    part: int = 1


@dataclass
class Result:
    """How a step went: PASSED, SHOWN, FAILED, OUT_OF_TIME or LEFT_OUT, why, and what it wrote."""

    name: str
    shows: str
    outcome: str
    detail: str
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    wrote: dict[str, Any] = field(default_factory=dict)  # by file, what is in JSON
    tail: list[str] = field(default_factory=list)  # of what it printed, if it did not pass


def print_now(line: str) -> None:
    """Also where the output is a file or a pipe, which shows how far the run has come."""
    print(line, flush=True)


def run_steps(
    steps: Sequence[Step],
    out: Path,
    budget_s: float,
    environment: Mapping[str, str],
    say: Callable[[str], None] = print_now,
) -> list[Result]:
    """Runs steps in order, within `budget_s` seconds in all, and writes what they gave into `out`.

    The summary is written after each step, so that it is there if this process is ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results: list[Result] = []
    for step in steps:
        left_s = budget_s - (time.monotonic() - began)
        say(f"\n=== {step.name}: {step.shows}")
        result = run_step(step, results, {s.name for s in steps}, left_s, out, environment)
        results.append(result)
        say(f"--- {step.name} {result.outcome} after {result.seconds:.0f} s: {result.detail}")
        for line in result.tail:
            say(f"    {line}")
        write_summary(results, out)
    return results


def run_step(
    step: Step,
    earlier: Sequence[Result],
    selected: set[str],
    left_s: float,
    out: Path,
    environment: Mapping[str, str],
) -> Result:
    """One step: left out, shown, or run and judged."""
    result = Result(
        step.name, step.shows, LEFT_OUT, "", 0.0, [shlex.join(c) for c in step.commands]
    )
    good = {one.name for one in earlier if one.outcome in (PASSED, SHOWN)}
    for name in step.writes:
        (out / name).unlink(missing_ok=True)  # of an earlier run
    # A step that was not selected is taken for done.
    lacking = [name for name in step.needs if name in selected and name not in good]
    path = {**os.environ, **environment}.get("PATH")
    absent = [name for name in step.programs if shutil.which(name, path=path) is None]
    if step.only_shown:
        result.outcome, result.detail = SHOWN, step.only_shown
    elif lacking:
        result.detail = f"{' and '.join(lacking)} did not pass"
    elif absent:
        result.detail = f"{' and '.join(absent)} not found on PATH"
    elif left_s < min(LEAST_S, step.limit_s):
        result.detail = f"the budget is used up: {max(0.0, left_s):.0f} s are left"
    else:
        began = time.monotonic()
        file = out / f"{step.name}.txt"
        run_judged(step, result, file, min(step.limit_s, left_s), {**os.environ, **environment})
        for name in step.writes:
            try:
                result.wrote |= read(out / name)
            except ValueError as error:
                if result.outcome == PASSED:
                    result.outcome, result.detail = FAILED, str(error)
        if result.outcome != PASSED:
            result.tail = text_of(file).splitlines()[-LINES_SHOWN:]
        result.seconds = time.monotonic() - began
    return result


def run_judged(
    step: Step, result: Result, file: Path, limit_s: float, environment: Mapping[str, str]
) -> None:
    """Runs the commands; their output goes to `file`, the outcome into `result`."""
    deadline = time.monotonic() + limit_s
    with file.open("wb") as output:
        for command in step.commands:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            try:
                status = run_command(
                    command, output.fileno(), deadline, {**environment, **step.environment}
                )
            except OSError as error:
                result.outcome, result.detail = FAILED, f"{command[0]} cannot be run: {error}"
                return
            if status is None:
                result.outcome, result.detail = OUT_OF_TIME, f"ended after {limit_s:.0f} s"
                return
            if status != 0:
                _, detail = step.judge(text_of(file))
                how = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
                result.outcome, result.detail = FAILED, f"{how}; {detail}"
                return
    good, result.detail = step.judge(text_of(file))
    result.outcome = PASSED if good else FAILED


def run_command(
    command: Sequence[str], output: int, deadline: float, environment: Mapping[str, str]
) -> int | None:
    """The exit status of a command, `None` if it was ended at the deadline. Nothing it started outlives it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # Python's faulthandler then says where it hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def text_of(file: Path) -> str:
    """What a step printed, whatever the bytes."""
    return file.read_bytes().decode("utf-8", "replace")


# --- the summary ----------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Printable text of one line, for a table in Markdown."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(plain.split())[:160].replace("|", "\\|")


def summary(results: Iterable[Result]) -> str:
    """A table in Markdown, then what may be said of the whole."""
    lines = ["| Step | Outcome | s | Shows | Said |", "|---|---|---:|---|---|"]
    counts: dict[str, int] = {}
    for one in results:
        counts[one.outcome] = counts.get(one.outcome, 0) + 1
        cells = (one.name, one.outcome, f"{one.seconds:.0f}", cell(one.shows), cell(one.detail))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), ""])


def write_summary(results: Sequence[Result], out: Path) -> None:
    (out / "summary.txt").write_text(summary(results))
    found = [asdict(one) for one in results]
    (out / "results.json").write_text(json.dumps({"steps": found}, indent=1))


def pack(details: Path, out: Path) -> None:
    """Leaves summary.txt, with the tables, results.json and details.tar.gz in `out`, and removes `details`."""
    tables = [details / name for name in (TABLE, NORMAL_TABLE, PUBLISHED_TABLE)]
    texts = [details / "summary.txt", *(table for table in tables if table.exists())]
    (out / "summary.txt").write_text("\n".join(text.read_text() for text in texts))
    shutil.copy(details / "results.json", out)
    with tarfile.open(out / "details.tar.gz", "w:gz") as archive:
        archive.add(details, details.name)
    shutil.rmtree(details)


# --- the steps of this project --------------------------------------------------------------------


def pytest_command(*words: str, dry: bool) -> list[str]:
    """A selection of tests; in a dry run it is made and not run."""
    flags = ["-q", "-p", "no:cacheprovider", *(["--collect-only"] if dry else [])]
    return [sys.executable, "-m", "pytest", *flags, *words]


def without(*words: str) -> list[str]:
    """pytest's flag for tests whose names have none of these."""
    return ["-k", " and ".join(f"not {word}" for word in words)]


def tests_step(
    name: str, shows: str, words: Sequence[str], limit_s: float, *, part: int, dry: bool
) -> Step:
    """A selection of tests, with what was built."""
    command = pytest_command(*words, dry=dry)
    return Step(name, shows, [command], limit_s, needs=("build",), judge=tests_passed, part=part)


def benchmark_step(
    name: str,
    shows: str,
    command: Sequence[str],
    writes: Mapping[str, str],
    limit_s: float,
    out: Path,
) -> Step:
    """A benchmark of what was built, which writes these files, by option."""
    files = [word for option, file in writes.items() for word in (option, str(out / file))]
    return Step(
        name,
        shows,
        [[sys.executable, *command, *files]],
        limit_s,
        part=3,
        needs=("build",),
        writes=tuple(writes.values()),
    )


def sanitizer_steps(exchange: str, normal: str) -> list[Step]:
    """compute-sanitizer on the smallest exchanges of two files of tests."""
    # Launches may come one after another there, and ranks that wait for each other would wait for ever: one
    # rank, which sends to itself.
    one_rank = [
        *(f"{exchange}::test_extreme_shapes_equal_the_reference[1-ranks-{mode}]" for mode in ("fp8", "bf16")),
        *(f"{normal}::test_each_node_shape_equals_the_reference[{mode}-1x1]" for mode in ("fp8", "bf16")),
    ]  # fmt: skip
    tests = pytest_command(*one_rank, dry=False)
    return [
        Step(
            tool,
            f"compute-sanitizer {tool} finds nothing in one rank's dispatch and combine, of both modes",
            [["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *tests]],
            90,
            part=4,
            needs=("build",),
            programs=("compute-sanitizer",),
            judge=nothing_found,
            environment={
                "CUDA_MODULE_LOADING": "LAZY",
                "DEEP_EP_TIMEOUT_S": "50",
                "DEEP_EP_VERIFY": "0",
            },
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ]


# Tests verify rows unless told otherwise, and rows are moved by bulk copies where they fit: by step, what else it runs
# in, and in which part of the run.
UNVERIFIED, LANES = {"DEEP_EP_VERIFY": "0"}, {"DEEP_EP_BULK_COPIES": "0"}
OTHER_SETTINGS: dict[str, dict[str, tuple[int, Mapping[str, str]]]] = {
    "gpu": {"unverified": (3, UNVERIFIED)},
    "modes": {"unverified": (2, UNVERIFIED)},
    "normal": {"unverified": (2, UNVERIFIED), "lanes": (3, {**UNVERIFIED, **LANES})},
}


def in_other_settings(step: Step, dry: bool) -> Iterable[Step]:
    """The same step with rows that do not prove themselves, or that lanes copy."""
    for name, (part, environment) in OTHER_SETTINGS.get(step.name, {}).items():
        settings = " ".join(f"{variable}={value}" for variable, value in environment.items())
        yield replace(
            step,
            name=f"{step.name}-{name}",
            shows=f"{step.shows}; {settings}",
            limit_s=120,
            part=part,
            environment=environment,
            only_shown=f"the tests of {step.name}, which are collected there" if dry else "",
        )


# Ends the daemon it begins, however its command ends.
WITH_MPS = """
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
nvidia-cuda-mps-control -f & daemon=$!
sleep 1
"$@"; status=$?
echo quit | nvidia-cuda-mps-control
kill $daemon
exit $status
"""


def nvshmem_is_here() -> bool:
    """Whether setup.py has a place to look at."""
    places = [ROOT / "third-party", *(Path(folder, "nvidia") for folder in sys.path)]
    return "NVSHMEM_DIR" in os.environ or any((place / "nvshmem").is_dir() for place in places)


def steps_of_processes(out: Path, dry: bool) -> list[Step]:
    """Ranks that are processes of the one GPU; and both modes for long."""
    tests = "tests/device/test_processes.py"
    no_nvshmem = "" if nvshmem_is_here() else "needs NVSHMEM: install_nvshmem.sh"
    steps = [
        Step(
            "processes",
            "2 and 4 processes equal the reference over CUDA IPC, kernels in turn; one that is killed is named",
            [pytest_command(tests, dry=dry)],
            100,
        ),
        Step(
            "mps",
            "the same with MPS, kernels at once",
            [["sh", "-c", WITH_MPS, "sh", *pytest_command(tests, dry=dry)]],
            80,
            programs=("nvidia-cuda-mps-control",),
            environment={
                "CUDA_MPS_PIPE_DIRECTORY": str(out / "mps"),
                "CUDA_MPS_LOG_DIRECTORY": str(out / "mps"),
            },
        ),
        Step(
            "soak",
            "thousands of rounds of both modes, mixed and verified; 50 buffers leave nothing",
            [pytest_command("tests/device/test_soak.py", dry=dry)],
            120,
        ),
        Step(
            "nvshmem",
            "the module with NVSHMEM: one and two processing elements equal the reference",
            [
                [sys.executable, "setup.py", "build_ext", "--inplace"],
                pytest_command("tests/device/test_nvshmem.py", dry=dry),
            ],
            260,
            only_shown="needs nvcc and NVSHMEM" if dry else no_nvshmem,
        ),
    ]
    return [replace(step, part=5, needs=("build",), judge=tests_passed) for step in steps]


def published_step(out: Path, published: Path | None) -> Step:
    """Our times beside published ones, once both modes are measured."""
    ours = [str(out / name) for name in ("latency.json", "normal.json")]
    folder = ["--published", str(published), "--ours", *ours]
    return Step(
        "published",
        "times of eight ranks beside published ones of eight GPUs",
        [
            [sys.executable, "benchmarks/against_published.py", *folder]
            + ["--markdown", str(out / PUBLISHED_TABLE)]
        ],
        15,
        part=3,
        needs=("latency", "bandwidth"),
        writes=(PUBLISHED_TABLE,),
        only_shown="" if published else "needs published times: --published FOLDER",
    )


def costs_step(out: Path, dry: bool) -> Step:
    """What the model of time takes for granted, as far as one GPU can tell; in a dry run it is compiled."""
    nvcc = compiler()
    flags = ["--dry-run", "--nvcc", nvcc or ""] if dry else ["--json", str(out / COSTS)]
    return Step(
        "costs",
        "costs of the model of time: shared memory, L2, fences, barriers, copies",
        [[sys.executable, "benchmarks/gpu_costs.py", *flags]],
        50,
        part=2,
        programs=("nvcc",),
        writes=() if dry else (COSTS,),
        only_shown="needs nvcc" if dry and nvcc is None else "",
    )


def all_steps(out: Path, dry: bool, published: Path | None = None) -> list[Step]:
    """What is done, in the order in which it is worth knowing; in a dry run on the cpu backend, in small."""
    python = sys.executable
    exchange, normal = "tests/test_low_latency.py", "tests/ops/test_normal.py"
    few = "--num-tokens 4 --hidden 256 --num-topk 2 --num-experts 8 --rounds 2"
    benchmark, normal_benchmark = ["benchmarks/low_latency_gpu.py"], ["benchmarks/normal_gpu.py"]
    if dry:
        benchmark += f"--num-ranks 1 2 --blocks 2 {few}".split()
        normal_benchmark += f"--num-ranks 2 4 --num-sms 4 {few}".split()
    steps = [
        Step(
            "driver",
            "a GPU, its driver and the toolkit",
            [
                ["nvcc", "--version"],
                ["nvidia-smi"],
                ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"],
            ],
            20,
            programs=("nvidia-smi", "nvcc"),
        ),
        Step(
            "packages",
            "this interpreter has what the steps import, and its torch finds the GPU",
            [
                [python, "-c", f"import torch, {', '.join(PACKAGES)}; print('torch', torch.__version__, torch.version.cuda)"],
                [python, "-c", "import sys; sys.path.append('tools'); import gpu; sys.exit(', '.join(gpu.missing_packages()) or None)"],
                [python, "-c", "import torch; print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())"],
            ][: 2 if dry else 3],
            40,
        ),
        Step(
            "build",
            "both targets compile and load with this torch",
            [
                [python, "setup.py", "build_ext", "--inplace"],
                [python, "-c", "import torch, deep_ep._cpu, deep_ep._cuda as m; print(m.device_count(), 'GPU')"],
            ],
            300,
            # Ranks that are threads need no NVSHMEM; without it one module less is compiled.
            environment={"NVSHMEM_DIR": str(out / "no-nvshmem")},
            only_shown="needs nvcc; here the modules are those of `make build`" if dry else "",
        ),
        Step(
            "facts",
            "streams that share a queue, what an allocation waits for; two ranks exchange; timer's step, a copy's speed",
            [[python, "benchmarks/gpu_facts.py", "--json", str(out / "facts.json")]],
            60,
            needs=("build",),
            writes=("facts.json",),
        ),
        tests_step(
            "gpu",
            "1 to 8 ranks share the GPU; late receives, delayed ranks and verdicts, events, graphs, failures",
            ["tests/device/test_gpu.py"],
            150, part=1, dry=dry,
        ),
        tests_step(
            "modes",
            "every mode, group size, hidden size and routing equals the reference",
            [
                exchange,
                # A process, or a node, for each rank; the program takes NCCL, a GPU for each.
                *without("program", "processes", "production", "nvlink", "nodes", "selections[1]", "selections[2]", "reference_"),
            ],
            140, part=2, dry=dry,
        ),
        benchmark_step(
            "latency",
            "latency, bandwidth, what counters cost",
            benchmark,
            {"--json": "latency.json", "--markdown": TABLE},
            110, out,
        ),
        tests_step(
            "normal",
            "normal mode on 1 x 4, 1 x 8 and 2 x 4 ranks equals the reference: fresh, with a handle, FP8, bias, graphs",
            ["tests/device/test_normal_gpu.py"],
            140, part=2, dry=dry,
        ),
        tests_step(
            "elastic",
            "ElasticBuffer, both layouts: rows, handles and the order of sums equal the reference",
            [
                f"tests/elastic/test_elastic_buffer.py::test_{name}"
                for name in (
                    "any_exchange_equals_the_reference",
                    "sums_have_one_order_and_one_rounding_per_level",
                    "handles_are_used_again_and_in_any_order",
                )
            ],
            30, part=4, dry=dry,
        ),
        tests_step(
            "phases",
            "the phases of operations add up; layout and the order of rows are those of the operation after them",
            [
                *("tests/observe/test_phases.py", "tests/observe/test_parts.py", "tests/moe/test_step_phases.py"),
                *without("program"),
            ],
            80, part=4, dry=dry,
        ),
        benchmark_step(
            "bandwidth",
            "normal mode, 4096 tokens of 4 and 8 ranks: share of a copy of the same bytes, what counters cost",
            normal_benchmark,
            {"--json": "normal.json", "--markdown": NORMAL_TABLE},
            110, out,
        ),
        tests_step(
            "calls",
            "sizes that change between calls; bad arguments are refused",
            [
                *("tests/ops/test_changing_sizes.py", "tests/checks/test_errors.py"),
                # What the kernel finds is known on a GPU once it has run; the step `gpu` waits for it.
                *without("alone", "disagree", "another_operation", "expert-too", "expert-below", "more-rows"),
            ],
            100, part=4, dry=dry,
        ),
    ]  # fmt: skip
    steps += [again for step in steps for again in in_other_settings(step, dry)]
    steps += sanitizer_steps(exchange, normal)
    steps.append(
        Step(
            "code",
            "registers and spills of each kernel; the machine code orders memory as the source does",
            [
                [python, "tools/kernel_resources.py", "--check"],
                [python, "tools/machine_code.py"],
            ],
            90,
            part=4,
            needs=("build",),
            programs=() if dry else ("cuobjdump", "nvdisasm"),
            only_shown="needs the CUDA modules, cuobjdump and nvdisasm" if dry else "",
        )
    )
    lanes = benchmark_step(
        "lanes",
        "normal mode without bulk copies, to compare with the step bandwidth",
        normal_benchmark,
        {"--json": "normal_lanes.json"},
        80,
        out,
    )
    steps.append(replace(lanes, environment=LANES))
    steps.append(costs_step(out, dry))
    steps.append(published_step(out, published))
    steps += steps_of_processes(out, dry)
    return sorted(steps, key=lambda step: step.part)


# --- the machine ----------------------------------------------------------------------------------


def step_environment(folders: Sequence[Path], dry: bool) -> dict[str, str]:
    """What all steps run with. `folders`: of programs, before those of PATH."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # A step must not take the cpu backend where it was to show the other one.
    return {
        "DEEP_EP_BACKEND": "cpu" if dry else "cuda",
        "DEEP_EP_TIMEOUT_S": "20",  # what hangs says so before its step is ended
        "PATH": os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def toolkit() -> list[Path]:
    """Where the programs of the CUDA toolkit are, also where PATH knows at most nvcc."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda") if home]
    return [folder for folder in folders if folder.is_dir()]


def compiler() -> str | None:
    """nvcc of this machine, where it has one; a dry run's steps find a stand-in first."""
    folders = [*map(str, toolkit()), os.environ.get("PATH", "")]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def stand_ins(folder: Path) -> Path:
    """Programs for a dry run: they say what they are, and memcheck runs what it is given."""
    programs = {
        "nvidia-smi": 'echo "stand-in for nvidia-smi: there is no GPU"',
        "nvcc": 'echo "stand-in for nvcc"',
        "nvidia-cuda-mps-control": '[ "$1" != -f ] || exec sleep 600',
        "compute-sanitizer": 'tool=$2; shift 4; [ "$tool" != memcheck ] || "$@" || exit\n'
        'echo "========= ERROR SUMMARY: 0 errors (stand-in: nothing was looked at)"',
    }  # fmt: skip
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def missing_packages() -> list[str]:
    """Packages that this interpreter lacks, or has in a version that is too old."""

    def has(module: str, requirement: str) -> bool:
        name, _, least = requirement.partition(">=")
        if importlib.util.find_spec(module) is None:
            return False
        return not least or int(importlib.metadata.version(name).split(".")[0]) >= int(least)

    return [wanted for module, wanted in PACKAGES.items() if not has(module, wanted)]


def wheels_command(names: Sequence[str]) -> str:
    """What to run, where there is a network, for a folder of wheels that fits this interpreter."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"python3 -m pip download --only-binary=:all: --python-version {version} --platform manylinux_2_28_x86_64 "
        f"--platform manylinux2014_x86_64 --dest wheels {shlex.join(names)}"
    )


def install(names: Sequence[str], wheels: Path, folder: Path) -> int:
    """Installs packages from a folder of wheels into `folder`; returns pip's exit status."""
    flags = ["--no-index", "--find-links", str(wheels), "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *flags, *names]
    return subprocess.run(command, check=False).returncode


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; names of steps are checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results (build/gpu)")  # fmt: skip
    parser.add_argument("--part", type=int, choices=range(1, PARTS + 1), help="only the steps of this part")  # fmt: skip
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"for all steps together ({PART_S:.0f} a part)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these steps and no others")  # fmt: skip
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="where packages that are missing come from")  # fmt: skip
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="of CSV files with published times (benchmarks/against_published.py)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: the cpu backend in small, stand-ins for programs")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.details = args.out / "details"
    published = args.published and args.published.resolve()
    args.steps = all_steps(args.details, args.dry_run, published)
    names = [step.name for step in args.steps]
    unknown = [name for name in args.only if name not in names]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is no step; the steps are {', '.join(names)}")
    if args.only:
        args.steps = [step for step in args.steps if step.name in args.only]
    if args.part is not None:
        args.steps = [step for step in args.steps if step.part == args.part]
    if args.budget is None:
        args.budget = PART_S * (1 if args.part else PARTS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; returns the exit status."""
    args = parse_arguments(argv)
    if args.list:
        for step in args.steps:
            print(f"{step.name}, part {step.part}, {step.limit_s:.0f} s at most: {step.shows}")
            for command in step.commands:
                print(f"    {shlex.join(command)}")
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ended steps leave no core files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step that runs as well
    with tempfile.TemporaryDirectory(prefix="deep_ep_gpu_") as folder:
        missing = missing_packages()
        if missing and args.wheels is not None and install(missing, args.wheels, Path(folder)) == 0:
            os.environ["PYTHONPATH"] = os.pathsep.join(
                filter(None, [folder, os.environ.get("PYTHONPATH", "")])
            )
        elif missing:
            print(
                f"packages that are missing here, or too old: {', '.join(missing)}. Where there is a network, run"
            )
            print(f"    {wheels_command(missing)}")
            print("and pass the folder with --wheels.")
        programs = [stand_ins(Path(tempfile.mkdtemp(dir=folder)))] if args.dry_run else toolkit()
        environment = step_environment(programs, args.dry_run)
        results = run_steps(args.steps, args.details, args.budget, environment)
    pack(args.details, args.out)
    if args.dry_run:
        print("\nA dry run on the cpu backend: nothing of this is a fact about a GPU.")
    print(f"\n{(args.out / 'summary.txt').read_text()}\nresults: {args.out}")
    return 0 if all(one.outcome in (PASSED, SHOWN) for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
