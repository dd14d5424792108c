"""The messages of ranks outside of operations: a class each, one encoding, one dispatcher.

Every rank speaks with the leader: rank 0, or who leads in its place (failover.py). A message is a JSON object on a
line, of which `type` names the class and the other members are its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, Generic, Literal, TypeVar

from deep_ep.base import codec
from deep_ep.base.ranks import Decision, Key, Progress
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.states import RankState

# "timeout": the sender gave up; "abandoned": others did; "other": nobody is missing.
Failure = Literal["timeout", "abandoned", "other"]

# ---- from a rank to the leader


@dataclass(frozen=True)
class FailureReport:
    """An operation of the sender failed.

    Attributes:
        key: which operation.
        failure: why.
        missing: ranks that the sender waited for.
        masks: whether it goes on without them.
    """

    key: Key
    failure: Failure
    missing: tuple[int, ...]
    masks: bool = False


@dataclass(frozen=True)
class ProgressAnswer:
    """To `AskProgress`: where the sender is."""

    round: int
    at: Progress


@dataclass(frozen=True)
class Unmasked:
    """The sender masks nobody any more, and others may wait for it again."""


@dataclass(frozen=True)
class InquiryRequest:
    """The sender has been waiting for long, or somebody wants a dump of all ranks.

    Attributes:
        final: whether its operation is about to time out.
        dump_to: a directory on the leader's host; empty: no dump is asked for.
    """

    final: bool
    dump_to: str = ""


@dataclass(frozen=True)
class StateReport:
    """Where the sender is, or what it has seen of the process of another rank of its host.

    Attributes:
        inquiry: of the `AskState` that it answers; 0: nobody has asked.
        state: of the sender, or of the other one.
    """

    inquiry: int
    state: RankState


# ---- either way: of the sender, or passed on by the leader


@dataclass(frozen=True)
class RankLeft:
    """A rank ends in order.

    Attributes:
        rank: that does.
        closed: last operation that it finished.
        parts: whether it waits in destroy() for the others.
    """

    rank: int
    closed: int
    parts: bool = False


@dataclass(frozen=True)
class RankRaised:
    """The program of a rank has ended with an exception: type, text, and where."""

    rank: int
    text: str


@dataclass(frozen=True)
class MonitoringFailed:
    """The sender will say nothing any more, for a reason of its own."""


# ---- from the leader to a rank


@dataclass(frozen=True)
class Welcome:
    """The greeting was right."""


@dataclass(frozen=True)
class AskProgress:
    """The arbiter asks where the rank is."""

    round: int


@dataclass(frozen=True)
class Undecided:
    """Nobody is missing in an operation that was reported, as far as the arbiter knows."""

    key: Key


@dataclass(frozen=True)
class RankDied:
    """A rank is dead; `how` as in `Decision.dead`."""

    rank: int
    how: str


@dataclass(frozen=True)
class AskState:
    """An inquiry asks where a rank is, and what its threads do: the rank itself or, where that does not answer, another
    one of its host.
    """

    inquiry: int
    rank: int


@dataclass(frozen=True)
class InquiryVerdict:
    """What an inquiry has found.

    Attributes:
        dumped: by folder, the files that were written there; none if that failed.
    """

    verdict: HangVerdict
    dumped: Mapping[str, tuple[str, ...]]


_ALL = (
    *(FailureReport, ProgressAnswer, Unmasked, InquiryRequest, StateReport),
    *(RankLeft, RankRaised, MonitoringFailed),
    *(Welcome, AskProgress, Decision, Undecided, RankDied, AskState, InquiryVerdict),
)
CLASSES: Mapping[str, type] = {class_.__name__: class_ for class_ in _ALL}

# One of the classes above.
Message = Any


def encode(message: Message) -> bytes:
    """A line, without its end."""
    plain = {"type": type(message).__name__, **codec.to_plain(message)}
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(line: bytes | bytearray) -> Message:
    """The message of a line.

    Raises:
        ValueError: it is none; says which type, or field, is wrong.
    """
    plain = codec.loads(line)
    if not isinstance(plain, dict):
        raise ValueError("a message is no object")  # noqa: TRY004 - of the text, not of an argument
    name = plain.pop("type", None)
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(f"type is {name!r:.80}")
    return codec.from_plain(CLASSES[name], plain)


Sender = TypeVar("Sender")
# What handles messages of each class. Raises `ValueError` where a message says what cannot be.
Handlers = Mapping[type, Callable[[Sender, Any], None]]


class Dispatcher(Generic[Sender]):
    """Takes each message to what handles its class."""

    def __init__(self, *handlers: Handlers[Sender]) -> None:
        """With the handlers of all who listen; a class has one."""
        self._handlers = {class_: handle for each in handlers for class_, handle in each.items()}

    def __call__(self, sender: Sender, message: Message) -> None:
        """Has it handled.

        Raises:
            ValueError: nobody handles it here, or it says what cannot be.
        """
        handle = self._handlers.get(type(message))
        if handle is None:
            raise ValueError(f"nobody here handles {type(message).__name__}")
        handle(sender, message)
