"""What causes do to the waiting of a window: verdicts, with their shares and savings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deep_ep.diagnose.analyze.waits_only.nodes import devices
from deep_ep.diagnose.analyze.waits_only.sides import PAIR, RECEIVER_SIDE, SENDER_SIDE, Cause
from deep_ep.diagnose.core.diagnosis import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    BoolArray,
    FloatArray,
    IntArray,
    Verdict,
)

_KINDS = {SENDER_SIDE: COMP_SLOW, RECEIVER_SIDE: MIXED_SLOW, PAIR: COMM_SLOW}
_NEXT_STEPS = {
    SENDER_SIDE: "Compare when this rank enters the operation with the other ranks: without "
    "timestamps a late sender and a slow outgoing link look the same.",
    RECEIVER_SIDE: "Compare tokens received and the time of entering with the other ranks: without "
    "timestamps many tokens, a slow incoming link and a rank that comes early look the same.",
    PAIR: "Test the link between the two (errors, width, routing); without timestamps the "
    "direction of the data is all that is known.",
}


class Effects:
    """The matrix of one window and what its causes are worth."""

    def __init__(
        self,
        wait: FloatArray,
        to_us: float,
        operation: str,
        hosts: Sequence[str] | None,
        nodes: IntArray,
    ) -> None:
        """Internal: use `judge_waits`.

        Args:
            wait: [n, n], NaN where unknown, and on the diagonal.
            to_us: microseconds per operation of one unit of the matrix.
            operation: what to call it.
            hosts: [n] host names, if known.
            nodes: [n].
        """
        self._wait = np.nan_to_num(wait)
        self._to_us = to_us
        self._operation = operation
        self._hosts = hosts
        self._devices = devices(hosts or nodes.tolist())
        self._nodes = nodes
        places = np.arange(wait.shape[0])
        self._last = np.argmax(self._wait, axis=1)
        self._largest = self._wait[places, self._last]
        others = self._wait.copy()
        others[places, self._last] = 0.0
        self._second = others.max(axis=1)
        self._reported = max(int(np.isfinite(wait).any(axis=1).sum()), 1)

    def verdict(self, cause: Cause) -> Verdict:
        """The cause in microseconds, with its place and its share."""
        hit = self._hit(cause)
        total = float(self._largest.sum())
        saved = np.minimum(self._largest - self._second, np.minimum(cause.effect, self._largest))
        if cause.side == RECEIVER_SIDE and cause.only_node < 0:
            saved = np.minimum(cause.effect, self._largest)
        # Cells too few or too equal to show any noise do not make an effect exact.
        half = 1.96 * cause.error if cause.error > 0 else math.nan
        path = cause.side == PAIR
        return Verdict(
            kind=_KINDS[cause.side],
            cause=cause.side,
            operation=self._operation,
            rank=None if path else max(cause.receiver, cause.source),
            edge=(cause.source, cause.receiver) if path and not cause.node_pair else None,
            nodes=(cause.source, cause.receiver) if cause.node_pair else None,
            effect_us=cause.effect * self._to_us,
            interval_us=(
                (cause.effect - half) * self._to_us,
                (cause.effect + half) * self._to_us,
            ),
            share=float(self._largest[hit].sum()) / total if total > 0 else 0.0,
            saving_us=float(saved[hit].sum()) / self._reported * self._to_us,
            certainty=float(np.maximum(0.0, 1.0 - cause.chance)),
            seen_in=float("nan"),
            evidence={
                "healthy_us": cause.healthy * self._to_us,
                "cells": float(cause.cells),
                **({"only_node": float(cause.only_node)} if cause.only_node >= 0 else {}),
            },
            where=self._where(cause),
            next_step=_NEXT_STEPS[cause.side],
        )

    def saving_of_all(self, causes: list[Cause]) -> float:
        """Microseconds of waiting per receiver that would go if all causes went together."""
        rest = self._wait.copy()
        for cause in causes:
            rows, columns = self._touched(cause)
            rest[np.ix_(rows, columns)] -= cause.effect
        saved = self._largest - np.maximum(rest, 0.0).max(axis=1, initial=0.0)
        return float(saved.sum()) / self._reported * self._to_us

    def _touched(self, cause: Cause) -> tuple[BoolArray, BoolArray]:
        """`[n]` each: the rows and the columns of the cells to which a cause adds."""
        if cause.node_pair:
            return self._nodes == cause.receiver, self._nodes == cause.source
        ranks = np.arange(self._nodes.size)
        others = (
            np.ones(ranks.size, bool) if cause.only_node < 0 else self._nodes == cause.only_node
        )
        return (
            ranks == cause.receiver if cause.receiver >= 0 else others,
            ranks == cause.source if cause.source >= 0 else others,
        )

    def _hit(self, cause: Cause) -> BoolArray:
        """`[n]`: receivers whose largest waiting is due to the cause."""
        rows, columns = self._touched(cause)
        return np.asarray(rows & columns[self._last] & (self._largest > 0))

    def _where(self, cause: Cause) -> str:
        if self._hosts is None:
            return ""
        ends = [end for end in (cause.source, cause.receiver) if end >= 0]
        if not cause.node_pair:
            return " > ".join(f"{self._hosts[end]} device:{self._devices[end]}" for end in ends)
        names = list(dict.fromkeys(self._hosts))
        # Nodes that were told apart within one host have no names.
        return " > ".join(names[end] for end in ends) if len(names) > 1 else ""
