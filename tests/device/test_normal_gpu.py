"""Normal operations of ranks that share one GPU: every mode, within a node and between nodes, and graphs.

What the cpu backend can run of it runs there too. `make gpu` runs it on a GPU, where nodes are a matter of
DEEP_EP_RANKS_PER_NODE alone: gateways relay, and all memory is in reach.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import deep_ep
from support.exchange import Shape, assert_same_bytes
from support.launch import DEVICE, Ranks
from support.normal_exchange import (
    SMALL,
    TINY,
    Mode,
    assert_sums,
    exchange_and_check,
    expect,
    make_inputs,
    normal_ranks,
    run_dispatch,
    shape_of,
)

NODES = {"1x4": (4, 4), "1x8": (8, 8), "2x4": (8, 4)}
PLAIN = Mode()
CASES = {
    "bf16": (PLAIN, SMALL),
    "fp8": (Mode(dtype="float8_e4m3fn", scales="float32", scale_strides="columns"), SMALL),
    "worst": (Mode(spare_rows=3), SMALL),
    "bias": (Mode(num_biases=2, async_finish=True), SMALL),
    "queues-of-two-slots": (PLAIN, TINY),  # one for each node at least
}
BYTES_PER_ROW = 4096


@contextmanager
def ranks_of(nodes: str, config: deep_ep.Config) -> Iterator[Ranks]:
    """Ranks of one process, on nodes that are so named."""
    num_ranks, ranks_per_node = NODES[nodes]
    with normal_ranks(num_ranks, ranks_per_node, [config], BYTES_PER_ROW) as ranks:
        yield ranks


def shape_for(num_ranks: int, hidden: int = 512, **more: Any) -> Shape:
    """Ranks with different numbers of tokens, one with none."""
    tokens = [(37 * rank + 20) % 61 for rank in range(num_ranks - 1)]
    return shape_of([*tokens, 0], hidden, 4 * num_ranks, 4, **more)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_a_device_equal_the_reference(nodes: str, case: str) -> None:
    """Fresh dispatch, dispatch with a handle, combine."""
    num_ranks, ranks_per_node = NODES[nodes]
    mode, config = CASES[case]
    with ranks_of(nodes, config) as ranks:
        for seed in range(2):
            shape = shape_for(num_ranks, seed=seed)
            exchange_and_check(ranks, shape, mode, config, ranks_per_node)


class Captured(NamedTuple):
    """One rank's dispatch with a handle, and the combine of what it brings, as a graph."""

    graph: Any
    x: torch.Tensor
    received: torch.Tensor
    combined: torch.Tensor


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda", reason="CUDA graphs; `make gpu` runs this on a machine with a GPU"
)
@pytest.mark.parametrize("nodes", NODES)
def test_a_captured_exchange_gives_the_reference_at_each_replay(nodes: str) -> None:
    num_ranks, ranks_per_node = NODES[nodes]
    one_at_a_time = threading.Lock()
    shape, mode = shape_for(num_ranks, hidden=24), PLAIN
    inputs = make_inputs(shape, mode)

    def capture(rank: int, buffer: deep_ep.Buffer, handle: tuple[Any, ...]) -> Captured:
        x = inputs[rank].values.to(DEVICE)
        graph = torch.cuda.CUDAGraph()
        with (
            one_at_a_time,
            torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ),
        ):
            received = buffer.dispatch(x, handle=handle, config=SMALL)[0]
            combined = buffer.combine(received, handle, config=SMALL)[0]
        return Captured(graph, x, received, combined)

    with ranks_of(nodes, SMALL) as ranks:
        dispatched = ranks.run(
            lambda rank, buffer: run_dispatch(buffer, inputs[rank], shape, mode, SMALL)[1]
        )
        captured = ranks.run(lambda rank, buffer: capture(rank, buffer, dispatched[rank][4]))
        for seed in range(3):
            others = make_inputs(replace(shape, seed=seed), mode)
            # Other rows by the ways of the captured handle.
            sent = [one._replace(cached_x=other.values) for one, other in zip(inputs, others)]

            def replay(rank: int, buffer: deep_ep.Buffer, sent: list[Any] = sent) -> None:
                captured[rank].x.copy_(sent[rank].cached_x)
                captured[rank].graph.replay()
                torch.cuda.current_stream().synchronize()
                buffer.communicator.raise_failure()

            ranks.run(replay)
            expected = expect(sent, shape, mode, ranks_per_node)
            expected = expected._replace(ys=[one.x for one in expected.cached])
            for rank, one in enumerate(captured):
                where = f"rank {rank}, replay {seed}"
                assert_same_bytes(one.received, expected.cached[rank].x, where)
                assert_sums(one.combined, rank, expected, where)
