"""The low-latency exchange, end to end: a program with DeepEP's options, and pytest tests (low_latency_cases.py).

As a program it spawns the ranks (or takes its place under torchrun), repeats the checks of the
original's test, and measures. With --diagnose it then shows who waited for whom; with --inject it
makes a rank, a path or an expert slow first, and succeeds only if the verdicts name exactly that:

    python tests/test_low_latency.py --num-processes 8 --diagnose --inject slow-rank=3:2ms
    torchrun --nproc-per-node 4 tests/test_low_latency.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import deep_ep
from deep_ep.utils.math import calc_diff, hash_tensor
from deep_ep.utils.testing import seconds
from support import reference
from support.launch import DEVICE
from support.program import (
    add_diagnosis_options,
    check_under_pressure,
    end_of_run,
    inject_into_routing,
    join,
    option_parser,
    parse_faults,
    start,
)

RANK_OFFSET = 128  # keeps rank - offset negative and exact in bfloat16
NUM_MARKED = 128  # last channels of the first tensor: the token's index

PRESSURE_REPETITIONS = 20
DIAGNOSE_ITERATIONS = 48
CPU_TIMED_ROUNDS, CUDA_TIMED_ROUNDS = 8, 30
# Who stops at its first call of a kind with --shrink-test, and how long the others wait for it. Ranks that share
# cores may be some seconds apart.
STOPS = {"dispatch": 1, "combine": 3, "clean": 5}
SHRINK_TIMEOUT_S = 30


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


class Stopped(Exception):
    """This rank calls nothing any more."""


class Shrinking:
    """What --shrink-test expects of one rank's masks; without the option, that nobody stops."""

    def __init__(self, buffer: deep_ep.Buffer) -> None:
        self._buffer = buffer
        self.masked: set[int] = set()

    def begin(self, call: str) -> None:
        """Before each call.

        Raises:
            Stopped: this rank stops here.
        """
        if self._buffer.enable_shrink and self._buffer.rank == STOPS[call]:
            raise Stopped

    def end(self, call: str) -> None:
        """After each call: exactly those are masked who have stopped by now."""
        if not self._buffer.enable_shrink:
            return
        self.masked |= {STOPS[call]} & set(range(self._buffer.group_size))
        status = torch.empty(self._buffer.group_size, dtype=torch.int32, device=DEVICE)
        self._buffer.low_latency_query_mask_buffer(status)
        found = set(status.nonzero().flatten().tolist())
        assert found == self.masked, f"{call}: masked are {found}, not {self.masked}"

    def is_masked(self, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Which entries select an expert of a masked rank, or none."""
        owners = topk_idx // (num_experts // self._buffer.group_size)
        away = torch.tensor(sorted(self.masked), dtype=owners.dtype, device=owners.device)
        return torch.isin(owners, away) | (topk_idx == -1)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The original's options, then ours."""
    parser = option_parser(__doc__, num_tokens=128, num_experts=288)
    parser.add_argument("--disable-nvlink", action="store_true", help="keep off NVLink")
    parser.add_argument("--use-logfmt", action="store_true", help="10-bit combine on the wire")
    parser.add_argument("--pressure-test", action="store_true", help="repeat and compare hashes")
    parser.add_argument(
        "--shrink-test", action="store_true", help="ranks 1, 3, 5 stop; the rest masks them"
    )
    ours = parser.add_argument_group("not in the original")
    ours.add_argument("--seed", type=int, default=1, help="seed of rank 0; rank r adds r (1)")
    ours.add_argument("--pressure-seeds", type=int, default=4, help="seeds of --pressure-test (4)")
    ours.add_argument(
        "--quick", action="store_true", help="one check and no timing before --diagnose"
    )
    add_diagnosis_options(ours)
    args = parser.parse_args(argv)
    if args.shrink_test:
        # Three ranks are waited for in vain, once each. An environment that says otherwise counts.
        os.environ.setdefault("DEEP_EP_TIMEOUT_S", str(SHRINK_TIMEOUT_S))
    parse_faults(parser, args)
    return args


# --- the checks -----------------------------------------------------------------------------------


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
        assert calc_diff(rows[:, -1], indices.view(-1)) < reference.ROUNDED_SCALE_DIFF
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
    shrinking: Shrinking,
) -> int:
    """One tensor through dispatch and both forms of combine, checked; returns a hash of all that
    was received.
    """
    for _ in range(
        num_dispatches
    ):  # twice now and then, so that both halves of the buffer are used
        shrinking.begin("dispatch")
        recv_x, recv_count, handle = dispatch_problem(buffer, x, problem, args, way)
        shrinking.end("dispatch")
    src_info, layout_range = handle[:2]
    heard_of = problem.all_topk_idx.clone()
    heard_of[sorted(shrinking.masked)] = -1
    problem = problem._replace(all_topk_idx=heard_of)
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

    for zero_copy in (False,) if args.use_logfmt else (False, True):
        if zero_copy:
            target = buffer.get_next_low_latency_combine_buffer(handle)
            for i, count in enumerate(recv_count.tolist()):
                target[i, :count] = expert_outputs[i, :count]
        shrinking.begin("combine")
        combined = combine_problem(
            buffer, expert_outputs, problem, handle, way.hook,
            use_logfmt=args.use_logfmt, zero_copy=zero_copy,
        )  # fmt: skip
        shrinking.end("combine")
        unheard = shrinking.is_masked(problem.topk_idx, args.num_experts)
        expected = x * problem.topk_weights.masked_fill(unheard, 0).sum(1).view(-1, 1)
        assert not combined.isnan().any()
        difference = calc_diff(expected, combined)
        bound = reference.FP8_COMBINE_DIFF if way.use_fp8 else reference.BF16_COMBINE_DIFF
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
    shrinking = Shrinking(buffer)
    for index, x in enumerate(tensors):
        for way in ways_to_dispatch():
            num_rounds += 1
            digest ^= check_round(
                buffer, x, problem, args, way, index == 0, 1 + num_rounds % 2, shrinking
            )
            if args.shrink_test:
                shrinking.begin("clean")
                buffer.clean_low_latency_buffer(args.num_tokens, args.hidden, args.num_experts)
                shrinking.end("clean")
            if args.quick:
                return digest
    return digest


