"""Proves the CUDA target on a machine with a GPU, in one command: `make gpu`, or python3 tools/gpu.py.

Builds the modules for the torch of this interpreter, compares every mode with the reference, tries streams, graphs,
late ranks and failures, measures, and has compute-sanitizer look. Ranks are threads of one process with a stream
each, in the last part also processes. It needs torch with CUDA, the packages that tests import, nvcc and one GPU of
compute capability 9.0 or newer; no network. Each step has a limit of its own: what fails or hangs is named, and the
rest goes on. Where a machine is lent for ten minutes at a time, --part 1 to --part 5 run a fifth each, the most
important first; the build of the first serves the others. The folder OUT has what each step printed and wrote, and
summary.txt. The exit status is 0 only if all steps passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
PARTS = 5
PART_S = 570.0  # for the steps of a part
# What a step that was told to end may take to say where it hangs.
GRACE_S = 3.0
LINES_SHOWN = 25

Judge = Callable[[str], "tuple[bool, str]"]


# --- what output means ----------------------------------------------------------------------------


def last_line(output: str) -> tuple[bool, str]:
    """Any output will do; its last line says how it went."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return True, lines[-1] if lines else "no output"


def tests_passed(output: str) -> tuple[bool, str]:
    """pytest's last line; tests that were all skipped have shown nothing."""
    found = re.findall(r"\d+ (?:passed|failed|skipped|deselected|errors?)\b.* in [\d.]+s", output)
    if not found:
        return False, "pytest said nothing of tests"
    return re.search(r"\b[1-9]\d* passed", found[-1]) is not None, found[-1]


def nothing_found(output: str) -> tuple[bool, str]:
    """compute-sanitizer's summaries, one per process."""
    found = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    if not found:
        return False, "compute-sanitizer printed no summary"
    return all(re.search(r"SUMMARY: 0 ", line) for line in found), found[-1]


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: one word.
        shows: what it shows if it passes.
        commands: run in turn until one fails.
        limit_s: for all of them together, seconds.
        part: of the run, from 1.
        judge: what the output means.
        environment: besides that of all steps.
    """

    name: str
    shows: str
    commands: Sequence[Sequence[str]]
    limit_s: float
    part: int = 1
    judge: Judge = last_line
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a step went, and why."""

    step: Step
    passed: bool
    said: str
    seconds: float


def run_steps(steps: Sequence[Step], out: Path, environment: Mapping[str, str]) -> list[Result]:
    """Runs steps in order; after each there is a summary, in case this process is ended."""
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for step in steps:
        print(f"\n=== {step.name}: {step.shows}", flush=True)
        file, began = out / f"{step.name}.txt", time.monotonic()
        passed, said = run_step(step, file, {**os.environ, **environment, **step.environment})
        results.append(Result(step, passed, said, time.monotonic() - began))
        for line in [] if passed else text_of(file).splitlines()[-LINES_SHOWN:]:
            print(f"    {line}")
        print(f"--- {'passed' if passed else 'FAILED'}: {said}", flush=True)
        (out / "summary.txt").write_text(summary(results))
    return results


