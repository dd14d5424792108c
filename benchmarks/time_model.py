"""What operations take in a model of a GPU's time: the real kernels, in a simulation in which what a thread does
costs what benchmarks/gpus.json says. These are figures of a model; none was measured on a GPU.

The native module is built first, with the GPU's constants and a count of basic blocks:

    DEEP_EP_TIME_MODEL=1 DEEP_EP_CUDA=0 python setup.py build_ext --build-lib build/time_model

    python benchmarks/time_model.py --model H800 --ranks 1x8 --operation normal --num-tokens 4096
    python benchmarks/time_model.py --model H200 --ranks 1x8 --operation low-latency
    python benchmarks/time_model.py --ranks 4x8 --operation normal --num-tokens 1024 --shrink 2
    python benchmarks/time_model.py --tune        what `python -m deep_ep.tune --model` reads, anew
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import _time_model
from _one_thread_group import GroupShape
from _tables import Table
from _time_model import Group, Operation
from rich.console import Console

from deep_ep.tune import choice, modelled
from deep_ep.tune.trials import NUM_SMS, Times, Trial
from deep_ep.types.config import Config, recommended_combine, recommended_dispatch

PORTS = {"NVLink": "nvlink_bytes_per_ns", "network": "nic_bytes_per_ns"}
CHUNKS = ("NVL_SEND", "NVL_RECV", "RDMA_SEND", "RDMA_RECV")
# Of --tune: tokens of a rank by nodes of 8 ranks, and how far rows are shrunk. Of 8 nodes 512 take three minutes a setting.
TUNED_TOKENS, TUNED_SHRINK = {1: 512, 2: 512, 4: 512, 8: 256}, 7
RANKS_PER_NODE = 8
# Of the picture, one for each of SPENT_FIELDS.
COLOURS = ("tab:green", "tab:orange", "lightgrey", "tab:blue", "tab:purple", "tab:red", "tab:pink")


def tables(
    title: str, operations: Mapping[str, Operation], costs: Mapping[str, float]
) -> list[Table]:
    """Times and rates of the hops, where the time of a block goes, and what is done for each row."""
    hops = [
        [
            f"{name}, {hop}",
            f"{one.us:.1f}",
            f"{sent['puts'] + sent['words'] + sent['signals']:.0f}",
            f"{one.sent_bytes[hop] / 1e6:.2f}",
            f"{one.sent_bytes[hop] / one.us / 1e3:.1f}",
            f"{one.sent_bytes[hop] / one.us / 1e3 / costs[PORTS[hop]]:.0%}",
            f"{one.rows_bytes[hop] / one.us / 1e3:.1f}",
        ]
        for name, one in operations.items()
        for hop, sent in one.sent.items()
    ]
    launches = _launches(operations)
    fields = list(launches[0][1].spent_us)
    per_row = {name: counts_per_row(name, one) for name, one in operations.items()}
    blocks = [
        [kernel, f"{one.us:.1f}", *(f"{spent / one.us:.0%}" for spent in one.spent_us.values())]
        for kernel, one in launches
    ]
    return [
        Table(
            f"{title}: hops in the model",
            ("operation", "us", "messages", "MB sent", "GB/s", "of the link", "rows, GB/s"),
            hops,
            "Rows, GB/s: payload as DeepEP counts, rows that stay on their rank (NVLink) or node (network) included.",
        ),
        Table(
            f"{title}: where the time of a block goes in the model",
            ("kernel", "us", *fields),
            blocks,
            "Of the first thread of each block; barrier: it waits for the other warps.",
        ),
        Table(
            f"{title}: for each row that a rank gets or sends, in the model",
            ("operation", "rows", *next(iter(per_row.values()))),
            [
                [
                    name,
                    f"{operations[name].rows['NVLink']:.0f}",
                    *(f"{count:.3f}" for count in counts.values()),
                ]
                for name, counts in per_row.items()
            ],
            "A look of a warp is at all that it waits for; what it finds is a step, or an end. Rows as DeepEP counts.",
        ),
    ]


def counts_per_row(kernel: str, operation: Operation) -> dict[str, float]:
    """What a rank does for each row that it gets or sends, those that stay on it included."""
    launch = operation.launches[kernel]
    counts = {"looks": launch.looks, "in vain": launch.looks_in_vain}
    counts["steps"] = launch.looks - launch.looks_in_vain
    for name in ("signals", "fences"):
        counts[name] = sum(of_hop[name] for of_hop in operation.sent.values())
    return {name: count / operation.rows["NVLink"] for name, count in counts.items()}


def _launches(operations: Mapping[str, Operation]) -> list[tuple[str, _time_model.Launch]]:
    return [launch for one in operations.values() for launch in one.launches.items()]


def draw(title: str, operations: Mapping[str, Operation], path: Path) -> None:
    """Where the time of a block goes, as bars."""
    from matplotlib.figure import Figure

    launches = _launches(operations)
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(launches)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(launches)
    for field, colour in zip(launches[0][1].spent_us, COLOURS, strict=True):
        spent = [launch.spent_us[field] for _, launch in launches]
        axes.barh(range(len(launches)), spent, left=left, color=colour, label=field)
        left = [begin + us for begin, us in zip(left, spent)]
    axes.set_yticks(range(len(launches)), [kernel for kernel, _ in launches])
    axes.invert_yaxis()
    axes.set_xlabel("us of a block in the model, not measured on a GPU")
    axes.set_title(title)
    figure.legend(loc="outside right center", frameon=False)
    # Without a date the same figures give the same picture.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)


def tune(console: Console) -> None:
    """Times of the settings that `python -m deep_ep.tune` tries, for all GPUs and the nodes of `TUNED_TOKENS`."""
    by_costs: dict[tuple[float, ...], list[str]] = {}
    for gpu in _time_model.gpus():
        by_costs.setdefault(tuple(_time_model.costs_of(gpu).values()), []).append(gpu)
    groups = [(gpus, nodes) for nodes in reversed(TUNED_TOKENS) for gpus in by_costs.values()]
    # A process each: the native module simulates one group at a time.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = list(pool.map(_tune, *zip(*groups)))
    modelled.write(sorted(found, key=lambda group: (group.gpus, group.num_nodes)))
    console.print(f"written to {modelled.FILE}")


def _tune(gpus: list[str], num_nodes: int) -> modelled.ModelledGroup:
    num_ranks = num_nodes * RANKS_PER_NODE
    num_tokens = TUNED_TOKENS[num_nodes]
    shape = GroupShape(num_ranks, num_tokens, 7168, 8, 256)
    costs = _time_model.costs_of(gpus[0])
    group = Group(_time_model.load(), costs, shape, RANKS_PER_NODE, TUNED_SHRINK)
    times: dict[Trial, Times] = {}

    def measure(_: str, tried: Sequence[Trial]) -> list[Times]:
        for trial in tried:
            if trial not in times:
                one = _time_model.normal(group, *trial)
                times[trial] = Times(one["normal_dispatch"].us, one["normal_combine"].us)
        return [times[trial] for trial in tried]

    base = Trial(recommended_dispatch(num_ranks, 20), recommended_combine(num_ranks, 20))
    choice.search(base, num_nodes, NUM_SMS, None, measure)
    return modelled.ModelledGroup(gpus, num_nodes, RANKS_PER_NODE, num_tokens, times)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="H800", choices=_time_model.gpus())
    parser.add_argument("--ranks", default="1x8", metavar="NODESxRANKS")
    parser.add_argument("--operation", default="low-latency", choices=("low-latency", "normal"))
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument(
        "--shrink", type=int, default=1, help="rows with so many times fewer bytes (large groups)"
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="costs that make gpu measured")
    parser.add_argument("--set", nargs="*", default=[], metavar="COST=VALUE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="SVG or PNG of a block's time")
    parser.add_argument(
        "--tune", action="store_true", help="all settings; the other options are ignored"
    )
    normal = parser.add_argument_group("normal mode; the recommended Config unless given")
    normal.add_argument("--num-sms", type=int, default=20)
    normal.add_argument("--no-bulk-copies", action="store_true", help="rows by lanes, not by TMA")
    normal.add_argument("--elastic", action="store_true", help="sums in the order of picks")
    for name in ("dispatch", "combine"):
        normal.add_argument(f"--{name}-chunks", type=int, nargs=len(CHUNKS), metavar=CHUNKS)
    return parser


def main() -> None:
    args = _parser().parse_args()
    console = Console(width=160, highlight=False)
    if args.tune:
        tune(console)
        return
    native = _time_model.load()
    num_nodes, ranks_per_node = map(int, args.ranks.split("x"))
    num_ranks = num_nodes * ranks_per_node
    costs = _time_model.costs_of(args.model, args.costs)
    costs.update({name: float(value) for name, value in (one.split("=") for one in args.set)})
    shape = GroupShape(num_ranks, args.num_tokens, args.hidden, args.num_topk, args.num_experts)
    group = Group(native, costs, shape, ranks_per_node, args.shrink)
    began = time.perf_counter()
    if args.operation == "normal":
        configs = [
            Config(args.num_sms, *chunks) if chunks else recommended(num_ranks, args.num_sms)
            for chunks, recommended in (
                (args.dispatch_chunks, recommended_dispatch),
                (args.combine_chunks, recommended_combine),
            )
        ]
        found = _time_model.normal(
            group, *configs, bulk_copies=not args.no_bulk_copies, sums_by_pick=args.elastic
        )
    else:
        found = _time_model.low_latency(group)
    title = f"{args.model}, {args.ranks}, {args.operation}, {args.num_tokens} tokens"
    for one in tables(title, found, costs):
        one.show(console)
    if args.picture is not None:
        draw(title, found, args.picture)
    console.print(f"simulated in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
