"""How a failed operation becomes an exception: the record that a kernel left, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH
from deep_ep.base.text import rows_of
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPRankGoneError,
    EPTimeoutError,
    EPTransportError,
    ranks_text,
)
from deep_ep.hang import wording

if TYPE_CHECKING:
    from deep_ep.base.ranks import Decision, RankPlace
    from deep_ep.hang.cause import HangVerdict


# What a failure says whose reason is all that has to be known. Of each: the reason, "normal" before it where normal
# operations say something else | what the error is about. Then the text; ranks, the operation before and the row are
# filled in.
_TABLE = """
index | argument
topk_idx holds an expert index out of range; entries must be -1 or in [0, num_experts). Check the router's output.

counts | argument
num_tokens_per_rank and is_token_in_rank do not agree; they must be of one layout. Pass them as one call of get_dispatch_layout returned them.

room | argument
more rows came to this rank than num_worst_tokens, or than the handle says; all must fit. Pass the group size times the most tokens that a rank has, or the handle as dispatch returned it.

handle | argument
the handle or topk_idx is not what the dispatch left or was given; combine needs both unchanged, except that entries of topk_idx may have become -1. Pass the handle and topk_idx of one dispatch that has been received.

surplus | transport
{ranks} told of more rows for an expert than num_max_dispatch_tokens_per_rank; a rank sends at most as many. Report it with both ranks' logs: memory was overwritten.

returned | transport
{ranks} returned other rows than this rank had dispatched, so its results are not valid. Read the error on that side first; the next operation starts afresh.

corrupt | transport
rows of {ranks} are not what was sent in this operation (DEEP_EP_VERIFY compares all of them), first that for token {token} of rank {owner}, which rank {sender} sent{over}; they must be. Report it with both ranks' logs: memory was overwritten or a message arrived out of order.

late | transport
{ranks} gave up operation {before} before this rank called it, and did not come to the next one. Read the error on that side first; all ranks must make the same calls, within DEEP_EP_TIMEOUT_S of each other. The next operation starts afresh.

normal handle | argument
the handle is not what a dispatch left that succeeded; a handle can be used unchanged, and once its dispatch has succeeded. Dispatch again, and keep its tensors.

