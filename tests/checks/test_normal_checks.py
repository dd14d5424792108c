"""Every bad normal call: its own clear exception, nothing sent, and the group usable afterwards."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import Buffer, Config, EventOverlap
from deep_ep.checks import handles as handle_values
from deep_ep.checks import layouts as layout_values
from deep_ep.checks import normal as normal_checks
from deep_ep.errors import (
    EPArgumentError,
    EPTransportError,
    EPTypeError,
    EPUnsupportedError,
    EPUsageError,
)
from deep_ep.native import backend
from deep_ep.observe.counters import RecvCounters
from deep_ep.ops import normal
from deep_ep.ops.stream_order import StreamOrder
from deep_ep.types.config import largest_hints
from deep_ep.types.handles import hidden_word
from support.bad_calls import (
    Arguments,
    Change,
    assert_raises,
    assert_says,
    case,
    elsewhere,
    of,
    strided,
    tensor_cases,
    to,
    with_value,
)
from support.exchange import misaligned
from support.launch import DEVICE, Ranks
from support.native_recorder import NativeRecorder
from support.normal_exchange import layout_of

NUM_TOKENS = (5, 0, 3, 7)
BAD_RANK = 2
HIDDEN = 64
NUM_EXPERTS, NUM_TOPK = 8, 3
CONFIG = Config(4, 2, 8, 2, 8)
NUM_BYTES = 1 << 20

reads_values = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the host does not read values")


def normal_ranks(num_ranks: int = len(NUM_TOKENS), **arguments: Any) -> Ranks:
    """A group whose buffers fit normal calls only."""
    sizes = {"num_nvl_bytes": NUM_BYTES, "num_rdma_bytes": NUM_BYTES, "low_latency_mode": False}
    return Ranks(num_ranks, 1, 128, num_ranks, **{**sizes, **arguments})


@pytest.fixture(scope="module", params=[4, 2], ids=["one-node", "two-nodes"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks, on one node or two; each test leaves them usable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_RANKS_PER_NODE", str(request.param))
        with normal_ranks() as made:
            yield made


def num_nodes(ranks: Ranks) -> int:
    """Of the group."""
    return int(ranks.buffers[0].runtime.get_num_rdma_ranks())


def topk_of(rank: int) -> torch.Tensor:
    """What the tokens of a rank select; some entries nobody."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(NUM_TOKENS[rank], NUM_EXPERTS, generator=generator)
    topk_idx = scores.argsort(1)[:, :NUM_TOPK].contiguous()
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.3] = -1
    return topk_idx.to(DEVICE)


def dispatch_arguments(rank: int, buffer: Buffer) -> Arguments:
    """A correct call of a rank."""
    topk_idx = topk_of(rank)
    layout, _ = layout_of(buffer, topk_idx, NUM_EXPERTS)
    x = torch.full((NUM_TOKENS[rank], HIDDEN), rank + 1.0, dtype=torch.bfloat16, device=DEVICE)
    return {
        "x": x,
        **layout,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(topk_idx.shape, device=DEVICE),
        "config": CONFIG,
    }


def dispatched(ranks: Ranks, **changes: Any) -> list[Any]:
    """What a correct dispatch returns on each rank."""
    return ranks.run(
        lambda rank, buffer: buffer.dispatch(**{**dispatch_arguments(rank, buffer), **changes})
    )


def combine_arguments(result: Any) -> Arguments:
    """A correct combine of what a dispatch returned."""
    x, _, weights, _, handle, _ = result
    rows = torch.zeros_like(x[:1]).expand(NUM_TOKENS[BAD_RANK], -1).contiguous()
    return {
        "x": x,
        "handle": handle,
        "topk_weights": weights,
        "bias": (rows, rows),
        "config": CONFIG,
    }


def assert_usable(ranks: Ranks) -> None:
    """A dispatch, one with its handle and a combine give what they should."""

    def exchange(rank: int, buffer: Buffer) -> None:
        arguments = dispatch_arguments(rank, buffer)
        x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        again = buffer.dispatch(arguments["x"], handle=handle, config=CONFIG)[0]
        assert torch.equal(x, again)
        combined, _, _ = buffer.combine(x, handle, config=CONFIG)
        expected = arguments["x"] * arguments["is_token_in_rank"].sum(1, keepdim=True)
        assert torch.equal(combined, expected)

    ranks.run(exchange)


def assert_given_up_for(outcomes: list[Any], error: type[Exception], words: list[str]) -> None:
    """One rank says what is wrong, the others that the operation was given up."""
    for rank, outcome in enumerate(outcomes):
        if rank == BAD_RANK:
            assert_says(outcome, error, words)
        else:
            assert_says(outcome, EPTransportError, ["gave up operation"])


