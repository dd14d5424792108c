"""What test_elastic.py does: the checks of the original's test, its lines, and diagnosis.

Every rank makes the inputs of all ranks from their seeds, and so knows what it must get. Needs neither
pytest nor hypothesis.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from deep_ep.utils.math import per_token_cast_to_fp8
from deep_ep.utils.testing import seconds
from support import elastic_reference as reference
from support.elastic_exchange import (
    Exchange,
    Mode,
    Outputs,
    Setup,
    assert_dispatched,
    assert_received,
    places_of,
    run_cached_dispatch,
    run_combine,
    run_dispatch,
)
from support.exchange import Shape, assert_same_bytes, bytes_of
from support.launch import DEVICE
from support.normal_exchange import Inputs
from support.program import (
    add_diagnosis_options,
    end_of_run,
    inject_into_routing,
    join,
    parse_faults,
    report,
)

Tensor = torch.Tensor

DIAGNOSE_ITERATIONS = 24
PRESSURE_SEEDS = 20
TIMED_ROUNDS = 30 if DEVICE == "cuda" else 3
# Tokens, hidden, top-k and experts: the original's; on the CPU, ranks share a machine's cores.
SIZES = (4096, 7168, 6, 256) if DEVICE == "cuda" else (64, 1024, 6, 32)
# Of the original's combinations in their order every so manieth, where not all are asked for.
STRIDE = 29


# --- options --------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    """The original's options, then ours."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default, meaning in (
        ("--num-processes", 8, "ranks to spawn"),
        ("--num-tokens", SIZES[0], "most tokens of a rank"),
        ("--hidden", SIZES[1], "channels per token"),
        ("--num-topk", SIZES[2], "experts per token"),
        ("--num-experts", SIZES[3], "experts in total"),
        ("--num-sms", 0, "of each call; 0: what is recommended"),
        ("--num-qps", 0, "of each call; 0: what is recommended"),
        ("--num-allocated-qps", 0, "of the buffer; 0: what is recommended"),
        ("--num-gpu-timeout-secs", 100, "how long a kernel waits"),
        ("--num-cpu-timeout-secs", 100, "how long the host waits"),
        ("--sl-idx", 0, "RDMA service level"),
        ("--do-cpu-sync", 1, "0: outputs of worst-case sizes, without waiting for counts"),
        ("--allow-hybrid-mode", 1, "0: every rank writes to every rank"),
        ("--allow-multiple-reduction", 1, "0: combine rounds once"),
        ("--prefer-overlap-with-compute", 0, "0: recommend more SMs"),
        ("--seed", 0, "of rank 0; the others count on"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} ({default})")
    for name, meaning in (
        ("--deterministic", "ask the buffer for it; rows always have one order"),
        ("--skip-check", "measure only"),
        ("--skip-perf-test", "check only"),
        ("--do-pressure-test", f"{PRESSURE_SEEDS} seeds, each twice with equal bytes; measures nothing"),
        ("--reuse-elastic-buffer", "one buffer for all seeds"),
        ("--test-first-only", "one combination"),
        ("--ignore-local-traffic", "do not count bytes that stay on their rank or in their domain"),
    ):  # fmt: skip
        parser.add_argument(name, action="store_true", help=meaning)
    for name, default, meaning in (
        ("--unbalanced-ratio", 1.0, "scores of rank 0's experts are so many times as high"),
        ("--masked-ratio", 0.0, "share of the selections that are none"),
    ):
        parser.add_argument(name, type=float, default=default, help=f"{meaning} ({default})")
    ours = parser.add_argument_group("not in the original")
    ours.add_argument(
        "--combinations",
        choices=("all", "few"),
        default="all" if DEVICE == "cuda" else "few",
        help="all 144, or some in which every value occurs (few, on a GPU all)",
    )
    ours.add_argument(
        "--ranks-per-node", type=int, help="ranks of a node, on one machine (what it has)"
    )
    add_diagnosis_options(ours)
    args = parser.parse_args(argv)
    parse_faults(parser, args)
    if args.num_experts % args.num_processes:
        parser.error(f"{args.num_experts} experts cannot be shared by {args.num_processes} ranks")
    return args


def combinations(args: argparse.Namespace) -> list[Mode]:
    """Those of the original, in its order."""
    found = []
    for do_copy, alignment, is_fp8, num_biases, previous, is_async, on_comm in itertools.product(
        (1, 0), (128, 1), (1, 0), (0, 1, 2), (0, 1), (0, 1), (0, 1)
    ):
        if previous and not on_comm:
            continue
        found.append(
            Mode(
                do_cpu_sync=bool(args.do_cpu_sync),
                expert_alignment=alignment,
                spare_tokens=0,
                dtype="float8_e4m3fn" if is_fp8 else "bfloat16",
                scales="float32" if is_fp8 else "",
                do_handle_copy=bool(do_copy),
                has_stats=True,
                combine_hidden=args.hidden,
                num_biases=num_biases,
                previous="handle" if previous else "none",
                is_async=bool(is_async),
                allocate_on_comm_stream=bool(on_comm),
            )
        )
    if args.combinations == "few":
        found = found[::STRIDE]
    return found[:1] if args.test_first_only else found