normal surplus | argument
{ranks} sent or passed on more rows than this rank's handle says; the handles of all ranks must be of one dispatch, and unchanged. Dispatch again, and keep its tensors.
"""
_ERRORS = {"argument": EPArgumentError, "transport": EPTransportError}
_TEXTS: dict[str, tuple[type[EPError], str]] = {
    reason: (_ERRORS[error], text) for reason, error, text in rows_of(_TABLE)
}


def error_from_failure(
    failure: Mapping[str, Any],
    rank: int,
    decision: Decision | None = None,
    places: Sequence[RankPlace] = (),
    verdict: HangVerdict | None = None,
    raised: Mapping[int, str] = MappingProxyType({}),
) -> EPError:
    """The exception for a failure record of the runtime (`Runtime.take_failure()`).

    Args:
        failure: the record; keys `reason`, `operation`, `op`, `ranks`, `last_op`, `expected`, `seen`, `waited_ns`,
            `given_up` (newest operation that each of the ranks gave up), `row` (where a row was found that
            is not what was sent).
        rank: the rank that raises.
        decision: what all ranks agreed on, if they did.
        places: where the ranks run; needed with a decision.
        verdict: what ranks were found to wait for while they did.
        raised: the exceptions that ended programs, by rank.
    """
    where = f"{failure['operation']} (operation {failure['op']}) on rank {rank}"
    ranks = sorted(failure["ranks"])
    reason = failure["reason"]
    if reason == "mismatch":
        return _mismatch(where, failure, ranks)
    is_normal = failure["operation"] in (NORMAL_DISPATCH, NORMAL_COMBINE)
    known = (_TEXTS.get(f"normal {reason}") if is_normal else None) or _TEXTS.get(reason)
    if known is not None:
        error, text = known
        row = dict(failure.get("row") or {})
        over = wording.OVER.get(row.pop("hop", ""), "")
        said = text.format(ranks=ranks_text(ranks), before=failure["op"] - 1, over=over, **row)
        return error(f"{where}: {said}")
    if decision is not None and rank in decision.culprits:
        return _given_up(where, failure, dict.fromkeys(decision.waiting, decision.key.op))
    if decision is not None and decision.paths:
        # Who was stopped, and is back once the others have given up, finds nobody missing: it was missing itself.
        ahead = {r: op - 1 for r, op in decision.waiting.items() if op > failure["op"] + 1}
        if ahead:
            return _given_up(where, failure, ahead)
        if reason == "abandoned" and all(source == rank for source, _ in decision.paths):
            decision = None
    if decision is not None:
        return _with_verdict(_agreed(where, failure, decision, places, raised), where, verdict)
    if reason == "timeout":
        return _with_verdict(_timeout(where, failure, ranks), where, verdict)
    return _given_up(
        where, failure, {r: max(failure["op"], op) for r, op in failure["given_up"].items()}
    )


def _given_up(where: str, failure: Mapping[str, Any], given_up: Mapping[int, int]) -> EPError:
    ranks = sorted(given_up)
    given = f"{ranks_text(ranks)} gave up operation {max(given_up.values(), default=failure['op'])}"
    return EPTransportError(
        f"{where}: {given} while this rank was in operation {failure['op']}, so its results are not "
        "valid; all ranks must be in one operation. Read the error on that side first; the next "
        "operation starts afresh."
    )


def _with_verdict(error: EPTimeoutError, where: str, verdict: HangVerdict | None) -> EPTimeoutError:
    """Adds what was found while ranks waited. That knows more than what they say once they have given up."""
    if verdict is None:
        return error
    error.verdict = verdict
    said, paths = wording.line(verdict), {path for cause in verdict.causes for path in cause.paths}
    same_paths = not paths or paths == {*error.broken_paths}
    is_same = verdict.ranks == error.missing_ranks and same_paths
    if is_same or error.dead_ranks or error.left_ranks:
        error.args = (f"{error} While ranks waited: {said}.",)
        return error
    error.args = (f"{where}: {said}. {wording.advice(verdict.causes[0])}",)
    error.missing_ranks = verdict.ranks
    error.broken_paths = tuple(sorted(paths))
    error.last_seen = {rank: error.last_seen.get(rank, 0) for rank in verdict.ranks}
    return error


def _last_seen(failure: Mapping[str, Any]) -> dict[int, int]:
    return {int(key): max(0, int(value)) for key, value in failure["last_op"].items()}


def _agreed(
    where: str,
    failure: Mapping[str, Any],
    decision: Decision,
    places: Sequence[RankPlace],
    raised: Mapping[int, str],
) -> EPTimeoutError:
    """What all ranks say alike, but for `where`."""
    culprits, last_seen = decision.culprits, _last_seen(failure)
    gone = bool(decision.dead or decision.left)
    if culprits:
        found = "; ".join(
            state_of(rank, decision, places[rank])
            + (f", whose program raised {raised[rank]}" if rank in raised else "")
            for rank in culprits
        )
    else:
        paths = ", ".join(f"{source} > {destination}" for source, destination in decision.paths)
        found = f"nobody is missing, but what was sent did not arrive on the paths {paths}"
    if gone:
        advice = (
            "An operation needs all ranks: end the job, or build a new Buffer on a group of those "
            "that live."
        )
    elif culprits:
        advice = (
            "See whether that process is stopped, left the loop early or is still compiling; if it "
            "is only slow, raise DEEP_EP_TIMEOUT_S. The buffer stays usable once all ranks call again."
        )
    else:
        advice = (
            "Check the links between these ranks; all ranks must be able to write to all others."
        )
    return (EPRankGoneError if gone else EPTimeoutError)(
        f"{where}: {'; '.join([found, *_waiting(decision)])}. {advice}",
        missing_ranks=culprits,
        last_seen={rank: last_seen[rank] for rank in culprits if rank in last_seen},
        operation=failure["operation"],
        op=failure["op"],
        waited_s=failure["waited_ns"] * 1e-9,
        dead_ranks=decision.dead,
        left_ranks=decision.left,
        waiting_ranks=decision.waiting,
        broken_paths=decision.paths,
    )


def state_of(rank: int, decision: Decision, place: RankPlace) -> str:
    """What a decision says of one of its culprits, in words."""
    process = f"process {place.pid} on host {place.host}"
    how = decision.dead.get(rank)
    if how == "host":
        return f"rank {rank} is dead (host {place.host} cannot be reached)"
    if how is not None:
        return f"rank {rank} is dead (its {process} ended)"
    if rank in decision.left:
        return (
            f"rank {rank} destroyed its buffer, or ended, after operation {decision.left[rank]} "
            f"({process})"
        )
    if rank in decision.silent:
        return f"rank {rank} does not answer ({process} is stopped or busy)"
    at = decision.elsewhere[rank]
    if not at.open:
        return f"rank {rank} is between operations, after operation {at.closed} ({process})"
    return f"rank {rank} is in operation {at.open} and does not wait there ({process})"


def _waiting(decision: Decision) -> list[str]:
    """`["ranks 1, 2 wait for it in operation 73"]`: one for each operation."""
    by_op: dict[int, list[int]] = {}
    for rank, op in decision.waiting.items():
        by_op.setdefault(op, []).append(rank)
    where = "operation" if decision.key.is_operation else decision.key.series
    return [
        f"{wording.wait_text(ranks, len(decision.culprits))} in {where} {op}"
        for op, ranks in sorted(by_op.items())
    ]


def _timeout(where: str, failure: Mapping[str, Any], ranks: list[int]) -> EPTimeoutError:
    last_seen = _last_seen(failure)
    waited_s = failure["waited_ns"] * 1e-9
    seen = "; ".join(
        f"rank {rank} was last seen in operation {last_seen[rank]}"
        if last_seen.get(rank)
        else f"rank {rank} has not been seen yet"
        for rank in ranks
    )
    return EPTimeoutError(
        f"{where}: {ranks_text(ranks)} did not arrive within {waited_s:.3g} s; {seen}. "
        "See whether that process died, left the loop early or is still compiling; if it is only "
        "slow, raise DEEP_EP_TIMEOUT_S. The buffer stays usable once all ranks call again.",
        missing_ranks=ranks,
        last_seen=last_seen,
        operation=failure["operation"],
        op=failure["op"],
        waited_s=waited_s,
    )


def _mismatch(where: str, failure: Mapping[str, Any], ranks: list[int]) -> EPArgumentError:
    expected, seen = failure["expected"], failure["seen"]
    differing = [name for name in seen if seen[name] != expected.get(name)]
    fields = ", ".join(f"{name} = {seen[name]} (here {expected.get(name)})" for name in differing)
    return EPArgumentError(
        f"{where}: {ranks_text(ranks)} called with {fields or 'other arguments'}; all ranks must "
        "call the same operation with the same sizes. Make the ranks agree and call again."
    )
