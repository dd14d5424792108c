"""What the programs among the tests share: options, comparison, ranks as processes, verdicts at the end.

Used by test_low_latency.py, test_intranode.py, test_internode.py and test_elastic.py, which run where
neither pytest nor hypothesis is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

import deep_ep
from deep_ep import diagnose
from deep_ep.testing import faults
from support.hot_routing import skew_routing
from support.launch import DEVICE, package_under_test, start_method

# --- options --------------------------------------------------------------------------------------


def option_parser(
    description: str | None, num_tokens: int, num_experts: int
) -> argparse.ArgumentParser:
    """With the options that all of the original's programs have.

    Args:
        description: of the program.
        num_tokens, num_experts: those it takes by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default, meaning in (
        ("--num-processes", 8, "ranks to spawn"),
        ("--num-tokens", num_tokens, "tokens per rank"),
        ("--hidden", 7168, "channels per token"),
        ("--num-topk", 8, "experts per token"),
        ("--num-experts", num_experts, "experts in total"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow multi-node NVLink")
    return parser


def add_diagnosis_options(options: argparse._ArgumentGroup) -> None:
    """--diagnose and what goes with it."""
    options.add_argument("--diagnose", action="store_true", help="heatmaps and verdicts at the end")
    options.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="one of the forms of deep_ep/testing/faults.py, as slow-rank=3:2ms; may be repeated;\nimplies --diagnose",
    )
    options.add_argument("--save-svg", metavar="FILE", help="a picture of what --diagnose found")


def parse_faults(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replaces the texts of --inject by faults, or ends the program with what is wrong with them."""
    try:
        args.inject = [faults.parse(text) for text in args.inject]
    except ValueError as error:
        parser.error(f"--inject: {error}")
    args.diagnose |= bool(args.inject)


def check_under_pressure(
    buffer: Any, seeds: Iterable[int], repetitions: int, check: Callable[[int], int]
) -> None:
    """The same seed must give the same bytes, every time; check(seed) returns a hash of all that was received."""
    for seed in seeds:
        report(buffer, f"Testing with seed {seed} ...")
        expected = check(seed)
        for repetition in range(repetitions):
            assert check(seed) == expected, f"seed {seed}, repetition {repetition}: other bytes"


def report(buffer: Any, line: str) -> None:
    """Prints a line on rank 0."""
    if buffer.rank == 0:
        print(line, flush=True)


# --- diagnosis ------------------------------------------------------------------------------------


def inject_into_routing(
    topk_idx: torch.Tensor,
    args: argparse.Namespace,
    num_ranks: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """What the injected hot ranks make of a routing."""
    for fault in args.inject:
        if isinstance(fault, faults.HotRank):
            topk_idx = skew_routing(topk_idx, fault, args.num_experts, num_ranks, generator)
    return topk_idx


def report_diagnosis(observed: Any, group: dist.ProcessGroup, args: argparse.Namespace) -> bool:
    """Prints heatmaps and verdicts on rank 0; returns on all ranks whether the verdicts are the
    injected faults.

    `observed` is the buffer, or what has its counters. Without --inject any verdict is right: the
    machine may well be uneven.
    """
    diagnosis = diagnose.run(observed)
    right = [True]
    if diagnosis is not None:
        console = Console()
        diagnose.report(diagnosis, console)
        if args.save_svg:
            diagnose.write_picture(diagnosis, args.save_svg)
        if args.inject:
            injected = set(faults.expected_verdicts(args.inject))
            named = {verdict.key for verdict in diagnosis.verdicts}
            right = [named == injected]
            for key in sorted(injected - named, key=str):
                console.print(f"[red]injected but not named:[/] {key}", highlight=False)
            for key in sorted(named - injected, key=str):
                console.print(f"[red]named but not injected:[/] {key}", highlight=False)
            if right[0]:
                console.print("[green]the verdicts name what was injected, and nothing else[/]")
    dist.broadcast_object_list(right, src=0, group=group)
    return right[0]


def end_of_run(
    buffer: Any,
    group: dist.ProcessGroup,
    args: argparse.Namespace,
    num_iterations: int,
    iteration_of: Callable[[Any, argparse.Namespace], Callable[[], None]],
    observed: deep_ep.Buffer | None = None,
) -> None:
    """Diagnoses iterations if --diagnose asks for it, then takes buffer and group down.

    Counters are on, and faults at work, in these iterations alone. Exits with status 1 where the results
    are right but the verdicts are not.

    Args:
        num_iterations: how many are diagnosed.
        iteration_of: returns a function that does one iteration as a model does. Nothing but communication
            calls may bring the ranks together in it: a collective in between would hide who is late.
        observed: what counts, where that is another buffer beneath this one.
    """
    right = True
    if args.diagnose:
        counting = observed or buffer
        iterate = iteration_of(buffer, args)
        counting.enable_counters(ring=4 * num_iterations)
        remove_faults = faults.apply(counting, args.inject)
        for _ in range(num_iterations):
            iterate()
        remove_faults()
        right = report_diagnosis(counting, group, args)
    buffer.destroy()
    dist.barrier(group)
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


def assert_named(done: subprocess.CompletedProcess[str], verdict: str) -> None:
    """The program has named what was injected. It may name others besides: cores are shared here."""
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "named but not injected" in output, output
    assert "injected but not named" not in output, output
    assert verdict in output, output


# --- ranks ----------------------------------------------------------------------------------------


def join(local_rank: int, num_local_ranks: int, store: str) -> dist.ProcessGroup:
    """The group of all ranks: under torchrun its own, else as the original does.

    Without torchrun WORLD_SIZE counts nodes and RANK is this node's index, and a single node needs
    neither address nor port.
    """
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    num_nodes = int(os.getenv("WORLD_SIZE", "1"))
    if under_torchrun():
        dist.init_process_group(backend)
    elif num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend, init_method=store, rank=local_rank, world_size=num_local_ranks
        )
    else:
        address, port = os.getenv("MASTER_ADDR", "127.0.0.1"), os.getenv("MASTER_PORT", "8361")
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=int(os.getenv("RANK", "0")) * num_local_ranks + local_rank,
            world_size=num_nodes * num_local_ranks,
        )
    return dist.new_group(list(range(dist.get_world_size())))


def torchrun(num_ranks: int) -> tuple[str, ...]:
    """The launcher, for as many ranks on this machine."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one rank."""
    return "LOCAL_RANK" in os.environ


def start(run_rank: Callable[..., None], args: argparse.Namespace) -> int:
    """Calls run_rank(local_rank, num_local_ranks, store, args) in each of --num-processes processes, or
    in this one under a launcher; returns the exit status. Rank 0 says first what is tested."""
    if os.getenv("RANK", "0") == "0":
        print(package_under_test(), flush=True)
    if under_torchrun():
        run_rank(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), "", args)
        return 0
    with tempfile.TemporaryDirectory(prefix="deep_ep_") as folder:
        store = f"file://{folder}/store"
        try:
            mp.start_processes(
                run_rank,
                args=(args.num_processes, store, args),
                nprocs=args.num_processes,
                start_method=start_method(),
            )
        except mp.ProcessExitedException as error:
            return error.exit_code
        except mp.ProcessRaisedException as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def run_program(
    program: Path, *arguments: str, launcher: Sequence[str] = (), timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """The program as its users start it, on the cpu backend's default settings.

    If it takes too long, its ranks are ended with it, and what they printed is lost.
    """
    command = [sys.executable, *launcher, str(program), *arguments]
    package = str(Path(deep_ep.__file__).parent.parent)  # the one under test, installed or not
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            output, errors = started.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, started.returncode, output, errors)
