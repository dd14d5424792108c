"""Noise of healthy machines that is not the same in every operation: it remembers, and others share it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray
from generator.machines import Setup

# A rail is congested for so many operations at a time.
CONGESTED_OPERATIONS = (10, 50)
# An operating system takes a rank's time every so many operations.
TICKS_APART = (5, 40)


class Noise(NamedTuple):
    """What one window's ranks, rails and fabric suffer in each operation, in us."""

    gap: FloatArray  # [operations, num_ranks], ahead of it
    rail: FloatArray  # [operations, devices of a node], on paths between nodes
    fabric: FloatArray  # [operations], on all paths between nodes


def draw_noise(setup: Setup, stream: np.random.SeedSequence) -> Noise:
    """Each family from its own stream, operation by operation, so that runs may end anywhere."""
    machine, operations = setup.machine, setup.num_operations
    node, index = machine.node_and_index(setup.num_ranks)
    ranks, nodes, ticks, *rails, pauses = (
        np.random.Generator(np.random.PCG64(s)) for s in stream.spawn(3 + int(index.max()) + 2)
    )
    gap = np.zeros((operations, setup.num_ranks))
    rail, fabric = np.zeros((operations, index.max() + 1)), np.zeros(operations)
    if machine.rank_noise:
        gap += machine.rank_noise * remembering(ranks, gap.shape, machine.noise_memory)
    if machine.node_noise:
        of_nodes = (operations, int(node.max()) + 1)
        gap += machine.node_noise * remembering(nodes, of_nodes, machine.noise_memory)[:, node]
    if machine.tick:
        gap += machine.tick * regular(ticks, gap.shape)
    if machine.congestion:
        for column, of_rail in zip(rail.T, rails):
            column[:] = machine.congestion * bursts(of_rail, operations, machine.congested_share)
    if machine.fabric_pause:
        is_paused, length = pauses.random((operations, 2)).T
        fabric += machine.fabric_pause * (is_paused < machine.paused_share) * (0.5 + length)
    return Noise(gap, rail, fabric)


def remembering(
    generator: np.random.Generator, shape: tuple[int, int], memory: float
) -> FloatArray:
    """[operations, .] of mean 0 and variance 1: AR(1) that forgets all but 1/e in `memory` operations."""
    kept = np.exp(-1.0 / memory)
    values = generator.normal(size=shape)
    values[1:] *= np.sqrt(1 - kept**2)
    for op in range(1, len(values)):
        values[op] += kept * values[op - 1]
    return values


def regular(generator: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """[operations, .]: 0.5 to 1.5 in every k-th operation of each column, by a k of its own."""
    apart = generator.integers(*TICKS_APART, shape[1], endpoint=True)
    phase = generator.integers(apart)
    is_due = (np.arange(shape[0])[:, None] + phase) % apart == 0
    return np.where(is_due, generator.uniform(0.5, 1.5, shape), 0.0)


def bursts(generator: np.random.Generator, operations: int, share: float) -> FloatArray:
    """[operations]: 0.5 to 1.5 throughout a burst, in `share` of the operations; 0 between bursts."""
    shortest, longest = CONGESTED_OPERATIONS
    pause = (shortest + longest) / 2 * (1 / share - 1)
    values = np.zeros(operations)
    op = -round(pause) - longest  # long enough ago to begin anywhere between two bursts
    while op < operations:
        op += int(generator.exponential(pause))
        length = int(generator.integers(shortest, longest, endpoint=True))
        values[max(op, 0) : max(op + length, 0)] = generator.uniform(0.5, 1.5)
        op += length
    return values
