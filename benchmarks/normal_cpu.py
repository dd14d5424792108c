"""Normal dispatch + combine on the cpu backend, side by side with the same exchange over gloo.

Both exchanges run in the same processes and alternate round by round, so that whatever else the
machine does hits both: where tokens go, FP8 rows with scales and top-k to every rank that has an
expert of theirs, BF16 rows back, their sum. The gloo version sorts by destination, exchanges with
torch.distributed.all_to_all_single, takes the same way back, and sums. A round's time is that of
its slowest rank; the ratio is that of the medians.

`--elastic` adds both layouts of `ElasticBuffer`. Its compact rows are compared with the same gloo exchange, the expanded
ones with one that puts rows by expert and adds up the rows of a token on each rank before they go back.

In the same rounds all ranks copy memory at once. What dispatch and combine must move, over the time
they take, is given as a share of what those copies reach. With several nodes, what crosses the network
is counted in a round of its own, and compared with the least: each token once for each node.

    python benchmarks/normal_cpu.py [--nodes 1 2] [--num-tokens 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DEEP_EP_BACKEND", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import deep_ep  # noqa: E402
from support import reference  # noqa: E402
from support.launch import raise_failures, run_processes  # noqa: E402

WARM_UP_ROUNDS = 1
# Of a copy: far more than caches hold.
COPIED_BYTES = 64 << 20
NUM_COPIES = 4


class Problem(NamedTuple):
    """One rank's tokens and their routing."""

    data: torch.Tensor  # [T, hidden] float8_e4m3fn
    scales: torch.Tensor  # [T, hidden / 128] float32
    topk_idx: torch.Tensor  # [T, K] int64, all selected
    topk_weights: torch.Tensor  # [T, K] float32
    num_experts: int


class Received(NamedTuple):
    """What one rank got, rows by source rank and token, and what combine needs."""

    data: torch.Tensor
    scales: torch.Tensor
    state: Any


