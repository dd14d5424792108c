"""Verdicts from cumulative waiting alone: matrices of other kernels, other tools, old logs.

The sums of waiting are taken apart into what a receiver does to all its sources (its row), what a
source does to all its receivers (its column), and single paths:

    wait[i, j] = level(kind of link) + row[i] + column[j] + excess[i, j]

Sources come first. A late source hardly waits itself, so its row is small and says nothing; it is
left out of everything that follows. Locations are quantiles that up to half of the group may
spoil. What happens by chance is bounded with tails as heavy as those of an exponential
distribution, heavier than a sum over many operations has them.

Without timestamps nobody knows when a source started, so a late source and a slow link out of it
look the same. Verdicts name a side, not a cause. With two nodes, most ranks of one of them being
late looks like a slow direction between the nodes and its other ranks coming early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.findings import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Diagnosis,
    FloatArray,
    IntArray,
    Measured,
    Verdict,
)
from deep_ep.diagnose.stats import MAD_TO_SIGMA, healthy, median_of
from deep_ep.errors import EPArgumentError, ranks_text

BoolArray = npt.NDArray[np.bool_]

SENDER_SIDE, RECEIVER_SIDE, PAIR = "sender side", "receiver side", "pair"
_KINDS = {SENDER_SIDE: COMP_SLOW, RECEIVER_SIDE: MIXED_SLOW, PAIR: COMM_SLOW}
_NEXT_STEPS = {
    SENDER_SIDE: "Compare when this rank enters the operation with the other ranks: without "
    "timestamps a late sender and a slow outgoing link look the same.",
    RECEIVER_SIDE: "Compare tokens received and the time of entering with the other ranks: without "
    "timestamps many tokens, a slow incoming link and a rank that comes early look the same.",
    PAIR: "Test the link between the two (errors, width, routing); without timestamps the "
    "direction of the data is all that is known.",
}

# A lower quartile of a row is healthy while half of the ranks are late; a lower median of a column too.
_LOW, _MIDDLE = 0.25, 0.5
# Effects below this share of what is healthy, and of the receiver's largest waiting, are not named.
_OF_LEVEL, _OF_LARGEST = 0.25, 0.05
# And below so many standard deviations between healthy members. Chosen, not tuned.
_SPREADS = 6.0
# Chance of any false verdict of one sort (sources, receivers, paths) in a healthy window.
_BY_CHANCE = 0.002
# A node of fewer ranks has too few cells to be looked at by itself.
_MIN_PER_NODE = 4
# Up to so many nodes one rank more or less decides what is usual between them.
_FEW_NODES = 4
# Ranks named late make room for others; that settles within a few rounds.
_MAX_ROUNDS = 6
# Waiting between nodes is so many times that within nodes where they are told apart without names.
_NODE_RATIO = 2.0
# Of two ranks one is named when it is waited for so many times longer, over that many operations.
_PAIR_RATIO, _PAIR_OPERATIONS = 3.0, 16
# Degrees of freedom up to which both sides of the noise are looked at, and the fewest that tell
# anything about it: those of 4 ranks.
_FEW, _FEWEST = 12.0, 5.0
# More cells than this know no better how noisy they are.
_SAMPLE = 50_000


def judge_waits(
    matrix: Any,
    *,
    operation: str = "dispatch",
    hosts: Sequence[str] | None = None,
    operations: int | None = None,
    unit_ns: float | None = None,
    delta_ns: float = 0.0,
) -> Diagnosis:
    """Verdicts from a matrix of summed waiting. Scale-free: only proportions decide.

    Args:
        matrix: [n, n] numbers >= 0 (list, array, tensor), rows wait, columns are waited for; the
            diagonal is ignored. A row of NaN is a rank that did not report.
        operation: what to call it in the verdicts.
        hosts: [n] host names, to tell links within a node from those between nodes; without them
            nodes are looked for in the matrix.
        operations: how many operations the sums cover; effects are per operation then, otherwise
            of the whole window.
        unit_ns: nanoseconds of one unit of the matrix; nanoseconds are assumed unless given.
        delta_ns: the smallest effect of interest, in nanoseconds per operation (or of the window).

    Returns:
        A Diagnosis with source "waits". Times of verdicts and of `measured` are in microseconds.

    Raises:
        EPArgumentError: not a square matrix of finite numbers >= 0, or another argument is wrong.
    """
    wait = square_matrix("judge_waits", matrix, missing_rows=True)
    num_ranks = wait.shape[0]
    _check_arguments(num_ranks, hosts, operations, unit_ns, delta_ns)
    missing: BoolArray = np.asarray(np.isnan(wait).all(axis=1))
    np.fill_diagonal(wait, np.nan)
    to_us = (1.0 if unit_ns is None else unit_ns) / (operations or 1) / 1e3

    nodes, guessed = _nodes(wait, hosts)
    if num_ranks == 2:
        causes = _of_two(wait, operations)
    elif num_ranks > 2:
        causes = _causes(wait, nodes)
    else:
        causes = []
    causes = [cause for cause in causes if cause.effect * to_us * 1e3 > delta_ns]
    rank_hosts = tuple(hosts) if hosts is not None else ("?",) * num_ranks
    devices = _devices(nodes)
    found = _Window(wait, to_us, operation, rank_hosts if hosts is not None else (), devices, nodes)
    verdicts = sorted((found.verdict(cause) for cause in causes), key=lambda v: -v.effect_us)
    return Diagnosis(
        measured={operation: _measured(wait * to_us, operation, operations)},
        verdicts=verdicts,
        remarks=_remarks(wait, missing, guessed, unit_ns, operations, bool(verdicts)),
        hosts=tuple("" if gone else host for host, gone in zip(rank_hosts, missing)),
        devices=tuple(-1 if gone else d for d, gone in zip(devices, missing)),
        # One node is what is left where nodes are not known.
        nodes=tuple(np.where(missing, -1, nodes).tolist()) if nodes.any() else (),
        savings_us={operation: found.saving_of_all(causes)},
        source="waits",
    )


def square_matrix(where: str, matrix: Any, *, missing_rows: bool = False) -> FloatArray:
    """A new [n, n] float64 array of finite numbers >= 0.

    Args:
        where: the function to name in errors.
        matrix: what the caller passed.
        missing_rows: whether ranks may be missing: rows of NaN, and NaN in their columns.

    Raises:
        EPArgumentError: it is anything else.
    """
    given = matrix.detach().cpu().numpy() if hasattr(matrix, "detach") else matrix
    what = f"{where}: the matrix must be [n, n] numbers, row i what rank i waited for each rank"
    try:
        array = np.asarray(given)
    except ValueError:
        raise EPArgumentError(
            f"{what}; its rows differ in length. Pass n rows of n numbers."
        ) from None
    if array.dtype.kind not in "biuf":
        raise EPArgumentError(
            f"{what}; this one holds {array.dtype.name} values. Convert them to integers or floats."
        )
    if array.ndim != 2 or array.size == 0:
        raise EPArgumentError(
            f"{what}; this one has shape {list(array.shape)}. Pass two dimensions of equal length."
        )
    if array.shape[0] != array.shape[1]:
        raise EPArgumentError(
            f"{what}; this one has {array.shape[0]} rows and {array.shape[1]} columns. Pass one row "
            "per rank; a rank that did not report gets a row of NaN."
        )
    values = array.astype(np.float64)
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0]
        raise EPArgumentError(
            f"{what}, all finite; [{row}][{column}] is {values[row, column]}. Correct that rank's row."
        )
    _check_unknown(what, values, missing_rows)
    if (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise EPArgumentError(
            f"{what}, 0 or more; [{row}][{column}] is {values[row, column]:g}. A counter was reset or "
            "wrapped between two readings; take the later reading as it is."
        )
    return values


def _check_unknown(what: str, values: FloatArray, missing_rows: bool) -> None:
    unknown = np.isnan(values)
    allowed = np.zeros(values.shape, bool)
    if missing_rows:
        gone = np.flatnonzero(unknown.all(axis=1))
        allowed[gone] = allowed[:, gone] = True
        np.fill_diagonal(allowed, True)
    if (unknown & ~allowed).any():
        row, column = np.argwhere(unknown & ~allowed)[0]
        raise EPArgumentError(
            f"{what}; [{row}][{column}] is NaN. "
            + (
                "Only whole rows may be NaN: ranks that did not report."
                if missing_rows
                else "Leave ranks that did not report to judge_waits, which takes rows of NaN."
            )
        )


def _check_arguments(
    num_ranks: int,
    hosts: Sequence[str] | None,
    operations: int | None,
    unit_ns: float | None,
    delta_ns: float,
) -> None:
    if hosts is not None and len(hosts) != num_ranks:
        raise EPArgumentError(
            f"judge_waits: hosts has {len(hosts)} entries, the matrix {num_ranks} ranks; there must "
            "be one host per rank. Pass them in rank order, or None."
        )
    if operations is not None and operations < 1:
        raise EPArgumentError(
            f"judge_waits: operations is {operations}; the sums must cover at least 1. "
            "Pass None if the number is not known."
        )
    if unit_ns is not None and not 0 < unit_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: unit_ns is {unit_ns}; it must be a number above 0. Pass 1 for "
            "nanoseconds, 1e9 / clock rate for cycles."
        )
    if not 0 <= delta_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: delta_ns is {delta_ns}; it must be 0 or more. Pass 0 for no floor."
        )


# ---- nodes


def _nodes(wait: FloatArray, hosts: Sequence[str] | None) -> tuple[IntArray, bool]:
    """`[n]` node of each rank, numbered in order of rank, and whether that is a guess."""
    num_ranks = wait.shape[0]
    if hosts is not None and len(set(hosts)) > 1:
        number = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        nodes = np.array([number[host] for host in hosts], np.int64)
        # Nodes of one rank leave nothing within a node to be told apart.
        return (nodes if len(number) < num_ranks else np.zeros(num_ranks, np.int64)), False
    # Late ranks, which hardly wait, would hide what their node looks like.
    usual = _quantile(wait, _MIDDLE, 1)
    waits_little = usual < 0.25 * _quantile_of(usual, 0.75)
    waiting = np.where(waits_little[:, None], np.nan, wait)
    for per_node in range(num_ranks // 2, 1, -1):
        if num_ranks >= 2 * _MIN_PER_NODE and num_ranks % per_node == 0:
            nodes = np.arange(num_ranks) // per_node
            if _looks_like_nodes(waiting, nodes):
                return nodes, True
    return np.zeros(num_ranks, np.int64), False


def _looks_like_nodes(wait: FloatArray, nodes: IntArray) -> bool:
    """Whether every pair of nodes waits clearly longer for each other than any within itself.

    Half of the sources of a node may be late then, or some hardly be waited for; not both.
    """
    first, second = np.flatnonzero(nodes == 0), np.flatnonzero(nodes == 1)
    inside = _quantile_of(wait[np.ix_(first, first)], _LOW)
    if _quantile_of(wait[np.ix_(first, second)], _MIDDLE) <= _NODE_RATIO * inside:
        return False
    columns = _by_node(wait, nodes, _MIDDLE)
    for share in (_MIDDLE, _LOW):
        blocks = _by_node(columns.T, nodes, share).T
        within = np.diag(blocks)
        between = blocks[~np.eye(within.size, dtype=bool)]
        # Nodes of which nobody waited are NaN, and speak neither for it nor against it.
        if _min(between) > _NODE_RATIO * _max(within, 0):
            return True
    return False


def _by_node(values: FloatArray, nodes: IntArray, share: float) -> FloatArray:
    """`[num_nodes, columns]`: a quantile over the rows of each node."""
    return np.stack(
        [_quantile(values[nodes == node], share, 0) for node in range(int(nodes.max()) + 1)]
    )


def _devices(nodes: IntArray) -> tuple[int, ...]:
    """Place of each rank among the ranks of its node."""
    return tuple(int(np.sum(nodes[:rank] == node)) for rank, node in enumerate(nodes))


def _kinds_of_link(nodes: IntArray) -> IntArray:
    """`[n, n]`: which cells are comparable.

    Within nodes, and between nodes; with two nodes each direction by itself, because a difference
    between the two directions is common and nothing is left to compare it with.
    """
    same = nodes[:, None] == nodes[None, :]
    if int(nodes.max()) == 1:
        return np.where(same, 0, 1 + nodes[:, None])
    return np.where(same, 0, 1)


def _levels(wait: FloatArray, kinds: IntArray, share: float) -> FloatArray:
    """`[n, n]`: what is usual for this kind of link."""
    levels = np.zeros(wait.shape)
    for kind in range(int(kinds.max()) + 1):
        cells = wait[kinds == kind]
        levels[kinds == kind] = np.nan_to_num(_quantile_of(cells, share))
    return levels


# ---- causes


@dataclass(frozen=True)
class _Cause:
    """Who is named: a source, a receiver, or both for a path; in the unit of the matrix.

    Attributes:
        cause: SENDER_SIDE, RECEIVER_SIDE or PAIR.
        receiver, source: -1 where it is everybody.
        effect, error: waiting above the healthy, its standard error.
        healthy: what is usual there.
        chance: bound on the probability of such an effect anywhere in the group by chance.
        cells: how many cells of the matrix show it.
        only_node: the node to which the others belong, -1 for all nodes.
        node_pair: receiver and source are nodes.
    """

    cause: str
    receiver: int
    source: int
    effect: float
    error: float
    healthy: float
    chance: float
    cells: int
    only_node: int = -1
    node_pair: bool = False


@dataclass(frozen=True)
class _Side:
    """What the columns of a matrix do.

    Attributes:
        causes: the columns that stand out.
        explained: [n, n], what columns that stand out in one node only do to its rows.
    """

    causes: list[_Cause]
    explained: FloatArray


def _of_two(wait: FloatArray, operations: int | None) -> list[_Cause]:
    """Two ranks can only be compared with each other: the one that is waited for far longer."""
    waited_for = np.array([wait[1, 0], wait[0, 1]])
    if not np.isfinite(waited_for).all():
        return []
    late = int(waited_for[1] > waited_for[0])
    more, less = float(waited_for[late]), float(waited_for[1 - late])
    few = operations is not None and operations < _PAIR_OPERATIONS
    if few or not more > _PAIR_RATIO * less:
        return []
    unknown = float("nan")
    return [_Cause(SENDER_SIDE, -1, late, more - less, unknown, less, unknown, 1)]


def _causes(wait: FloatArray, nodes: IntArray) -> list[_Cause]:
    """Of two views of what is usual between nodes, the one that needs fewer causes.

    A middle level is wrong when most ranks of a node are late, a low one when a rank of a small node
    is hardly waited for. With one node, or many, the two agree.
    """
    num_nodes = int(nodes.max()) + 1
    shares = (_MIDDLE, _LOW) if 1 < num_nodes <= _FEW_NODES else (_LOW,)
    return min((_causes_above(wait, nodes, share) for share in shares), key=len)


def _causes_above(wait: FloatArray, nodes: IntArray, level_share: float) -> list[_Cause]:
    kinds = _kinds_of_link(nodes)
    late = np.zeros(nodes.size, bool)
    for _ in range(_MAX_ROUNDS):
        seen = np.where(late[:, None], np.nan, wait)
        levels = _levels(seen, kinds, level_share)
        sources = _side(seen, levels, nodes, late, SENDER_SIDE)
        before = late.copy()
        late[[c.source for c in sources.causes if c.only_node < 0]] = True
        if (before == late).all():
            break
    nobody = np.zeros(nodes.size, bool)
    receivers = _side(seen.T, levels.T, nodes, nobody, RECEIVER_SIDE)
    explained = sources.explained + receivers.explained.T
    paths = _paths(wait - explained, levels, kinds, late, wait)
    return sources.causes + receivers.causes + _merge_node_pairs(paths, nodes)


def _side(
    wait: FloatArray, levels: FloatArray, nodes: IntArray, late: BoolArray, cause: str
) -> _Side:
    """Columns that stand out of a matrix.

    Args:
        wait: [n, n], NaN where unknown or not to be looked at.
        levels: what is usual for each cell.
        nodes: [n].
        late: columns that are known to stand out and stay in the list.
        cause: SENDER_SIDE, or RECEIVER_SIDE when everything is transposed.
    """
    above = wait - levels
    above = above - _quantile(above, _LOW, 1)[:, None]
    column = _quantile(above, _MIDDLE, 0)
    count = np.sum(np.isfinite(above), axis=0)
    tail, spread = _noise(above - column)
    error = 1.25 * spread / np.sqrt(np.maximum(count, 1))
    reference, between = healthy(column)
    effect = column - reference
    level = _mean(np.where(np.isfinite(wait), levels, np.nan), 0)
    threshold = np.maximum.reduce(
        [
            tail * _tail_of_median(count, _BY_CHANCE / nodes.size),
            _OF_LEVEL * level,
            _OF_LARGEST * _largest(wait, late, cause),
            np.full(nodes.size, _SPREADS * between),
        ]
    )
    stands_out = late | (effect > threshold)
    # Scale-free, but rounding is no effect.
    stands_out &= effect > 1e-9 * np.nanmax(np.abs(wait), initial=0.0)
    chance = nodes.size * _chance(effect, tail, count)
    whole = [
        _named(cause, int(j), effect[j], error[j], level[j] + reference, chance[j], count[j])
        for j in np.flatnonzero(stands_out)
    ]
    causes, explained = _side_within_nodes(above, levels, wait, nodes, stands_out, cause)
    return _Side(whole + causes, explained)


def _named(
    cause: str,
    rank: int,
    effect: float,
    error: float,
    usual: float,
    chance: float,
    cells: int,
    only_node: int = -1,
) -> _Cause:
    receiver, source = (-1, int(rank)) if cause == SENDER_SIDE else (int(rank), -1)
    return _Cause(
        *(cause, receiver, source, float(effect), float(error), float(usual), float(chance)),
        cells=int(cells),
        only_node=only_node,
    )


def _largest(wait: FloatArray, late: BoolArray, cause: str) -> FloatArray:
    """`[n]`: the largest waiting with which an effect of each column competes.

    For a source that is the largest of a usual receiver, beside late ranks; for a receiver (all is
    transposed then) its own.
    """
    if cause == RECEIVER_SIDE:
        return np.nan_to_num(_max(wait, 0))
    beside = np.where(late[None, :], np.nan, wait)
    return np.full(wait.shape[0], np.nan_to_num(median_of(_max(beside, 1))))


def _side_within_nodes(
    above: FloatArray,
    levels: FloatArray,
    wait: FloatArray,
    nodes: IntArray,
    known: BoolArray,
    cause: str,
) -> tuple[list[_Cause], FloatArray]:
    """Columns that stand out in the rows of one node only, such as all NVLink paths of a rank."""
    explained = np.zeros(wait.shape)
    num_nodes = int(nodes.max()) + 1
    if num_nodes < 2 or np.bincount(nodes).min() < _MIN_PER_NODE:
        return [], explained
    effect = _by_node(above, nodes, _MIDDLE)
    count = _sum_by_node(np.isfinite(above).astype(np.float64), nodes)
    # [row node, column node, place]: each column among its peers.
    peers = _peers(nodes)
    among = np.where(peers >= 0, effect[:, peers], np.nan)
    reference = _quantile(among, _MIDDLE, 2)
    spread = MAD_TO_SIGMA * _quantile(np.abs(among - reference[:, :, None]), _MIDDLE, 2)
    noise = _noise_by_node(above - effect[nodes], nodes)
    effect = effect - reference[:, nodes]
    usual = _sum_by_node(levels, nodes) / np.bincount(nodes)[:, None]
    largest = _largest_by_node(wait, nodes, cause)
    threshold = np.maximum.reduce(
        [
            noise[:, nodes] * _tail_of_median(count, _BY_CHANCE / effect.size),
            _OF_LEVEL * usual,
            _OF_LARGEST * largest,
            _SPREADS * spread[:, nodes],
        ]
    )
    stands_out = (effect > threshold) & ~known[None, :]
    chance = effect.size * _chance(effect, noise[:, nodes], count)
    causes: dict[int, _Cause] = {}
    for node, j in np.argwhere(stands_out):
        explained[nodes == node, j] = effect[node, j]
        found = _named(
            *(cause, j, effect[node, j], float("nan"), usual[node, j], chance[node, j]),
            cells=int(count[node, j]),
            only_node=int(node),
        )
        if j in causes:
            found = replace(max(causes[j], found, key=lambda c: c.effect), only_node=-1)
        causes[j] = found
    return list(causes.values()), explained


def _peers(nodes: IntArray) -> IntArray:
    """`[num_nodes, largest node]`: the ranks of each node, -1 where there are fewer."""
    sizes = np.bincount(nodes)
    peers = np.full((sizes.size, int(sizes.max())), -1, np.int64)
    for node in range(sizes.size):
        peers[node, : sizes[node]] = np.flatnonzero(nodes == node)
    return peers


def _sum_by_node(values: FloatArray, nodes: IntArray) -> FloatArray:
    return np.stack([values[nodes == node].sum(axis=0) for node in range(int(nodes.max()) + 1)])


def _largest_by_node(wait: FloatArray, nodes: IntArray, cause: str) -> FloatArray:
    """`[num_nodes, n]`: the largest waiting with which an effect on rows of a node competes."""
    if cause == RECEIVER_SIDE:
        return np.broadcast_to(np.nan_to_num(_max(wait, 0)), (int(nodes.max()) + 1, nodes.size))
    usual = _by_node(_max(wait, 1)[:, None], nodes, _MIDDLE)
    return np.broadcast_to(np.nan_to_num(usual), (usual.shape[0], nodes.size))


def _paths(
    wait: FloatArray, levels: FloatArray, kinds: IntArray, late: BoolArray, raw: FloatArray
) -> list[_Cause]:
    """Single cells that stand out of what rows, columns and the kind of link leave over."""
    above = wait - levels
    row, column = np.zeros(late.size), np.zeros(late.size)
    for _ in range(2):
        row = row + _quantile(above - row[:, None] - column, _MIDDLE, 1)
        rest = np.where(late[:, None], np.nan, above - row[:, None])
        column = np.nan_to_num(_quantile(rest, _MIDDLE, 0))
    # Waiting ends at zero: a rank that is late, or comes early, shows less of it in some cells than
    # the others would have. That makes no other cell slow.
    usual = median_of(row[~late]) + median_of(column[~late])
    row, column = row - median_of(row[~late]), column - median_of(column[~late])
    excess = above - usual - np.maximum(row, 0.0)[:, None] - np.maximum(column, 0.0)
    residual = above - usual - row[:, None] - column
    excess = np.minimum(excess, residual)
    tail = np.zeros(wait.shape)
    error = np.zeros(wait.shape)
    for kind in range(int(kinds.max()) + 1):
        cells = kinds == kind
        noise = _noise(np.where(cells & ~late[:, None], residual, np.nan))
        tail[cells], error[cells] = noise
    limit = math.log(excess.size / _BY_CHANCE)
    threshold = np.maximum.reduce(
        [
            tail * limit,
            _OF_LEVEL * levels,
            np.broadcast_to(_OF_LARGEST * np.nan_to_num(_max(raw, 1))[:, None], wait.shape),
            _SPREADS * error,
        ]
    )
    found = []
    for i, j in np.argwhere(excess > threshold):
        by_chance = _chance_of_one(float(excess[i, j]), float(tail[i, j])) * excess.size
        found.append(
            _Cause(
                *(PAIR, int(i), int(j), float(excess[i, j]), float(error[i, j])),
                healthy=float(raw[i, j] - excess[i, j]),
                chance=by_chance,
                cells=1,
            )
        )
    return found


def _merge_node_pairs(paths: list[_Cause], nodes: IntArray) -> list[_Cause]:
    """Most paths from one node to another are one cause."""
    sizes = np.bincount(nodes)
    by_pair: dict[tuple[int, int], list[_Cause]] = {}
    for path in paths:
        by_pair.setdefault((int(nodes[path.receiver]), int(nodes[path.source])), []).append(path)
    merged = []
    for (a, b), found in by_pair.items():
        if a == b or len(found) <= max(1, sizes[a] * sizes[b] // 2):
            merged += found
            continue
        typical = sorted(found, key=lambda path: path.effect)[len(found) // 2]
        merged.append(replace(typical, receiver=a, source=b, cells=len(found), node_pair=True))
    return merged


# ---- noise


def _noise(residual: FloatArray) -> tuple[float, float]:
    """Of cells: decay length of the upper tail if it is exponential, and standard deviation."""
    known = residual[np.isfinite(residual)]
    if known.size < 2:
        return 0.0, 0.0
    # Rows and columns were fitted to the same cells, which makes them look quieter.
    rows = np.sum(np.isfinite(residual).any(axis=1))
    columns = np.sum(np.isfinite(residual).any(axis=0))
    free = max(known.size - rows - columns + 1, 1)
    fitted = math.sqrt(known.size / free) * max(1.0, _FEWEST / free)
    known = known[:: known.size // _SAMPLE + 1]
    middle, high = (_quantile_of(known, share) for share in (0.5, 0.9))
    away = np.abs(known - middle)
    tail = (high - middle) / math.log(5.0)
    # The upper tenth of a few cells says little; what lies below the middle helps out.
    tail = max(tail, _quantile_of(away, 0.75) / math.log(2.0) * min(_FEW / free, 1.0))
    return fitted * tail, fitted * MAD_TO_SIGMA * _quantile_of(away, 0.5)


def _noise_by_node(residual: FloatArray, nodes: IntArray) -> FloatArray:
    """`[num_nodes, num_nodes]`: the tail within nodes and between them."""
    same = nodes[:, None] == nodes[None, :]
    within, _ = _noise(np.where(same, residual, np.nan))
    between, _ = _noise(np.where(same, np.nan, residual))
    return np.where(np.eye(int(nodes.max()) + 1, dtype=bool), within, between)


def _tail_of_median(count: npt.NDArray[Any], chance: float) -> FloatArray:
    """How far the median of `count` exponential values exceeds ln 2 that rarely (Chernoff)."""
    rest = np.exp(2 * math.log(chance) / np.maximum(count, 1))
    return np.asarray(-np.log((1 - np.sqrt(1 - rest)) / 2) - math.log(2.0))


def _chance(effect: FloatArray, tail: Any, count: npt.NDArray[Any]) -> FloatArray:
    """The inverse of `_tail_of_median`: a bound on the probability of such a median."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(np.exp(-np.maximum(effect / tail, 0.0)) / 2, 0.5)
    return np.asarray(np.where(effect > 0, np.sqrt(4 * share * (1 - share)) ** count, 1.0))


