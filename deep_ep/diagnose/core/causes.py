"""Causes of waiting: one row each. Rules, wording, pages, documents and compatibility read it here.

A new cause is a row here, a rule in `analyze`, and a test of that rule.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from .package import rows_of

Slow = Literal["comp-slow", "comm-slow", "mixed-slow"]
COMP_SLOW: Slow = "comp-slow"
COMM_SLOW: Slow = "comm-slow"
MIXED_SLOW: Slow = "mixed-slow"
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
        return CAUSES[self.value]


@dataclass(frozen=True)
class CauseRow:
    """One cause; docs/reading_a_verdict.md says what tells it from others.

    Attributes:
        slow: its class.
        claim: what it says of what it names, as the predicate of a sentence.
        matrix: of the matrices of a kind of operation, the one that shows it.
        axis: what it fills there: a "column" (waited for), a "row" (waits) or a "cell".
        next_step: one sentence: what to check next; `{operation}`, `{rank}`, `{source}`,
            `{destination}` and the words of its rule are filled in.
    """

    slow: Slow
    claim: str
    matrix: str
    axis: str
    next_step: str


# Of each cause: its class | its text | what it says | which matrix shows it | as what. Then the next step.
_TABLE = """
comp-slow | late | comes late | late | column
The time passes before it calls {operation}, or before its hook: profile what rank {rank} runs there (clocks, throttling, other processes, host code).

comp-slow | late at times | comes late now and then | late | column
It is late in some operations only: look for what rank {rank} does now and then (garbage collection, logging, checkpoints, another process, clocks that throttle).

comp-slow | slow send | takes long to send | issue | column
It takes longer to send, not to get there: compare clocks, memory bandwidth and num_sms of rank {rank} with the others.

comp-slow | slow receive | takes long to receive | wait | row
It takes longer to store what has arrived: compare clocks, memory bandwidth and num_sms of rank {rank} with the others.

comm-slow | path | is slow | path | cell
Only this direction of this pair is slow: check link, NIC and route from rank {source} to rank {destination} (error counters, speed, congestion).

comm-slow | path or back | is slow, or the way back is | path | cell
The way from rank {source} to rank {destination} is slow, or the way back: clocks have drifted too far to tell. Measure them again, buffer.measure_clock_offsets() on all ranks.

comm-slow | ingress | receives slowly from everybody | path | row
Every path{links} into rank {rank} is slow: check {check}.

comm-slow | egress | reaches everybody slowly | path | column
Every path{links} out of rank {rank} is slow: check {check}.

comm-slow | ingress or egress | receives slowly from everybody, or reaches everybody slowly | path | row
Every path{links} into rank {rank}, or every path out of it, is slow: check {check}.

comm-slow | uplink | reaches all other nodes slowly | path | column
Every path from node {node} to other nodes is slow: check what joins this node to the fabric: its switch, its cables, its NICs' settings.

comm-slow | downlink | receives slowly from all other nodes | path | row
Every path from other nodes to node {node} is slow: check what joins this node to the fabric: its switch, its cables, its NICs' settings.

comm-slow | uplink or downlink | reaches all other nodes slowly, or receives slowly from them | path | row
Every path from other nodes to node {node}, or every path out of it, is slow: check what joins this node to the fabric: its switch, its cables, its NICs' settings.

comm-slow | node pair | is slow between all their ranks | path | cell
Every path from node {source} to node {destination} is slow: check the switches and routes between the two.

comm-slow | rail | is slow on every node | path | cell
Every path between nodes among the devices number {rail} is slow: check the rail switch that joins their NICs.

comm-slow | everywhere | is slower than it used to be | path | cell
All paths {links} are slower than they were: look for another job on the fabric, or a changed clock or setting.

mixed-slow | hot experts | is sent more than the others | tokens | row
Its experts get {load} times an even share of the tokens: look at the routing, and move or replicate its busiest experts.

mixed-slow | slow receiver | holds up whoever sends to it | issue | row
It empties its queues slowly, so that others cannot send: compare clocks, memory bandwidth and num_sms of rank {rank} with the others, and its tokens; a larger Config gives it more slots.

mixed-slow | early | comes before the others and waits for them | late | row
Rank {rank} has less to do than the others and waits for them; that is no fault of its own: even out the work.

comp-slow | sender side | is waited for by everybody | wait | column
Compare its work with the other ranks': it waits less than they do by what they wait for it, in dispatches too, where more tokens for its experts would not show.

comm-slow | link | has a slow link | wait | column
Test its link (errors, width, NIC): it waits as long as the others; without timestamps the way in and the way out look the same.

comm-slow | pair | is slow | wait | cell
Test the link between the two (errors, width, routing): the destination comes late because it waits for this source.

mixed-slow | receiver side | waits for everybody | wait | row
Compare its work with the other ranks': it has less to do and waits for them. That is no fault of its own.
"""
# By name: a record of a later version may hold one that is not here.
CAUSES: Mapping[str, CauseRow] = MappingProxyType(
    {cause: CauseRow(cast("Slow", slow), *texts) for slow, cause, *texts in rows_of(_TABLE)}
)
