"""`torchrun --nproc-per-node 8 -m deep_ep.tune`: SMs and chunk sizes for a model, measured on this job.

`python -m deep_ep.tune --model H200 --ranks 8x8` answers without a cluster, from a model of the GPU's time.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deep_ep.buffer import Buffer
from deep_ep.doctor.host import Host
from deep_ep.doctor.job import Job, job_of
from deep_ep.errors import EPArgumentError, EPError
from deep_ep.native import backend
from deep_ep.tune import choice, links, meeting, memory, modelled, trials
from deep_ep.tune.choice import Experts, Tuned
from deep_ep.tune.trials import Exchange, Model, Times, Trial

_PROGRAM = "python -m deep_ep.tune"
_FAILED, _BAD_ARGUMENTS = 1, 2
# What is measured of those that are not given.
_USUAL = {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program on one rank and returns its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if (given.model is None) != (given.ranks is None):
        parser.error("--model and --ranks go together, such as --model H200 --ranks 8x8")
    experts = _experts(parser, given)
    console = Console(width=120, highlight=False)
    try:
        if given.model is not None:
            _look_up(console, experts, given)
            return 0
        for name, usual in _USUAL.items():
            setattr(given, name, getattr(given, name) or usual)
        job = job_of(Host())
        if job is None:
            parser.error(
                "no rank has been started; use a launcher: torchrun --nproc-per-node 8 -m deep_ep.tune"
            )
        console.quiet = job.rank != 0
        on_gpu = backend.get().name == "cuda"
        if on_gpu:
            torch.cuda.set_device(job.local_rank % torch.cuda.device_count())
        with meeting.joined(job, "nccl" if on_gpu else "gloo"):
            _require_equal(given)
            console.print(f"{memory.machine()}; {job.size} ranks")
            if given.measure_links:
                _measure_links(console, given.rounds)
            else:
                _tune(console, experts, given, job)
    except (EPError, OSError) as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return _BAD_ARGUMENTS if isinstance(error, EPArgumentError) else _FAILED
    return 0


def _require_equal(given: argparse.Namespace) -> None:
    """All ranks measure the same; where a file goes is rank 0's alone. Collective."""
    of_ranks: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {**vars(given), "output": None})
    first = of_ranks[0]
    for rank, options in enumerate(of_ranks):
        for name, value in options.items():
            if value != first[name]:
                raise EPArgumentError(
                    f"--{name.replace('_', '-')} is {first[name]} on rank 0, {value} on rank {rank}; it must be the "
                    "same on all ranks. Start all with the same arguments."
                )


def _tune(console: Console, experts: Experts | None, given: argparse.Namespace, job: Job) -> None:
    """Finds what was remembered, or measures chunk sizes and then SMs with the best of them. Collective."""
    model = Model(given.hidden, given.tokens, given.topk, given.experts, given.fp8)
    console.print(str(model))
    tuned = None if given.again else memory.remembered(model, job.size, experts)
    everywhere: list[object] = [None] * job.size
    dist.all_gather_object(everywhere, tuned)
    # Where one host does not know it, or knows another one, it is measured again on all.
    is_new = tuned is None or everywhere.count(tuned) < job.size
    if tuned is None or is_new:
        recommended = _recommended(job.size)
        # Buffers grow with SMs, and where a size is rounded up also with steps.
        largest = [
            trial
            for chunks in trials.chunk_trials(recommended, num_nodes=2)
            for trial in trials.sm_trials(chunks, {max(given.num_sms), Buffer.num_sms})
        ]
        exchange = Exchange(dist.group.WORLD, model, largest)
        measure = functools.partial(exchange.measure, rounds=given.rounds)
        num_nodes = exchange.num_nodes()
        tuned = _search(console, recommended, num_nodes, given.num_sms, experts, measure)
        exchange.buffer.destroy()
    else:
        console.print("remembered; --again measures again")
    # One file that cannot be written does not cost the other.
    try:
        _say(console, tuned, given.output if job.rank == 0 else None)
    finally:
        if job.local_rank == 0 and is_new:
            console.print(f"remembered in {memory.remember(model, job.size, experts, tuned)}")


def _look_up(console: Console, experts: Experts | None, given: argparse.Namespace) -> None:
    """Answers from what a model of the GPU computed, without ranks."""
    num_nodes, per_node = given.ranks
    group = modelled.find(given.model, num_nodes, per_node)
    for name, computed in {**_USUAL, "tokens": group.tokens}.items():
        if getattr(given, name) not in (None, computed):
            raise EPArgumentError(
                f"tune --model: --{name} is {getattr(given, name)}; {computed} was computed and nothing else. Leave it "
                "out, or measure on the job."
            )
    console.print(
        f"{given.model}, by a model, not measured: {num_nodes} x {per_node} ranks, {group.tokens} "
        f"tokens x 7168 x top-8 of 256 experts, FP8 out and BF16 back\n{modelled.ERROR}"
    )
    recommended = _recommended(num_nodes * per_node)
    tuned = _search(console, recommended, num_nodes, given.num_sms, experts, group.measure)
    _say(console, tuned, given.output)