class Gloo:
    """The exchange as one would write it with collectives: rows sorted by destination, one
    all-to-all each way.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows [sum(sent), ...] of bytes, in the order of their destinations."""
        result = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        dist.all_to_all_single(result, rows, received, sent, group=self.group)
        return result

    def dispatch(self, problem: Problem) -> Received:
        """One row per token and rank; experts are made local as dispatch does it."""
        num_local_experts = problem.num_experts // self.num_ranks
        num_tokens, num_topk = problem.topk_idx.shape
        in_rank = torch.zeros(num_tokens, self.num_ranks, dtype=torch.bool)
        in_rank.scatter_(1, problem.topk_idx // num_local_experts, True)
        ranks, tokens = in_rank.t().nonzero(as_tuple=True)
        sent = in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = sent.tolist(), received.tolist()
        experts = problem.topk_idx[tokens] - ranks[:, None] * num_local_experts
        elsewhere = (experts < 0) | (experts >= num_local_experts)
        parts = [
            problem.data.view(torch.uint8)[tokens],
            problem.scales.view(torch.uint8)[tokens],
            experts.masked_fill(elsewhere, -1).view(torch.uint8),
            problem.topk_weights[tokens].masked_fill(elsewhere, 0).view(torch.uint8),
        ]
        arrived = self.all_to_all(torch.cat(parts, dim=1), *splits)
        data, scales, experts, weights = (
            part.contiguous() for part in arrived.split([part.shape[1] for part in parts], dim=1)
        )
        return Received(
            data.view(torch.float8_e4m3fn),
            scales.view(torch.float32),
            (tokens, num_tokens, *splits, experts.view(torch.int64), weights),
        )

    def combine(self, ys: torch.Tensor, received: Received) -> torch.Tensor:
        """ys [received rows, hidden] bfloat16 -> [T, hidden] bfloat16."""
        tokens, num_tokens, sent, came, _, _ = received.state
        returned = self.all_to_all(ys.view(torch.uint8), came, sent).view(torch.bfloat16)
        total = torch.zeros(num_tokens, ys.shape[1])
        for rows, part in zip(tokens.split(sent), returned.split(sent)):
            total.index_add_(0, rows, part.float())
        return total.bfloat16()


class GlooByExpert(Gloo):
    """The same, and each rank has its rows by expert, as grouped matrix products take them."""

    def dispatch(self, problem: Problem) -> Received:
        """A row for each pick; which row of the exchange it is belongs to the state."""
        received = super().dispatch(problem)
        *state, experts, _ = received.state
        order = experts.flatten().argsort(stable=True)[int((experts < 0).sum()) :]
        rows = order // experts.shape[1]
        data = received.data.view(torch.uint8)[rows].view(received.data.dtype)
        return Received(data, received.scales[rows], (*state, rows, len(experts)))

    def combine(self, ys: torch.Tensor, received: Received) -> torch.Tensor:
        """Rows of a token are added up before they go back."""
        *state, rows, num_rows = received.state
        sums = torch.zeros(num_rows, ys.shape[1]).index_add_(0, rows, ys.float()).bfloat16()
        return super().combine(sums, received._replace(state=(*state, None, None)))


class Ours:
    """The same with deep_ep: layout, dispatch, combine."""

    def __init__(self, group: dist.ProcessGroup, args: argparse.Namespace) -> None:
        num_ranks = group.size()
        self.configs = (
            deep_ep.Buffer.get_dispatch_config(num_ranks),
            deep_ep.Buffer.get_combine_config(num_ranks),
        )
        row_bytes = args.hidden * 2
        self.buffer = deep_ep.Buffer(
            group,
            max(c.get_nvl_buffer_size_hint(row_bytes, num_ranks) for c in self.configs),
            max(c.get_rdma_buffer_size_hint(row_bytes, num_ranks) for c in self.configs),
            explicitly_destroy=True,
        )

    def dispatch(self, problem: Problem) -> Received:
        """The handle is the state."""
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            problem.topk_idx, problem.num_experts
        )
        (data, scales), _, _, _, handle, _ = self.buffer.dispatch(
            (problem.data, problem.scales),
            None,
            per_rank,
            per_node,
            in_rank,
            per_expert,
            problem.topk_idx,
            problem.topk_weights,
            config=self.configs[0],
        )
        return Received(data, scales, handle)

    def combine(self, ys: torch.Tensor, received: Received) -> torch.Tensor:
        combined: torch.Tensor = self.buffer.combine(ys, received.state, config=self.configs[1])[0]
        return combined


class Elastic:
    """The same with DeepEP V2's calls, in one of the two layouts."""

    def __init__(
        self, group: dist.ProcessGroup, args: argparse.Namespace, *, do_expand: bool
    ) -> None:
        sizes = {"hidden": args.hidden, "num_topk": args.num_topk}
        self.buffer = deep_ep.ElasticBuffer(
            group, num_max_tokens_per_rank=args.num_tokens, explicitly_destroy=True, **sizes
        )
        self.do_expand = do_expand

    def dispatch(self, problem: Problem) -> Received:
        """The handle is the state."""
        (data, scales), _, _, handle, _ = self.buffer.dispatch(
            (problem.data, problem.scales),
            problem.topk_idx,
            problem.topk_weights,
            num_experts=problem.num_experts,
            do_expand=self.do_expand,
        )
        return Received(data, scales, handle)

    def combine(self, ys: torch.Tensor, received: Received) -> torch.Tensor:
        return self.buffer.combine(ys, received.state)[0]


def make_problem(rank: int, args: argparse.Namespace) -> Problem:
    """Random tokens, distinct experts."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(args.num_tokens, args.hidden, generator=generator).bfloat16()
    scores = torch.rand(args.num_tokens, args.num_experts, generator=generator)
    topk_idx = scores.topk(args.num_topk, dim=1).indices
    weights = torch.rand(args.num_tokens, args.num_topk, generator=generator)
    return Problem(*reference.cast_fp8(x), topk_idx, weights, args.num_experts)


def rows_to_relay(rank: int, num_ranks: int, problem: Problem, args: argparse.Namespace) -> int:
    """Tokens of this rank for other nodes, once for each."""
    experts_per_node = problem.num_experts // args.num_nodes
    in_node = torch.zeros(args.num_tokens, args.num_nodes, dtype=torch.bool)
    in_node.scatter_(1, problem.topk_idx // experts_per_node, True)
    in_node[:, rank // (num_ranks // args.num_nodes)] = False
    return int(in_node.sum())


def bytes_to_move(
    rank: int, num_ranks: int, received: Received, problem: Problem, args: argparse.Namespace
) -> dict[str, float]:
    """Of this rank's share, by phase: rows for it, and those of its tokens that another node relays."""
    num_rows = len(received.data) + rows_to_relay(rank, num_ranks, problem, args)
    row_bytes = args.hidden + problem.scales.shape[1] * 4 + args.num_topk * 12
    return {"dispatch": num_rows * row_bytes, "combine": num_rows * args.hidden * 2}


