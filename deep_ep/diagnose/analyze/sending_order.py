"""How much longer paths take for being sent over late.

A port that is slower than its rank hands rows over falls behind it more and more, so what is sent last waits longest.
Where each rank has an order of its own, clocks would take that up, and what they leave looks like slow sides.
"""

from __future__ import annotations

import numpy as np

from ..collect.group_matrices import Matrices
from ..collect.hops import NORMAL_KINDS
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import median, median_of, or_zero, typical_slope
from .partners import members, partners

# Receivers and sources, [4, circles] each.
_Paths = tuple[IntArray, IntArray]

# In smaller groups most circles lead through any rank that is slow.
_MIN_RANKS = 8
# Circles that are looked at, and places by which two of them must differ to tell anything.
_CIRCLES, _LATER = 4_000, 0.2
# By how much the orders of ranks must differ, in places.
_UNLIKE = 0.1
# The order matters where paths differ for it by so many times the smallest effect of interest.
_MATTERS = 2.0


def queued_in_ports(
    m: Matrices, time: FloatArray, classes: IntArray, floor_ns: float
) -> FloatArray:
    """[receiver, source] ns: how much longer than usual, or shorter, what is sent over each path waits in its port.

    Args:
        m: of the kind of operation.
        time: [receiver, source] ns from issue to arrival; NaN where not known.
        classes: as in PathModel.
        floor_ns: the smallest effect of interest.
    """
    queued = np.zeros(classes.shape)
    # In normal operations, what is sent late has waited for slots of its receiver.
    if m.operation in NORMAL_KINDS or m.num_ranks < _MIN_RANKS:
        return queued
    for within, of_link in enumerate((classes > 0, classes == 0)):
        others = partners(m.place.nodes, of_link, within=bool(within))
        ranks = np.arange(m.num_ranks)[:, None]
        are_paths = (others >= 0) & of_link[ranks, others]
        if not are_paths.any():
            continue
        sent = np.where(are_paths, m.send[others, ranks], np.nan)
        first, last = (of.reduce(sent, axis=1, initial=np.nan) for of in (np.fmin, np.fmax))
        # Places in the order of a rank, from 0 to 1.
        place = (m.send - first) / np.where(last > first, last - first, np.nan)
        # An order that all ranks keep to is one with what is slow into those who come last.
        common = median(np.where(are_paths, place[ranks, others], np.nan), 1)
        circle, mates = _circles(others, of_link, m.place.nodes)
        if not median_of(np.abs(place[circle] - common[circle[0]])) > _UNLIKE:
            continue
        # Who hands over the last rows for all at about the same time has hardly any order.
        part = min(2 * median_of((last - first) / last), 1.0)
        most = max(or_zero(part * median_of(time[circle].mean(axis=0))), 0.0)
        cost = _cost(place, time, circle, mates, most)
        differs = cost * np.nan_to_num(place - median_of(place[circle]))
        if np.abs(differs[circle]).max() > _MATTERS * floor_ns:
            queued += np.where(of_link, differs, 0.0)
    return queued


def _cost(place: FloatArray, time: FloatArray, circle: _Paths, mates: _Paths, most: float) -> float:
    """ns from the first place to the last.

    Clocks cancel in circles. Against the same one the other way around it differs in nothing that all paths into a rank or out
    of it have, and against another one through the same nodes in nothing that those of a node have.
    """
    cost = 0.0
    for other in (circle[::-1], mates):
        later, longer = ((x[circle] - x[other]).sum(axis=0) for x in (place, time))
        more = typical_slope(later, longer - cost * later, _LATER)
        cost = min(cost + max(more, 0.0), most)
    return cost


def _circles(others: IntArray, of_link: BoolArray, nodes: IntArray) -> tuple[_Paths, _Paths]:
    """Paths of a kind of link that lead around in four steps, and such through other ranks of the same nodes."""
    generator = np.random.default_rng(0)
    ranks = generator.integers(0, nodes.size, (1, _CIRCLES))
    for _ in range(3):
        chosen = generator.integers(0, others.shape[1], _CIRCLES)
        ranks = np.concatenate([ranks, others[ranks[-1:], chosen]])
    following = np.roll(ranks, -1, axis=0)
    lead_around = (ranks >= 0).all(axis=0) & of_link[ranks, following].all(axis=0)
    ranks, following = ranks[:, lead_around], following[:, lead_around]
    inside = members(nodes)
    mates = inside[nodes[ranks], generator.integers(0, inside.shape[1], ranks.shape)]
    mates = np.where(mates < 0, ranks, mates)
    return (ranks, following), (mates, np.roll(mates, -1, axis=0))