def _chance_of_one(excess: float, tail: float) -> float:
    return math.exp(-excess / tail) if tail > 0 else 0.0


def _quantile(values: FloatArray, share: float, axis: int) -> FloatArray:
    """`stats.quantile` for large matrices: partitions where few places are asked for."""
    count = np.sum(np.isfinite(values), axis=axis, keepdims=True)
    at = np.maximum(np.floor(share * (count - 1)), 0).astype(np.intp)
    places = np.unique(at)
    ordered = np.partition(values, places, axis=axis) if places.size <= 4 else np.sort(values, axis)
    return np.asarray(np.squeeze(np.take_along_axis(ordered, at, axis), axis=axis))


def _quantile_of(values: FloatArray, share: float) -> float:
    """The same of all values; NaN if none is known."""
    known = values[np.isfinite(values)]
    if not known.size:
        return float("nan")
    place = int(share * (known.size - 1))
    return float(np.partition(known, place)[place])


def _max(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmax`, silent: NaN where nothing is known."""
    largest = np.max(np.where(np.isnan(values), -np.inf, values), axis=axis, initial=-np.inf)
    return np.where(np.isfinite(largest), largest, np.nan)


def _min(values: FloatArray) -> float:
    """The smallest known value; NaN if none is."""
    return -float(_max(-values, 0))


def _mean(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmean`, silent: 0 where nothing is known."""
    known = np.isfinite(values)
    return np.asarray(np.where(known, values, 0.0).sum(axis) / np.maximum(known.sum(axis), 1))


# ---- words


class _Window:
    """The matrix of one window and what its causes are worth."""

    def __init__(
        self,
        wait: FloatArray,
        to_us: float,
        operation: str,
        hosts: tuple[str, ...],
        devices: tuple[int, ...],
        nodes: IntArray,
    ) -> None:
        self._wait = np.nan_to_num(wait)
        self._to_us = to_us
        self._operation = operation
        self._hosts = hosts
        self._devices = devices
        self._nodes = nodes
        places = np.arange(wait.shape[0])
        self._last = np.argmax(self._wait, axis=1)
        self._largest = self._wait[places, self._last]
        others = self._wait.copy()
        others[places, self._last] = 0.0
        self._second = others.max(axis=1)
        self._reported = max(int(np.isfinite(wait).any(axis=1).sum()), 1)

    def verdict(self, cause: _Cause) -> Verdict:
        """The cause in microseconds, with its place and its share."""
        hit = self._hit(cause)
        total = float(self._largest.sum())
        saved = np.minimum(self._largest - self._second, np.minimum(cause.effect, self._largest))
        if cause.cause == RECEIVER_SIDE and cause.only_node < 0:
            saved = np.minimum(cause.effect, self._largest)
        # Cells too few or too equal to show any noise do not make an effect exact.
        half = 1.96 * cause.error if cause.error > 0 else math.nan
        path = cause.cause == PAIR
        return Verdict(
            kind=_KINDS[cause.cause],
            cause=cause.cause,
            operation=self._operation,
            rank=None if path else max(cause.receiver, cause.source),
            edge=(cause.source, cause.receiver) if path and not cause.node_pair else None,
            nodes=(cause.source, cause.receiver) if cause.node_pair else None,
            effect_us=cause.effect * self._to_us,
            interval_us=(
                (cause.effect - half) * self._to_us,
                (cause.effect + half) * self._to_us,
            ),
            share=float(self._largest[hit].sum()) / total if total > 0 else 0.0,
            saving_us=float(saved[hit].sum()) / self._reported * self._to_us,
            certainty=max(0.0, 1.0 - cause.chance)
            if not math.isnan(cause.chance)
            else cause.chance,
            seen_in=float("nan"),
            evidence={
                "healthy_us": cause.healthy * self._to_us,
                "cells": float(cause.cells),
                **({"only_node": float(cause.only_node)} if cause.only_node >= 0 else {}),
            },
            where=self._where(cause),
            next_step=_NEXT_STEPS[cause.cause],
        )

    def saving_of_all(self, causes: list[_Cause]) -> float:
        """Microseconds of waiting per receiver that would go if all causes went together."""
        rest = self._wait.copy()
        for cause in causes:
            rows, columns = self._touched(cause)
            rest[np.ix_(rows, columns)] -= cause.effect
        saved = self._largest - np.maximum(rest, 0.0).max(axis=1, initial=0.0)
        return float(saved.sum()) / self._reported * self._to_us

    def _touched(self, cause: _Cause) -> tuple[BoolArray, BoolArray]:
        """`[n]` each: the rows and the columns of the cells to which a cause adds."""
        if cause.node_pair:
            return self._nodes == cause.receiver, self._nodes == cause.source
        ranks = np.arange(self._nodes.size)
        others = (
            np.ones(ranks.size, bool) if cause.only_node < 0 else self._nodes == cause.only_node
        )
        return (
            ranks == cause.receiver if cause.receiver >= 0 else others,
            ranks == cause.source if cause.source >= 0 else others,
        )

    def _hit(self, cause: _Cause) -> BoolArray:
        """`[n]`: receivers whose largest waiting is due to the cause."""
        rows, columns = self._touched(cause)
        return np.asarray(rows & columns[self._last] & (self._largest > 0))

    def _where(self, cause: _Cause) -> str:
        if not self._hosts:
            return ""
        ends = [end for end in (cause.source, cause.receiver) if end >= 0]
        if cause.node_pair:
            names = list(dict.fromkeys(self._hosts))
            return " > ".join(names[end] for end in ends)
        return " > ".join(f"{self._hosts[end]} device:{self._devices[end]}" for end in ends)


def _measured(wait_us: FloatArray, operation: str, operations: int | None) -> Measured:
    num_ranks = wait_us.shape[0]
    unknown, row = np.full(wait_us.shape, np.nan), np.full(num_ranks, np.nan)
    return Measured(
        operation=operation,
        num_operations=operations or 0,
        first_operation=0,
        last_operation=0,
        duration_us=float("nan"),
        wait_us=wait_us,
        late_us=unknown,
        issue_us=unknown,
        path_us=unknown,
        tokens=unknown,
        bytes=unknown,
        gap_us=row,
        send_us=row,
        drain_us=row,
        own_wait_us=_max(wait_us, 1),
    )


def _remarks(
    wait: FloatArray,
    missing: BoolArray,
    guessed: bool,
    unit_ns: float | None,
    operations: int | None,
    named: bool,
) -> list[str]:
    num_ranks = wait.shape[0]
    if num_ranks == 1:
        return ["one rank: nothing to compare"]
    remarks = [
        "only sums of waiting are known, no timestamps: a late sender and a slow outgoing link look "
        "the same, and one long operation looks like many; verdicts name a side, not a cause"
    ]
    if missing.any():
        gone = ranks_text(int(rank) for rank in np.flatnonzero(missing))
        remarks.append(f"{gone} did not report: what they waited for is not known")
    if num_ranks == 2 and not named:
        if missing.any():
            remarks.append("undecided: of two ranks one did not report")
        elif operations is not None and operations < _PAIR_OPERATIONS:
            remarks.append(
                f"undecided: two ranks can only be compared with each other, and {operations} "
                f"operations are too few for that (at least {_PAIR_OPERATIONS})"
            )
    if unit_ns is None:
        remarks.append("the unit of the matrix is not known and taken for nanoseconds")
    if operations is None:
        remarks.append("the number of operations is not known: effects are of the whole window")
    if guessed:
        remarks.append("hosts are not known: nodes were told apart by the waiting between them")
    return remarks
