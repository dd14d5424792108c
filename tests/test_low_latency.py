"""The low-latency exchange, end to end: a program with DeepEP's options, and pytest tests.

As a program it spawns the ranks (or takes its place under torchrun), repeats the checks of the
original's test, and measures. With --diagnose it then shows who waited for whom; with --inject it
makes a rank, a path or an expert slow first, and succeeds only if the verdicts name exactly that:

    python tests/test_low_latency.py --num-processes 8 --diagnose --inject slow-rank=3:2ms
    torchrun --nproc-per-node 4 tests/test_low_latency.py
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import deep_ep
import reference
from deep_ep import diagnose, faults
from exchange import (
    Inputs,
    Mode,
    Shape,
    assert_combined,
    assert_received,
    assert_received_one,
    assert_same_bytes,
    combine,
    dispatch,
    exchange_and_check,
    expected_combine,
    expected_dispatch,
    expected_experts,
    experts,
    make_inputs,
    ranks_for,
)
from launch import (
    DEVICE,
    START_METHOD,
    raise_failures,
    run_processes,
    shared_memory_left,
    shared_memory_segments,
)

RANK_OFFSET = 128  # keeps rank - offset negative and exact in bfloat16
NUM_MARKED = 128  # last channels of the first tensor: the token's index

# Bounds on calc_diff, all the original's.
ROUNDED_SCALE_DIFF = 0.007
FP8_COMBINE_DIFF = 9e-4
BF16_COMBINE_DIFF = 1e-5

PRESSURE_REPETITIONS = 20
DIAGNOSE_ITERATIONS = 48
CPU_TIMED_ROUNDS, CUDA_TIMED_ROUNDS = 8, 30


class Dispatch(NamedTuple):
    """One way to dispatch."""

    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    hook: bool


class Problem(NamedTuple):
    """What this rank sends in every round, and what all ranks selected."""

    topk_idx: torch.Tensor  # [T, K] int64
    topk_weights: torch.Tensor  # [T, K] float32
    all_topk_idx: torch.Tensor  # [num_ranks, T, K]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The original's options, then ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-processes", type=int, default=8, help="ranks to spawn (8)")
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens per rank (128)")
    parser.add_argument("--hidden", type=int, default=7168, help="channels per token (7168)")
    parser.add_argument("--num-topk", type=int, default=8, help="experts per token (8)")
    parser.add_argument("--num-experts", type=int, default=288, help="experts in total (288)")
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow multi-node NVLink")
    parser.add_argument("--disable-nvlink", action="store_true", help="keep off NVLink")
    parser.add_argument("--use-logfmt", action="store_true", help="10-bit combine on the wire")
    parser.add_argument("--pressure-test", action="store_true", help="repeat and compare hashes")
    parser.add_argument("--shrink-test", action="store_true", help="not in this release")
    ours = parser.add_argument_group("not in the original")
    ours.add_argument("--seed", type=int, default=1, help="seed of rank 0; rank r adds r (1)")
    ours.add_argument("--pressure-seeds", type=int, default=4, help="seeds of --pressure-test (4)")
    ours.add_argument(
        "--quick", action="store_true", help="one check and no timing before --diagnose"
    )
    ours.add_argument("--diagnose", action="store_true", help="heatmaps and verdicts at the end")
    ours.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="slow-rank=3:2ms, slow-path=2>5:1ms or hot-rank=6; may be repeated;\nimplies --diagnose",
    )
    ours.add_argument("--save-svg", metavar="FILE", help="the report of --diagnose as a picture")
    args = parser.parse_args(argv)
    if args.shrink_test:
        parser.error(
            "--shrink-test: masking ranks out belongs to a later release; run without it, or kill a "
            "rank and see tests/test_missing_rank.py"
        )
    try:
        args.inject = [faults.parse(text) for text in args.inject]
    except ValueError as error:
        parser.error(f"--inject: {error}")
    args.diagnose |= bool(args.inject)
    return args


# --- the checks -----------------------------------------------------------------------------------


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - cosine-like similarity in float64; 0 when equal, insensitive to zeros."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def hash_tensor(t: torch.Tensor) -> int:
    """Sum of the tensor's 32-bit words: insensitive to the order of rows."""
    return int(t.contiguous().view(torch.int32).sum())


def ways_to_dispatch() -> Iterator[Dispatch]:
    """hook x FP8 x round_scale (FP8 only) x use_ue8m0 (rounded only)."""
    for hook in (False, True):
        yield Dispatch(False, False, False, hook)
        for round_scale, use_ue8m0 in ((False, False), (True, False), (True, True)):
            yield Dispatch(True, round_scale, use_ue8m0, hook)


def make_tensors(args: argparse.Namespace, rank: int) -> list[torch.Tensor]:
    """Tensors [T, hidden] bfloat16 to dispatch: the first with known values, the others random."""
    size = (args.num_tokens, args.hidden)
    marked = torch.full(size, rank - RANK_OFFSET, dtype=torch.bfloat16, device=DEVICE)
    marked[:, -NUM_MARKED:] = torch.arange(args.num_tokens, device=DEVICE).bfloat16().view(-1, 1)
    tensors = [marked]
    if args.use_logfmt:
        scales = torch.rand(4).tolist()
        tensors += [torch.randn(size, device=DEVICE).bfloat16() * scale * 0.5 for scale in scales]
    return [*tensors, torch.randn(size, device=DEVICE).bfloat16() * 0.1]


