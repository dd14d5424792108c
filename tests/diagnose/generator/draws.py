"""The random numbers of generated windows: heavy-tailed noise, clocks, and who gets which tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from generator.machines import TOKENS_PER_RANK, Setup
from generator.noise import draw_noise

# Hot experts stay for so many operations, where they move.
MOVING_OPERATIONS = 50
# A clock that steps within a run does so ahead of one of these.
_STEP_OPERATIONS = (32, 96)
# The best round trip of several takes up to so much longer than one without any noise, in us.
_BEST_EXCESS_US = 0.5
# The gaps of layers differ by up to so much from the usual, as a share of it.
_LAYER_SPREAD = 0.4
# A moving hot rank leaves something for the others.
_MOST_MOVING = 0.75
_NOISE_TABLE = 2**18


class Draws(NamedTuple):
    """All random numbers of a batch. First dimension: windows; noise is in units of its scale."""

    personal: FloatArray  # [., num_ranks], about 1
    clock_error: FloatArray  # [., num_ranks], us
    drift: FloatArray  # [., num_ranks]
    clock_zero: IntArray  # [., num_ranks], ns: each clock has its own
    clock_step: IntArray  # [., num_ranks], ns: by how much it is set forward
    step_ahead_of: IntArray  # [.], number of the operation; 1: before the run
    round_trip: (
        FloatArray  # [., num_ranks, num_ranks], us: noise of the best one, both ways together
    )
    start: FloatArray  # [., num_ranks], us
    wander: FloatArray  # [., operations, num_ranks], standard normal
    gap: FloatArray  # [., operations, num_ranks]
    send: FloatArray
    drain: FloatArray
    path: FloatArray  # [., operations, num_ranks, num_ranks]
    own_path: FloatArray  # [., num_ranks, num_ranks], about 1
    late: FloatArray  # [., operations, num_ranks], us, by noise that remembers
    rail: FloatArray  # [., operations, devices of a node], us, likewise
    fabric: FloatArray  # [., operations], us
    layer_gap: FloatArray  # [., layers], about 1
    tokens: IntArray  # [., rounds, expert rank, source]
    load: FloatArray  # [., num_ranks], mean over rounds


def draw(setup: Setup, share: FloatArray, seeds: Sequence[int]) -> Draws:
    """Of one window per seed; share [windows, num_ranks]: of the tokens, as hot ranks have them."""
    windows = [_draw_window(setup, share[i], seed) for i, seed in enumerate(seeds)]
    return Draws(*(np.stack(values) for values in zip(*windows)))


def _draw_window(setup: Setup, share: FloatArray, seed: int) -> Draws:
    """Each quantity from its own stream, operation by operation."""
    machine, num_ranks, operations = setup.machine, setup.num_ranks, setup.num_operations
    children = np.random.SeedSequence(seed).spawn(13)
    streams = (np.random.Generator(np.random.PCG64(s)) for s in children[:7] + children[8:])
    ranks, wander, gap, send, drain, path, routing, layers, moves, paths, batches, clocks = streams
    table = _noise_table(machine.tail_degrees, machine.hiccup_share)
    node, _ = machine.node_and_index(num_ranks)

    def noise(stream: np.random.Generator, *shape: int) -> FloatArray:
        return table[stream.integers(0, _NOISE_TABLE, shape, np.uint32)]

    personal = 1.0 + machine.spread * np.clip(ranks.normal(size=num_ranks), -2, 2)
    wrong_clocks, drifts = ranks.normal(size=(2, num_ranks))
    host_clocks, host_drifts = ranks.normal(size=(2, num_ranks))[:, node]
    drifts, host_drifts = np.clip(drifts, -2, 2), np.clip(host_drifts, -2, 2)
    clock_zero = ranks.integers(10**12, 10**15, num_ranks)
    start = ranks.uniform(0, 10 * machine.jitter, num_ranks)

    first_layer = routing.normal(size=(1, num_ranks))
    other_layers = layers.normal(size=(machine.layers - 1, num_ranks))
    popularity = _popularity(machine.skew, np.concatenate([first_layer, other_layers]))
    load = _loads(setup, popularity, share, moves)
    shape = setup.num_rounds, num_ranks
    chances = (load / load.sum(axis=1, keepdims=True))[:, None]
    batch = TOKENS_PER_RANK * _batches(setup, batches)[:, None]
    tokens = routing.multinomial(np.rint(batch).astype(np.int64), chances, shape)
    layer_gap = 1 + _LAYER_SPREAD * layers.uniform(-1, 1, machine.layers)
    shared = draw_noise(setup, children[7])
    stepping, step_ahead_of = clocks.integers(num_ranks), clocks.integers(*_STEP_OPERATIONS)
    excess = np.triu(clocks.uniform(0, _BEST_EXCESS_US, (num_ranks, num_ranks)), 1)
    return Draws(
        personal=personal,
        clock_error=machine.clock_error * wrong_clocks + machine.host_clock_error * host_clocks,
        drift=(machine.drift_ppm * drifts + machine.host_drift_ppm * host_drifts) * 1e-6,
        clock_zero=clock_zero,
        clock_step=round(machine.clock_step * 1e3) * (np.arange(num_ranks) == stepping),
        step_ahead_of=step_ahead_of if machine.clock_steps_within else np.ones((), np.int64),
        round_trip=excess + excess.T,
        start=start,
        wander=wander.normal(size=(operations, num_ranks)),
        gap=noise(gap, operations, num_ranks),
        send=noise(send, operations, num_ranks),
        drain=noise(drain, operations, num_ranks),
        path=noise(path, operations, num_ranks, num_ranks),
        own_path=1.0
        + machine.path_spread * np.clip(paths.normal(size=(num_ranks, num_ranks)), -2, 2),
        late=shared.gap,
        rail=shared.rail,
        fabric=shared.fabric,
        layer_gap=layer_gap if machine.layers > 1 else np.ones(1),
        tokens=np.swapaxes(tokens, 1, 2),
        load=load.mean(axis=0),
    )


def _batches(setup: Setup, stream: np.random.Generator) -> FloatArray:
    """[rounds]: what share of the tokens there is."""
    shares = np.array(setup.machine.batches)
    if setup.machine.batches_alternate:
        return shares[np.arange(setup.num_rounds) % len(shares)]
    return stream.choice(shares, setup.num_rounds)


def _loads(
    setup: Setup, popularity: FloatArray, share: FloatArray, moves: np.random.Generator
) -> FloatArray:
    """[rounds, num_ranks]: how popular each rank's experts are; popularity [layers, num_ranks]."""
    machine, num_ranks = setup.machine, setup.num_ranks
    by_layer = np.array([_with_hot_ranks(one, share) for one in popularity])
    rounds = np.arange(setup.num_rounds)
    load: FloatArray = by_layer[rounds % machine.layers]
    if machine.moving_hot_share:
        span = rounds * len(setup.kinds) // MOVING_OPERATIONS
        hot = moves.integers(num_ranks, size=span[-1] + 1)[span]
        share_hot = min(machine.moving_hot_share, _MOST_MOVING * num_ranks)
        load = load * (num_ranks - share_hot) / (num_ranks - load[rounds, hot])[:, None]
        load[rounds, hot] = share_hot
    return load


