"""The connections of a buffer's ranks: a hub on rank 0, and a spoke on every other rank."""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from deep_ep import inquiry
from deep_ep.agreement import Arbiter, Message
from deep_ep.hang import traces, wording
from deep_ep.hang.cause import Verdict
from deep_ep.inquiry import Inquiries, Told
from deep_ep.lines import Line, LineClosed, descriptors_left
from deep_ep.loop import Loop, Member
from deep_ep.rendezvous import Place

# How long a rank may take to connect, and descriptors that are left to the program. Chosen.
_CONNECT_S = 10.0
_SPARE_DESCRIPTORS = 64
# Until those who are told of a death have ended what waited for that rank. Chosen.
_LAST_WORDS_S = 0.2

_log = logging.getLogger("deep_ep")


class Hub(Loop):
    """Rank 0's thread: the arbiter, the ranks of this process, and connections to all others.

    Attributes:
        address: where the others connect, host and port.
        listener: takes their connections until all are in.
        lines: the connections, by rank.
    """

    def __init__(
        self, places: Sequence[Place], ranks_per_node: int, token: str, address: str
    ) -> None:
        num_ranks = len(places)
        if descriptors_left() < num_ranks + _SPARE_DESCRIPTORS:
            raise OSError(
                f"{num_ranks} connections are needed, and {descriptors_left()} more descriptors are "
                "allowed; raise RLIMIT_NOFILE (ulimit -n)"
            )
        super().__init__("deep_ep.liveness hub")
        self._token = token
        self._arbiter = Arbiter(num_ranks, self._send, self.call_later, time.monotonic)
        self._inquiries = Inquiries(
            places, ranks_per_node, self._arbiter, self._send, self.call_later, self._tell
        )
        self._num_ranks = num_ranks
        self._members: dict[int, Member] = {}
        self.lines: dict[int, Line] = {}
        self._strangers: list[Line] = []
        self._told: list[object] = []
        self._dumps_to = traces.default_folder()
        loopback = address.startswith("127.")
        self.listener = socket.create_server((address if loopback else "", 0), backlog=num_ranks)
        self.listener.setblocking(False)
        self.address = (address, int(self.listener.getsockname()[1]))
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def take_in(self, member: Member) -> None:
        """A rank of this process joins; from any thread."""
        self.post(lambda: self._members.update({member.rank: member}))
        member.attach(self)

    def complete(self, unreachable: Sequence[int]) -> None:
        """All ranks have connected, but for these."""
        self._selector.unregister(self.listener)
        self.listener.close()
        for line in self._strangers:
            self._unwatch(line)
        self._strangers.clear()
        for rank in unreachable:
            self._arbiter.unwatch(rank)

    def members(self) -> Sequence[Member]:
        return list(self._members.values())

    def say(self, rank: int, message: Message) -> None:
        if message["type"] in inquiry.TYPES:
            self._inquiries.handle(rank, message)
        else:
            self._arbiter.handle(rank, message)

    def leave(self, rank: int, closed: int) -> None:
        self._members.pop(rank, None)
        self._arbiter.handle(rank, {"type": "left", "closed": closed})
        self._stop_if_last()

    def leave_all(self) -> None:
        for rank, member in list(self._members.items()):
            self.leave(rank, member.progress().closed)
        self._stop()

    def fail(self) -> None:
        for line in list(self.lines.values()):
            with contextlib.suppress(LineClosed):
                line.send({"type": "off"})
        for member in self.members():
            member.lose("")

    def forget(self) -> None:
        super().forget()
        self.listener.close()
        for line in (*self.lines.values(), *self._strangers):
            line.close()

    def _tell(self, told: Told) -> None:
        """A verdict: to the log, to all ranks, and where dumps go."""
        said = _said(told.verdict)
        if said and said != self._told:
            self._told = said
            _log.warning("deep_ep: %s", wording.line(told.verdict), extra={"verdict": told.verdict})
        folders = [*told.dump_to]
        if told.is_final and self._dumps_to is not None:
            folders.append(str(self._dumps_to / told.verdict.buffer))
        dumped = {folder: _dump(folder, told) for folder in dict.fromkeys(folders)}
        message = {"type": "verdict", "verdict": told.verdict.plain(), "dumped": dumped}
        for rank in (*self._members, *self.lines):
            self._send(rank, message)

    def _stop_if_last(self) -> None:
        if not self._members and not self.lines:
            self._stop()

    def _send(self, rank: int, message: Message) -> None:
        if rank in self._members:
            # Not at once: the arbiter is in the middle of something.
            self.post(lambda: self._hand(rank, message))
        elif rank in self.lines:
            line = self.lines[rank]
            try:
                line.send(message)
            except LineClosed:
                return  # heard of when it is read, behind what it still sent
            self._watch(line, lambda: self._serve(rank))

    def _hand(self, rank: int, message: Message) -> None:
        if rank in self._members:
            self._members[rank].handle(message)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = Line(self.listener.accept()[0])
            self._strangers.append(line)
            if len(self._strangers) > 2 * self._num_ranks:
                self._unwatch(self._strangers.pop(0))
            self._watch(line, lambda: self._greet(line))

    def _greet(self, line: Line) -> None:
        """Lets a stranger in that knows the token."""
        try:
            messages = line.receive()
            if not messages:
                return
            rank = self._admitted(messages[0])
            line.send({"type": "welcome"})
        except (LineClosed, ValueError, TypeError, KeyError):
            with contextlib.suppress(ValueError):  # there were too many
                self._strangers.remove(line)
            self._unwatch(line)
            return
        self._strangers.remove(line)
        self.lines[rank] = line
        self._selector.modify(line, selectors.EVENT_READ, lambda: self._serve(rank))

    def _admitted(self, message: Message) -> int:
        """The rank that says hello.

        Raises:
            ValueError, TypeError, KeyError: it may not come in.
        """
        token, rank = str(message["token"]), int(message["rank"])
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise ValueError("the token is wrong")
        if not 0 < rank < self._num_ranks or rank in self.lines or rank in self._members:
            raise ValueError(f"there is no place for rank {rank}")
        return rank

    def _serve(self, rank: int) -> None:
        line = self.lines.get(rank)
        if line is None:
            return
        try:
            with contextlib.suppress(LineClosed):  # behind what it still sent
                line.flush()
            for message in line.receive():
                self.say(rank, message)
            self._watch(line, lambda: self._serve(rank))
        except LineClosed as closed:
            self._drop(rank)
            has_come_to_destroy = rank in self._arbiter.parting
            self._arbiter.lose(rank, closed.how)
            if not has_come_to_destroy:
                self.call_later(_LAST_WORDS_S, lambda: self._inquiries.ask(is_final=True))
            self._stop_if_last()
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("deep_ep: what rank %d says is not understood: %s", rank, error)
            self._drop(rank)
            self._arbiter.unwatch(rank)

    def _drop(self, rank: int) -> None:
        self._unwatch(self.lines.pop(rank))