def make_problem(args: argparse.Namespace, group: dist.ProcessGroup) -> Problem:
    """Routing of all ranks, ten entries of each rank dropped at random places."""
    scores = torch.randn(args.num_tokens, args.num_experts, device=DEVICE).abs() + 1
    topk_idx = scores.topk(args.num_topk, dim=1, sorted=True).indices.to(deep_ep.topk_idx_t)
    weights = torch.randn(args.num_tokens, args.num_topk, device=DEVICE).abs()
    if args.num_tokens:
        rows = torch.randint(args.num_tokens, (10,))
        topk_idx[rows, torch.randint(args.num_topk, (10,))] = -1
    everyone = [torch.empty_like(topk_idx) for _ in range(group.size())]
    dist.all_gather(everyone, topk_idx, group)
    return Problem(topk_idx, weights, torch.stack(everyone))


def dispatch_problem(
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    problem: Problem,
    args: argparse.Namespace,
    way: Dispatch,
) -> tuple[Any, torch.Tensor, tuple[Any, ...]]:
    """(recv_x, recv_count, handle) of one dispatch whose cumulative statistics are checked."""
    stats = torch.zeros(args.num_experts // buffer.group_size, dtype=torch.int32, device=DEVICE)
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        x,
        problem.topk_idx,
        args.num_tokens,
        args.num_experts,
        use_fp8=way.use_fp8,
        round_scale=way.round_scale,
        use_ue8m0=way.use_ue8m0,
        cumulative_local_expert_recv_stats=stats,
        async_finish=not way.hook,
        return_recv_hook=way.hook,
    )
    hook() if way.hook else event.current_stream_wait()
    assert torch.equal(stats, recv_count)
    return recv_x, recv_count, handle


def combine_problem(
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    problem: Problem,
    handle: tuple[Any, ...],
    hook: bool,
    **arguments: Any,
) -> torch.Tensor:
    """One combine into a tensor of our own."""
    out = torch.empty(
        (problem.topk_idx.shape[0], x.shape[2]), dtype=torch.bfloat16, device=x.device
    )
    combined, event, receive = buffer.low_latency_combine(
        x,
        problem.topk_idx,
        problem.topk_weights,
        handle,
        async_finish=not hook,
        return_recv_hook=hook,
        out=out,
        **arguments,
    )
    receive() if hook else event.current_stream_wait()
    assert combined.data_ptr() == out.data_ptr()
    return combined


def check_layout(
    problem: Problem, recv_count: torch.Tensor, layout_range: torch.Tensor, rank: int
) -> None:
    """Counts and ranges of each local expert are those of the routing."""
    num_local_experts = len(recv_count)
    for i in range(num_local_experts):
        selections = int((problem.all_topk_idx == rank * num_local_experts + i).sum())
        assert int(recv_count[i]) == selections, f"expert {i}: {recv_count[i]} != {selections}"
        assert int((layout_range[i] & 0xFFFFFFFF).sum()) == selections


def check_marked_rows(
    rows: torch.Tensor,
    src_info: torch.Tensor,
    layout_range: torch.Tensor,
    selections: torch.Tensor,
    num_tokens: int,
    exact: bool,
) -> None:
    """Rows [n, hidden] of one local expert that came from the first tensor carry their origin in
    their values.
    """
    values = rows[:, :-NUM_MARKED].amin(1)
    assert torch.equal(values, rows[:, :-NUM_MARKED].amax(1)), "a row is not constant"
    indices = (src_info % num_tokens).to(rows.dtype).view(-1, 1)
    if not exact:
        assert calc_diff(rows[:, -1], indices.view(-1)) < ROUNDED_SCALE_DIFF
        return
    assert torch.equal(rows[:, -NUM_MARKED:], indices.expand(-1, NUM_MARKED)), "wrong token"
    for source, packed in enumerate(layout_range.tolist()):
        begin, count = divmod(packed, 1 << 32)
        assert count == int(selections[source])
        assert int((values == source - RANK_OFFSET).sum()) == count
        assert (values[begin : begin + count] == source - RANK_OFFSET).all(), "wrong source"


def check_round(
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    problem: Problem,
    args: argparse.Namespace,
    way: Dispatch,
    marked: bool,
    num_dispatches: int,
) -> int:
    """One tensor through dispatch and both forms of combine, checked; returns a hash of all that
    was received.
    """
    for _ in range(
        num_dispatches
    ):  # twice now and then, so that both halves of the buffer are used
        recv_x, recv_count, handle = dispatch_problem(buffer, x, problem, args, way)
    src_info, layout_range = handle[:2]
    check_layout(problem, recv_count, layout_range, buffer.rank)

    data, scales = recv_x if way.use_fp8 else (recv_x, None)
    # Only valid rows are ever touched: the whole tensor would be half a gigabyte per rank.
    expert_outputs = (
        torch.empty(data.shape, dtype=torch.bfloat16, device=DEVICE) if way.use_fp8 else data
    )
    digest = 0
    for i, count in enumerate(recv_count.tolist()):
        rows = data[i, :count]
        digest ^= hash_tensor(rows)
        if scales is not None:
            digest ^= hash_tensor(scales[i, :count])
            rows = reference.dequantise(rows, scales[i, :count])
            expert_outputs[i, :count] = rows
        if marked and count:
            expert = buffer.rank * len(recv_count) + i
            selections = (problem.all_topk_idx == expert).sum((1, 2))
            check_marked_rows(
                rows, src_info[i, :count], layout_range[i], selections, len(x), not way.round_scale
            )

    weights = problem.topk_weights.masked_fill(problem.topk_idx == -1, 0)
    expected = x * weights.sum(1).view(-1, 1)
    for zero_copy in (False,) if args.use_logfmt else (False, True):
        if zero_copy:
            target = buffer.get_next_low_latency_combine_buffer(handle)
            for i, count in enumerate(recv_count.tolist()):
                target[i, :count] = expert_outputs[i, :count]
        combined = combine_problem(
            buffer, expert_outputs, problem, handle, way.hook,
            use_logfmt=args.use_logfmt, zero_copy=zero_copy,
        )  # fmt: skip
        assert not combined.isnan().any()
        difference = calc_diff(expected, combined)
        bound = FP8_COMBINE_DIFF if way.use_fp8 else BF16_COMBINE_DIFF
        assert difference < bound, f"{way}, zero_copy={zero_copy}: {difference} >= {bound}"
        digest ^= hash_tensor(combined)
    return digest