# Equal sums over the experts of each rank.
SHIFTED = torch.tensor([-99, 99] * (NUM_EXPERTS // 2), dtype=torch.int32, device=DEVICE)


def without_topk(arguments: Arguments) -> Arguments:
    """The same call without top-k tensors."""
    return {**arguments, "topk_idx": None, "topk_weights": None}


def with_scales(change: Callable[[torch.Tensor], Any], data: torch.dtype = torch.uint8) -> Change:
    """Data with scales of which something is wrong."""

    def changed(arguments: Arguments) -> Arguments:
        scales = torch.ones(NUM_TOKENS[BAD_RANK], 4, device=DEVICE)
        return {**arguments, "x": (arguments["x"].to(data), change(scales))}

    return changed


DISPATCH_CASES = [
    case("x-address", of("x", misaligned), "x begins at address", "x.clone()"),
    *tensor_cases("x", None, any_strides=True),
    *tensor_cases("num_tokens_per_rank", torch.int64),
    *tensor_cases("is_token_in_rank", torch.int32),
    *tensor_cases("topk_idx", torch.int32),
    *tensor_cases("topk_weights", torch.float64, any_strides=True),
    case("expert-dtype", of("num_tokens_per_expert", lambda t: t.long()), "torch.int32"),
    case("no-rank-counts", to(num_tokens_per_rank=None), "num_tokens_per_rank is None", error=EPUsageError),
    case("no-mask", to(is_token_in_rank=None), "is_token_in_rank is None", error=EPUsageError),
    case("no-expert-counts", to(num_tokens_per_expert=None), "num_tokens_per_expert is None", error=EPUsageError),
    case("experts-7-of-4", of("num_tokens_per_expert", lambda t: t[:7]), "7 experts", "Use 8"),
    case("no-experts", of("num_tokens_per_expert", lambda t: t[:0]), "0 experts", "Use 4"),
    case("too-many-experts", of("num_tokens_per_expert", lambda t: t.new_zeros(4100)), "at most 4096"),
    case("weights-alone", to(topk_idx=None), "topk_idx alone is None", error=EPUsageError),
    case("indices-alone", to(topk_weights=None), "topk_weights alone is None", error=EPUsageError),
    case(
        "worst-tokens-without-top-k", to(topk_idx=None, topk_weights=None, num_worst_tokens=64),
        "num_worst_tokens is 64 and topk_idx is None", error=EPUsageError,
    ),
    case("negative-worst-tokens", to(num_worst_tokens=-1), "num_worst_tokens is -1"),
    case("broken-worst-tokens", to(num_worst_tokens=1.5), "num_worst_tokens is 1.5", error=EPTypeError),
    case("huge-worst-tokens", to(num_worst_tokens=2**31), "at most 2147483647"),
    case("no-alignment", to(expert_alignment=0), "expert_alignment is 0"),
    case("alignment-type", to(expert_alignment=None), "expert_alignment is None", error=EPTypeError),
    case("short-row", of("x", lambda x: x[:, :4].contiguous()), "rows of 8 bytes", "Pad x to 8"),
    case("empty-row", of("x", lambda x: x[:, :0]), "rows of 0 bytes", "Pad x to 8"),
    case("x-of-one", of("x", lambda x: (x,)), "x holds Tensor", "(x, x_scales)", error=EPTypeError),
    case("scaled-item", with_scales(lambda s: s, torch.bfloat16), "scales and dtype torch.bfloat16"),
    case("scale-dtype", with_scales(lambda s: s.double()), "x_scales", "torch.float32 or torch.int32"),
    case("scale-rows", with_scales(lambda s: s[:2]), "x_scales", "shape"),
    case("no-scales", with_scales(lambda _: None), "x holds Tensor, NoneType", error=EPTypeError),
    case("many-scales", with_scales(lambda s: s.repeat(1, 64)), "num_scales is 256", "at most 255"),
    case(
        "top-k-above-128",
        lambda a: {
            **a,
            "topk_idx": a["topk_idx"].repeat(1, 43),
            "topk_weights": a["topk_weights"].repeat(1, 43),
        },
        "num_topk is 129", "at most 128",
    ),
    case("config-type", to(config=20), "config is a int", error=EPTypeError),
    case("odd-sms", to(config=Config(5)), "config.num_sms is 5", "even"),
    case("no-sms", to(config=Config(0)), "config.num_sms is 0"),
    case("many-sms", to(config=Config(258)), "config.num_sms is 258", "from 2 to 256"),
    case(
        "buffer-too-small", to(config=Config(200)),
        f"num_nvl_bytes = {NUM_BYTES}", "get_nvl_buffer_size_hint(128, 4)", "DEEP_EP_RANKS_PER_NODE",
    ),
    case("recv-counters-type", to(recv_counters=3), "recv_counters", "int", error=EPTypeError),
    case("counters-of-another-group", lambda a: {**a, "recv_counters": RecvCounters(3)}, "4 ranks"),
    case(
        "wait-stats-dtype", lambda a: {**a, "dispatch_wait_recv_cost_stats": torch.zeros(4, device=DEVICE)},
        "dispatch_wait_recv_cost_stats", "torch.int64",
    ),
    case("x-negated", of("x", torch._neg_view), "x is a view that changes signs", "resolve_neg()"),
    case(
        "x-conjugated", of("x", lambda x: torch.ones(x.shape, dtype=torch.complex64, device=DEVICE).conj()),
        "x is a view that changes signs", "resolve_conj()",
    ),
    case(
        "event-of-torch", to(previous_event=EventOverlap(torch.Event(device=DEVICE))),  # type: ignore[arg-type]
        "previous_event.event is a Event", "EventHandle", "Buffer.capture()", error=EPTypeError,
    ),
    case("comm-stream-alone", to(allocate_on_comm_stream=True), "allocate_on_comm_stream"),
    case(
        "comm-stream-without-an-event-before", to(allocate_on_comm_stream=True, async_finish=True),
        "allocate_on_comm_stream",
    ),
    case(
        "comm-stream-without-an-event-after",
        lambda a: {**a, "allocate_on_comm_stream": True, "previous_event": Buffer.capture()},
        "allocate_on_comm_stream",
    ),
    case(
        "wrong-rank-count", of("num_tokens_per_rank", with_value(1, 9)),
        "num_tokens_per_rank[1] is 9", "is_token_in_rank counts", marks=reads_values,
    ),
    case(
        "wrong-expert-count", of("num_tokens_per_expert", with_value(5, 9)),
        "num_tokens_per_expert[5] is 9", "topk_idx counts", marks=reads_values,
    ),
    case(
        "wrong-expert-count-without-top-k",
        lambda a: {**without_topk(a), "num_tokens_per_expert": torch.zeros_like(a["num_tokens_per_expert"])},
        "num_tokens_per_expert is [0, 0] for the experts of rank 0", marks=reads_values,
    ),
    case(
        "negative-expert-count-without-top-k",
        lambda a: {**without_topk(a), "num_tokens_per_expert": a["num_tokens_per_expert"] + SHIFTED},
        "num_tokens_per_expert is [-", "for the experts of rank 0", marks=reads_values,
    ),
    case(
        "wrong-top-k", of("topk_idx", lambda t: torch.full_like(t, 3)),
        "num_tokens_per_expert[", "topk_idx counts", marks=reads_values,
    ),
    case(
        "wrong-mask", of("is_token_in_rank", lambda t: t.flip(0)),
        "is_token_in_rank[", "topk_idx makes it", marks=reads_values,
    ),
]  # fmt: skip


def changed_item(i: int, change: Callable[[torch.Tensor], Any]) -> Change:
    """Changes one item of the handle."""
    return of("handle", lambda h: (*h[:i], change(h[i]), *h[i + 1 :]))


HANDLE_CASES = [
    case("type", to(handle=3), "handle is a int", "tuple of", error=EPTypeError),
    case("length", of("handle", lambda h: h[:-1]), "elements", "tuple of"),
    case("none", of("handle", lambda h: (None, *h[1:])), "handle[0] is a NoneType", error=EPTypeError),
    case("dtype", changed_item(2, lambda t: t.long()), "handle[2]", "torch.int64"),
    case("shape", changed_item(2, lambda t: t[:1]), "handle[2]", "shape"),
    case("device", changed_item(2, elsewhere), "handle[2]", "meta"),
    case("strides", changed_item(2, strided), "handle[2]", "contiguous()"),
    case("copy", of("handle", lambda h: tuple(t.clone() for t in h)), "is a copy", "do not clone"),
    case("other-num-sms", to(config=Config(6, 2, 8, 2, 8)), "handle[1]", "shape", "num_sms"),
    case("odd-sms", to(config=Config(5)), "config.num_sms is 5"),
    case("buffer-too-small", to(config=Config(4, 2, 4096)), "get_nvl_buffer_size_hint(128, 4)"),
    case("recv-counters-type", to(recv_counters=3), "recv_counters", "int", error=EPTypeError),
]  # fmt: skip

CACHED_CASES = [
    case("other-tokens", of("x", lambda x: x[:-1]), "x has 2 rows", "3 tokens"),
    case("short-row", of("x", lambda x: x[:, :4].contiguous()), "rows of 8 bytes"),
    case("top-k", to(topk_idx=torch.zeros(3, 1)), "handle and topk_idx are both given", error=EPUsageError),
    case("weights", to(topk_weights=torch.zeros(3, 1)), "handle and topk_weights are both given", error=EPUsageError),
]  # fmt: skip

COMBINE_CASES = [
    *tensor_cases("x", torch.float32, any_strides=True),
    *tensor_cases("topk_weights", torch.float64, any_strides=True),
    case("short-row", of("x", lambda x: x[:, :4].contiguous()), "rows of 8 bytes"),
    case("top-k-above-128", of("topk_weights", lambda t: t.repeat(1, 43)), "num_topk is 129"),
    case("3-biases", of("bias", lambda b: (*b, b[0])), "bias holds Tensor, Tensor, Tensor", error=EPUsageError),
    case("bias-type", of("bias", lambda b: (b[0], 3)), "bias holds Tensor, int", error=EPUsageError),
    case("bias-dtype", of("bias", lambda b: (b[0].float(), None)), "bias[0]", "torch.float32"),
    case("x-address", of("x", misaligned), "x begins at address", "x.clone()"),
    case("x-negated", of("x", torch._neg_view), "x is a view that changes signs", "resolve_neg()"),
    case("bias-address", of("bias", lambda b: (b[0], misaligned(b[1]))), "bias[1] begins at"),
    case("bias-rows", of("bias", lambda b: (None, b[1][1:])), "bias[1]", "shape"),
    case("bias-hidden", of("bias", lambda b: (None, b[1][:, :8].contiguous())), "bias[1]", "shape"),
    case(
        "wait-stats-size",
        lambda a: {**a, "combine_wait_recv_cost_stats": torch.zeros(3, dtype=torch.int64, device=DEVICE)},
        "combine_wait_recv_cost_stats", "shape",
    ),
]  # fmt: skip


def assert_refused(
    ranks: Ranks, name: str, arguments: Arguments, error: type[Exception], words: list[str]
) -> None:
    """A call of `BAD_RANK` raises, and nothing was sent."""
    call = getattr(ranks.buffers[BAD_RANK], name)
    assert_raises(lambda: call(**arguments), error, [f"{name}: ", *words])
    assert_usable(ranks)


bad = functools.partial(pytest.mark.parametrize, ("change", "error", "words"))


@bad(DISPATCH_CASES)
def test_a_bad_dispatch_raises_and_sends_nothing(
    ranks: Ranks, change: Change, error: type[Exception], words: list[str]
) -> None:
    arguments = change(dispatch_arguments(BAD_RANK, ranks.buffers[BAD_RANK]))
    assert_refused(ranks, "dispatch", arguments, error, words)


@bad(HANDLE_CASES + CACHED_CASES)
def test_a_bad_dispatch_with_a_handle_raises_and_sends_nothing(
    ranks: Ranks, change: Change, error: type[Exception], words: list[str]
) -> None:
    handle = dispatched(ranks)[BAD_RANK][4]
    x = dispatch_arguments(BAD_RANK, ranks.buffers[BAD_RANK])["x"]
    arguments = change({"x": x, "handle": handle, "config": CONFIG})
    assert_refused(ranks, "dispatch", arguments, error, words)


@bad(HANDLE_CASES + COMBINE_CASES)
def test_a_bad_combine_raises_and_sends_nothing(
    ranks: Ranks, change: Change, error: type[Exception], words: list[str]
) -> None:
    arguments = change(combine_arguments(dispatched(ranks)[BAD_RANK]))
    assert_refused(ranks, "combine", arguments, error, words)


@reads_values
@pytest.mark.parametrize("value", [-7, 1 << 20])
def test_a_handle_with_wrong_numbers_is_refused_and_nothing_is_sent(
    ranks: Ranks, value: int
) -> None:
    """Wherever the number is that was overwritten; sources of rows nobody goes by."""
    buffer = ranks.buffers[BAD_RANK]
    handle = dispatched(ranks)[BAD_RANK][4]
    sources = 3 if len(handle) == 6 else 7
    x = torch.zeros(len(handle[sources]), HIDDEN, dtype=torch.bfloat16)
    own_local = BAD_RANK % (len(NUM_TOKENS) // num_nodes(ranks))
    for i, item in enumerate(handle):
        if i == sources:
            continue
        places = list(torch.cartesian_prod(*map(torch.arange, item.shape)).view(-1, item.dim()))
        if item.shape == (4, 4):  # of the prefix matrix the column of this rank
            places = [place for place in places if place[1] == BAD_RANK]
        step = 1 if i == len(handle) - 1 else max(1, len(places) // 5)
        for place in map(tuple, places[::step]):
            kept = item[place].clone()
            # Any negative number says that a token is not sent; to whom else it was relayed nobody here knows.
            is_relayed = place[0] >= NUM_TOKENS[BAD_RANK] and place[-1] != own_local
            is_unsent = value < 0 and (kept < 0 or is_relayed)
            item[place] = ~kept if item.dtype == torch.bool else value
            if not is_unsent:
                words = ["combine: handle[", "dispatch left something else"]
                assert_raises(
                    lambda: buffer.combine(x, handle, config=CONFIG), EPArgumentError, words
                )
            item[place] = kept
    assert_usable(ranks)


@pytest.mark.parametrize("sliced", [False, True])
def test_a_handle_of_more_rows_than_came_can_be_sliced(ranks: Ranks, sliced: bool) -> None:
    results = dispatched(ranks, num_worst_tokens=64)

    def combine(rank: int, buffer: Buffer) -> Any:
        x, topk_idx, _, per_expert, handle, _ = results[rank]
        assert x.shape[0] == len(topk_idx) == 64
        assert per_expert == []
        prefix = handle[-4] if len(handle) == 10 else handle[0][:, rank]
        count, i = int(prefix[-1]), 7 if len(handle) == 10 else 3
        assert (topk_idx[:count] >= 0).any(1).all()
        assert (topk_idx[count:] == -1).all()
        if sliced:
            x, handle = x[:count], (*handle[:i], handle[i][:count], *handle[i + 1 :])
        return buffer.combine(x, handle, config=CONFIG)[0]

    for rank, combined in enumerate(ranks.run(combine)):
        arguments = dispatch_arguments(rank, ranks.buffers[rank])
        expected = arguments["x"] * arguments["is_token_in_rank"].sum(1, keepdim=True)
        assert torch.equal(combined, expected)


def test_the_bytes_of_the_worst_case_are_what_is_allocated(ranks: Ranks) -> None:
    for rank, result in enumerate(dispatched(ranks, num_worst_tokens=64)):
        x, topk_idx, topk_weights, _, handle, _ = result
        several = len(handle) == 10
        rows = (x, topk_idx, topk_weights, handle[7] if several else handle[3])
        relayed = handle[-1][NUM_TOKENS[rank] :] if several else handle[-1][:0]
        place = ranks.buffers[rank].runtime.topology
        shape = normal_checks.NormalShape(
            NUM_TOKENS[rank], 2 * HIDDEN, NUM_TOPK, 0, NUM_EXPERTS, CONFIG
        )
        counted = sum(tensor.nbytes for tensor in (*rows, relayed))
        assert counted == normal_checks.worst_bytes(shape, place, 64)


def test_a_worst_case_that_no_memory_holds_is_refused_before_anything_is_sent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_backend = type(ranks.buffers[0].communicator.backend)
    monkeypatch.setattr(of_backend, "available_bytes", lambda _: 1 << 20)

    def dispatch(rank: int, buffer: Buffer) -> None:
        arguments = dispatch_arguments(rank, buffer)
        if rank == BAD_RANK:
            assert_raises(
                lambda: buffer.dispatch(**arguments, num_worst_tokens=1 << 21),
                EPArgumentError,
                ["dispatch: num_worst_tokens is 2097152", "bytes on each rank, and 1048576 are"],
            )
        buffer.dispatch(**arguments, num_worst_tokens=64)

    ranks.run(dispatch)
    assert_usable(ranks)


@reads_values
def test_more_rows_than_the_worst_case_are_refused_where_they_come(ranks: Ranks) -> None:
    def dispatch(rank: int, buffer: Buffer) -> None:
        worst = 1 if rank == BAD_RANK else 64
        buffer.dispatch(**dispatch_arguments(rank, buffer), num_worst_tokens=worst)

    outcomes = ranks.outcomes(dispatch)
    words = ["dispatch: num_worst_tokens is 1", "rows come to this rank"]
    assert_given_up_for(outcomes, EPArgumentError, words)
    assert_usable(ranks)


@pytest.mark.parametrize(
    ("kind", "method", "x_of"),
    [(normal.Normal, "_new_received", lambda call, *_: call.x), (StreamOrder, "contiguous", lambda x, *_: x)],
    ids=["rows", "copies"],
)  # fmt: skip
def test_a_rank_without_memory_gives_the_operation_up(
    ranks: Ranks,
    kind: type,
    method: str,
    x_of: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the rows that come, and for a copy of those that go."""
    plain = getattr(kind, method)

    def failing(self: Any, *arguments: Any) -> Any:
        if (x_of(*arguments) == BAD_RANK + 1).any():
            raise MemoryError("no room")
        return plain(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kind, method, failing)
        outcomes = ranks.outcomes(
            lambda rank, buffer: buffer.dispatch(**dispatch_arguments(rank, buffer))
        )
    assert_given_up_for(outcomes, MemoryError, ["no room"])
    assert_usable(ranks)


@pytest.fixture
def like_a_gpu(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads no values and waits for nothing, as where operations are queued on streams."""
    monkeypatch.setattr(ranks.buffers[0].communicator.backend, "runs_in_streams", True)
    monkeypatch.setattr(layout_values, "check", lambda *_: None)
    monkeypatch.setattr(handle_values, "check", lambda *_: None)


@pytest.mark.usefixtures("like_a_gpu")
def test_only_a_dispatch_of_unknown_size_waits_for_counts(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = [NativeRecorder(buffer.runtime.native) for buffer in ranks.buffers]
    for buffer, recorder in zip(ranks.buffers, recorders):
        monkeypatch.setattr(buffer.runtime, "native", recorder)

    def asked(fn: Callable[[int, Buffer], Any]) -> tuple[list[Any], list[str]]:
        for recorder in recorders:
            recorder.asked.clear()
        results = ranks.run(fn)
        assert len({tuple(recorder.asked) for recorder in recorders}) == 1
        return results, [name for name in recorders[0].asked if name != "dispatch_layout"]

    def dispatch(rank: int, buffer: Buffer, **arguments: Any) -> Any:
        return buffer.dispatch(**dispatch_arguments(rank, buffer), **arguments)

    end = ["normal_dispatch", "take_failure"]
    results, names = asked(dispatch)
    assert names == ["normal_notify", "normal_counts", *end]
    assert asked(lambda r, b: dispatch(r, b, num_worst_tokens=64))[1] == ["normal_notify", *end]
    again = lambda r, b: b.dispatch(dispatch_arguments(r, b)["x"], results[r][4], config=CONFIG)  # noqa: E731
    assert asked(again)[1] == end
    back = lambda r, b: b.combine(results[r][0], results[r][4], config=CONFIG)  # noqa: E731
    assert asked(back)[1] == ["normal_combine", "take_failure"]


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (to(num_worst_tokens=1), ["more rows came to this rank than num_worst_tokens"]),
        (
            of("num_tokens_per_rank", with_value(1, 9)),
            ["num_tokens_per_rank and is_token_in_rank do not agree"],
        ),
    ],
    ids=["worst-tokens", "counts"],
)
def test_what_the_host_cannot_read_the_kernels_refuse(
    ranks: Ranks, change: Change, words: list[str]
) -> None:
    def dispatch(rank: int, buffer: Buffer) -> None:
        arguments = {**dispatch_arguments(rank, buffer), "num_worst_tokens": 64}
        buffer.dispatch(**(change(arguments) if rank == BAD_RANK else arguments))

    outcomes = ranks.outcomes(dispatch)
    assert_given_up_for(outcomes, EPArgumentError, words)
    assert_usable(ranks)


@pytest.mark.usefixtures("like_a_gpu")
def test_who_comes_after_one_rank_has_given_up_meets_those_that_still_wait(ranks: Ranks) -> None:
    wrong, late, refused = of("num_tokens_per_rank", with_value(1, 9)), 3, threading.Event()

    def dispatch(rank: int, buffer: Buffer) -> None:
        arguments = dispatch_arguments(rank, buffer)
        if rank == late:
            assert refused.wait(60.0)
        try:
            buffer.dispatch(**(wrong(arguments) if rank == BAD_RANK else arguments))
        finally:
            if rank == BAD_RANK:
                refused.set()

    outcomes = ranks.outcomes(dispatch)
    assert_given_up_for(outcomes, EPArgumentError, [])
    assert_usable(ranks)


def dispatched_in_vain(ranks: Ranks) -> list[Any]:
    """What a dispatch returned whose handles it has not filled."""
    results = dispatched(ranks)
    for _, _, _, _, handle, _ in results:
        word = hidden_word(handle[1] if len(handle) == 6 else handle[2])
        assert word is not None
        assert int(word) > 0
        word.zero_()
    return results


@pytest.mark.usefixtures("like_a_gpu")
def test_the_handle_of_a_failed_dispatch_is_refused_by_the_kernels(ranks: Ranks) -> None:
    results = dispatched_in_vain(ranks)
    outcomes = ranks.outcomes(
        lambda rank, buffer: buffer.combine(results[rank][0], results[rank][4], config=CONFIG)
    )
    words = ["combine", "the handle is not what a dispatch left that succeeded"]
    for outcome in outcomes:
        assert_says(outcome, EPArgumentError, words)
    assert_usable(ranks)


@reads_values
def test_the_handle_of_a_failed_dispatch_is_refused(ranks: Ranks) -> None:
    x, _, _, _, handle, _ = dispatched_in_vain(ranks)[BAD_RANK]
    buffer = ranks.buffers[BAD_RANK]
    for call in (
        lambda: buffer.combine(x, handle, config=CONFIG),
        lambda: buffer.dispatch(x[: NUM_TOKENS[BAD_RANK]], handle, config=CONFIG),
    ):
        assert_raises(call, EPUsageError, ["handle is empty", "dispatch again"])
    assert_usable(ranks)


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        pytest.param(None, EPUsageError, ["is None", "get_dispatch_layout"], id="none"),
        pytest.param([2, 99], EPArgumentError, ["[", "is_token_in_rank counts"], id="wrong", marks=reads_values),
    ],
)  # fmt: skip
def test_between_nodes_a_dispatch_needs_the_counts_of_nodes(
    ranks: Ranks, counts: list[int] | None, error: type[Exception], words: list[str]
) -> None:
    given = None
    if counts is not None:
        given = torch.tensor(counts, dtype=torch.int32)[: num_nodes(ranks)]
    if num_nodes(ranks) == 1:
        dispatched(ranks, num_tokens_per_rdma_rank=given)
    else:
        buffer = ranks.buffers[BAD_RANK]
        arguments = {**dispatch_arguments(BAD_RANK, buffer), "num_tokens_per_rdma_rank": given}
        words = ["dispatch: num_tokens_per_rdma_rank", *words]
        assert_raises(lambda: buffer.dispatch(**arguments), error, words)
    assert_usable(ranks)


@pytest.mark.parametrize("name", ["internode_dispatch", "internode_combine"])
def test_the_calls_between_nodes_need_a_config(ranks: Ranks, name: str) -> None:
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    call = getattr(ranks.buffers[0], name)
    assert_raises(lambda: call(x, None), EPUsageError, [f"{name}: config is None"])


def test_nodes_of_different_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", "2")
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    with normal_ranks(3) as ranks:
        for call in (lambda b: b.dispatch(x), lambda b: b.combine(x, ())):
            with pytest.raises(EPUnsupportedError, match="3 ranks are on nodes of 2") as caught:
                call(ranks.buffers[0])
            assert "DEEP_EP_RANKS_PER_NODE" in str(caught.value)


def test_a_queue_needs_a_place_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", "1")
    with normal_ranks() as ranks:
        buffer = ranks.buffers[BAD_RANK]
        arguments = {**dispatch_arguments(BAD_RANK, buffer), "config": Config(2, 2, 3, 1, 2)}
        words = ["config.num_max_nvl_chunked_recv_tokens is 3", "4 nodes"]
        assert_raises(lambda: buffer.dispatch(**arguments), EPArgumentError, words)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any configuration that the kernels can follow."""
    nvl_send, rdma_send = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    nvl_recv = draw(st.integers(nvl_send + 1, 1000))
    rdma_recv = draw(st.integers(2 * rdma_send, 1000))
    return Config(2 * draw(st.integers(1, 128)), nvl_send, nvl_recv, rdma_send, rdma_recv)


@given(
    config=configs(),
    num_nodes=st.integers(1, 40),
    ranks_per_node=st.integers(1, 64),
    row_bytes=st.integers(1, 2000).map(lambda n: 16 * n),
    num_topk=st.integers(0, 128),
    num_scales=st.integers(0, 128),
)
def test_the_size_hints_fit_every_call(
    config: Config,
    num_nodes: int,
    ranks_per_node: int,
    row_bytes: int,
    num_topk: int,
    num_scales: int,
) -> None:
    num_ranks = num_nodes * ranks_per_node
    needed = normal_checks.num_bytes(
        backend.get().binding, num_ranks, ranks_per_node, config, row_bytes, num_topk, num_scales
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_RANKS_PER_NODE", str(ranks_per_node))
        hints = largest_hints((config,), row_bytes, num_ranks)
    assert needed[0] <= hints[0]
    assert needed[1] <= hints[1]


# --- ranks that call something else ----------------------------------------------------------------


def among_more_experts(arguments: Arguments) -> Arguments:
    """Each rank has as many more, which nobody selects."""
    per_expert = arguments["num_tokens_per_expert"].view(len(NUM_TOKENS), -1)
    padded = torch.cat([per_expert, torch.zeros_like(per_expert)], dim=1).flatten()
    return {**without_topk(arguments), "num_tokens_per_expert": padded}


# What BAD_RANK changes, and the fields in which it differs: there, here.
DISAGREEMENTS = [
    pytest.param(of("x", lambda x: x.repeat(1, 2)), {"bytes of a row": (256, 128)}, id="hidden"),
    pytest.param(of("x", lambda x: x.float()), {"bytes of a row": (256, 128)}, id="dtype"),
    pytest.param(
        with_scales(lambda s: s), {"bytes of a row": (64, 128), "scales of a row": (4, 0)}, id="scales"
    ),
    pytest.param(without_topk, {"num_topk": (0, 3)}, id="no-top-k"),
    pytest.param(among_more_experts, {"num_experts": (16, 8), "num_topk": (0, 3)}, id="experts"),
    pytest.param(to(config=Config(6, 2, 8, 2, 8)), {"num_sms": (6, 4)}, id="num-sms"),
    pytest.param(
        to(config=Config(4, 2, 10, 2, 8)), {"num_max_nvl_chunked_recv_tokens": (10, 8)}, id="nvl-queues"
    ),
    pytest.param(
        to(config=Config(4, 2, 8, 2, 12)), {"num_max_rdma_chunked_recv_tokens": (12, 8)}, id="rdma-queues"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "fields"), DISAGREEMENTS)
def test_ranks_that_disagree_are_named_with_the_fields(
    ranks: Ranks, change: Change, fields: dict[str, tuple[int, int]]
) -> None:
    def dispatch(rank: int, buffer: Buffer) -> None:
        arguments = dispatch_arguments(rank, buffer)
        buffer.dispatch(**(change(arguments) if rank == BAD_RANK else arguments))

    for rank, error in enumerate(ranks.outcomes(dispatch)):
        assert type(error) is EPArgumentError, f"rank {rank}: {error!r}"
        assert str(error).count("(here ") == len(fields), "fields that agree are not named"
        if rank != BAD_RANK:
            assert f"rank {BAD_RANK} called with" in str(error)
            for name, (there, here) in fields.items():
                assert f"{name} = {there} (here {here})" in str(error)
    assert_usable(ranks)


def test_what_only_the_sender_uses_need_not_agree(ranks: Ranks) -> None:
    def exchange(rank: int, buffer: Buffer) -> None:
        worst = 64 if rank == BAD_RANK else 0
        config = Config(4, 1 + rank, 8, 2 ** (rank % 3), 8)
        arguments = {**dispatch_arguments(rank, buffer), "config": config}
        x, _, _, _, handle, _ = buffer.dispatch(
            **arguments, num_worst_tokens=worst, expert_alignment=1 + rank
        )
        combined, _, _ = buffer.combine(x, handle, config=config)
        assert torch.equal(
            combined, arguments["x"] * arguments["is_token_in_rank"].sum(1, keepdim=True)
        )

    ranks.run(exchange)


Calls = dict[str, Callable[[int, Buffer], Any]]


def calls_of(ranks: Ranks) -> Calls:
    """What a rank may call next, each correct by itself."""
    first, second = dispatched(ranks), dispatched(ranks)

    def again(rank: int, buffer: Buffer) -> None:
        buffer.dispatch(dispatch_arguments(rank, buffer)["x"], first[rank][4], config=CONFIG)

    def low_latency(_: int, buffer: Buffer) -> None:
        x = torch.zeros(1, 128, dtype=torch.bfloat16, device=DEVICE)
        topk_idx = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
        buffer.low_latency_dispatch(x, topk_idx, 1, len(NUM_TOKENS), use_fp8=False)

    return {
        "dispatch": lambda rank, buffer: buffer.dispatch(**dispatch_arguments(rank, buffer)),
        "dispatch again": again,
        "combine": lambda r, buffer: buffer.combine(first[r][0], first[r][4], config=CONFIG),
        "combine another": lambda r, b: b.combine(second[r][0], second[r][4], config=CONFIG),
        "low_latency_dispatch": low_latency,
    }


@pytest.mark.parametrize("ranks_per_node", [4, 2], ids=["one-node", "two-nodes"])
def test_a_rank_that_calls_something_else_is_named(
    ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of one rank against each of the others'."""
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", str(ranks_per_node))
    with normal_ranks(low_latency_mode=True) as ranks:
        calls = calls_of(ranks)
        for theirs, mine in itertools.permutations(calls, 2):
            outcomes = ranks.outcomes(
                lambda rank, buffer, called=(mine, theirs): calls[called[rank == BAD_RANK]](
                    rank, buffer
                )
            )
            operations = {theirs.split()[0], mine.split()[0]}
            for rank, error in enumerate(outcomes):
                assert type(error) is EPArgumentError, f"{theirs}, {mine}, rank {rank}: {error!r}"
                assert rank == BAD_RANK or f"rank {BAD_RANK} called with" in str(error)
                assert ("operation = " in str(error)) == (len(operations) == 2)
                assert all(name in str(error) for name in operations)
            assert_usable(ranks)
