"""Every exception of the package, and how a failed operation becomes one.

All of them are `RuntimeError`, because programs written for DeepEP catch that. A message has four
parts: where, what was given, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class EPError(RuntimeError):
    """Base of every error raised by `deep_ep`."""


class EPArgumentError(EPError, ValueError):
    """An argument is wrong, or ranks passed different ones. Nothing was sent; correct it and call again."""


class EPTypeError(EPArgumentError, TypeError):
    """An argument has the wrong Python type. Nothing was sent."""


class EPUsageError(EPArgumentError, AssertionError):
    """A call that is not allowed in the present state. DeepEP raises `AssertionError` there, so this is one."""


class EPUnsupportedError(EPError, NotImplementedError):
    """This version cannot do what was asked for; the message says what to use instead."""


class EPNotBuiltError(EPError):
    """Something that is not installed was asked for: a backend that is not built or finds no device, or
    a package that pictures or metrics need. Build or install it, or do without."""


class EPTransportError(EPError):
    """Ranks could not be connected, or an operation was given up because peers gave it up."""


class EPTimeoutError(EPError):
    """Some ranks did not show up in time. The buffer stays usable once all ranks call again.

    Attributes:
        missing_ranks: ranks that were waited for, ascending.
        last_seen: number of the last operation in which each missing rank was seen (0: never).
        operation: name of the operation that waited.
        op: its number, 1-based (0: not an operation of a buffer).
        waited_s: how long this rank waited, seconds.
    """

    def __init__(
        self,
        message: str,
        missing_ranks: Iterable[int] = (),
        last_seen: Mapping[int, int] | None = None,
        operation: str = "",
        op: int = 0,
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(sorted(missing_ranks))
        self.last_seen = dict(last_seen or {})
        self.operation = operation
        self.op = op
        self.waited_s = waited_s

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.missing_ranks, self.last_seen, self.operation, self.op, self.waited_s)
        return type(self), (str(self), *state)


def ranks_text(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"ranks 0-2, 5"`; `[3]` -> `"rank 3"`."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def error_from_failure(failure: Mapping[str, Any], rank: int) -> EPError:
    """The exception for a failure record of the runtime (`Runtime.take_failure()`).

    Args:
        failure: the record; keys `kind`, `operation`, `op`, `ranks`, `last_op`, `expected`, `seen`, `waited_ns`.
        rank: the rank that raises.
    """
    where = f"{failure['operation']} (operation {failure['op']}) on rank {rank}"
    ranks = sorted(failure["ranks"])
    kind = failure["kind"]
    if kind == "timeout":
        return _timeout(where, failure, ranks)
    if kind == "mismatch":
        return _mismatch(where, failure, ranks)
    if kind == "index":
        return EPArgumentError(
            f"{where}: topk_idx holds an expert index out of range; entries must be -1 or in "
            "[0, num_experts). Check the router's output."
        )
    return EPTransportError(
        f"{where}: {ranks_text(ranks)} gave this operation up, so its results are not valid. "
        "Read the error on that side first; the next operation starts afresh."
    )


def _timeout(where: str, failure: Mapping[str, Any], ranks: list[int]) -> EPTimeoutError:
    last_seen = {int(key): max(0, int(value)) for key, value in failure["last_op"].items()}
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
