"""What profiles say that normal operations move, against the routing."""

from __future__ import annotations

import json
from pathlib import Path
from threading import get_native_id
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.base.topology import Topology
from deep_ep.observe import traffic
from deep_ep.types.handles import OneNodeHandle, hidden_word, new_channel_prefix
from support.launch import DEVICE
from support.normal_exchange import layout_of, normal_ranks

HIDDEN, EXPERTS = 256, 8
# Tokens of each rank: none, one, and uneven numbers.
TOKENS = (0, 1, 13, 30)
RANKS = len(TOKENS)


def routing_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.randint(-1, EXPERTS, (TOKENS[rank], 3), generator=generator)
    topk_idx[5:6] = -1
    return topk_idx


def in_rank(rank: int) -> torch.Tensor:
    """[num_tokens, num_ranks] bool."""
    owner = torch.where(routing_of(rank) >= 0, routing_of(rank) // (EXPERTS // RANKS), -1)
    return (owner[..., None] == torch.arange(RANKS)).any(1)


def ours(profile: torch.profiler.profile, path: Path) -> list[dict[str, Any]]:
    """Events of our operators in order of time."""
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("name", "").startswith("deep_ep::")]
    return sorted(found, key=lambda event: event["ts"])


def profile_of(run: Any, folder: Path, ranks_per_node: int = RANKS) -> list[list[dict[str, Any]]]:
    """Such events of each rank."""
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    configs = [deep_ep.Buffer.get_dispatch_config(2), deep_ep.Buffer.get_combine_config(2)]
    with normal_ranks(RANKS, ranks_per_node, configs, 2 * HIDDEN) as ranks:
        with torch.profiler.profile(record_shapes=True, experimental_config=everywhere) as profile:
            threads = ranks.run(lambda rank, buffer: (run(rank, buffer), get_native_id())[1])
        events = ours(profile, folder / "trace.json")
    return [[event for event in events if event["tid"] == thread] for thread in threads]


def concrete(event: dict[str, Any]) -> list[Any]:
    return [json.loads(text) if text else None for text in event["args"].get("Concrete Inputs", [])]


def moved(events: list[dict[str, Any]]) -> list[list[Any]]:
    """Inputs of the traffic operators of a rank, with the tokens for each rank behind them."""
    found: list[list[Any]] = []
    for event in events:
        if event["name"] == "deep_ep::traffic":
            found.append(concrete(event))
        elif event["name"] == "deep_ep::tokens_per_rank":
            _, first, tokens = concrete(event)
            assert first == 0
            found[-1].append(tokens)
    return found


def exchange(rank: int, buffer: deep_ep.Buffer, x: Any, **options: Any) -> tuple[Any, Any]:
    topk_idx = routing_of(rank).to(DEVICE)
    layout, _ = layout_of(buffer, topk_idx, EXPERTS)
    received, _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=torch.ones(topk_idx.shape, device=DEVICE),
        **layout,
        **options,
    )
    return received, handle


