"""Operations of a group in a model of a GPU's time: the real kernels, simulated, with what a GPU takes for what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _normal_group
import _one_thread_group
from _counts import mean_sent, pairs_of, row_bytes, sent_bytes
from _one_thread_group import ROOT, GroupShape
from _simulated_ranks import SimulatedRanks

from deep_ep.types.config import Config

MODULE_FOLDER = ROOT / "build" / "time_model" / "deep_ep"
GPUS = Path(__file__).resolve().with_name("gpus.json")
# Costs of all GPUs, of which each may have other ones.
COMMON = "Hopper"
# Bytes that take a nanosecond; all other costs are nanoseconds.
RATE = "_bytes_per_ns"
HOPS = {True: "NVLink", False: "network"}
# In the first one the ranks agree on channels. The last one counts.
ROUNDS = 2


@dataclass(frozen=True)
class Launch:
    """One kernel, mean of the ranks.

    Attributes:
        us: what it takes.
        spent_us: where the time of a block goes, by `native.SPENT_FIELDS`.
        looks, looks_in_vain: of the warps of a rank, each at all that it waits for at the time.
    """

    us: float
    spent_us: Mapping[str, float]
    looks: float
    looks_in_vain: float


@dataclass(frozen=True)
class Operation:
    """One operation of the last round.

    Attributes:
        launches: by the kernel's name.
        us: of the operation's own kernel.
        sent: what a rank sends over each hop, by the names of the transport's counts; mean of the ranks.
        sent_bytes: all of it, as it is charged.
        rows: that a rank gets or sends, by hop, as DeepEP counts: over NVLink those from itself included, over the
            network one for each token and node, its own included.
        rows_bytes: their payload.
    """

    launches: Mapping[str, Launch]
    us: float
    sent: Mapping[str, Mapping[str, float]]
    sent_bytes: Mapping[str, float]
    rows: Mapping[str, float]
    rows_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Group:
    """Where operations run.

    Attributes:
        native: of `load`.
        costs: of a GPU, by `costs_of`.
        shape: of the group; at most 4 nodes have experts of a token.
        ranks_per_node: of each node.
        shrink: rows are simulated with so many times fewer bytes, which take as long; it saves memory. What a row
            takes besides its bytes, such as instructions of its sum, is left out to the same part.
    """

    native: Any
    costs: Mapping[str, float]
    shape: GroupShape
    ranks_per_node: int
    shrink: int = 1

    @property
    def num_nodes(self) -> int:
        return self.shape.num_ranks // self.ranks_per_node

    def small_shape(self) -> GroupShape:
        """Of the rows that are simulated."""
        return replace(self.shape, hidden=self.shape.hidden // self.shrink)

    def routes(self) -> list[list[int]]:
        """Random ones, by rank."""
        return _one_thread_group.random_routes(self.shape, num_nodes=self.num_nodes)


def gpus() -> list[str]:
    """Names of those that have costs."""
    return [name for name in json.loads(GPUS.read_text()) if name != COMMON]


def costs_of(gpu: str, measured: Path | None = None) -> dict[str, float]:
    """The costs of a GPU, without their sources.

    Args:
        gpu: one of `gpus()`.
        measured: a file of costs that count in the place of these, as `make gpu` writes it.
    """
    known = json.loads(GPUS.read_text())
    costs = known[COMMON] | known[gpu]
    if measured is not None:
        costs |= json.loads(measured.read_text())
    return {name: float(value) for name, (value, _source) in costs.items()}


def load() -> Any:
    """The native module that tells the time.

    Raises:
        SystemExit: it has not been built.
    """
    if not list(MODULE_FOLDER.glob("_cpu.*.so")):
        raise SystemExit(
            f"{MODULE_FOLDER} has no native module; see time_model.py for how to build it"
        )
    return _one_thread_group.load_native(MODULE_FOLDER)


def low_latency(group: Group) -> dict[str, Operation]:
    """FP8 dispatch and bf16 combine, by kernel."""
    shape, native, routes = group.small_shape(), group.native, group.routes()
    phases = native.PHASE_SEND | native.PHASE_RECEIVE
    rows = dict.fromkeys(HOPS.values(), shape.num_tokens * shape.num_topk)

    return _simulate(
        group,
        lambda rank: _one_thread_group.Rank(native, rank, shape, routes[rank], False),
        {
            "low_latency_dispatch": lambda rank: rank.dispatch(phases),
            "low_latency_combine": lambda rank: rank.combine(phases),
        },
        lambda rank: rows,
    )


def normal(
    group: Group,
    dispatch_config: Config,
    combine_config: Config,
    bulk_copies: bool = True,
    sums_by_pick: bool = False,
) -> dict[str, Operation]:
    """FP8 dispatch, with its notify, and bf16 combine, by kernel; sums as those of `ElasticBuffer` or of `Buffer`."""
    shape, routes = group.small_shape(), group.routes()
    experts_per_node = shape.num_experts // group.num_nodes
    queues = [_normal_group.Queues.of(config) for config in (dispatch_config, combine_config)]

    def rows(rank: _normal_group.Rank) -> Mapping[str, float]:
        entries = enumerate(rank.topk_idx)
        nodes = {(i // shape.num_topk, expert // experts_per_node) for i, expert in entries}
        return {"NVLink": rank.num_recv_rows, "network": len(nodes)}

    def make_rank(rank: int) -> _normal_group.Rank:
        return _normal_group.Rank(
            group.native,
            rank,
            shape,
            group.ranks_per_node,
            routes[rank],
            False,
            *queues,
            bulk_copies=bulk_copies,
            sums_by_pick=sums_by_pick,
        )

    rank_type = _normal_group.Rank
    operations = {"normal_dispatch": rank_type.dispatch, "normal_combine": rank_type.combine}
    return _simulate(group, make_rank, operations, rows)


def _simulate(
    group: Group,
    make_rank: Callable[[int], Any],
    operations: Mapping[str, Callable[[Any], None]],
    rows: Callable[[Any], Mapping[str, float]],
) -> dict[str, Operation]:
    """Runs the operations in turn, on all ranks at once.

    Args:
        make_rank: has a `runtime`; called on the rank's thread.
        operations: by kernel.
        rows: `Operation.rows` of a rank.
    """
    ranks = SimulatedRanks(group.native, group.shape.num_ranks, group.ranks_per_node)
    ranks.simulation.set_costs(
        {
            name: value / group.shrink if name.endswith(RATE) else value
            for name, value in group.costs.items()
        }
    )
    handles: dict[int, bytes] = {}
    # Of the last round, by kernel and rank.
    seen: dict[str, dict[int, tuple[Any, ...]]] = {kernel: {} for kernel in operations}

    def body(rank: int) -> None:
        this = make_rank(rank)
        ranks.connect(rank, this.runtime, handles)
        for number in range(ROUNDS):
            for kernel, call in operations.items():
                before = this.runtime.traffic()
                num_launches = len(ranks.simulation.launches(rank))
                ranks.meet((kernel, number), rank)
                call(this)
                launches = ranks.simulation.launches(rank)[num_launches:]
                seen[kernel][rank] = (before, this.runtime.traffic(), launches, rows(this))
        failure = this.runtime.take_failure()
        ranks.meet("ended", rank)
        this.runtime.close()
        if failure is not None:
            raise RuntimeError(f"rank {rank}: {failure}")

    ranks.run(body)
    return {
        kernel: _operation(group, kernel, [of_ranks[rank] for rank in range(ranks.num_ranks)])
        for kernel, of_ranks in seen.items()
    }


def _operation(group: Group, kernel: str, by_rank: Sequence[tuple[Any, ...]]) -> Operation:
    """The mean of all ranks."""
    before, after, launched, of_rank = zip(*by_rank)
    launches = {}
    for same in zip(*launched):
        names, begin_ns, end_ns, spent_ns, looks, in_vain = zip(*same)
        spent = [_mean(column) / 1e3 for column in zip(*spent_ns)]
        launches[names[0]] = Launch(
            (_mean(end_ns) - _mean(begin_ns)) / 1e3,
            dict(zip(group.native.SPENT_FIELDS, spent)),
            _mean(looks),
            _mean(in_vain),
        )
    num_ranks, per_node = group.shape.num_ranks, group.ranks_per_node
    sent = {
        hop: mean_sent(before, after, pairs_of(num_ranks, per_node, same_node))
        for same_node, hop in HOPS.items()
        if same_node or per_node < num_ranks
    }
    rows = {hop: _mean([of_hops[hop] for of_hops in of_rank]) for hop in sent}
    num_bytes = row_bytes(group.shape.hidden, kernel.endswith("dispatch"))
    return Operation(
        launches,
        launches[kernel].us,
        sent,
        {hop: group.shrink * sent_bytes(counts) for hop, counts in sent.items()},
        rows,
        {hop: of_hop * num_bytes for hop, of_hop in rows.items()},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
