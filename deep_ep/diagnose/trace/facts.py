"""What stands in a merged trace with an operator: how it is written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from ..core.package import PHASES, codec
from ..storage import foreign
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

    links: Optional[LinkBytes]  # noqa: UP045 - read at run time, by Python 3.9 as well
    calls: Sequence[Counted]


def of(arguments: Mapping[str, Any], where: str) -> ExchangeFacts:
    """Of the `args` of an operator; nothing is known where it has none. `where` is the file and the event, for errors."""
    if KEY not in arguments:
        return ExchangeFacts(links=None, calls=())
    try:
        facts = foreign.read(ExchangeFacts, arguments[KEY])
    except codec.CodecError as error:
        error.path.insert(0, KEY)
        raise foreign.refusal(error, where, "argument", "a merged trace") from None
    return replace(facts, calls=[_with_all_phases(call) for call in facts.calls])


def _with_all_phases(call: Counted) -> Counted:
    """Other versions know of others."""
    ns = {phase: call.phases.ns.get(phase, 0) for phase in PHASES}
    return replace(call, phases=replace(call.phases, ns=ns))