def check_all(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace, seed: int
) -> int:
    """All loops of the original's test for one seed; returns a hash of all that was received."""
    torch.manual_seed(seed + buffer.rank)
    tensors = make_tensors(args, buffer.rank)
    problem = make_problem(args, group)
    digest, num_rounds = 0, 0
    for index, x in enumerate(tensors):
        for way in ways_to_dispatch():
            num_rounds += 1
            digest ^= check_round(
                buffer, x, problem, args, way, index == 0, num_dispatches=1 + num_rounds % 2
            )
            if args.quick:
                return digest
    return digest


# --- timing ---------------------------------------------------------------------------------------


def seconds(fn: Callable[[], None]) -> float:
    """How long `fn` takes, its work on the device included."""
    if DEVICE != "cuda":
        begin = time.perf_counter()
        fn()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    fn()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


def measure(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace, seed: int
) -> None:
    """Prints the original's lines. On the CPU backend these are times of ranks that share the
    machine's cores.
    """
    torch.manual_seed(seed + buffer.rank)
    x = torch.randn(args.num_tokens, args.hidden, device=DEVICE).bfloat16()
    problem = make_problem(args, group)
    num_selections = int((problem.topk_idx >= 0).sum())
    num_scales = args.hidden // 128
    dispatch_bytes = num_selections * (args.hidden + num_scales * 4 + 16)
    combine_bytes = num_selections * (
        args.hidden * 10 // 8 + num_scales * 4 if args.use_logfmt else args.hidden * 2
    )

    way = Dispatch(use_fp8=True, round_scale=False, use_ue8m0=False, hook=False)
    (data, scales), recv_count, handle = dispatch_problem(buffer, x, problem, args, way)
    expert_outputs = torch.empty(data.shape, dtype=torch.bfloat16, device=DEVICE)
    for i, count in enumerate(recv_count.tolist()):
        expert_outputs[i, :count] = reference.dequantise(data[i, :count], scales[i, :count])

    def times(hook: bool) -> dict[str, list[float]]:
        """Seconds of each phase, by name, in every round; warm-up rounds left out."""
        result: dict[str, list[float]] = {
            "dispatch": [],
            "dispatch recv": [],
            "combine": [],
            "combine recv": [],
        }
        rounds = CUDA_TIMED_ROUNDS if DEVICE == "cuda" else CPU_TIMED_ROUNDS
        for _ in range(2 + rounds):
            returned: tuple[Any, ...] = ()

            def send_tokens() -> None:
                nonlocal returned
                returned = buffer.low_latency_dispatch(
                    x, problem.topk_idx, args.num_tokens, args.num_experts, return_recv_hook=hook
                )

            def send_results() -> None:
                nonlocal returned
                returned = buffer.low_latency_combine(
                    expert_outputs, problem.topk_idx, problem.topk_weights, handle,
                    use_logfmt=args.use_logfmt, return_recv_hook=hook,
                )  # fmt: skip

            for name, send in (("dispatch", send_tokens), ("combine", send_results)):
                result[name].append(seconds(send))
                if hook:
                    result[f"{name} recv"].append(seconds(returned[-1]))
        return {name: values[2:] for name, values in result.items()}

    fused, phases = times(hook=False), times(hook=True)
    both = [d + c for d, c in zip(fused["dispatch"], fused["combine"])]
    average = {name: statistics.fmean(values) * 1e6 for name, values in fused.items() if values}
    phase = {name: statistics.fmean(values) * 1e6 for name, values in phases.items()}
    lines = (
        f"Dispatch + combine bandwidth: "
        f"{(dispatch_bytes + combine_bytes) / 1e9 / statistics.fmean(both):.2f} GB/s, "
        f"avg_t={statistics.fmean(both) * 1e6:.2f} us, "
        f"min_t={min(both) * 1e6:.2f} us, max_t={max(both) * 1e6:.2f} us",
        f"Dispatch bandwidth: {dispatch_bytes / 1e3 / average['dispatch']:.2f} GB/s, "
        f"avg_t={average['dispatch']:.2f} us | "
        f"Combine bandwidth: {combine_bytes / 1e3 / average['combine']:.2f} GB/s, "
        f"avg_t={average['combine']:.2f} us",
        f"Dispatch send/recv time: {phase['dispatch']:.2f} + {phase['dispatch recv']:.2f} us | "
        f"Combine send/recv time: {phase['combine']:.2f} + {phase['combine recv']:.2f} us",
    )
    for line in lines:
        sys.stdout.write(f"[rank {buffer.rank}] {line}\n")  # one write: ranks share the terminal
        sys.stdout.flush()
        dist.barrier(group)