def _popularity(skew: float, normal: FloatArray) -> FloatArray:
    """[., num_ranks], mean 1: log-normal of relative standard deviation `skew`, cut at two of them."""
    sigma = np.sqrt(np.log1p(skew**2))
    popularity = np.exp(sigma * np.clip(normal, -2, 2))
    return popularity / popularity.mean(axis=-1, keepdims=True)


def _with_hot_ranks(popularity: FloatArray, share: FloatArray) -> FloatArray:
    """Hot ranks get their share of an even load, the others what is left in their proportions."""
    hot = np.isfinite(share)
    if not hot.any():
        return popularity
    left = max(popularity.size - share[hot].sum(), 0.0)
    others = np.where(hot, 0.0, popularity)
    return np.where(hot, share, others * left / max(others.sum(), 1e-12))


@functools.lru_cache(maxsize=8)
def _noise_table(tail_degrees: float, hiccup_share: float) -> npt.NDArray[np.float32]:
    """Heavy-tailed noise to draw from: Student's t, and now and then a hiccup.

    Drawing entries of a table costs a quarter of drawing afresh.
    """
    rng = np.random.default_rng(20250611)
    noise = 0.8 * rng.standard_t(tail_degrees, _NOISE_TABLE)
    hiccup = rng.random(_NOISE_TABLE) < hiccup_share
    return (noise + np.where(hiccup, rng.exponential(10.0, _NOISE_TABLE), 0.0)).astype(np.float32)
