"""What test_intranode.py and test_internode.py do: the checks of the original's tests, its lines, and diagnosis.

A rank's dispatch is checked against what all ranks know of each other: rows carry the number of their
source. Needs neither pytest nor hypothesis.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import deep_ep
from deep_ep.utils.math import (
    calc_diff,
    create_grouped_scores,
    hash_tensor,
    per_token_cast_back,
    per_token_cast_to_fp8,
)
from deep_ep.utils.testing import seconds
from support import normal_reference
from support.launch import DEVICE
from support.normal_exchange import layout_of, source_prefix
from support.program import (
    add_diagnosis_options,
    check_under_pressure,
    end_of_run,
    inject_into_routing,
    join,
    option_parser,
    parse_faults,
    report,
    under_torchrun,
)

Tensor = torch.Tensor

# Bounds on calc_diff, the original's. Its test between nodes applies the first to random FP8 data alone
# and, for want of parentheses, none to all other data; here they have the second.
FP8_COMBINE_DIFF = 5e-4
COMBINE_DIFF = 5e-6
WEIGHTS_DIFF = 1e-9

DIAGNOSE_ITERATIONS = 24
CPU_TIMED_ROUNDS, CUDA_TIMED_ROUNDS = 4, 30
NUM_SMS = 24
# The low-latency run on the same buffer: tokens, channels, experts per rank, top-k.
LOW_LATENCY = 16, 5120, 32, 9


class Problem(NamedTuple):
    """What this rank sends, and what all ranks know."""

    x: Tensor  # [T, hidden] bfloat16, the number of the rank
    x_random: Tensor  # [T, hidden] bfloat16
    topk_idx: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32, the number of the rank
    weights_random: Tensor  # [T, K] float32
    layout: dict[str, Any]  # of get_dispatch_layout, as dispatch takes it
    num_recv: int  # tokens of all ranks for this one
    counts: list[int]  # selections of all ranks, per local expert


class Data(NamedTuple):
    """One of the tensors that go through all checks."""

    name: str
    x: Any  # a tensor, or the pair of FP8 data and scales
    sent: Tensor  # [T, hidden] bfloat16, what combine is compared with
    weights: Tensor
    is_random: bool


class Way(NamedTuple):
    """One of the ways to call."""

    previous: bool
    async_finish: bool
    data: Data
    has_topk: bool


# --- options --------------------------------------------------------------------------------------


def parse_arguments(
    argv: list[str] | None, description: str, between_nodes: bool
) -> argparse.Namespace:
    """The original's options, then ours."""
    parser = option_parser(description, num_tokens=4096, num_experts=256)
    ours = parser.add_argument_group("not in the original")
    parser.add_argument("--use-fabric", action="store_true", help="the same by another name")
    parser.add_argument(
        "--test-ll-compatibility", action="store_true", help="low latency on the same buffer"
    )
    if between_nodes:
        parser.add_argument(
            "--pressure-test-mode",
            type=int,
            default=0,
            choices=(0, 1, 2),
            help="1: repeat and compare hashes; 2: and measure (0)",
        )
        for options, name, default, meaning in (
            (parser, "--num-topk-groups", None, "nodes that a token's experts are of (at most 4)"),
            (ours, "--ranks-per-node", None, "ranks of a node, on one machine (what it has)"),
            (ours, "--pressure-seeds", 4, "seeds of pressure (4)"),
            (ours, "--pressure-repetitions", 20, "repetitions of each (20)"),
        ):
            options.add_argument(name, type=int, default=default, help=meaning)
    ours.add_argument("--quick", action="store_true", help="two ways to call, and no timing")
    ours.add_argument("--tune", action="store_true", help="time all chunk sizes, not the default")
    ours.add_argument(
        "--nvl-slots",
        type=int,
        help="of an NVLink queue; few run out with few tokens (the original's)",
    )
    add_diagnosis_options(ours)
    args = parser.parse_args(argv)
    parse_faults(parser, args)
    args.between_nodes = between_nodes
    if not between_nodes:
        args.num_topk_groups, args.pressure_test_mode, args.ranks_per_node = None, 0, None
    elif args.ranks_per_node and not under_torchrun() and args.num_processes <= args.ranks_per_node:
        parser.error(
            f"{args.num_processes} ranks are one node of {args.ranks_per_node}; there must be several. "
            "Pass a smaller --ranks-per-node, or run test_intranode.py"
        )
    return args