# --- timing ---------------------------------------------------------------------------------------


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
    num_scales = args.hidden // reference.FP8_GROUP
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


def iteration_of(buffer: deep_ep.Buffer, args: argparse.Namespace) -> Callable[[], None]:
    """Dispatch and combine as a model does them, with another routing every time."""
    generator = torch.Generator().manual_seed(args.seed * 1000 + buffer.rank)
    num_local_experts = args.num_experts // buffer.group_size
    expert_outputs = torch.empty(
        (num_local_experts, buffer.group_size * args.num_tokens, args.hidden),
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    x = torch.randn((args.num_tokens, args.hidden), generator=generator).bfloat16().to(DEVICE)
    weights = torch.rand((args.num_tokens, args.num_topk), generator=generator).to(DEVICE)

    def iterate() -> None:
        scores = torch.rand((args.num_tokens, args.num_experts), generator=generator)
        topk_idx = scores.topk(args.num_topk, dim=1).indices
        topk_idx = inject_into_routing(topk_idx, args, buffer.group_size, generator).to(DEVICE)
        (data, _), recv_count, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, args.num_tokens, args.num_experts
        )
        # Stands for the experts: work in proportion to the rows that arrived.
        for i, count in enumerate(recv_count.tolist()):
            expert_outputs[i, :count] = data[i, :count]
        buffer.low_latency_combine(expert_outputs, topk_idx, weights, handle)

    return iterate


# --- the program ----------------------------------------------------------------------------------


def run_rank(local_rank: int, num_local_ranks: int, store: str, args: argparse.Namespace) -> None:
    """One rank from start to end."""
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
        enable_shrink=args.shrink_test,
    )
    with contextlib.suppress(Stopped):
        check_all(buffer, group, args, args.seed)
    if args.shrink_test:
        dist.barrier(group)  # who has stopped waits for the end of the others
        if buffer.rank == 0:
            print(f"masked: {buffer.why_masked()}", flush=True)
    if not args.quick and not args.shrink_test:
        measure(buffer, group, args, args.seed)
    if args.pressure_test:
        seeds = range(args.seed, args.seed + args.pressure_seeds)
        check_under_pressure(
            buffer, seeds, PRESSURE_REPETITIONS, lambda seed: check_all(buffer, group, args, seed)
        )
    end_of_run(buffer, group, args, DIAGNOSE_ITERATIONS, iteration_of)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    return start(run_rank, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
if "pytest" in sys.modules:  # pytest's import, not a run of the program
    from support.low_latency_cases import *  # noqa: F403