def run_step(step: Step, file: Path, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether it passed, and what is to be said of it; `file` gets what its commands print."""
    deadline = time.monotonic() + step.limit_s
    with file.open("wb") as output:
        for command in step.commands:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            try:
                status = run_command(command, output.fileno(), deadline, environment)
            except OSError as error:
                return False, f"{command[0]} cannot be run: {error.strerror}"
            if status is None:
                return False, f"ended after {step.limit_s:.0f} s"
            if status != 0:
                how = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
                return False, f"{how}; {step.judge(text_of(file))[1]}"
    return step.judge(text_of(file))


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


def summary(results: Sequence[Result]) -> str:
    """A table in Markdown, and how many steps passed."""
    lines = ["| Step | Outcome | s | Shows | Said |", "|---|---|---:|---|---|"]
    for one in results:
        outcome, seconds = "passed" if one.passed else "FAILED", f"{one.seconds:.0f}"
        cells = (one.step.name, outcome, seconds, cell(one.step.shows), cell(one.said))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{sum(r.passed for r in results)} of {len(results)} passed\n"])


def cell(text: str) -> str:
    """Printable text of one line, for a table in Markdown."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(plain.split())[:160].replace("|", "\\|")


# --- the steps of this project --------------------------------------------------------------------


def tests(name: str, shows: str, words: Sequence[str], limit_s: float, part: int) -> Step:
    """A selection of tests."""
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return Step(name, shows, [command], limit_s, part, tests_passed)


def benchmark(
    name: str, shows: str, program: str, limit_s: float, part: int, out: Path, **files: str
) -> Step:
    """A program that measures, and writes these files, by option."""
    options = [word for option, file in files.items() for word in (f"--{option}", str(out / file))]
    return Step(name, shows, [[PYTHON, f"benchmarks/{program}.py", *options]], limit_s, part)


def without(*words: str) -> list[str]:
    """pytest's flag for tests whose names have none of these."""
    return ["-k", " and ".join(f"not {word}" for word in words)]


EXCHANGE, NORMAL = "tests/test_low_latency.py", "tests/ops/test_normal.py"
# Tests verify rows unless told otherwise, and rows are moved by bulk copies where they fit.
UNVERIFIED, LANES = {"DEEP_EP_VERIFY": "0"}, {"DEEP_EP_BULK_COPIES": "0"}


def in_setting(step: Step, name: str, part: int, environment: Mapping[str, str]) -> Step:
    """The same step, in another setting."""
    shows = f"{step.shows}; {' '.join(f'{k}={v}' for k, v in environment.items())}"
    return replace(
        step,
        name=f"{step.name}-{name}",
        shows=shows,
        limit_s=120,
        part=part,
        environment=environment,
    )


def sanitizer_steps() -> Iterable[Step]:
    """compute-sanitizer on the smallest exchanges of both modes."""
    # Launches may come one after another there, and ranks that wait for each other would wait for ever: one
    # rank, which sends to itself.
    one_rank = [
        *(f"{EXCHANGE}::test_extreme_shapes_equal_the_reference[1-ranks-{mode}]" for mode in ("fp8", "bf16")),
        *(f"{NORMAL}::test_each_node_shape_equals_the_reference[{mode}-1x1]" for mode in ("fp8", "bf16")),
    ]  # fmt: skip
    run = tests("", "", one_rank, 0, 4).commands[0]
    for tool in ("memcheck", "racecheck", "synccheck"):
        yield Step(
            tool,
            f"compute-sanitizer {tool} finds nothing in one rank's dispatch and combine, of both modes",
            [["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *run]],
            90,
            4,
            nothing_found,
            {"CUDA_MODULE_LOADING": "LAZY", "DEEP_EP_TIMEOUT_S": "50", **UNVERIFIED},
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


def steps_of_processes(out: Path) -> Iterable[Step]:
    """Ranks that are processes of the one GPU; and both modes for long."""
    processes = tests(
        "processes",
        "2 and 4 processes equal the reference over CUDA IPC, kernels in turn; one that is killed is named",
        ["tests/device/test_processes.py"],
        100,
        5,
    )
    yield processes
    mps = ["sh", "-c", WITH_MPS, "sh", *processes.commands[0]]
    folders = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(out / "mps"))
    shows = "the same with MPS, kernels at once"
    yield replace(processes, name="mps", shows=shows, commands=[mps], limit_s=80, environment=folders)  # fmt: skip
    yield tests(
        "soak",
        "thousands of rounds of both modes, mixed and verified; 50 buffers leave nothing",
        ["tests/device/test_soak.py"],
        120,
        5,
    )
    nvshmem = tests(
        "nvshmem",
        "the module with NVSHMEM (install_nvshmem.sh): one and two processing elements equal the reference",
        ["tests/device/test_nvshmem.py"],
        260,
        5,
    )
    yield replace(nvshmem, commands=[BUILD, *nvshmem.commands])


BUILD = [PYTHON, "setup.py", "build_ext", "--inplace"]


def all_steps(out: Path) -> list[Step]:
    """By part; within one in the order in which it is worth knowing."""
    gpu = tests(
        "gpu",
        "1 to 8 ranks share the GPU; late receives, delayed ranks and verdicts, events, graphs, failures",
        ["tests/device/test_gpu.py"],
        150, 1,
    )  # fmt: skip
    modes = tests(
        "modes",
        "every mode, group size, hidden size and routing equals the reference",
        # A process, or a node, for each rank; the program takes NCCL, a GPU for each.
        [EXCHANGE, *without("program", "processes", "production", "nvlink", "nodes", "selections[1]", "selections[2]", "reference_")],
        140, 2,
    )  # fmt: skip
    normal = tests(
        "normal",
        "normal mode on 1 x 4, 1 x 8 and 2 x 4 ranks equals the reference: fresh, with a handle, FP8, bias, graphs",
        ["tests/device/test_normal_gpu.py"],
        140, 2,
    )  # fmt: skip
    bandwidth = benchmark(
        "bandwidth",
        "normal mode, 4096 tokens of 4 and 8 ranks: share of a copy of the same bytes, what counters cost",
        "normal_gpu", 110, 3, out, json="normal.json", markdown="normal.md",
    )  # fmt: skip
    steps = [
        Step(
            "driver",
            "a GPU, its driver, the toolkit, and a torch that finds them",
            [
                ["nvcc", "--version"],
                ["nvidia-smi"],
                [PYTHON, "-c", "import torch, numpy, pybind11, pytest, hypothesis, rich\n"
                 "print('torch', torch.__version__, torch.cuda.get_device_name(), torch.cuda.get_device_capability())"],
            ],
            60,
        ),
        Step(
            "build",
            "both targets compile and load with this torch",
            [BUILD, [PYTHON, "-c", "import torch, deep_ep._cpu, deep_ep._cuda as m; print(m.device_count(), 'GPU')"]],
            300,
            # Ranks that are threads need no NVSHMEM; without it one module less is compiled.
            environment={"NVSHMEM_DIR": str(out / "no-nvshmem")},
        ),
        benchmark(
            "facts",
            "streams that share a queue, what an allocation waits for; two ranks exchange; timer's step, a copy's speed",
            "gpu_facts", 60, 1, out, json="facts.json",
        ),
        gpu,
        modes,
        in_setting(modes, "unverified", 2, UNVERIFIED),
        normal,
        in_setting(normal, "unverified", 2, UNVERIFIED),
        benchmark(
            "costs",
            "costs of the model of time: shared memory, L2, fences, barriers, copies",
            "gpu_costs", 50, 2, out, json="costs.json",
        ),
        benchmark(
            "latency",
            "latency, bandwidth, what counters cost",
            "low_latency_gpu", 110, 3, out, json="latency.json", markdown="latency.md",
        ),
        bandwidth,
        in_setting(gpu, "unverified", 3, UNVERIFIED),
        in_setting(normal, "lanes", 3, {**UNVERIFIED, **LANES}),
        replace(
            bandwidth,
            name="lanes",
            shows="normal mode without bulk copies, to compare with the step bandwidth",
            commands=[[PYTHON, "benchmarks/normal_gpu.py", "--json", str(out / "normal_lanes.json")]],
            limit_s=80,
            environment=LANES,
        ),
        *sanitizer_steps(),
        tests(
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
            30, 4,
        ),
        tests(
            "phases",
            "the phases of operations add up; layout and the order of rows are those of the operation after them",
            ["tests/observe/test_phases.py", "tests/observe/test_parts.py", "tests/moe/test_step_phases.py", *without("program")],
            80, 4,
        ),
        tests(
            "calls",
            "sizes that change between calls; bad arguments are refused",
            [
                *("tests/ops/test_changing_sizes.py", "tests/checks/test_errors.py"),
                # What the kernel finds is known on a GPU once it has run; the step `gpu` waits for it.
                *without("alone", "disagree", "another_operation", "expert-too", "expert-below", "more-rows"),
            ],
            90, 4,
        ),
        Step(
            "code",
            "registers and spills of each kernel; the machine code orders memory as the source does",
            [[PYTHON, "tools/kernel_resources.py", "--check"], [PYTHON, "tools/machine_code.py"]],
            90,
            4,
        ),
        *steps_of_processes(out),
    ]  # fmt: skip
    return sorted(steps, key=lambda step: step.part)


def step_environment() -> dict[str, str]:
    """What all steps run with."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return {
        # A step must not take the cpu backend where it was to show the other one.
        "DEEP_EP_BACKEND": "cuda",
        "DEEP_EP_TIMEOUT_S": "20",  # what hangs says so before its step is ended
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(cuda)]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results (build/gpu)")  # fmt: skip
    parser.add_argument("--part", type=int, choices=range(1, PARTS + 1), help="only the steps of this part")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps and no others")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    steps = {step.name: step for step in all_steps(out) if args.part in (None, step.part)}
    unknown = [name for name in args.only or () if name not in steps]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is no step; the steps are {', '.join(steps)}")
    chosen = [step for step in steps.values() if not args.only or step.name in args.only]
    if args.list:
        for step in chosen:
            print(f"{step.name}, part {step.part}, {step.limit_s:.0f} s at most: {step.shows}")
            for command in step.commands:
                print(f"    {shlex.join(command)}")
        return 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ended steps leave no core files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step that runs as well
    results = run_steps(chosen, out, step_environment())
    print(f"\n{summary(results)}\nresults: {out}")
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