def make_config(buffer: deep_ep.Buffer, args: argparse.Namespace) -> deep_ep.Config:
    """The original's, unless other slots are asked for."""
    capacity = 256
    if args.between_nodes:
        capacity = 720 if buffer.group_size in (24, 48, 96, 144, 160) else 512
    if args.nvl_slots:
        capacity = args.nvl_slots
    network = (16, 128) if args.between_nodes else ()
    return deep_ep.Config(NUM_SMS, min(8, capacity - 1), capacity, *network)


# --- what is sent ---------------------------------------------------------------------------------


def cast_back(x: Any) -> Tensor:
    """bfloat16 of what a dispatch brought."""
    return x if isinstance(x, Tensor) else per_token_cast_back(*x)


def make_problem(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace, seed: int
) -> Problem:
    """Random routing, between nodes of a few nodes; its layout is checked."""
    torch.manual_seed(seed)
    rank, num_ranks = buffer.rank, buffer.group_size
    size = args.num_tokens, args.hidden
    x = torch.full(size, rank, dtype=torch.bfloat16, device=DEVICE)
    x_random = torch.randn(size, dtype=torch.bfloat16, device=DEVICE)
    topk_idx = draw_routing(args, num_ranks, num_nodes_of(buffer)).to(DEVICE)
    weights = torch.full((args.num_tokens, args.num_topk), float(rank), device=DEVICE)
    layout, event = layout_of(buffer, topk_idx, args.num_experts)
    assert event.event is None
    want = normal_reference.layout(
        topk_idx.cpu(), args.num_experts, num_ranks, num_ranks // num_nodes_of(buffer)
    )
    for mine, expected in zip(layout.values(), want):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine.cpu(), expected)
    per_rank_of_all = layout["num_tokens_per_rank"].clone()
    per_expert_of_all = layout["num_tokens_per_expert"].clone()
    dist.all_reduce(per_rank_of_all, group=group)
    dist.all_reduce(per_expert_of_all, group=group)
    return Problem(
        x,
        x_random,
        topk_idx,
        weights,
        torch.randn_like(weights),
        layout,
        int(per_rank_of_all[rank]),
        per_expert_of_all.view(num_ranks, -1)[rank].tolist(),
    )