class Spoke(Loop):
    """Another rank's thread: its connection to rank 0.

    Attributes:
        line: the connection.
    """

    def __init__(self, member: Member, address: tuple[str, int], token: str) -> None:
        super().__init__(f"deep_ep.liveness rank {member.rank}")
        self._member = member
        connection = socket.create_connection(address, _CONNECT_S)
        self.line = Line(connection)
        self.line.send({"token": token, "rank": member.rank})
        self._await_welcome(connection)
        member.attach(self)
        self._watch(self.line, self._serve)

    def members(self) -> Sequence[Member]:
        return [self._member]

    def say(self, rank: int, message: Message) -> None:
        try:
            self.line.send(message)
        except LineClosed:
            return  # heard of when it is read
        self._watch(self.line, self._serve)

    def leave(self, rank: int, closed: int) -> None:
        with contextlib.suppress(LineClosed):
            self.line.send({"type": "left", "closed": closed})
        self._stop()

    def leave_all(self) -> None:
        self.leave(self._member.rank, self._member.progress().closed)

    def fail(self) -> None:
        with contextlib.suppress(LineClosed):
            self.line.send({"type": "unwatched"})
        self._member.lose("")

    def forget(self) -> None:
        super().forget()
        self.line.close()

    def _await_welcome(self, connection: socket.socket) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(connection, selectors.EVENT_READ)
            if not waiting.select(_CONNECT_S):
                raise OSError(f"rank 0 did not answer within {_CONNECT_S:g} s")
        try:
            self.line.receive()
        except LineClosed as error:
            raise OSError("rank 0 closed the connection") from error

    def _serve(self) -> None:
        try:
            with contextlib.suppress(LineClosed):  # behind what it still sent
                self.line.flush()
            for message in self.line.receive():
                if message.get("type") == "off":
                    self._end("")
                    return
                self._member.handle(message)
            self._watch(self.line, self._serve)
        except LineClosed as closed:
            self._end(closed.how)

    def _end(self, how: str) -> None:
        """No more of rank 0; what the rank itself looks for goes on."""
        self._unwatch(self.line)
        self._member.lose(how)


def _dump(folder: str, told: Told) -> list[str]:
    """The files that were written; none if that failed."""
    try:
        files = traces.write_dump(folder, told.states, told.verdict)
    except OSError as error:
        _log.warning("deep_ep: no dump in %s: %s", folder, error)
        return []
    else:
        read = "python -m deep_ep.diagnose hang"
        _log.warning("deep_ep: %d files in %s; %s %s", len(files), folder, read, folder)
        return [str(file) for file in files]


def _said(verdict: Verdict) -> list[object]:
    """What makes one verdict another one than the last."""
    return [(c.kind, c.ranks, c.series, c.number, c.paths, c.circle) for c in verdict.causes]
