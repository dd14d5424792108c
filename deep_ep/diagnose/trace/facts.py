"""What stands in a merged trace with an operator: how it is written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.package import PHASES, OperationPhases
from ..storage.codec import TEXT, Integer, List, MappingOf, Maybe, Object, Wrong
from .counted import Counted
from .operations import LinkBytes

# Of an operator's arguments.
KEY = "deep_ep"


@dataclass(frozen=True)
class ExchangeFacts:
    """Of one exchange.

    Attributes:
        links: what it moves; `None`: nobody knows.
        calls: those that counters have.
    """

    links: LinkBytes | None = None
    calls: Sequence[Counted] = field(default_factory=list)


def _phases(
    operation: int, kind: str, ns: Mapping[str, int], charged: Mapping[str, int]
) -> OperationPhases:
    of_ranks = {int(rank): waited for rank, waited in charged.items() if rank.isdecimal()}
    return OperationPhases(operation, kind, {phase: ns.get(phase, 0) for phase in PHASES}, of_ranks)


_COUNT = Integer()
_LINKS = Maybe(List(_COUNT, LinkBytes._fields, lambda by_link: LinkBytes(*by_link)))
_PHASES = Object(
    _phases,
    (_COUNT, "operation"),
    (TEXT, "kind"),
    (MappingOf(_COUNT), "ns", "charged"),
)
_FACTS = Object(
    ExchangeFacts,
    (_LINKS, "links"),
    (List(Object(Counted, (_PHASES, "phases"), (_LINKS, "links"))), "calls"),
)


def as_json(facts: ExchangeFacts) -> dict[str, Any]:
    """As it is stored."""
    return _FACTS.write(facts)


def of(arguments: Mapping[str, Any], where: str) -> ExchangeFacts:
    """Of the arguments of an operator; nothing is known where it has none.

    Args:
        arguments: `args` of the event.
        where: the file and the event, for errors.

    Raises:
        EPArgumentError: they are damaged.
    """
    if KEY not in arguments:
        return ExchangeFacts()
    try:
        facts: ExchangeFacts = _FACTS.read(arguments[KEY], {})
    except Wrong as wrong:
        raise wrong.at(KEY).refusal(where, "argument", "a merged trace") from None
    return facts