def words_of(mode: Mode) -> str:
    """A combination as the line about it has it."""
    options = {
        "handle copy": mode.do_handle_copy,
        "expert alignment": mode.alignment,
        "FP8": mode.dtype != "bfloat16",
        "biases": mode.num_biases,
        "previous event": mode.previous != "none",
        "async": mode.is_async,
        "allocate on comm stream": mode.allocate_on_comm_stream,
    }
    return ", ".join(f"{name}: {int(value)}" for name, value in options.items())


# --- what is sent ---------------------------------------------------------------------------------


def draw_routing(
    args: argparse.Namespace, num_tokens: int, num_ranks: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """topk_idx and topk_weights of the highest scores; some are none."""
    scores = torch.rand(num_tokens, args.num_experts, generator=generator, device=generator.device)
    scores[:, : args.num_experts // num_ranks] *= args.unbalanced_ratio
    weights, topk_idx = scores.topk(args.num_topk, sorted=False)
    masked = torch.rand(weights.shape, generator=generator, device=generator.device)
    masked = masked < args.masked_ratio
    return (
        topk_idx.masked_fill(masked, -1).to(deep_ep.topk_idx_t),
        weights.masked_fill(masked, 0),
    )


def make_problem(setup: Setup, args: argparse.Namespace, seed: int, mode: Mode) -> Exchange:
    """What all ranks send, the same on every rank: each has one token less than the one before it."""
    inputs = []
    for rank in range(setup.num_ranks):
        generator = torch.Generator(DEVICE).manual_seed(seed + rank)
        num_tokens = max(1, args.num_tokens - rank)

        def values(rows: int = num_tokens, generator: torch.Generator = generator) -> Tensor:
            random = torch.randn(rows, args.hidden, generator=generator, device=DEVICE)
            return random.bfloat16()

        x, scales = values(), None
        if mode.scales:
            x, scales = per_token_cast_to_fp8(x)
        topk_idx, weights = draw_routing(args, num_tokens, setup.num_ranks, generator)
        biases = tuple(values() for _ in range(mode.num_biases))
        inputs.append(Inputs(x, scales, topk_idx, weights, x, weights, x, biases))
    num_tokens_of = tuple(len(one.topk_idx) for one in inputs)
    sizes = args.num_tokens, args.hidden, args.num_experts, args.num_topk
    return places_of(setup, Shape(num_tokens_of, *sizes), mode, inputs)


def contributions(sources: Tensor, column: int, num_topk: int, hidden: int) -> Tensor:
    """[n, hidden] bfloat16 of [n] global source indices: what a pick returns, random but known to all.

    A quarter is so large that float32 loses the others beside them, so that sums depend on their order.
    """
    first = (sources.long() * num_topk + column)[:, None] * hidden
    number = first + torch.arange(hidden, device=sources.device)
    mixed = (number * 2654435761) & 0xFFFFFFFF
    small = ((mixed ^ (mixed >> 15)) & 0xFFFF).sub(1 << 15).div(1 << 15)
    return torch.where((mixed >> 12) % 4 == 0, small.sign() * 2**30, small).bfloat16()


# --- checks ---------------------------------------------------------------------------------------


def check(buffer: Any, problem: Exchange, args: argparse.Namespace) -> Tensor:
    """All calls in one way, all results of this rank exact; returns the rows, for comparison."""
    rank, mode = buffer.rank_idx, replace(problem.mode, cached_weights=True)
    digest = []
    for layout in (
        mode,
        replace(mode, do_expand=True, is_tma_aligned=bool(mode.scales), do_zero_padding=True),
    ):
        of = with_mode(problem, layout)
        counted = torch.arange(of.shape.num_local_experts, dtype=torch.int32, device=DEVICE)
        sms = {"num_sms": args.num_sms, "num_qps": args.num_qps}
        *received, handle = run_dispatch(
            of, buffer, cumulative_local_expert_recv_stats=counted, **sms
        )
        again, _, weights_again, _ = run_dispatch(of, buffer, **sms)
        cached = run_cached_dispatch(of, buffer, handle)
        combined, back = run_combine(of, buffer, handle, returned_rows(rank, of), received[2])

        got = Outputs(*received, handle, counted, *cached, combined, back)
        assert_dispatched(of, got, rank)
        assert_received(of, got._replace(recv_x=again, recv_topk_weights=weights_again), rank)
        check_combined(got, rank, of)
        digest.append(combined)
    return bytes_of(torch.stack(digest))


def with_mode(of: Exchange, mode: Mode) -> Exchange:
    """The same inputs in another way."""
    return places_of(of.setup, of.shape, mode, of.inputs)


def returned_rows(rank: int, of: Exchange) -> Tensor:
    """What this rank's experts make of each pick, in compact rows added up and rounded."""
    arrival, slots, hidden = of.arrivals[rank], of.slots[rank], of.shape.hidden
    sources = reference.sources_of(arrival, of.num_max_tokens)
    rows = torch.full((of.num_rows[rank], hidden), torch.nan, device=DEVICE)
    rows = rows.bfloat16()
    total = torch.zeros(len(sources), hidden, device=DEVICE)
    for column in range(of.shape.num_topk):
        here = arrival.topk_idx[:, column] >= 0
        values = contributions(sources[here], column, of.shape.num_topk, hidden)
        total[here] += values
        if of.mode.do_expand:
            rows[slots[here, column]] = values
    if not of.mode.do_expand:
        rows[: len(sources)] = total.bfloat16()
    return rows


def check_combined(got: Outputs, rank: int, of: Exchange) -> None:
    """Sums in their order with their roundings; weights come back as they were sent."""
    shape, setup, mine = of.shape, of.setup, of.inputs[rank]
    sources = rank * of.num_max_tokens + torch.arange(len(mine.topk_idx), device=DEVICE)
    values = torch.stack(
        [contributions(sources, k, shape.num_topk, shape.hidden) for k in range(shape.num_topk)],
        dim=1,
    )
    owners = mine.topk_idx.div(shape.num_local_experts, rounding_mode="floor")
    how = reference.reduction(of.mode.do_expand, setup.allow_multiple_reduction, setup.num_domains)
    want = reference.add_up(values, owners, how, setup.num_scaleup_ranks, mine.biases)
    assert_same_bytes(got.combined, want, f"rank {rank}, combine")
    assert got.combined_weights is not None
    sent = mine.topk_weights.masked_fill(mine.topk_idx < 0, 0)
    assert_same_bytes(got.combined_weights, sent, f"rank {rank}, weights")


# --- timing ---------------------------------------------------------------------------------------


def measure(
    buffer: Any, group: dist.ProcessGroup, problem: Exchange, args: argparse.Namespace
) -> None:
    """Prints the original's lines, without those parts that are no kernels of their own here. On the CPU
    backend these are times of ranks that share the machine's cores."""
    rank, mode = buffer.rank_idx, problem.mode
    mine = problem.inputs[rank]
    expanded = with_mode(problem, replace(mode, do_expand=True, is_tma_aligned=bool(mode.scales)))
    *_, handle = run_dispatch(problem, buffer)
    *_, slots = run_dispatch(expanded, buffer)
    num_so, num_su = traffic(rank, expanded, args)
    row_bytes = args.hidden * mine.x.element_size()
    if mine.scales is not None:
        row_bytes += mine.scales.shape[1] * mine.scales.element_size()
    y = torch.ones(handle.num_recv_tokens, args.hidden, dtype=torch.bfloat16, device=DEVICE)
    z = torch.ones(slots.num_expanded_tokens, args.hidden, dtype=torch.bfloat16, device=DEVICE)
    calls: tuple[tuple[str, str, int, Callable[[], object]], ...] = (
        ("*", "dispatch", row_bytes, lambda: run_dispatch(problem, buffer)),
        ("-", "dispatch", row_bytes, lambda: run_dispatch(expanded, buffer)),
        ("#", "dispatch", row_bytes, lambda: run_cached_dispatch(problem, buffer, handle)),
        ("@", "combine", 2 * args.hidden, lambda: run_combine(problem, buffer, handle, y)),
        ("+", "combine", 2 * args.hidden, lambda: run_combine(expanded, buffer, slots, z)),
    )
    for mark, name, num_bytes, call in calls:
        call()
        dist.barrier(group)
        mean_s = statistics.fmean(seconds(call) for _ in range(TIMED_ROUNDS))
        so, su = (rows * num_bytes / 1e9 / mean_s for rows in (num_so, num_su))
        line = (
            f" {mark} EP: {rank}/{buffer.num_ranks} | {name}: {so:.2f} GB/s (SO), "
            f"{su:.2f} GB/s (SU), {mean_s * 1e6:.0f} us, {num_su * num_bytes} bytes"
        )
        lines: list[Any] = [None] * buffer.num_ranks
        dist.all_gather_object(lines, line, group=group)
        report(buffer, "\n".join(lines))


def traffic(rank: int, of: Exchange, args: argparse.Namespace) -> tuple[int, int]:
    """Rows of this rank's tokens, one per scale-out domain; rows that it receives."""
    setup = of.setup
    owners = of.inputs[rank].topk_idx.div(of.shape.num_local_experts, rounding_mode="floor")
    domains = owners.div(setup.num_scaleup_ranks, rounding_mode="floor")
    sources = of.arrivals[rank].sources
    own = rank // setup.num_scaleup_ranks if args.ignore_local_traffic else None
    sent = [int((domains == d).any(1).sum()) for d in range(setup.num_domains) if d != own]
    received = int((sources != rank).sum()) if args.ignore_local_traffic else len(sources)
    return sum(sent), received


# --- diagnosis ------------------------------------------------------------------------------------


def iteration_of(buffer: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Dispatch and combine as a model does them, with another routing every time."""
    generator = torch.Generator().manual_seed(1000 + buffer.rank_idx)
    x = torch.randn((args.num_tokens, args.hidden), generator=generator).bfloat16().to(DEVICE)

    def iterate() -> None:
        topk_idx, weights = draw_routing(args, args.num_tokens, buffer.num_ranks, generator)
        topk_idx = inject_into_routing(topk_idx, args, buffer.num_ranks, generator)
        recv_x, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx.to(DEVICE),
            topk_weights=weights.to(DEVICE),
            num_experts=args.num_experts,
        )
        buffer.combine(recv_x, handle)

    return iterate


# --- the program ----------------------------------------------------------------------------------


def run_rank(local_rank: int, num_local_ranks: int, store: str, args: argparse.Namespace) -> None:
    """One rank from start to end."""
    if args.ranks_per_node:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(args.ranks_per_node)
    group = join(local_rank, num_local_ranks, store)
    buffer = make_buffer(group, args)
    print_config(buffer, args)
    with torch.inference_mode():
        if args.do_pressure_test:
            buffer = check_under_pressure(buffer, group, args)
        else:
            report(buffer, "Running all test cases:")
            for mode in combinations(args):
                report(buffer, f" > Testing with {words_of(mode)} ...")
                problem = make_problem(setup_of(buffer), args, args.seed, mode)
                if not args.skip_check:
                    check(buffer, problem, args)
                if not args.skip_perf_test:
                    measure(buffer, group, problem, args)
    end_of_run(buffer, group, args, DIAGNOSE_ITERATIONS, iteration_of, observed=buffer.buffer)


def make_buffer(group: dist.ProcessGroup, args: argparse.Namespace) -> Any:
    """The original's."""
    return deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=args.num_tokens,
        hidden=args.hidden,
        deterministic=args.deterministic,
        allow_hybrid_mode=bool(args.allow_hybrid_mode),
        allow_multiple_reduction=bool(args.allow_multiple_reduction),
        prefer_overlap_with_compute=bool(args.prefer_overlap_with_compute),
        sl_idx=args.sl_idx,
        num_allocated_qps=args.num_allocated_qps,
        num_cpu_timeout_secs=args.num_cpu_timeout_secs,
        num_gpu_timeout_secs=args.num_gpu_timeout_secs,
        explicitly_destroy=True,
    )


def setup_of(buffer: Any) -> Setup:
    """What the reference must know of a buffer."""
    _, ranks_per_node = buffer.get_physical_domain_size()
    return Setup(
        buffer.num_ranks,
        ranks_per_node,
        buffer.allow_hybrid_mode,
        buffer.allow_multiple_reduction,
    )


def print_config(buffer: Any, args: argparse.Namespace) -> None:
    """The block that the original begins with."""
    num_sms = args.num_sms or buffer.get_theoretical_num_sms(args.num_experts, args.num_topk)
    num_qps = args.num_qps or buffer.get_theoretical_num_qps(num_sms)
    report(
        buffer,
        "Config:\n"
        f" > Ranks: {buffer.num_scaleout_ranks} x {buffer.num_scaleup_ranks}\n"
        f" > Experts: {args.num_topk}/{args.num_experts}\n"
        f" > Tokens: {args.num_tokens}, hidden: {args.hidden}\n"
        f" > SMs: {num_sms}, QPs: {num_qps}, allocated: {buffer.num_allocated_qps}\n"
        f" > Buffer: {buffer.num_bytes} bytes",
    )


def check_under_pressure(buffer: Any, group: dist.ProcessGroup, args: argparse.Namespace) -> Any:
    """Many seeds, each of which must give the same bytes twice; returns the last buffer."""
    modes = combinations(args)
    for number in range(PRESSURE_SEEDS):
        seed, mode = args.seed + number * buffer.num_ranks, modes[number % len(modes)]
        report(buffer, f"Testing with seed {seed} ...")
        if number and not args.reuse_elastic_buffer:
            buffer.destroy()
            buffer = make_buffer(group, args)
        problem = make_problem(setup_of(buffer), args, seed, mode)
        first = check(buffer, problem, args)
        assert torch.equal(check(buffer, problem, args), first), f"seed {seed}: other bytes"
    return buffer