def draw_routing(
    args: argparse.Namespace,
    num_ranks: int,
    num_nodes: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """[T, K] int64: the best experts, between nodes of the best nodes only."""
    scores = torch.randn(args.num_tokens, args.num_experts, generator=generator).abs() + 1
    if args.between_nodes:
        num_groups = args.num_topk_groups or min(num_nodes, 4)
        of_node = scores.view(args.num_tokens, num_nodes, -1)
        best = of_node.amax(2).topk(num_groups, dim=1, sorted=False).indices
        scores = create_grouped_scores(scores, best, num_nodes)
    topk_idx = scores.topk(args.num_topk, dim=1, sorted=False).indices
    return topk_idx.to(deep_ep.topk_idx_t)


def num_nodes_of(buffer: deep_ep.Buffer) -> int:
    """Nodes of the group."""
    assert buffer.runtime is not None
    return int(buffer.runtime.get_num_rdma_ranks())


# --- the checks -----------------------------------------------------------------------------------


def all_data(problem: Problem, args: argparse.Namespace) -> Iterator[Data]:
    """Random rows, rows of one number, and those in FP8, whose scales are column-major; between nodes
    also random FP8, with scales as they come. One at a time, since they are large."""
    yield Data("BF16, random", problem.x_random, problem.x_random, problem.weights_random, True)
    yield Data("BF16", problem.x, problem.x, problem.weights, False)
    data, scales = per_token_cast_to_fp8(problem.x)
    column_major = scales.t().contiguous().t()
    yield Data("FP8", (data, column_major), problem.x, problem.weights, False)
    if args.between_nodes:
        pair = per_token_cast_to_fp8(problem.x_random)
        yield Data("FP8, random", pair, problem.x_random, problem.weights_random, True)


def ways_to_call(problem: Problem, args: argparse.Namespace) -> Iterator[Way]:
    """data x previous_event x async_finish x top-k; of them two with --quick."""
    for data in all_data(problem, args):
        for previous, async_finish, has_topk in itertools.product((False, True), repeat=3):
            if not args.quick or previous == async_finish == has_topk:
                yield Way(previous, async_finish, data, has_topk)


def check_all(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace, seed: int
) -> int:
    """All checks of the original's test for one seed; returns a hash of all that was received."""
    problem = make_problem(buffer, group, args, seed)
    config = make_config(buffer, args)
    digest = 0
    for way in ways_to_call(problem, args):
        words = (
            f"{way.data.name}, {'with' if way.has_topk else 'without'} top-k "
            f"(async={way.async_finish}, previous={way.previous})"
        )
        digest += check_way(buffer, problem, way, config, args)
        if not args.pressure_test_mode:
            report(buffer, f"[testing] Running with {words} ... passed")
    return digest


def check_way(
    buffer: deep_ep.Buffer,
    problem: Problem,
    way: Way,
    config: deep_ep.Config,
    args: argparse.Namespace,
) -> int:
    """Dispatch, a second one, and combine; returns a hash of what was received."""
    timing = {"config": config, "async_finish": way.async_finish}

    def finish(*results: Any) -> tuple[Any, ...]:
        *results, event = results
        assert (event.event is not None) == way.async_finish
        if way.async_finish:
            event.current_stream_wait()
        return tuple(results)

    def previous() -> dict[str, Any]:
        return {"previous_event": buffer.capture() if way.previous else None}

    arguments = dispatch_arguments(problem, way)
    recv_x, recv_idx, recv_weights, counts, handle = finish(
        *buffer.dispatch(way.data.x, **arguments, **timing, **previous())
    )
    rows = cast_back(recv_x)
    prefix = source_prefix(handle, buffer.rank)
    assert len(rows) == problem.num_recv, f"{len(rows)} rows, not {problem.num_recv}"
    assert counts == problem.counts
    if not way.data.is_random:
        check_sources(rows, prefix)
    if way.has_topk:
        check_topk(recv_idx, recv_weights, problem, prefix, way)
        worst = finish(
            *buffer.dispatch(
                way.data.x,
                **arguments,
                **timing,
                **previous(),
                num_worst_tokens=max(1, args.num_tokens * buffer.group_size),
            )
        )
        check_worst(worst, recv_x, recv_idx, recv_weights)
        del worst
    else:
        recv_x, *nothing = finish(
            *buffer.dispatch(way.data.x, handle=handle, **timing, **previous())
        )
        assert nothing == [None] * 4
        rows = cast_back(recv_x)
        if not way.data.is_random:
            check_sources(rows, prefix)
    digest = hash_tensor(rows)
    del recv_x

    if way.has_topk and not way.data.is_random:  # so that all columns come back
        recv_weights = with_filled_columns(recv_idx, recv_weights)
    biases = make_biases(problem) if args.between_nodes else ()
    combined, combined_weights = finish(
        *buffer.combine(
            rows,
            handle,
            topk_weights=recv_weights,
            bias=biases or None,
            **timing,
            **previous(),
        )
    )
    check_combined(combined, combined_weights, biases, problem, way, args)
    return digest


def dispatch_arguments(problem: Problem, way: Way) -> dict[str, Any]:
    """The layout, and top-k if asked for."""
    if not way.has_topk:
        return problem.layout
    return {**problem.layout, "topk_idx": problem.topk_idx, "topk_weights": way.data.weights}


def check_sources(rows: Tensor, prefix: list[int]) -> None:
    """Rows of each source lie where the handle says, and have its number in all channels."""
    assert torch.equal(rows.amin(1), rows.amax(1)), "a row is not constant"
    begin = 0
    for source, end in enumerate(prefix):
        assert (rows[begin:end, 0] == source).all(), f"rows {begin}:{end} are not of {source}"
        begin = end
    assert begin == len(rows)


def check_topk(
    recv_idx: Tensor, recv_weights: Tensor, problem: Problem, prefix: list[int], way: Way
) -> None:
    """Experts are of this rank, as often as counted; weights are those of their sources."""
    num_local_experts = len(problem.counts)
    assert ((recv_idx >= -1) & (recv_idx < num_local_experts)).all()
    selected = torch.bincount(recv_idx.flatten() + 1, minlength=num_local_experts + 1)[1:]
    assert selected.tolist() == problem.counts
    assert (recv_weights[recv_idx < 0] == 0).all()
    if not way.data.is_random:
        check_sources(with_filled_columns(recv_idx, recv_weights), prefix)


def with_filled_columns(recv_idx: Tensor, recv_weights: Tensor) -> Tensor:
    """Where an expert is of another rank, the row's largest weight."""
    largest = recv_weights.amax(1, keepdim=True).expand_as(recv_weights)
    return torch.where(recv_idx < 0, largest, recv_weights).contiguous()


def check_worst(
    worst: tuple[Any, ...], recv_x: Any, recv_idx: Tensor, recv_weights: Tensor
) -> None:
    """The same rows, then some that are nobody's."""
    worst_x, worst_idx, worst_weights, counts, _ = worst
    num_recv = len(recv_idx)
    assert counts == []
    pairs = [(worst_idx, recv_idx), (worst_weights, recv_weights)]
    pairs += zip(worst_x, recv_x) if isinstance(recv_x, tuple) else [(worst_x, recv_x)]
    for one, other in pairs:
        as_bytes = (t.contiguous().view(torch.uint8) for t in (one[:num_recv], other))
        assert len(one) == len(worst_idx)
        assert torch.equal(*as_bytes)
    assert (worst_idx[num_recv:] == -1).all()


def make_biases(problem: Problem) -> tuple[Tensor, Tensor]:
    """Ones, and random numbers."""
    return torch.ones_like(problem.x), torch.randn_like(problem.x)


def check_combined(
    combined: Tensor,
    combined_weights: Tensor | None,
    biases: tuple[Tensor, ...],
    problem: Problem,
    way: Way,
    args: argparse.Namespace,
) -> None:
    """A token comes back once per rank that it went to."""
    num_ranks = problem.layout["is_token_in_rank"].sum(1, keepdim=True).clamp(min=1)
    total = combined.float()
    for bias in biases:
        total -= bias.float()
    is_rounded = way.data.is_random and isinstance(way.data.x, tuple)
    bound = FP8_COMBINE_DIFF if is_rounded else COMBINE_DIFF
    difference = calc_diff(total / num_ranks, way.data.sent)
    assert difference < bound, f"{way.data.name}: {difference} >= {bound}"
    if way.has_topk:
        assert combined_weights is not None
        back = combined_weights if way.data.is_random else combined_weights / num_ranks
        difference = calc_diff(back, way.data.weights)
        assert difference < WEIGHTS_DIFF, f"{way.data.name}, weights: {difference}"
    else:
        assert combined_weights is None


def check_low_latency(buffer: deep_ep.Buffer, group: dist.ProcessGroup) -> None:
    """The low-latency test on this buffer, after normal calls."""
    import test_low_latency  # which is a program, too

    num_tokens, hidden, experts_per_rank, num_topk = LOW_LATENCY
    num_experts = experts_per_rank * buffer.group_size
    buffer.clean_low_latency_buffer(num_tokens, hidden, num_experts)
    sizes = {"num-tokens": num_tokens, "hidden": hidden, "num-experts": num_experts}
    options = [f"--{name}={value}" for name, value in {**sizes, "num-topk": num_topk}.items()]
    args = test_low_latency.parse_arguments([*options, "--quick"])
    test_low_latency.check_all(buffer, group, args, seed=1)


# --- timing ---------------------------------------------------------------------------------------


def measure(buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace) -> None:
    """Prints the original's lines. On the CPU backend these are times of ranks that share the
    machine's cores."""
    problem = make_problem(buffer, group, args, buffer.rank)
    layout = mean_seconds(lambda: buffer.get_dispatch_layout(problem.topk_idx, args.num_experts))
    report(buffer, f"[layout] Kernel performance: {layout * 1e3:.3f} ms")
    default = deep_ep.Buffer.get_dispatch_config(buffer.group_size)
    way = Way(False, False, Data("", problem.x, problem.x, problem.weights, False), False)
    config = make_config(buffer, args)
    *_, handle, _ = buffer.dispatch(problem.x, **dispatch_arguments(problem, way), config=config)
    row_bytes = args.hidden * 2
    to_nodes = problem.layout["num_tokens_per_rdma_rank"] if args.between_nodes else None
    rdma_bytes = int(to_nodes.sum()) * row_bytes if to_nodes is not None else 0
    nvl_bytes = problem.num_recv * row_bytes

    for name, x, factor in (
        ("FP8", per_token_cast_to_fp8(problem.x_random), (1 + 4 / 128) / 2),
        ("BF16", problem.x_random, 1.0),
    ):
        best = min(
            timed(buffer, words, factor * nvl_bytes, factor * rdma_bytes,
                  lambda config=config, x=x: buffer.dispatch(x, handle=handle, config=config))
            for words, config in settings(args, chunks(args, "dispatch", buffer), default)
        )  # fmt: skip
        report(buffer, f"[tuning] Best dispatch ({name}): {best[1]}")
        dist.barrier(group)
    recv_x = buffer.dispatch(problem.x_random, handle=handle, config=config)[0]
    default = deep_ep.Buffer.get_combine_config(buffer.group_size)
    best = min(
        timed(buffer, words, nvl_bytes, rdma_bytes,
              lambda config=config: buffer.combine(recv_x, handle, config=config))
        for words, config in settings(args, chunks(args, "combine", buffer), default)
    )  # fmt: skip
    report(buffer, f"[tuning] Best combine: {best[1]}")


def chunks(
    args: argparse.Namespace, operation: str, buffer: deep_ep.Buffer
) -> list[tuple[int, int]]:
    """Chunk sizes the original tries, of NVLink and of RDMA."""
    if not args.tune:
        return []
    if not args.between_nodes:
        tried = range(4, 33, 2) if operation == "dispatch" else range(1, 17)
        return [(size, 6) for size in tried]
    if operation == "dispatch":
        return list(itertools.product(range(4, 45, 4), range(4, 33, 4)))
    first = 12 if num_nodes_of(buffer) == 2 else 8
    return list(itertools.product(range(1, 8), range(first, 33, 4)))


def settings(
    args: argparse.Namespace, sizes: list[tuple[int, int]], default: deep_ep.Config
) -> Iterator[tuple[str, deep_ep.Config]]:
    """Their words, and the configurations; the recommended one last, with as many channels."""
    capacity = 512 if args.between_nodes else 256
    for nvl, rdma in sizes:
        words = f"NVL chunk {nvl}" + (f", RDMA chunk {rdma}" if args.between_nodes else "")
        yield words, deep_ep.Config(NUM_SMS, nvl, capacity, rdma, 128)
    words = "NVL chunk default" + (", RDMA chunk default" if args.between_nodes else "")
    yield words, replace(default, num_sms=NUM_SMS)


def timed(
    buffer: deep_ep.Buffer,
    words: str,
    nvl_bytes: float,
    rdma_bytes: float,
    call: Callable[[], object],
) -> tuple[float, str]:
    """Seconds of a call, and the line about it, which is printed."""
    mean_s = mean_seconds(call)
    rates = [f"{nvl_bytes / 1e9 / mean_s:.2f} GB/s (NVL)"]
    if rdma_bytes:
        rates.insert(0, f"{rdma_bytes / 1e9 / mean_s:.2f} GB/s (RDMA)")
    line = f"SMs {NUM_SMS}, {words}: {', '.join(rates)}, avg_t: {mean_s * 1e6:.2f} us"
    report(buffer, f"[tuning] {line}")
    return mean_s, line


def mean_seconds(call: Callable[[], object]) -> float:
    """Of several calls after one that does not count."""
    call()
    rounds = CUDA_TIMED_ROUNDS if DEVICE == "cuda" else CPU_TIMED_ROUNDS
    return statistics.fmean(seconds(call) for _ in range(rounds))


# --- diagnosis ------------------------------------------------------------------------------------


def iteration_of(buffer: deep_ep.Buffer, args: argparse.Namespace) -> Callable[[], None]:
    """Layout, dispatch and combine as a model does them, with another routing every time."""
    generator = torch.Generator().manual_seed(1000 + buffer.rank)
    x = torch.randn((args.num_tokens, args.hidden), generator=generator).bfloat16().to(DEVICE)
    weights = torch.rand((args.num_tokens, args.num_topk), generator=generator).to(DEVICE)
    config = make_config(buffer, args)

    def iterate() -> None:
        topk_idx = draw_routing(args, buffer.group_size, num_nodes_of(buffer), generator)
        topk_idx = inject_into_routing(topk_idx, args, buffer.group_size, generator).to(DEVICE)
        layout, _ = layout_of(buffer, topk_idx, args.num_experts)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, config=config, **layout
        )
        buffer.combine(recv_x, handle, config=config)

    return iterate