class Crossing(NamedTuple):
    """What one rank has to do with the network in one operation."""

    rows_came: int  # to this rank
    least_rows: int  # of this rank for other nodes: dispatch sends them, combine gets them back
    row_bytes: int  # payload
    bytes_sent: int  # by this rank, all of them


def count_crossing(
    ours: Ours | Elastic, problem: Problem, ys: torch.Tensor, args: argparse.Namespace
) -> dict[str, Crossing]:
    """By operation, in a round of its own."""
    buffer = ours.buffer.buffer if isinstance(ours, Elastic) else ours.buffer
    rank, num_ranks = buffer.rank, buffer.group_size
    elsewhere = torch.arange(num_ranks) // (num_ranks // args.num_nodes)
    elsewhere = elsewhere != elsewhere[rank]

    def bytes_sent() -> int:
        paths = [path for path, far in zip(buffer.runtime.native.traffic()["to"], elsewhere) if far]
        return sum(path["put_bytes"] + 8 * (path["words"] + path["signals"]) for path in paths)

    buffer.enable_counters()
    sent = [bytes_sent()]
    received = ours.dispatch(problem)
    sent.append(bytes_sent())
    ours.combine(ys, received)
    sent.append(bytes_sent())
    counters = buffer.normal_relay_dispatch_counters, buffer.normal_combine_counters
    came = [int(one.snapshot()["tokens"][elsewhere.numpy()].sum()) for one in counters]
    buffer.disable_counters()
    least_rows = rows_to_relay(rank, num_ranks, problem, args)
    entries = args.num_topk * 8  # as they travel
    row_bytes = args.hidden + problem.scales.shape[1] * 4 + entries, args.hidden * 2
    return {
        name: Crossing(came[i], least_rows, row_bytes[i], sent[i + 1] - sent[i])
        for i, name in enumerate(("dispatch", "combine"))
    }


def exchanges(group: dist.ProcessGroup, args: argparse.Namespace) -> dict[str, Any]:
    """By name, each beside the one over gloo that it is compared with, which comes first."""
    found: dict[str, Any] = {"gloo": Gloo(group), "deep_ep": Ours(group, args)}
    if args.elastic:
        found["V2 compact"] = Elastic(group, args, do_expand=False)
        found["gloo by expert"] = GlooByExpert(group)
        found["V2 expanded"] = Elastic(group, args, do_expand=True)
    return found


def dequantised(received: Received) -> torch.Tensor:
    """What the experts would return."""
    parts = zip(received.data.split(1024), received.scales.split(1024))
    return torch.cat([reference.dequantise(*part) for part in parts])