# --- diagnosis ------------------------------------------------------------------------------------


def run_measured_iterations(buffer: deep_ep.Buffer, args: argparse.Namespace) -> None:
    """Iterations as a model does them, with the faults at work; the counters see nothing else.

    Nothing but dispatch and combine may bring the ranks together here: a collective in between
    would hide who is late.
    """
    generator = torch.Generator().manual_seed(args.seed * 1000 + buffer.rank)
    num_local_experts = args.num_experts // buffer.group_size
    expert_outputs = torch.empty(
        (num_local_experts, buffer.group_size * args.num_tokens, args.hidden),
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    x = torch.randn((args.num_tokens, args.hidden), generator=generator).bfloat16().to(DEVICE)
    weights = torch.rand((args.num_tokens, args.num_topk), generator=generator).to(DEVICE)
    buffer.enable_counters(ring=4 * DIAGNOSE_ITERATIONS)
    remove_faults = faults.apply(buffer, args.inject)
    for _ in range(DIAGNOSE_ITERATIONS):
        scores = torch.rand((args.num_tokens, args.num_experts), generator=generator)
        topk_idx = scores.topk(args.num_topk, dim=1).indices
        for fault in args.inject:
            if isinstance(fault, faults.HotRank):
                topk_idx = faults.skew_routing(
                    topk_idx, fault, args.num_experts, buffer.group_size, generator
                )
        topk_idx = topk_idx.to(DEVICE)
        (data, _), recv_count, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, args.num_tokens, args.num_experts
        )
        # Stands for the experts: work in proportion to the rows that arrived.
        for i, count in enumerate(recv_count.tolist()):
            expert_outputs[i, :count] = data[i, :count]
        buffer.low_latency_combine(expert_outputs, topk_idx, weights, handle)
    remove_faults()


def report_diagnosis(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace
) -> bool:
    """Prints heatmaps and verdicts on rank 0; returns on all ranks whether the verdicts are the
    injected faults.

    Without --inject any verdict is right: the machine may well be uneven.
    """
    diagnosis = diagnose.run(buffer)
    right = [True]
    if diagnosis is not None:
        console = Console(record=bool(args.save_svg))
        diagnose.report(diagnosis, console)
        if args.save_svg:
            diagnose.save_svg(console, args.save_svg)
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


# --- the program ----------------------------------------------------------------------------------


def run_rank(local_rank: int, num_local_ranks: int, store: str, args: argparse.Namespace) -> None:
    """One rank from start to end. Exits with status 1 where the results are right but the verdicts
    are not.
    """
    group = join(local_rank, num_local_ranks, store)
    num_ranks = group.size()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        args.num_tokens, args.hidden, num_ranks, args.num_experts
    )
    if local_rank == 0:
        print(f"Allocating buffer size: {size / 1e6} MB ...", flush=True)
    buffer = deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=args.num_experts // num_ranks,
        allow_nvlink_for_low_latency_mode=not args.disable_nvlink,
        explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl,
    )
    check_all(buffer, group, args, args.seed)
    if not args.quick:
        measure(buffer, group, args, args.seed)
    if args.pressure_test:
        check_under_pressure(buffer, group, args)
    right = True
    if args.diagnose:
        run_measured_iterations(buffer, args)
        right = report_diagnosis(buffer, group, args)
    buffer.destroy()
    dist.barrier(group)
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


def check_under_pressure(
    buffer: deep_ep.Buffer, group: dist.ProcessGroup, args: argparse.Namespace
) -> None:
    """The same seed must give the same bytes, every time."""
    for seed in range(args.seed, args.seed + args.pressure_seeds):
        if buffer.rank == 0:
            print(f"Testing with seed {seed} ...", flush=True)
        expected = check_all(buffer, group, args, seed)
        for repetition in range(PRESSURE_REPETITIONS):
            digest = check_all(buffer, group, args, seed)
            assert digest == expected, (
                f"seed {seed}, repetition {repetition}: other bytes than before"
            )


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


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one rank."""
    return "LOCAL_RANK" in os.environ


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    args = parse_arguments(argv)
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
                start_method=START_METHOD,
            )
        except mp.ProcessExitedException as error:
            return error.exit_code
        except mp.ProcessRaisedException as error:
            print(error, file=sys.stderr)
            return 1
    return 0


# --- pytest ---------------------------------------------------------------------------------------

PLAIN = Mode()
FP8 = Mode(use_fp8=True)
MODES = {
    "bf16": PLAIN,
    "bf16-hook": Mode(hook=True),
    "bf16-async": Mode(async_finish=True),
    "bf16-zero-copy": Mode(zero_copy=True),
    "bf16-zero-copy-hook": Mode(zero_copy=True, hook=True),
    "bf16-out": Mode(use_out=True),
    "logfmt": Mode(use_logfmt=True),
    "logfmt-hook": Mode(use_logfmt=True, hook=True),
    "fp8": FP8,
    "fp8-hook": Mode(use_fp8=True, hook=True),
    "fp8-async-out": Mode(use_fp8=True, async_finish=True, use_out=True),
    "fp8-round": Mode(use_fp8=True, round_scale=True),
    "fp8-ue8m0": Mode(use_fp8=True, round_scale=True, use_ue8m0=True),
    "fp8-ue8m0-hook-zero-copy": Mode(
        use_fp8=True, round_scale=True, use_ue8m0=True, hook=True, zero_copy=True
    ),
}
SMALL = Shape(
    num_tokens=(5, 0, 8, 3), num_max_tokens=8, hidden=512, num_experts=12, num_topk=4, dropped=0.2
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any group size up to 8, any tokens up to the maximum, any multiple of 128 channels, top-k up
    to 32.
    """
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    num_max_tokens = draw(st.integers(1, 12))
    tokens = st.one_of(st.just(0), st.just(num_max_tokens), st.integers(0, num_max_tokens))
    return Shape(
        num_tokens=tuple(draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks))),
        num_max_tokens=num_max_tokens,
        hidden=128 * draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16])),
        num_experts=num_ranks * draw(st.integers(1, 6)),
        num_topk=draw(st.sampled_from([1, 2, 3, 6, 8, 9, 11, 12, 31, 32])),
        routing=draw(st.sampled_from(["random", "repeats", "one-expert", "nowhere"])),
        dropped=draw(st.sampled_from([0.0, 0.1, 0.9])),
        seed=draw(st.integers(0, 2**20)),
    )


