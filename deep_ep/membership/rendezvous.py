"""How the ranks of a new buffer find each other: facts first, then handles, then connections.

Each step ends in an exchange of its outcome, so that an error on one rank is raised on all of
them, by name, and nobody waits for a rank that has given up. What ranks say is JSON, checked before
it is used: another version, or another program, can be wrong, but it cannot be more than data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from deep_ep.base.ranks import RankPlace
from deep_ep.errors import EPArgumentError, EPError, EPTimeoutError, EPTransportError, ranks_text
from deep_ep.group import Group

T = TypeVar("T")

# Of what a rank says. Handles and error texts are far below.
_MOST_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class RankFacts:
    """What a rank says about itself before anything is allocated.

    `agreed` holds what must be equal on all ranks. `error` is why this rank cannot take part.
    """

    host: str
    pid: int
    agreed: Mapping[str, Any]
    error: str | None = None

    @property
    def place(self) -> RankPlace:
        """Where that is."""
        return RankPlace(self.host, self.pid)


def exchange_facts(
    group: Group, agreed: Mapping[str, Any], error: EPError | None = None
) -> list[RankFacts]:
    """Every rank's facts, once they are known to agree.

    Raises:
        EPError: `error`, if this rank passed one.
        EPArgumentError: another rank did, or ranks differ in `agreed`; names them.
        EPTransportError: another rank said what no rank of this version says.
        EPTimeoutError: some ranks did not come.
    """
    mine = RankFacts(
        socket.gethostname(),
        os.getpid(),
        {name: _plain(value) for name, value in agreed.items()},
        None if error is None else str(error),
    )
    try:
        said = _exchange(group, vars(mine), _FACTS)
    except (EPTimeoutError, EPTransportError):
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    facts = [RankFacts(**fields) for fields in said]
    _raise_first_error("Buffer", [fact.error for fact in facts], EPArgumentError)
    for name in agreed:
        _require_equal(name, [fact.agreed.get(name) for fact in facts])
    return facts


def together(group: Group, step: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and gathers the results.

    Args:
        group: the ranks.
        step: what it does, for messages.
        action: returns what JSON can hold; tuples come out as lists.

    Raises:
        EPTransportError: it failed on some rank; raised on all of them, with the reason.
    """
    outcome: dict[str, Any] = {"error": None, "value": None}
    failure: Exception | None = None
    try:
        outcome["value"] = action()
    except (RuntimeError, OSError, MemoryError, ValueError, TypeError) as error:
        failure = error
        outcome["error"] = f"{type(error).__name__}: {error}"
    outcomes = _exchange(group, outcome, _OUTCOME)
    if isinstance(failure, EPError):
        raise failure
    try:
        _raise_first_error(
            f"Buffer ({step})", [said["error"] for said in outcomes], EPTransportError
        )
    except EPTransportError as error:
        raise error from failure
    return [said["value"] for said in outcomes]


_TEXT_OR_NONE = (str, type(None))
_FACTS: Mapping[str, tuple[type, ...]] = {
    "host": (str,),
    "pid": (int,),
    "agreed": (dict,),
    "error": _TEXT_OR_NONE,
}
_OUTCOME: Mapping[str, tuple[type, ...]] = {"error": _TEXT_OR_NONE, "value": (object,)}


def _exchange(
    group: Group, said: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]
) -> list[dict[str, Any]]:
    """What every rank says: an object with these fields of these types."""
    texts: list[Any] = group.all_gather_object(json.dumps(said))
    return [_parse(rank, text, fields) for rank, text in enumerate(texts)]


def _parse(rank: int, text: Any, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    said: Any = None
    if isinstance(text, str) and len(text) <= _MOST_CHARACTERS:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            said = None
    if not (
        isinstance(said, dict)
        and said.keys() == fields.keys()
        and all(isinstance(said[name], types) for name, types in fields.items())
    ):
        shown = repr(text[:80]) if isinstance(text, str) else f"a {type(text).__name__}"
        raise EPTransportError(
            f"Buffer: rank {rank} sent {shown}; ranks must send JSON objects with "
            f"{', '.join(fields)}. Run one version of deep_ep on all ranks, and see that nobody else "
            "uses their group meanwhile."
        )
    return said


def _plain(value: Any) -> str | int | float | None:
    """What JSON can hold, of an argument that need not be what it should be."""
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)


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


def _raise_first_error(where: str, errors: list[str | None], error_type: type[EPError]) -> None:
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise error_type(
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
