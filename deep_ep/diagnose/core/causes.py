"""Causes of waiting: one row each. Rules, wording, pages, documents and compatibility read it here.

A new cause is a row here, a rule in `analyze`, and a test of that rule.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

COMP_SLOW = "comp-slow"
COMM_SLOW = "comm-slow"
MIXED_SLOW = "mixed-slow"
TITLES = {COMP_SLOW: "Comp-Slow", COMM_SLOW: "Comm-Slow", MIXED_SLOW: "Mixed-Slow"}


class Cause(str, enum.Enum):
    """What `Verdict.cause` says; the values are what records, pages and metrics carry."""

    LATE = "late"
    LATE_AT_TIMES = "late at times"
    SLOW_SEND = "slow send"
    SLOW_RECEIVE = "slow receive"
    PATH = "path"
    PATH_OR_BACK = "path or back"
    INGRESS = "ingress"
    EGRESS = "egress"
    INGRESS_OR_EGRESS = "ingress or egress"
    UPLINK = "uplink"
    DOWNLINK = "downlink"
    UPLINK_OR_DOWNLINK = "uplink or downlink"
    NODE_PAIR = "node pair"
    RAIL = "rail"
    EVERYWHERE = "everywhere"
    HOT_EXPERTS = "hot experts"
    SLOW_RECEIVER = "slow receiver"
    EARLY = "early"
    # Without timestamps.
    SENDER_SIDE = "sender side"
    LINK = "link"
    RECEIVER_SIDE = "receiver side"
    PAIR = "pair"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @property
    def row(self) -> CauseRow:
        """What is known about this cause."""
        return _ROWS[self]


@dataclass(frozen=True)
class CauseRow:
    """One cause.

    Attributes:
        slow: its class: COMP_SLOW, COMM_SLOW or MIXED_SLOW.
        names: what such a verdict names, with the letter that stands for it in documents.
        claim: what it says of that, as the predicate of a sentence.
        evidence: what tells it from other causes.
        next_step: one sentence: what to check next; `{operation}`, `{rank}`, `{source}`,
            `{destination}` and the words of its rule are filled in.
        matrix: of the matrices of a kind of operation, the one that shows it.
        axis: what it fills there: a "column" (waited for), a "row" (waits) or a "cell".
    """

    slow: str
    names: str
    claim: str
    evidence: str
    next_step: str
    matrix: str
    axis: str


_ROWS = {
    Cause.LATE: CauseRow(
        COMP_SLOW,
        "rank *j*",
        "comes late",
        "the others see its data issued late **and** its own clock shows more time up to the end of "
        "its sends",
        "The time passes before it calls {operation}, or before its hook: profile what rank {rank} "
        "runs there (clocks, throttling, other processes, host code).",
        "late",
        "column",
    ),
    Cause.LATE_AT_TIMES: CauseRow(
        COMP_SLOW,
        "rank *j*",
        "comes late now and then",
        "in a tenth of the operations or more, and not because of ticks that most ranks have, its own "
        "clock shows far more time than ranks ever take; the effect is the mean over all operations",
        "It is late in some operations only: look for what rank {rank} does now and then (garbage "
        "collection, logging, checkpoints, another process, clocks that throttle).",
        "late",
        "column",
    ),
    Cause.SLOW_SEND: CauseRow(
        COMP_SLOW,
        "rank *j*",
        "takes long to send",
        "as for *late*, and most of the time is the sending",
        "It takes longer to send, not to get there: compare clocks, memory bandwidth and num_sms of "
        "rank {rank} with the others.",
        "issue",
        "column",
    ),
    Cause.SLOW_RECEIVE: CauseRow(
        COMP_SLOW,
        "rank *j*",
        "takes long to receive",
        "its own time after the last arrival; it is late in the next operation",
        "It takes longer to store what has arrived: compare clocks, memory bandwidth and num_sms of "
        "rank {rank} with the others.",
        "wait",
        "row",
    ),
    Cause.PATH: CauseRow(
        COMM_SLOW,
        "path *j* > *i*",
        "is slow",
        "arrival minus issue, against its row, its column and its tokens",
        "Only this direction of this pair is slow: check link, NIC and route from rank {source} to "
        "rank {destination} (error counters, speed, congestion).",
        "path",
        "cell",
    ),
    Cause.PATH_OR_BACK: CauseRow(
        COMM_SLOW,
        "path *j* > *i*",
        "is slow, or the way back is",
        "as a path, where clocks have drifted and hardly any other path of one of the two was seen",
        "The way from rank {source} to rank {destination} is slow, or the way back: clocks have "
        "drifted too far to tell. Measure them again, buffer.measure_clock_offsets() on all ranks.",
        "path",
        "cell",
    ),
    Cause.INGRESS: CauseRow(
        COMM_SLOW,
        "rank *i*",
        "receives slowly from everybody",
        "that part of its row of path times, as a whole: within its node, between nodes, or both",
        "Every path{links} into rank {rank} is slow: check {check}.",
        "path",
        "row",
    ),
    Cause.EGRESS: CauseRow(
        COMM_SLOW,
        "rank *i*",
        "reaches everybody slowly",
        "that part of its column of path times, as a whole",
        "Every path{links} out of rank {rank} is slow: check {check}.",
        "path",
        "column",
    ),
    Cause.INGRESS_OR_EGRESS: CauseRow(
        COMM_SLOW,
        "rank *i*",
        "receives slowly from everybody, or reaches everybody slowly",
        "its row or its column of path times; clocks may be off too far to tell which",
        "Every path{links} into rank {rank}, or every path out of it, is slow: check {check}.",
        "path",
        "row",
    ),
    Cause.UPLINK: CauseRow(
        COMM_SLOW,
        "node *a*",
        "reaches all other nodes slowly",
        "the median of its paths to other nodes, against that of the other nodes",
        "Every path from node {node} to other nodes is slow: check what joins this node to the "
        "fabric: its switch, its cables, its NICs' settings.",
        "path",
        "column",
    ),
    Cause.DOWNLINK: CauseRow(
        COMM_SLOW,
        "node *a*",
        "receives slowly from all other nodes",
        "the median of its paths from other nodes, against that of the other nodes",
        "Every path from other nodes to node {node} is slow: check what joins this node to the "
        "fabric: its switch, its cables, its NICs' settings.",
        "path",
        "row",
    ),
    Cause.UPLINK_OR_DOWNLINK: CauseRow(
        COMM_SLOW,
        "node *a*",
        "reaches all other nodes slowly, or receives slowly from them",
        "as either of them; clocks may be off too far to tell which",
        "Every path from other nodes to node {node}, or every path out of it, is slow: check what "
        "joins this node to the fabric: its switch, its cables, its NICs' settings.",
        "path",
        "row",
    ),
    Cause.NODE_PAIR: CauseRow(
        COMM_SLOW,
        "nodes *a* > *b*",
        "is slow between all their ranks",
        "the median of the paths from *a* to *b* against other pairs of nodes, of which there must be "
        "some",
        "Every path from node {source} to node {destination} is slow: check the switches and routes "
        "between the two.",
        "path",
        "cell",
    ),
    Cause.RAIL: CauseRow(
        COMM_SLOW,
        "rail *r*",
        "is slow on every node",
        "the median of the paths between nodes among devices number *r*, against the other rails",
        "Every path between nodes among the devices number {rail} is slow: check the rail switch that "
        "joins their NICs.",
        "path",
        "cell",
    ),
    Cause.EVERYWHERE: CauseRow(
        COMM_SLOW,
        "all ranks",
        "is slower than it used to be",
        "all paths within nodes, or between them, against the group's own history of some windows",
        "All paths {links} are slower than they were: look for another job on the fabric, or a changed "
        "clock or setting.",
        "path",
        "cell",
    ),
    Cause.HOT_EXPERTS: CauseRow(
        MIXED_SLOW,
        "rank *i*",
        "is sent more than the others",
        "its tokens over an even share **and** the time that they cost it",
        "Its experts get {load} times an even share of the tokens: look at the routing, and move or "
        "replicate its busiest experts.",
        "tokens",
        "row",
    ),
    Cause.SLOW_RECEIVER: CauseRow(
        MIXED_SLOW,
        "rank *i*",
        "holds up whoever sends to it",
        "normal operations: most of its sources wait for slots of its queues while it waits for no rows "
        "itself **and** its own time after the last arrival",
        "It empties its queues slowly, so that others cannot send: compare clocks, memory bandwidth and "
        "num_sms of rank {rank} with the others, and its tokens; a larger Config gives it more slots.",
        "issue",
        "row",
    ),
    Cause.EARLY: CauseRow(
        MIXED_SLOW,
        "rank *i*",
        "comes before the others and waits for them",
        "lateness and own time both clearly below the others', and nothing else is found",
        "Rank {rank} has less to do than the others and waits for them; that is no fault of its own: "
        "even out the work.",
        "late",
        "row",
    ),
    Cause.SENDER_SIDE: CauseRow(
        COMP_SLOW,
        "rank *j*",
        "is waited for by everybody",
        "without timestamps: its column of waiting, and it waits less than the others by as much",
        "Compare its work with the other ranks': it waits less than they do by what they wait for it, in "
        "dispatches too, where more tokens for its experts would not show.",
        "wait",
        "column",
    ),
    Cause.LINK: CauseRow(
        COMM_SLOW,
        "rank *j*",
        "has a slow link",
        "without timestamps: its column of waiting, and it waits as long as the others",
        "Test its link (errors, width, NIC): it waits as long as the others; without timestamps the way "
        "in and the way out look the same.",
        "wait",
        "column",
    ),
    Cause.PAIR: CauseRow(
        COMM_SLOW,
        "path *j* > *i*",
        "is slow",
        "without timestamps: rank *i* is waited for, and one cell of its row of waiting stands out",
        "Test the link between the two (errors, width, routing): the destination comes late because it "
        "waits for this source.",
        "wait",
        "cell",
    ),
    Cause.RECEIVER_SIDE: CauseRow(
        MIXED_SLOW,
        "rank *i*",
        "waits for everybody",
        "without timestamps: its row of waiting, in every kind of operation; nobody is waited for",
        "Compare its work with the other ranks': it has less to do and waits for them. That is no fault "
        "of its own.",
        "wait",
        "row",
    ),
}
# By name: a record of a later version may hold one that is not here.
CAUSES: Mapping[str, CauseRow] = MappingProxyType(
    {cause.value: row for cause, row in _ROWS.items()}
)