@given(shape=shapes(), mode=st.sampled_from(sorted(MODES)))
def test_any_exchange_equals_the_reference(shape: Shape, mode: str) -> None:
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_the_reference(mode: str) -> None:
    with ranks_for(SMALL) as ranks:
        exchange_and_check(ranks, SMALL, MODES[mode])


@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp8-ue8m0", "logfmt"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_any_group_size_works(num_ranks: int, mode: str) -> None:
    tokens = tuple((3 * rank) % 5 for rank in range(num_ranks))
    shape = Shape(tokens, num_max_tokens=4, hidden=1024, num_experts=2 * num_ranks, num_topk=2)
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, MODES[mode])


@pytest.mark.parametrize(
    "hidden", [128, 384, 896, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 8320]
)
def test_any_hidden_size_works(hidden: int) -> None:
    shape = Shape((3, 2), num_max_tokens=4, hidden=hidden, num_experts=4, num_topk=2)
    with ranks_for(shape) as ranks:
        for mode in ("bf16", "fp8", "fp8-ue8m0", "logfmt"):
            exchange_and_check(ranks, shape, MODES[mode])


@pytest.mark.parametrize("num_topk", [1, 12, 32])
def test_any_top_k_up_to_32_works(num_topk: int) -> None:
    shape = Shape(
        (6, 6), num_max_tokens=6, hidden=256, num_experts=64, num_topk=num_topk, dropped=0
    )
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, FP8)
        exchange_and_check(ranks, shape, PLAIN)


def test_many_experts_work() -> None:
    shape = Shape((9, 16), num_max_tokens=16, hidden=128, num_experts=512, num_topk=8)
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, FP8)


@pytest.mark.parametrize("routing", ["one-expert", "nowhere", "repeats"])
@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_extreme_routing_works(routing: str, mode: str) -> None:
    shape = replace(SMALL, num_tokens=(8, 8, 8, 8), routing=routing, dropped=0.0)
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, MODES[mode])


def test_a_group_without_any_token_gets_nothing() -> None:
    shape = replace(SMALL, num_tokens=(0, 0, 0, 0))
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, FP8)
        exchange_and_check(ranks, shape, PLAIN)


def test_many_operations_with_changing_inputs_and_modes_do_not_disturb_each_other() -> None:
    with ranks_for(SMALL) as ranks:
        for number in range(24):
            tokens = tuple((number * (rank + 3)) % 9 for rank in range(4))
            shape = replace(SMALL, num_tokens=tokens, seed=number)
            exchange_and_check(ranks, shape, list(MODES.values())[number % len(MODES)])


def test_smaller_shapes_run_on_the_same_buffer() -> None:
    others = [
        replace(SMALL, num_tokens=(4, 2, 0, 1), num_max_tokens=4, hidden=128),
        replace(SMALL, num_experts=4, num_topk=32),
        replace(SMALL, num_tokens=(1, 1, 1, 1), num_max_tokens=1, num_experts=8),
    ]
    with ranks_for(SMALL) as ranks:
        for shape in [SMALL, *others, SMALL, *others[::-1]]:
            exchange_and_check(ranks, shape, FP8)
            exchange_and_check(ranks, shape, Mode(zero_copy=True))


def test_two_dispatches_may_be_outstanding_and_combined_in_any_order() -> None:
    shapes = [SMALL, replace(SMALL, num_tokens=(8, 1, 0, 8), seed=7)]
    with ranks_for(SMALL) as ranks:
        inputs = [make_inputs(shape) for shape in shapes]
        received = [
            ranks.run(lambda rank, buffer, i=i: dispatch(buffer, inputs[i][rank], shapes[i], FP8))
            for i in range(2)
        ]
        for i in (1, 0):
            want = expected_dispatch(inputs[i], shapes[i], FP8)
            assert_received(received[i], want, shapes[i], FP8)
            ys = [experts(one, rank) for rank, one in enumerate(received[i])]
            combined = ranks.run(
                lambda rank, buffer, i=i, ys=ys: combine(
                    buffer, inputs[i][rank], received[i][rank].handle, ys[rank], PLAIN
                )
            )
            assert_combined(combined, expected_combine(inputs[i], ys, want))


