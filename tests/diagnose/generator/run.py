"""The run itself: the protocol followed causally, operation after operation, and stamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deep_ep.diagnose.core.diagnosis import BoolArray, FloatArray, IntArray
from generator.draws import draw
from generator.faults import GeneratorFault, added_by
from generator.machines import Kind, Setup, StampRule
from generator.ports import Ports, Sends, Turns
from generator.recording import (
    ARRIVAL,
    CLOCK_ERROR,
    ENTERED,
    EXIT,
    ISSUED,
    OP,
    PREVIOUS_EXIT,
    SEEN,
    SENT,
    TIMER_STEP,
    TOKENS,
    WAIT_BEGIN,
)

# `previous_exit` is stamped at the very end, `exit` before the counters are written.
_EXIT_STAMPS_APART_US = 0.5
# Nobody enters an operation sooner than this after the one before.
_LEAST_GAP_US = 1.0
# So many experts of a rank send one after the other.
_LOCAL_EXPERTS = 5
# A stated error of a clock is so many standard deviations of the true one.
_STATED_DEVIATIONS = 2.0
# A word on its own, as in measurements of clocks, takes so much of the time that rows take.
_LATENCY_OF_A_WORD = 0.5
# What timers are thought to gain on each other, where nobody measured it.
_LARGEST_DRIFT_PPM = 40.0
# Operations over which the drift of a rank's speed forgets itself.
_WANDER_OPERATIONS = 100.0


class Operation(NamedTuple):
    """One operation of all windows, or one hop of it; times in us on a clock that nobody has."""

    tokens: IntArray  # [windows, receiver, source]
    entered: FloatArray  # [windows, num_ranks]
    issued: FloatArray  # [windows, receiver, source]
    sent: FloatArray  # [windows, num_ranks]
    wait_begin: FloatArray  # [windows, num_ranks]
    arrival: FloatArray  # [windows, receiver, source]; -inf: nothing is sent
    exit: FloatArray  # [windows, num_ranks]
    # [windows, receiver, source]: how long a source waited for slots; there are enough in low latency
    blocked: FloatArray = np.zeros(())


def headers_seen(entered: FloatArray, latency: FloatArray) -> FloatArray:
    """[windows, num_ranks]: when the header of the last source is there."""
    seen: FloatArray = (entered[:, None, :] + latency).max(axis=2)
    return seen


class Run:
    """All windows of a batch, with the faults of each."""

    def __init__(
        self, setup: Setup, faults: Sequence[Sequence[GeneratorFault]], seeds: Sequence[int]
    ) -> None:
        num_ranks = setup.num_ranks
        self.setup = setup
        self.extra = added_by(faults, setup, seeds)
        self.draws = draw(setup, self.extra.share, seeds)
        path, path_per_token = setup.machine.latency(num_ranks)
        self.path = path * self.draws.own_path + self.extra.path
        self.own = np.eye(num_ranks, dtype=bool)
        self.node, self.index = setup.machine.node_and_index(num_ranks)
        self.between = self.node[:, None] != self.node[None, :]
        nic = np.maximum(self.extra.nic[:, :, None], self.extra.nic[:, None, :])
        path_per_token = path_per_token * np.where(self.between, nic, 1.0)
        self.path_per_token = path_per_token + self.extra.path_per_token
        self.same_rail = self.index[:, None] == self.index[None, :]
        # What was slow already when clocks were measured.
        self.slow_before = self.extra.path * setup.machine.measured_while_slow
        self.stated_clock_error = self._stated_clock_error()
        self.ports = Ports(setup, self.extra.nic) if setup.machine.ports else None
        # Where the experts of a rank send one after the other, each to one destination after the
        # other, those of the last expert are the last for everybody.
        last_expert = 1 - (np.arange(num_ranks)[:, None] + 1) / num_ranks
        self.by_expert = 1 - last_expert / _LOCAL_EXPERTS
        rank = np.arange(num_ranks)
        self.behind_next = 1 - ((rank[:, None] - rank[None, :] - 1) % num_ranks) / num_ranks

    def exits(self, stamps: IntArray | None = None, blocked: IntArray | None = None) -> FloatArray:
        """Follows the protocol; returns exits and fills in `stamps` and `blocked`, as `Batch` has them."""
        exits = [self.draws.start]
        wander = self.draws.wander[:, 0]
        memory = np.exp(-1.0 / _WANDER_OPERATIONS)
        op = number = 0
        while op < self.setup.num_operations:
            if op:
                wander = memory * wander + np.sqrt(1 - memory**2) * self.draws.wander[:, op]
            speed = self.draws.personal + self.setup.machine.wander * wander
            previous_exit = exits[-1]
            hops = self.operation(op, speed, previous_exit)
            number += 1
            for place, hop in enumerate(hops, op):
                if stamps is not None:
                    self._stamp(stamps[:, place], number, hop, previous_exit)
                if blocked is not None:
                    blocked[:, place] = np.rint(hop.blocked * 1e3)
                exits.append(hop.exit)
            op += len(hops)
        return np.stack(exits, axis=1)

    def operation(self, op: int, speed: FloatArray, previous_exit: FloatArray) -> list[Operation]:
        """The hops of the operation that begins with hop `op`, all with the same number."""
        return [self._operation(op, speed, previous_exit)]

    def _operation(self, op: int, speed: FloatArray, previous_exit: FloatArray) -> Operation:
        machine, draws, extra = self.setup.machine, self.draws, self.extra
        kind = self.kind(op)
        dispatched = draws.tokens[:, op // len(self.setup.kinds)]
        tokens = np.swapaxes(dispatched, 1, 2) if kind.returns else dispatched
        outgoing, incoming = tokens.sum(axis=1), tokens.sum(axis=2)

        entered = self.enter(op, speed, previous_exit, kind, outgoing)
        send = speed * (machine.send + machine.send_per_token * outgoing)
        send = np.maximum(send + machine.jitter / 3 * draws.send[:, op], 0.0) + extra.send
        order = self.order(kind, tokens)
        issued = entered[:, None, :] + send[:, None, :] * order
        sent = entered + send
        wait_begin = sent + machine.hook_us * draws.personal

        latency = self.latency(op)
        share = None if self._by_destination(kind) else order
        arrival = self.arrive(Sends(tokens, entered, issued, share, latency))
        if machine.fenced:
            landed = np.where(self.between, -np.inf, arrival).max(axis=1)
            wait_begin = np.maximum(sent, landed) + machine.hook_us * draws.personal
        ready = np.maximum(wait_begin, arrival.max(axis=2))

        drain = speed * (machine.drain + machine.drain_per_token * incoming)
        drain = np.maximum(drain + machine.jitter / 3 * draws.drain[:, op], 0.0) + extra.drain
        return Operation(tokens, entered, issued, sent, wait_begin, arrival, ready + drain)

    def enter(
        self,
        op: int,
        speed: FloatArray,
        previous_exit: FloatArray,
        kind: Kind,
        outgoing: IntArray,
    ) -> FloatArray:
        """[windows, num_ranks]: when each rank enters; outgoing [windows, num_ranks], its tokens."""
        machine, draws, extra = self.setup.machine, self.draws, self.extra
        gap = machine.gap * draws.layer_gap[:, self.setup.layer(op), None]
        if kind.returns:
            gap = gap + machine.compute_per_token * outgoing
        gap = speed * gap + machine.jitter * draws.gap[:, op] + draws.late[:, op] - extra.early
        entered = previous_exit + np.maximum(gap, _LEAST_GAP_US) + extra.gap
        for place, rank, late_us in extra.hiccups.get(op + 1, ()):
            entered[place, rank] += late_us
        return entered

    def latency(self, op: int) -> FloatArray:
        """[windows, receiver, source]: of each way in this operation, whatever is sent."""
        jitter = self.setup.machine.path_jitter * np.abs(self.draws.path[:, op])
        latency = np.where(self.own, 0.0, self.path) + np.where(self.own, 0.0, jitter)
        of_rail = self.draws.rail[:, op][:, None, self.index]
        latency = latency + np.where(self.between & self.same_rail, of_rail, 0.0)
        latency = latency + np.where(self.between, self.draws.fabric[:, op, None, None], 0.0)
        for place, paths, us in self.extra.held_up.get(op + 1, ()):
            latency[place, paths] += us
        return latency

    def arrive(self, sends: Sends) -> FloatArray:
        """[windows, receiver, source]: when the last token of each is there; see `Ports.arrivals`."""
        if self.ports is None:
            return (
                sends.issued
                + sends.latency
                + np.where(self.own, 0.0, self.path_per_token * sends.tokens)
            )
        return self.ports.arrivals(sends) + self.extra.path_per_token * sends.tokens

    def _by_destination(self, kind: Kind) -> bool:
        machine = self.setup.machine
        return machine.in_turn or (machine.combine_by_destination and kind.returns)

    def order(self, kind: Kind, tokens: IntArray) -> FloatArray:
        """[windows, receiver, source]: the part of its sending after which a source has handed over
        all for a receiver."""
        if self._by_destination(kind):
            turns = Turns(self.setup)
            sent = turns.undone(np.cumsum(turns.taken(tokens), axis=1))
            return sent / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
        if self.ports is None or kind.returns:
            return np.broadcast_to(self.by_expert, tokens.shape)
        # Tokens are sent as they are numbered, each to where it is routed: the last of n for one
        # destination has one of n + 1 equal parts after it. The first is sent to the next rank.
        order = 1 - self.behind_next / (tokens + 1)
        return order / order.max(axis=1, keepdims=True)

    def kind(self, op: int) -> Kind:
        return self.setup.kinds[op % len(self.setup.kinds)]

    def _stated_clock_error(self) -> IntArray:
        """[., receiver, source], ns: what offsets were thought to be wrong by when they were measured."""
        machine = self.setup.machine
        if machine.states_round_trip:
            path, _ = machine.latency(self.setup.num_ranks)
            there = _LATENCY_OF_A_WORD * path * self.draws.own_path + self.slow_before
            half = (there + np.swapaxes(there, 1, 2) + self.draws.round_trip) / 2
            stated = np.rint(half * 1e3).astype(np.int64) + machine.timer_step_ns
            return np.where(self.own, 0, stated)
        variance = machine.clock_error**2 + self.between * machine.host_clock_error**2
        stated = np.rint(_STATED_DEVIATIONS * np.sqrt(2 * variance) * 1e3)
        return np.where(self.own, 0, stated).astype(np.int64)[None]

    def _stated_drift(self, age_us: FloatArray) -> IntArray:
        """[windows, receiver, source], ns: what clocks of this age may have drifted by, as kernels say."""
        machine = self.setup.machine
        ppm = machine.stated_drift_ppm
        if ppm is None:
            ppm = _LARGEST_DRIFT_PPM if machine.drift_ppm or machine.host_drift_ppm else 0.0
        stated = ppm * 1e-3 * age_us
        return np.where(self.own, 0, np.rint(stated[:, :, None])).astype(np.int64)

    def _stamp(
        self, stamps: IntArray, number: int, done: Operation, previous_exit: FloatArray
    ) -> None:
        """Fills in `stamps` [windows, receiver, source or own, 6] of a hop of operation `number`."""
        machine, draws = self.setup.machine, self.draws
        zero, before = self._clock_zero(number), self._clock_zero(number - 1)
        step = machine.timer_step_ns
        sources, own = stamps[:, :, :-1], stamps[:, :, -1]
        # From the source's clock to the receiver's, by an offset that is wrong by some, and knows of no
        # step. What was slow in one direction only is taken for an offset by half.
        age = machine.clock_age_s * 1e6 + done.entered
        wrong = draws.clock_error + (draws.drift + self.extra.drift) * age
        clock = np.rint(wrong * 1e3).astype(np.int64) + draws.clock_zero
        one_sided = (self.slow_before - np.swapaxes(self.slow_before, 1, 2)) / 2
        offset = clock[:, :, None] - clock[:, None, :] + np.rint(one_sided * 1e3).astype(np.int64)
        entered = _to_ns(done.entered, zero, step)
        sources[..., ENTERED] = entered[:, None, :] + offset
        sources[..., ISSUED] = _to_ns(done.issued, zero[:, None, :], step) + offset
        arrival, seen = self._look(done)
        sources[..., ARRIVAL] = _to_ns(arrival, zero[:, :, None], step)
        sources[..., SEEN] = seen
        sources[..., TOKENS] = done.tokens
        sources[..., CLOCK_ERROR] = self.stated_clock_error + self._stated_drift(age)
        sources[~np.isfinite(done.arrival)] = 0
        own[..., OP] = number
        own[..., WAIT_BEGIN] = _to_ns(done.wait_begin, zero, step)
        own[..., EXIT] = _to_ns(done.exit, zero, step)
        own[..., SENT] = _to_ns(done.sent, zero, step)
        own[..., TIMER_STEP] = step
        if number > 1:
            own[..., PREVIOUS_EXIT] = _to_ns(previous_exit + _EXIT_STAMPS_APART_US, before, step)

    def _clock_zero(self, number: int) -> IntArray:
        """[windows, num_ranks], ns: what the clocks of operation `number` read when the run began."""
        has_stepped = number >= self.draws.step_ahead_of[:, None]
        zero: IntArray = self.draws.clock_zero + self.draws.clock_step * has_stepped
        return zero

    def _look(self, done: Operation) -> tuple[FloatArray, BoolArray]:
        """[windows, receiver, source] each: when a source is said to have come, and whether it was
        seen to; 0 where nothing was sent."""
        arrival = np.where(np.isfinite(done.arrival), done.arrival, 0.0)
        rule, begin = self.setup.machine.stamp_rule, done.wait_begin[:, :, None]
        if rule is StampRule.TRUE_ARRIVAL:
            return arrival, np.ones(arrival.shape, bool)
        return np.maximum(arrival, begin), arrival > begin


def _to_ns(us: FloatArray, zero: IntArray, step: int) -> IntArray:
    """On the clock that read `zero` ns when the run began and counts in steps of `step` ns."""
    stamps: IntArray = np.rint(us * 1e3).astype(np.int64) + zero
    return stamps - stamps % step if step > 1 else stamps
