"""Every exception of the package.

All of them are `RuntimeError`, because programs written for DeepEP catch that. A message has four
parts: where, what was given, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class HangVerdictLike(Protocol):
    """What an exception has of a `deep_ep.hang.cause.HangVerdict`."""

    @property
    def causes(self) -> tuple[Any, ...]:
        """Each a `deep_ep.hang.cause.HangCause`, what most ranks wait for first."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All accused ranks, ascending."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """All ranks that wait, ascending."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""


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

    Ranks that can reach each other agree on `missing_ranks` and what follows from `dead_ranks` on.

    Attributes:
        missing_ranks: ranks that were waited for and did not wait themselves, ascending.
        last_seen: number of the last operation in which each missing rank was seen (0: never), as far
            as this rank can tell.
        operation: name of the operation that waited.
        op: its number, 1-based (0: not an operation of a buffer).
        waited_s: how long this rank had waited, seconds; less than it may where another rank gave up first.
        dead_ranks: those of the missing ranks whose process, or host, is gone.
        left_ranks: those that destroyed their buffer or ended in order.
        waiting_ranks: ranks that wait for others themselves; none if rank 0 could not be asked.
        broken_paths: if nobody is missing: (source, destination) where nothing arrived.
        verdict: what ranks were found to wait for while they did, a `deep_ep.hang.cause.HangVerdict`; `None` if
            that was not asked, as where operations time out within two seconds.
    """

    def __init__(
        self,
        message: str,
        missing_ranks: Iterable[int] = (),
        last_seen: Mapping[int, int] | None = None,
        operation: str = "",
        op: int = 0,
        waited_s: float = 0.0,
        dead_ranks: Iterable[int] = (),
        left_ranks: Iterable[int] = (),
        waiting_ranks: Iterable[int] = (),
        broken_paths: Iterable[tuple[int, int]] = (),
        verdict: HangVerdictLike | None = None,
    ) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(sorted(missing_ranks))
        self.last_seen = dict(last_seen or {})
        self.operation = operation
        self.op = op
        self.waited_s = waited_s
        self.dead_ranks = tuple(sorted(dead_ranks))
        self.left_ranks = tuple(sorted(left_ranks))
        self.waiting_ranks = tuple(sorted(waiting_ranks))
        self.broken_paths = tuple(broken_paths)
        self.verdict = verdict


class EPRankGoneError(EPTimeoutError):
    """Ranks are dead or have ended. They never come again, so this buffer cannot be used any more."""


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