@pytest.mark.parametrize("mode", ["bf16", "bf16-zero-copy", "logfmt"])
def test_a_handle_can_be_combined_repeatedly(mode: str) -> None:
    inputs = make_inputs(SMALL)
    with ranks_for(SMALL) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], SMALL, PLAIN))
        ys = [experts(one, rank) for rank, one in enumerate(received)]
        first, second, third = (
            ranks.run(
                lambda rank, buffer: combine(
                    buffer, inputs[rank], received[rank].handle, ys[rank], MODES[mode]
                )
            )
            for _ in range(3)
        )
    assert_combined(second, first)
    assert_combined(third, first)


def test_entries_dropped_after_the_dispatch_contribute_nothing() -> None:
    inputs = make_inputs(SMALL)
    with ranks_for(SMALL) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], SMALL, PLAIN))
        ys = [experts(one, rank) for rank, one in enumerate(received)]
        generator = torch.Generator().manual_seed(3)
        fewer = [
            one._replace(
                topk_idx=one.topk_idx.masked_fill(
                    torch.rand(one.topk_idx.shape, generator=generator) < 0.5, -1
                )
            )
            for one in inputs
        ]
        combined = ranks.run(
            lambda rank, buffer: combine(
                buffer, fewer[rank], received[rank].handle, ys[rank], PLAIN
            )
        )
    want = expected_combine(fewer, ys, expected_dispatch(inputs, SMALL, PLAIN))
    assert_combined(combined, want)


def test_combine_fuses_multiplication_and_addition() -> None:
    """Two nearly cancelling terms: what is left is mostly rounding, and tells how often it was
    done.
    """
    shape = Shape((8, 8), num_max_tokens=8, hidden=512, num_experts=14, num_topk=2)
    inputs = []
    for one in make_inputs(shape):
        weights = torch.rand(8, 1) + 0.5
        weights = torch.cat([weights, -weights * (1 + 2**-18)], dim=1)
        # Experts 0 and 7 make the same of a row, see apply_expert().
        inputs.append(one._replace(topk_idx=torch.tensor([[0, 7]] * 8), topk_weights=weights))
    with ranks_for(shape) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], shape, PLAIN))
        ys = [experts(one, rank) for rank, one in enumerate(received)]
        combined = ranks.run(
            lambda rank, buffer: combine(
                buffer, inputs[rank], received[rank].handle, ys[rank], PLAIN
            )
        )
    want = expected_combine(inputs, ys, expected_dispatch(inputs, shape, PLAIN))
    assert_combined(combined, want)


def test_bf16_dispatch_moves_bytes_unchanged() -> None:
    """NaN payloads, infinities, denormals, negative zero: clients send other types viewed as
    bfloat16.
    """
    patterns = torch.randint(-(2**15), 2**15, (8, SMALL.hidden), dtype=torch.int16)
    patterns[0, :6] = torch.tensor([0x7FC1, -1, 0x7F80, 1, -(2**15), 0x7F81], dtype=torch.int16)
    inputs = [
        one._replace(x=patterns[: len(one.x)].view(torch.bfloat16)) for one in make_inputs(SMALL)
    ]
    with ranks_for(SMALL) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], SMALL, PLAIN))
    assert_received(received, expected_dispatch(inputs, SMALL, PLAIN), SMALL, PLAIN)


def test_nan_columns_stay_nan_and_disturb_no_neighbour() -> None:
    inputs = make_inputs(SMALL)
    for one in inputs:
        one.x[:, 7] = torch.nan
    with ranks_for(SMALL) as ranks:
        exchanged = ranks.run(
            lambda rank, buffer: round_trip(buffer, inputs[rank], rank, SMALL, PLAIN)
        )
    for rank, combined in enumerate(exchanged):
        sent = (inputs[rank].topk_idx >= 0).any(1)
        assert combined.cpu()[sent, 7].isnan().all()
        assert not combined.cpu()[:, torch.arange(SMALL.hidden) != 7].isnan().any()


def test_cleaning_the_buffer_between_operations_changes_nothing() -> None:
    with ranks_for(SMALL) as ranks:
        for number in range(3):
            exchange_and_check(ranks, replace(SMALL, seed=number), FP8)
            ranks.run(
                lambda _, buffer: buffer.clean_low_latency_buffer(
                    SMALL.num_max_tokens, SMALL.hidden, SMALL.num_experts
                )
            )


def test_cumulative_statistics_add_up() -> None:
    inputs = make_inputs(SMALL)
    stats = [
        torch.full((SMALL.num_local_experts,), 100, dtype=torch.int32, device=DEVICE)
        for _ in inputs
    ]
    with ranks_for(SMALL) as ranks:
        for _ in range(3):
            received = ranks.run(
                lambda rank, buffer: dispatch(
                    buffer,
                    inputs[rank],
                    SMALL,
                    FP8,
                    cumulative_local_expert_recv_stats=stats[rank],
                )
            )
    for one, total in zip(received, stats):
        assert torch.equal(total, 100 + 3 * one.recv_count)