# --- the program ----------------------------------------------------------------------------------


def run_rank(local_rank: int, num_local_ranks: int, store: str, args: argparse.Namespace) -> None:
    """One rank from start to end."""
    if args.ranks_per_node:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(args.ranks_per_node)
    group = join(local_rank, num_local_ranks, store)
    torch.manual_seed(group.rank())
    buffer = make_buffer(group, args)
    config = f"num_tokens={args.num_tokens}, hidden={args.hidden}, num_topk={args.num_topk}"
    if args.between_nodes:
        config += f", num_nodes={num_nodes_of(buffer)}"
    report(buffer, f"[config] {config}")
    if args.between_nodes and num_nodes_of(buffer) == 1:
        sys.exit(
            "all ranks are on one node: pass a smaller --ranks-per-node, or run test_intranode.py"
        )
    if args.pressure_test_mode:
        check_under_pressure(
            buffer,
            range(args.pressure_seeds),
            args.pressure_repetitions,
            lambda seed: check_all(buffer, group, args, seed * buffer.group_size + buffer.rank),
        )
    else:
        check_all(buffer, group, args, buffer.rank)
    if args.test_ll_compatibility:
        check_low_latency(buffer, group)
        report(buffer, "[testing] low latency on the same buffer ... passed")
    if not args.quick and args.pressure_test_mode != 1:
        measure(buffer, group, args)
    end_of_run(buffer, group, args, DIAGNOSE_ITERATIONS, iteration_of)


def make_buffer(group: dist.ProcessGroup, args: argparse.Namespace) -> deep_ep.Buffer:
    """The original's: 2 GB for NVLink, between nodes 1 GB for RDMA."""
    num_rdma_bytes = int(1e9) if args.between_nodes else 0
    num_qps_per_rank = NUM_SMS if args.between_nodes else 1
    if args.test_ll_compatibility:
        num_tokens, hidden, experts_per_rank, _ = LOW_LATENCY
        num_qps_per_rank = max(num_qps_per_rank, experts_per_rank)
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_tokens, hidden, group.size(), experts_per_rank * group.size()
        )
        num_rdma_bytes = max(num_rdma_bytes, size)
    return deep_ep.Buffer(
        group,
        int(2e9),
        num_rdma_bytes,
        low_latency_mode=args.test_ll_compatibility,
        num_qps_per_rank=num_qps_per_rank,
        explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl or args.use_fabric,
    )