def rows_of(rank: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.ones(TOKENS[rank], hidden, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
def test_each_link_has_the_rows_that_the_routing_sends_over_it(
    ranks_per_node: int, tmp_path: Path
) -> None:
    """In all of a dispatch, a dispatch with its handle, and a combine, which goes the same way back."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        received, handle = exchange(rank, buffer, rows_of(rank))
        buffer.dispatch(rows_of(rank, 128), handle=handle)
        buffer.combine(received, handle)

    events = profile_of(run, tmp_path, ranks_per_node)
    sent = torch.stack([in_rank(source).sum(0) for source in range(RANKS)])
    of_node = [
        in_rank(source).view(-1, RANKS // ranks_per_node, ranks_per_node).any(2)
        for source in range(RANKS)
    ]
    for rank in range(RANKS):
        node, place = divmod(rank, ranks_per_node)
        others = [source for source in range(RANKS) if source % ranks_per_node != place]
        peers = [
            source
            for source in range(RANKS)
            if source % ranks_per_node == place and source // ranks_per_node != node
        ]
        rows = [
            int(sent[rank, rank]),
            int(sent[others, rank].sum()),
            sum(int(of_node[source][:, node].sum()) for source in peers),
        ]
        there, back = sent[rank].tolist(), sent[:, rank].tolist()
        fresh, again, combine = moved(events[rank])
        assert fresh[1:] == [2 * HIDDEN, *rows, there]
        assert again[1:] == [2 * 128, *rows, there]
        assert combine[1:] == [2 * HIDDEN, *rows, back]
        assert [fresh[0], again[0], combine[0]] == list(range(fresh[0], fresh[0] + 3))


def test_scales_travel_with_rows(tmp_path: Path) -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        scales = torch.ones(TOKENS[rank], HIDDEN // 128, device=DEVICE)
        exchange(rank, buffer, (rows_of(rank).to(torch.float8_e4m3fn), scales))

    for events in profile_of(run, tmp_path):
        ((_, row_bytes, *_),) = moved(events)
        assert row_bytes == HIDDEN + 4 * HIDDEN // 128


def test_rows_are_counted_where_memory_is_for_the_worst_case(tmp_path: Path) -> None:
    """The host does not know the counts then, but the CPU backend has them when the call returns."""
    if DEVICE == "cuda":
        pytest.skip("on a GPU the handle is not filled when the call returns")

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        exchange(rank, buffer, rows_of(rank), num_worst_tokens=sum(TOKENS))

    for rank, events in enumerate(profile_of(run, tmp_path)):
        ((_, _, local, nvlink, rdma, _),) = moved(events)
        assert local + nvlink + rdma == sum(int(in_rank(r)[:, rank].sum()) for r in range(RANKS))


def handle_of(num_ranks: int, *, is_done: bool) -> tuple[Any, ...]:
    """Of rank 1, with a row of each rank, and as many tokens for rank r as r."""
    storage = new_channel_prefix(num_ranks, 1, torch.device("cpu"))
    storage[:, 0] = torch.arange(num_ranks)
    if is_done:
        word = hidden_word(storage)
        assert word is not None
        word.fill_(1)
    empty = torch.empty(0, dtype=torch.int32)
    prefix = torch.arange(1, num_ranks + 1, dtype=torch.int32)[:, None].repeat(1, num_ranks)
    return tuple(OneNodeHandle(prefix, storage, empty, empty, empty, empty))


def recorded(num_ranks: int, path: Path, *, is_done: bool, is_counted: bool) -> list[list[Any]]:
    place = Topology(1, num_ranks, num_ranks)
    handle = handle_of(num_ranks, is_done=is_done)
    with torch.profiler.profile(record_shapes=True) as profile:
        traffic.record(place, handle, 7, 10, is_combine=False, is_counted=is_counted)
    return [concrete(event) for event in ours(profile, path)]


def test_large_groups_are_recorded_in_lists_that_the_profiler_keeps(tmp_path: Path) -> None:
    said = recorded(72, tmp_path / "t.json", is_done=True, is_counted=False)
    assert said[0] == [7, 10, 1, 71, 0]
    assert [(call, first) for call, first, _ in said[1:]] == [(7, 0), (7, 30), (7, 60)]
    assert [token for _, _, tokens in said[1:] for token in tokens] == list(range(72))


def test_a_handle_that_is_not_filled_yet_is_not_counted(tmp_path: Path) -> None:
    assert recorded(4, tmp_path / "t.json", is_done=False, is_counted=False) == []
    assert recorded(4, tmp_path / "t.json", is_done=False, is_counted=True) != []
    handle = handle_of(4, is_done=True)
    copied = tuple(tensor.clone() for tensor in handle)
    traffic.record(Topology(1, 4, 4), copied, 1, 1, is_combine=False, is_counted=True)