@pytest.mark.parametrize("square", [False, True], ids=["R", "RxR"])
def test_wait_cost_tensors_grow_in_the_own_row_only(square: bool) -> None:
    num_ranks = SMALL.num_ranks
    size = (num_ranks, num_ranks) if square else (num_ranks,)
    inputs = make_inputs(SMALL)
    costs = [
        [torch.full(size, 5, dtype=torch.int64, device=DEVICE) for _ in range(2)] for _ in inputs
    ]

    def exchange(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 2 and DEVICE == "cpu":  # so that the others do wait
            buffer.runtime.delay(3_000_000)
        received = dispatch(
            buffer, inputs[rank], SMALL, FP8, dispatch_wait_recv_cost_stats=costs[rank][0]
        )
        combine(
            buffer, inputs[rank], received.handle, experts(received, rank), PLAIN,
            combine_wait_recv_cost_stats=costs[rank][1],
        )  # fmt: skip

    with ranks_for(SMALL) as ranks:
        for _ in range(2):
            ranks.run(exchange)
    for rank in range(num_ranks):
        for tensor in costs[rank]:
            own = tensor[rank] if square else tensor
            assert (own >= 5).all()
            if square:
                assert (tensor[torch.arange(num_ranks) != rank] == 5).all()
        if rank != 2 and DEVICE == "cpu":
            own = costs[rank][0][rank] if square else costs[rank][0]
            assert own[2] > 5 + 3_000_000, "nobody seems to have waited for the delayed rank"


@pytest.mark.parametrize("context", ["inference_mode", "no_grad", "requires_grad"])
def test_autograd_state_does_not_matter(context: str) -> None:
    inputs = make_inputs(SMALL)

    def exchange(rank: int, buffer: deep_ep.Buffer) -> torch.Tensor:
        guard = nullcontext() if context == "requires_grad" else getattr(torch, context)()
        with guard:
            one = inputs[rank]
            if context == "requires_grad":
                one = one._replace(
                    x=one.x.clone().requires_grad_(),
                    topk_weights=one.topk_weights.clone().requires_grad_(),
                )
            return round_trip(buffer, one, rank, SMALL, PLAIN).detach().clone()

    with ranks_for(SMALL) as ranks:
        combined = ranks.run(exchange)
        plain = ranks.run(lambda rank, buffer: round_trip(buffer, inputs[rank], rank, SMALL, PLAIN))
    assert_combined(combined, plain)


def test_outputs_stay_valid_while_the_buffer_is_used_on() -> None:
    """Results are no aliases of the communication buffer."""
    inputs = make_inputs(SMALL)
    other = make_inputs(replace(SMALL, seed=9))
    with ranks_for(SMALL) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], SMALL, FP8))
        for _ in range(4):
            ranks.run(lambda rank, buffer: round_trip(buffer, other[rank], rank, SMALL, FP8))
    assert_received(received, expected_dispatch(inputs, SMALL, FP8), SMALL, FP8)


def test_nvlink_choice_does_not_change_results() -> None:
    with ranks_for(SMALL, allow_nvlink_for_low_latency_mode=False) as ranks:
        for mode in (FP8, PLAIN, Mode(zero_copy=True)):
            exchange_and_check(ranks, SMALL, mode)


@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_ranks_on_different_nodes_get_the_same_results(
    ranks_per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", ranks_per_node)
    with ranks_for(SMALL) as ranks:
        for name in ("fp8", "bf16-hook", "bf16-zero-copy", "logfmt"):
            exchange_and_check(ranks, SMALL, MODES[name])


@pytest.mark.parametrize("ranks_per_node", ["1", "2", "4"])
def test_dispatch_layout_counts_tokens_and_selections(
    ranks_per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated experts count a token once, a selection each time; -1 and experts of nobody count
    nowhere.
    """
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", ranks_per_node)
    num_experts = 12
    topk_idx = torch.randint(-1, num_experts, (50, 4))
    topk_idx[0] = -1
    topk_idx[1] = 5
    topk_idx[2, 0] = num_experts
    owner = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx // 3, -1)
    in_rank = torch.stack([(owner == rank).any(1) for rank in range(4)], dim=1)
    size = int(ranks_per_node)
    in_node = torch.stack(
        [
            (owner // size == node).any(1) & in_rank[:, node * size :][:, :size].any(1)
            for node in range(4 // size)
        ],
        dim=1,
    )
    with ranks_for(SMALL) as ranks:
        for rows in (50, 0):
            per_rank, per_node, per_expert, got, event = ranks.buffers[1].get_dispatch_layout(
                topk_idx[:rows].to(DEVICE), num_experts
            )
            assert event.event is None
            assert got.dtype == torch.bool
            assert torch.equal(got.cpu(), in_rank[:rows])
            assert per_rank.tolist() == in_rank[:rows].sum(0).tolist()
            want = torch.bincount(topk_idx[:rows].flatten() + 1, minlength=num_experts + 2)
            assert per_expert.tolist() == want[1 : num_experts + 1].tolist()
            if ranks_per_node == "4":
                assert per_node is None
            else:
                assert per_node.tolist() == in_node[:rows].sum(0).tolist()


def round_trip(
    buffer: deep_ep.Buffer, inputs: Inputs, rank: int, shape: Shape, mode: Mode
) -> torch.Tensor:
    """Dispatch, experts, combine of one rank."""
    received = dispatch(buffer, inputs, shape, mode)
    return combine(buffer, inputs, received.handle, experts(received, rank), mode)


def exchange_in_process(
    rank: int, group: dist.ProcessGroup, shape: Shape, modes: list[str]
) -> None:
    """One rank that is a process: exchanges and compares. All ranks know all inputs."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        shape.num_max_tokens, shape.hidden, shape.num_ranks, shape.num_experts
    )
    buffer = deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=shape.num_local_experts,
        explicitly_destroy=True,
    )
    inputs = make_inputs(shape)
    for name in modes:
        got = dispatch(buffer, inputs[rank], shape, MODES[name])
        want = expected_dispatch(inputs, shape, MODES[name])
        assert_received_one(got, want[rank], shape, MODES[name], f"rank {rank}, {name}")
        combined = combine(buffer, inputs[rank], got.handle, experts(got, rank), MODES[name])
        expected = reference.combine_one(
            rank, expected_experts(want), inputs[rank].topk_idx, inputs[rank].topk_weights, want
        )
        assert_same_bytes(combined.cpu(), expected, f"rank {rank}, {name}, combine")
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_processes_equal_the_reference_and_leave_no_shared_memory(num_ranks: int) -> None:
    tokens = tuple(range(5, 5 + num_ranks))
    shape = Shape(tokens, num_max_tokens=8, hidden=1024, num_experts=4 * num_ranks, num_topk=4)
    before = shared_memory_segments()
    modes = ["fp8", "bf16", "bf16-zero-copy-hook"]
    raise_failures(run_processes(exchange_in_process, num_ranks, shape, modes))
    assert not shared_memory_left(before)