def run_rank(rank: int, group: dist.ProcessGroup, args: argparse.Namespace) -> dict[str, Any]:
    """One rank: alternating rounds of all exchanges and of copies. Returns seconds per round and
    phase, and bytes.
    """
    problem = make_problem(rank, args)
    known = exchanges(group, args)
    times: dict[str, list[float]] = {}

    def timed(name: str, fn: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = fn()
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    # What the experts would return is made once for each layout; only the exchange is timed.
    rows: dict[str, torch.Tensor] = {}
    crossing: dict[str, Crossing] = {}
    for name, exchange in known.items():
        received = exchange.dispatch(problem)
        if name.startswith("gloo"):
            expected, rows[name] = received, dequantised(received)
            ys = rows[name]
            continue
        for mine, theirs in zip(received[:2], expected[:2]):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), "rows differ"
        rows[name] = ys
        if name == "deep_ep":
            to_move = bytes_to_move(rank, group.size(), received, problem, args)
        if args.num_nodes > 1:
            counted = count_crossing(exchange, problem, ys, args)
            crossing |= {f"{name}, {phase}": found for phase, found in counted.items()}
    del received, expected
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def round_of(name: str) -> torch.Tensor:
        exchange = known[name]
        dist.barrier(group)
        begin = time.perf_counter()
        received = timed(f"{name} dispatch", lambda: exchange.dispatch(problem))
        received = received._replace(data=None, scales=None)
        combined = timed(f"{name} combine", lambda: exchange.combine(rows[name], received))
        times.setdefault(name, []).append(time.perf_counter() - begin)
        return combined

    def copy() -> None:
        for _ in range(NUM_COPIES):
            target.copy_(source)

    for _ in range(WARM_UP_ROUNDS + args.rounds):
        combined = {name: round_of(name) for name in known}
        dist.barrier(group)
        timed("copy", copy)
    for name, mine in combined.items():
        if name.startswith("gloo"):
            theirs = mine.float()
        difference = (mine.float() - theirs).abs().max()
        assert difference <= 2**-6 * theirs.abs().max(), f"{name} and gloo disagree"
    for exchange in known.values():
        if hasattr(exchange, "buffer"):
            exchange.buffer.destroy()
    return {
        "times": {name: values[WARM_UP_ROUNDS:] for name, values in times.items()},
        "bytes": to_move,
        "crossing": crossing,
    }


def report(results: list[dict[str, Any]]) -> None:
    """Prints a line per exchange, the ratio, and the shares of what copies reach."""
    medians = {
        name: statistics.median(map(max, zip(*(one["times"][name] for one in results))))
        for name in results[0]["times"]
    }
    names = [name for name in medians if f"{name} dispatch" in medians]
    for name in names:
        if name.startswith("gloo"):
            compared = medians[name]
        print(
            f"  {name:14} {medians[name] * 1e3:6.0f} ms a round (median of the slowest rank; dispatch "
            f"{medians[f'{name} dispatch'] * 1e3:.0f}, combine {medians[f'{name} combine'] * 1e3:.0f}), "
            f"ratio {compared / medians[name]:.2f} x"
        )
    copied = len(results) * COPIED_BYTES * NUM_COPIES / medians["copy"]
    print(f"  copies   {copied / 1e9:8.2f} GB/s, of all ranks at once")
    for phase in ("dispatch", "combine"):
        total = sum(one["bytes"][phase] for one in results)
        rate = total / medians[f"deep_ep {phase}"]
        print(
            f"  {phase:8} {rate / 1e9:8.2f} GB/s of the {total / 1e9:.2f} GB that must move: "
            f"{rate / copied:.0%} of copies"
        )
    for phase in results[0]["crossing"]:
        ranks = [one["crossing"][phase] for one in results]
        least_rows = sum(one.least_rows for one in ranks)
        payload = sum(one.least_rows * one.row_bytes for one in ranks)
        print(
            f"  network, {phase}: {sum(one.rows_came for one in ranks) / least_rows:.2f} of the least rows; "
            f"{sum(one.bytes_sent for one in ranks) / payload:.4f} of their {payload / 1e9:.3f} GB with headers"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-processes", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="of equal size")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elastic", action="store_true", help="ElasticBuffer, too")
    args = parser.parse_args()
    print(
        f"{args.num_tokens} tokens x {args.hidden} x top-{args.num_topk} of {args.num_experts} experts, FP8 dispatch, "
        f"BF16 combine; {os.cpu_count()} cores; torch {torch.__version__}"
    )
    for num_nodes in args.nodes:
        args.num_nodes = num_nodes
        ranks_per_node = args.num_processes // num_nodes
        print(f"EP{args.num_processes}, {num_nodes} x {ranks_per_node}", flush=True)
        env = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)}
        outcomes = run_processes(run_rank, args.num_processes, args, env=env, timeout_s=900)
        report(raise_failures(outcomes))


if __name__ == "__main__":
    main()
