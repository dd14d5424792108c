"""How the ranks of a new buffer find each other: facts first, then handles, then connections.

Each step ends in an exchange of its outcome, so that an error on one rank is raised on all of
them, by name, and nobody waits for a rank that has given up.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from deep_ep.errors import EPArgumentError, EPError, EPTimeoutError, EPTransportError, ranks_text
from deep_ep.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What a rank says about itself before anything is allocated.

    `agreed` holds what must be equal on all ranks. `error` is why this rank cannot take part.
    """

    host: str
    agreed: Mapping[str, Any]
    error: str | None = None


def exchange_facts(
    group: Group, agreed: Mapping[str, Any], error: EPError | None = None
) -> list[Facts]:
    """Every rank's facts, once they are known to agree.

    Raises:
        EPError: `error`, if this rank passed one.
        EPArgumentError: another rank did, or ranks differ in `agreed`; names them.
        EPTimeoutError: some ranks did not come.
    """
    mine = Facts(socket.gethostname(), agreed, None if error is None else str(error))
    try:
        facts = group.all_gather_object(mine)
    except EPTimeoutError:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    _raise_first_error("Buffer", [fact.error for fact in facts], EPArgumentError)
    for name in agreed:
        _require_equal(name, [fact.agreed[name] for fact in facts])
    return facts


def together(group: Group, step: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and gathers the results.

    Raises:
        EPTransportError: it failed on some rank; raised on all of them, with the reason.
    """
    outcome: tuple[str | None, Any]
    failure: Exception | None = None
    try:
        outcome = (None, action())
    except (RuntimeError, OSError, MemoryError) as error:
        failure = error
        outcome = (f"{type(error).__name__}: {error}", None)
    outcomes: list[tuple[str | None, Any]] = group.all_gather_object(outcome)
    if isinstance(failure, EPError):
        raise failure
    try:
        _raise_first_error(f"Buffer ({step})", [text for text, _ in outcomes], EPTransportError)
    except EPTransportError as error:
        raise error from failure
    return [value for _, value in outcomes]


def _raise_first_error(where: str, errors: list[str | None], kind: type[EPError]) -> None:
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise kind(
            f"{where}: {ranks_text(failed)} failed, first: {errors[failed[0]]} "
            "All ranks must succeed; correct it there and build the buffer again on all ranks."
        )


def _require_equal(name: str, values: list[Any]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    if len(ranks) > 1:
        found = ", ".join(f"{value} on {ranks_text(group)}" for value, group in ranks.items())
        raise EPArgumentError(
            f"Buffer: {name} is {found}; it must be the same on all ranks. "
            "Compute it from values all ranks share."
        )