@pytest.mark.slow
def test_production_shape_equals_the_reference() -> None:
    """DeepSeek-V3's decoding step: 128 tokens, 7168 channels, top 8 of 256 experts, 8 ranks."""
    tokens = (128,) * 8
    shape = Shape(
        tokens, num_max_tokens=128, hidden=7168, num_experts=256, num_topk=8, dropped=0.01
    )
    raise_failures(run_processes(exchange_in_process, 8, shape, ["fp8", "bf16-hook"]))


# --- the reference and the program ----------------------------------------------------------------


def test_reference_fma_rounds_once() -> None:
    """Against the C library's fmaf, on values whose exact sum lies next to a tie."""
    fmaf = ctypes.CDLL(None).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a = torch.randn(20_000).bfloat16()
    b = torch.ldexp(torch.randn(20_000), torch.randint(-30, 3, (20_000,)))
    c = torch.randn(20_000).bfloat16().float()
    want = torch.tensor([fmaf(*values) for values in zip(a.tolist(), b.tolist(), c.tolist())])
    assert torch.equal(reference.fma(a, b, c), want)


def test_reference_scales_are_powers_of_two_that_fit() -> None:
    x = torch.ldexp(torch.randn(64, 512), torch.randint(-20, 20, (64, 1))).bfloat16()
    data, scales = reference.cast_fp8(x, round_scale=True)
    assert torch.equal(torch.ldexp(torch.ones_like(scales), scales.log2().int()), scales)
    assert torch.equal(reference.unpack_ue8m0(reference.pack_ue8m0(scales)), scales)
    groups = x.float().unflatten(-1, (-1, 128)).abs().amax(-1)
    assert (groups / scales <= 448).all()
    assert (groups / scales > 224).logical_or(groups <= 1e-4).all()
    assert calc_diff(reference.dequantise(data, scales), x) < ROUNDED_SCALE_DIFF


def run_program(*arguments: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """This file as a program, on the cpu backend's default settings."""
    command = [sys.executable, *launcher, __file__, *arguments]
    package = str(Path(deep_ep.__file__).parent.parent)  # the one under test, installed or not
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )


REDUCED = (
    "--num-tokens",
    "32",
    "--hidden",
    "1024",
    "--num-experts",
    "64",
    "--num-topk",
    "4",
    "--quick",
)


@pytest.mark.parametrize(
    "injected",
    [
        ("slow-rank=3:2ms",),
        ("slow-path=2>5:1ms",),
        ("hot-rank=6",),
        ("slow-rank=1:3ms", "slow-path=4>2:2ms"),
    ],
    ids=" ".join,
)
def test_program_names_what_was_injected(injected: tuple[str, ...]) -> None:
    flags = [word for fault in injected for word in ("--inject", fault)]
    done = run_program(*REDUCED, "--diagnose", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the verdicts name what was injected, and nothing else" in done.stdout


def test_program_fails_when_a_fault_is_not_named() -> None:
    """A delay far below what matters is injected, so naming it would be wrong, and not naming it is
    a failure.
    """
    done = run_program(*REDUCED, "--inject", "slow-rank=3:1us")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "injected but not named" in done.stdout


@pytest.mark.slow
def test_program_at_full_size_checks_measures_and_diagnoses() -> None:
    done = run_program("--diagnose", "--inject", "slow-rank=3:2ms")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "Allocating buffer size:",
        "Dispatch + combine bandwidth:",
        "Dispatch send/recv time:",
    ):
        assert words in done.stdout


def test_program_repeats_itself_under_pressure() -> None:
    done = run_program(*REDUCED, "--num-processes", "4", "--pressure-test", "--pressure-seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_program_runs_every_loop_with_logfmt() -> None:
    done = run_program(
        "--num-processes", "2", "--num-tokens", "16", "--hidden", "1024", "--num-experts", "8",
        "--num-topk", "4", "--use-logfmt", "--disable-nvlink",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_program_runs_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = run_program(*REDUCED, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr


def test_program_says_that_shrinking_comes_later() -> None:
    done = run_program("--shrink-test")
    assert done.returncode == 2
    assert "later release" in done.stderr


if __name__ == "__main__":
    sys.exit(main())