def _say(console: Console, tuned: Tuned, output: Path | None) -> None:
    """Prints what to take, and writes it."""
    console.print(f"take {tuned.reason}")
    text = json.dumps(memory.sections(tuned), indent=1)
    console.print(text)
    if output is not None:
        output.write_text(f"{text}\n")


def _measure_links(console: Console, rounds: int) -> None:
    """Prints what links carry, as other programs take it."""
    speeds = links.measure(links.NUM_BYTES, rounds)
    console.print(
        f"{links.NUM_BYTES >> 20} MiB of each rank, all_to_all of {dist.get_backend()}, the slowest rank's median of {rounds}"
    )
    for name, speed in (("within a node", speeds.nvlink), ("between nodes", speeds.nic)):
        console.print(f"{name}: " + ("no such links" if speed is None else f"{speed:.3g} GB/s"))
    # A link that is not there carries nothing that its speed could limit.
    given = ":".join(f"{speed or links.NONE:.3g}" for speed in (speeds.nvlink, speeds.nic))
    console.print(f"for python -m deep_ep.diagnose: --links {given}")


def _search(
    console: Console,
    base: Trial,
    num_nodes: int,
    num_sms: Sequence[int],
    experts: Experts | None,
    measure: Callable[[Sequence[Trial]], Sequence[Times]],
) -> Tuned:
    """What to take of what was measured, which is shown."""

    def measure_and_show(title: str, tried: Sequence[Trial]) -> Sequence[Times]:
        times = measure(tried)
        columns = ["SMs", "NVLink step", "RDMA step", "dispatch us", "combine us"]
        if experts is not None:
            columns += ["experts beside it us", "layer us"]
        table = Table(*columns, title=title)
        for trial, each in zip(tried, times):
            num_sms = trial.dispatch.num_sms
            # Where dispatch and combine differ, a step is written DISPATCH/COMBINE.
            steps = [
                "/".join(dict.fromkeys(str(getattr(config, name)) for config in trial))
                for name in (trials.NVL_STEP, trials.RDMA_STEP)
            ]
            microseconds = [each.dispatch, each.combine]
            if experts is not None:
                microseconds += [experts.beside(num_sms), choice.layer_us(trial, each, experts)]
            table.add_row(str(num_sms), *steps, *(f"{us:.0f}" for us in microseconds))
        console.print(table)
        return times

    return choice.search(base, num_nodes, num_sms, experts, measure_and_show)


def _recommended(num_ranks: int) -> Trial:
    return Trial(Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks))


def _experts(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Experts | None:
    if given.compute_us is None:
        return None
    total = given.total_sms
    if total is None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).multi_processor_count
    if total is None:
        parser.error("--compute-us needs --total-sms where there is no GPU, such as 132 of an H100")
    if total <= max(given.num_sms):
        parser.error(f"--total-sms is {total}; it must be above the most of --num-sms")
    return Experts(given.compute_us, total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Measures dispatch and combine of a model with several chunk sizes and numbers of SMs, and says "
        "which to take. Run it under torchrun with the ranks of the job.",
        epilog="Exit status: 0 measured or remembered; 1 the exchange failed or a file cannot be written; 2 bad arguments.",
    )
    parser.add_argument(
        "--model",
        metavar="GPU",
        help="measure nothing: answer from a model of an H100, H200 or H800, with --ranks; needs no GPU and no launcher",
    )
    parser.add_argument(
        "--ranks", type=_nodes_and_ranks, metavar="NODESxRANKS", help="with --model: the group"
    )
    parser.add_argument("--tokens", type=_positive, help=f"of each rank ({_USUAL['tokens']})")
    parser.add_argument("--hidden", type=_positive, help=f"channels ({_USUAL['hidden']})")
    parser.add_argument("--experts", type=_positive, help=f"in total ({_USUAL['experts']})")
    parser.add_argument("--topk", type=_positive, help=f"experts of a token ({_USUAL['topk']})")
    parser.add_argument("--fp8", action="store_true", help="dispatch in FP8; else in BF16")
    parser.add_argument("--num-sms", type=_even, nargs="+", default=list(trials.NUM_SMS))
    parser.add_argument("--rounds", type=_positive, default=5, help="of each setting (5)")
    parser.add_argument(
        "--compute-us",
        type=_positive,
        help="how long the experts take on the whole GPU, where they run beside the exchange of another micro-batch",
    )
    parser.add_argument("--total-sms", type=_positive, help="of the GPU (asked of the driver)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON for Config(**section) and --deepep-config"
    )
    parser.add_argument(
        "--measure-links",
        action="store_true",
        help="measure nothing but what the links carry, for --links of python -m deep_ep.diagnose",
    )
    parser.add_argument("--again", action="store_true", help="also if it was measured before")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer of at least 1")
    return int(text)


def _nodes_and_ranks(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be nodes x ranks of each, such as 8x8")
    return int(found[1]), int(found[2])


def _even(text: str) -> int:
    value = _positive(text)
    if value % 2:
        raise argparse.ArgumentTypeError(f"{value}; it must be even, for two SMs make a channel")
    return value


if __name__ == "__main__":
    sys.exit(main())
