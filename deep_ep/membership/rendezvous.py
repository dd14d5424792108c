"""How the ranks of a new buffer find each other: facts first, then handles, then connections.

Each step ends in an exchange of its outcome, so that an error on one rank is raised on all of
them, by name, and nobody waits for a rank that has given up. What ranks say is JSON, checked before
it is used: another version, or another program, can be wrong, but it cannot be more than data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, TypeVar

from deep_ep.base import codec
from deep_ep.base.group import Group
from deep_ep.base.ranks import RankPlace
from deep_ep.errors import EPArgumentError, EPError, EPTimeoutError, EPTransportError, ranks_text

T = TypeVar("T")

# Of what a rank says. Handles and error texts are far below.
_MOST_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class RankFacts:
    """What a rank says about itself before anything is allocated.

    Attributes:
        host, pid: where it runs.
        agreed: what must be equal on all ranks, in words.
        error: why this rank cannot take part.
    """

    host: str
    pid: int
    agreed: Mapping[str, str]
    error: Optional[str] = None  # noqa: UP045 - read by the codec, also in Python 3.9


def exchange_facts(
    group: Group, agreed: Mapping[str, Any], error: EPError | None = None
) -> list[RankPlace]:
    """Where all ranks run, once their facts are known to agree.

    Raises:
        EPError: `error`, if this rank passed one.
        EPArgumentError: another rank did, or ranks differ in `agreed`; names them.
        EPTransportError: another rank said what no rank of this version says.
        EPTimeoutError: some ranks did not come.
    """
    mine = RankFacts(
        socket.gethostname(),
        os.getpid(),
        {name: repr(value) for name, value in agreed.items()},
        None if error is None else str(error),
    )
    try:
        facts = _exchange(group, mine)
    except (EPTimeoutError, EPTransportError):
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    _raise_first_error("Buffer", [fact.error for fact in facts], EPArgumentError)
    for name in agreed:
        _require_equal(name, [fact.agreed.get(name, "None") for fact in facts])
    return [RankPlace(fact.host, fact.pid) for fact in facts]


@dataclass(frozen=True)
class _Outcome:
    """Of a step on one rank: what it returned, or why it failed."""

    value: Any
    error: Optional[str]  # noqa: UP045


def together(group: Group, step: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and gathers the results.

    Args:
        group: the ranks.
        step: what it does, for messages.
        action: returns what JSON can hold; tuples come out as lists.

    Raises:
        EPTransportError: it failed on some rank; raised on all of them, with the reason.
    """
    failure: Exception | None = None
    try:
        outcome = _Outcome(action(), None)
    except (RuntimeError, OSError, MemoryError, ValueError, TypeError) as error:
        failure = error
        outcome = _Outcome(None, f"{type(error).__name__}: {error}")
    outcomes = _exchange(group, outcome)
    if isinstance(failure, EPError):
        raise failure
    errors = [said.error for said in outcomes]
    _raise_first_error(f"Buffer ({step})", errors, EPTransportError, failure)
    return [said.value for said in outcomes]


def _exchange(group: Group, mine: T) -> list[T]:
    """What every rank says, which is of the same class."""
    texts: list[Any] = group.all_gather_object(json.dumps(codec.to_plain(mine)))
    return [_parse(rank, text, type(mine)) for rank, text in enumerate(texts)]


def _parse(rank: int, text: Any, kind: type[T]) -> T:
    try:
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise codec.CodecError("is no text, or too long")
        return codec.from_plain(kind, codec.loads(text.encode()))
    except ValueError as error:
        shown = repr(text[:80]) if isinstance(text, str) else f"a {type(text).__name__}"
        names = ", ".join(each.name for each in dataclasses.fields(kind))  # type: ignore[arg-type]
        raise EPTransportError(
            f"Buffer: rank {rank} sent {shown}, which is wrong: {str(error)[:160]}; ranks must send JSON objects with "
            f"{names}. Run one version of deep_ep on all ranks, and see that nobody else uses their group meanwhile."
        ) from None


def address(hosts: Sequence[str]) -> str:
    """An address of this host that ranks on these hosts can reach: loopback where there is no other
    host, else its name's, or the one it sends from.
    """
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _raise_first_error(
    where: str,
    errors: list[str | None],
    error_type: type[EPError],
    own: Exception | None = None,
) -> None:
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failed:
        first = next(iter(failed.values())).rstrip(".")
        raise error_type(
            f"{where}: {ranks_text(failed)} failed, first: {first}. "
            "All ranks must succeed; correct it there and build the buffer again on all ranks."
        ) from own


def _require_equal(name: str, values: list[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        found = ", ".join(f"{value} on {ranks_text(group)}" for value, group in ranks.items())
        raise EPArgumentError(
            f"Buffer: {name} is {found}; it must be the same on all ranks. "
            "Compute it from values all ranks share."
        )
