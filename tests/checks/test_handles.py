"""Handles that lie: whatever a program does to the tensors between dispatch and combine, it gets the
right sums or an error by name, and the group goes on.

On the CPU the values are looked at before anything is sent; on a GPU the kernel finds them. Both are
tested here, the kernel with the look left out.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Callable

import pytest
import torch

import deep_ep
import support.exchange
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.errors import EPArgumentError, EPError, EPTimeoutError, EPTransportError, EPUsageError
from support.exchange import (
    Mode,
    Received,
    Shape,
    begin_dispatch,
    combine,
    dispatch,
    exchange_and_check,
    experts,
    make_inputs,
    ranks_for,
    send_back,
)

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=256, num_experts=6, num_topk=3, dropped=0.2)
MODE = Mode()
INPUTS = make_inputs(SHAPE)
LIAR = 1

Lie = Callable[[list[Any]], None]


def hidden_words(handle: list[Any]) -> torch.Tensor:
    """What lies behind handle[0] in its storage."""
    flat = torch.empty(0, dtype=torch.int32).set_(handle[0].untyped_storage())
    return flat[handle[0].storage_offset() + handle[0].numel() :]


def first_entry(handle: list[Any]) -> torch.Tensor:
    """What dispatch left of the first entry of topk_idx that it sent: expert, and place with its seal."""
    entries = hidden_words(handle)[4 + 2 * SHAPE.num_experts :].view(-1, 2)
    first: torch.Tensor = entries[int((entries[:, 0] >= 0).nonzero()[0])]
    return first


def other_place(handle: list[Any]) -> None:
    first_entry(handle)[1] ^= 1


def far_place(handle: list[Any]) -> None:
    first_entry(handle)[1] |= 0xFFFF


def no_places(handle: list[Any]) -> None:
    hidden_words(handle)[4 + 2 * SHAPE.num_experts :].view(-1, 2)[:, 1] = 0x7F7F7F7F


def swapped_places(handle: list[Any]) -> None:
    """Two rows of one expert change places."""
    entries = hidden_words(handle)[4 + 2 * SHAPE.num_experts :].view(-1, 2)
    sent = entries[:, 0]
    same = (sent[:, None] == sent) & (sent >= 0)
    one, other = (int(i) for i in same.triu(1).nonzero()[0])
    entries[[one, other]] = entries[[other, one]]


def other_range(name: str, change: int) -> Lie:
    """Another range of a local expert's rows of a source: how many in its low 32 bits, the first one in its high ones."""

    def lie(handle: list[Any]) -> None:
        expert, source = ((handle[1] & 0xFFFFFFFF) > 0).nonzero()[0]
        handle[1][expert, source] += change

    lie.__name__ = name
    return lie


def more_rows_than_fit(handle: list[Any]) -> None:
    """For the last source, of which there may be as many in the tensors; and the hidden record says so as well."""
    pair = SHAPE.num_ranks - 1
    handle[1][0, pair] = (handle[1][0, pair] >> 32 << 32) + SHAPE.num_max_tokens + 1
    hidden_words(handle)[4 + SHAPE.num_experts + pair] = SHAPE.num_max_tokens + 1


def negative_count_in_both(handle: list[Any]) -> None:
    """Of the last source, so that its range ends before it begins; and the hidden record says so as well."""
    pair = SHAPE.num_ranks - 1
    begin = int(handle[1][0, pair]) >> 32
    assert begin >= 2
    handle[1][0, pair] = begin << 32 | 0xFFFFFFFE
    hidden_words(handle)[4 + SHAPE.num_experts + pair] = -2


def no_ranges(handle: list[Any]) -> None:
    handle[1].zero_()


# With these, rows go back as they should, and the liar alone would add up others.
LIES_ABOUT_PLACES: list[Lie] = [other_place, far_place, no_places, swapped_places]
LIES: list[Lie] = [
    *LIES_ABOUT_PLACES,
    other_range("one_row_less", -1),
    other_range("many_rows", 1 << 20),
    other_range("negative_count", 1 << 31),
    other_range("far_begin", 1 << 52),
    other_range("next_begin", 1 << 32),
    *(more_rows_than_fit, negative_count_in_both, no_ranges),
]


def on_all_ranks(run: Callable[[int, deep_ep.Buffer], Any], go_on: bool = True) -> list[Any]:
    """Runs this on each rank; unless `go_on` is False, checks an exchange afterwards."""
    with ranks_for(SHAPE) as ranks:
        results = ranks.run(run)
        if go_on:
            exchange_and_check(ranks, SHAPE, MODE)
    return results


def combine_as(rank: int, buffer: deep_ep.Buffer, received: Received, handle: Any) -> Any:
    """A combine of what the experts made of `received`, with another handle."""
    return combine(buffer, INPUTS[rank], handle, experts(received, rank), MODE)


@contextlib.contextmanager
def perhaps_failing_with_the_liar() -> Iterator[None]:
    """Whether a rank fails with the liar depends on who is first; if so, it says who gave up.

    Rank 2 may be told by rank 0, which failed with the liar, before the liar itself tells it.
    """
    told = None
    try:
        yield
    except EPTransportError as error:
        told = str(error)
    who = f"{LIAR}|0-{LIAR}|{LIAR}-2|0"
    assert told is None or re.search(f": ranks? ({who}) gave up operation", told)


@pytest.fixture
def the_kernel_looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the look before sending is left out, as it is on a GPU."""
    if request.param:
        monkeypatch.setattr(low_latency_checks, "handle_values", lambda *_: None)
    return bool(request.param)


in_both = pytest.mark.parametrize(
    "the_kernel_looks", [False, True], ids=["before-sending", "in-the-kernel"], indirect=True
)


@in_both
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_handle_with_other_values_is_refused(
    lie: Lie, the_kernel_looks: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "5")

    def run(rank: int, buffer: deep_ep.Buffer) -> str:
        received = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        true = [value.clone() if i == 1 else value for i, value in enumerate(received.handle)]
        if rank == LIAR:
            untouched = torch.cat((received.handle[0].flatten(), hidden_words(true))).clone()
            lie(list(received.handle))
            with pytest.raises(EPArgumentError, match="handle"):
                combine_as(rank, buffer, received, received.handle)
            hidden_words(true).copy_(untouched[true[0].numel() :])
            true[0].copy_(untouched[: true[0].numel()].view_as(true[0]))
        elif the_kernel_looks and (
            lie is no_ranges or (rank == 0 and lie not in LIES_ABOUT_PLACES)
        ):
            with pytest.raises(EPTransportError, match=f"rank {LIAR}"):
                combine_as(rank, buffer, received, received.handle)
        elif the_kernel_looks:
            # Its rows come back all the same: that expert had none of rank 2.
            with perhaps_failing_with_the_liar():
                combine_as(rank, buffer, received, received.handle)
        combine_as(rank, buffer, received, tuple(true))
        return "combined"

    with ranks_for(SHAPE) as ranks:
        for buffer in ranks.buffers:
            buffer.runtime.set_launch_shape(blocks=blocks, warps=2)
        assert ranks.run(run) == ["combined"] * SHAPE.num_ranks
        exchange_and_check(ranks, SHAPE, MODE)


@in_both
def test_tokens_of_a_handle_may_change(the_kernel_looks: bool) -> None:
    """They are the program's: rows go back to where they came from without them."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        received = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        expected = combine_as(rank, buffer, received, received.handle)
        received.handle[0].random_(-(1 << 31), (1 << 31) - 1)
        assert torch.equal(combine_as(rank, buffer, received, received.handle), expected)

    on_all_ranks(run)


def test_rows_that_say_they_are_of_no_token_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program may look up what the token is."""
    monkeypatch.setenv("DEEP_EP_VERIFY", "0")

    def send(rank: int, buffer: deep_ep.Buffer) -> Any:
        return begin_dispatch(buffer, INPUTS[rank], SHAPE, replace(MODE, hook=True))[2]

    with ranks_for(SHAPE) as ranks:
        hooks = ranks.run(send)
        memory = ranks.buffers[LIAR].get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        memory.fill_(255)
        outcomes = ranks.outcomes(lambda rank, _: hooks[rank]())
        assert isinstance(outcomes[LIAR], EPTransportError)
        assert "not what was sent" in str(outcomes[LIAR])
        exchange_and_check(ranks, SHAPE, MODE)


def dispatched_nowhere(topk_idx: torch.Tensor) -> torch.Tensor:
    """An entry that dispatch had as -1 names an expert."""
    token, k = (int(i) for i in (topk_idx < 0).nonzero()[0])
    topk_idx[token, k] = 0
    return topk_idx


def another_expert(topk_idx: torch.Tensor) -> torch.Tensor:
    token, k = (int(i) for i in (topk_idx >= 0).nonzero()[0])
    topk_idx[token, k] = (topk_idx[token, k] + 1) % SHAPE.num_experts
    return topk_idx


def fewer_tokens(topk_idx: torch.Tensor) -> torch.Tensor:
    return topk_idx[:-1].contiguous()


def fewer_slots(topk_idx: torch.Tensor) -> torch.Tensor:
    return topk_idx[:, :-1].contiguous()


def more_tokens(topk_idx: torch.Tensor) -> torch.Tensor:
    """Of which the handle has no entries; its storage ends before them, so nothing is launched."""
    return torch.cat((topk_idx, topk_idx[:1]))


@in_both
@pytest.mark.parametrize(
    "change",
    [dispatched_nowhere, another_expert, fewer_tokens, fewer_slots, more_tokens],
    ids=lambda change: change.__name__,
)
def test_a_topk_idx_that_dispatch_did_not_have_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], the_kernel_looks: bool
) -> None:
    inputs = make_inputs(SHAPE)
    inputs[LIAR].topk_idx[0, 0] = -1

    def run(rank: int, buffer: deep_ep.Buffer) -> str:
        received = dispatch(buffer, inputs[rank], SHAPE, MODE)
        ys = experts(received, rank)
        mine = inputs[rank]
        if rank == LIAR:
            changed = change(mine.topk_idx.clone())
            lie = mine._replace(topk_idx=changed, topk_weights=torch.ones(changed.shape))
            with pytest.raises(EPArgumentError, match="topk_idx"):
                combine(buffer, lie, received.handle, ys, MODE)
        elif the_kernel_looks and change is not more_tokens:
            with perhaps_failing_with_the_liar():
                combine(buffer, mine, received.handle, ys, MODE)
        combine(buffer, mine, received.handle, ys, MODE)
        return "combined"

    assert on_all_ranks(run) == ["combined"] * SHAPE.num_ranks


def test_entries_may_become_minus_one() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        received = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        mine = INPUTS[rank]._replace(topk_idx=torch.full_like(INPUTS[rank].topk_idx, -1))
        sums = combine(buffer, mine, received.handle, experts(received, rank), MODE)
        assert not sums.any()

    on_all_ranks(run, go_on=False)


def test_handles_of_different_dispatches_are_refused_on_all_ranks() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        old = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        new = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        mine = old if rank == LIAR else new
        with pytest.raises(EPArgumentError, match=r"dispatch = [12] \(here [12]\)"):
            combine_as(rank, buffer, mine, mine.handle)
        combine_as(rank, buffer, old, old.handle)

    on_all_ranks(run)


@pytest.mark.exhaustive
@in_both
def test_a_handle_whose_receive_failed_is_refused(
    the_kernel_looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program catches the hook's error and goes on to combine."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "2")
    late = 2

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == late:
            return
        received, _, hook = begin_dispatch(buffer, INPUTS[rank], SHAPE, Mode(hook=True))
        with pytest.raises(EPTimeoutError):
            hook()
        # The kernel misses the late rank first.
        what = f"rank {late}" if the_kernel_looks else "handle is empty"
        for _ in range(2):
            with pytest.raises(EPError, match=what):
                send_back(buffer, INPUTS[rank], received)

    on_all_ranks(run, go_on=False)


def test_rows_that_do_not_come_back_are_missed_where_they_belong() -> None:
    """A handle whose hidden record lies as well; whose rows they are notices all the same."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        received = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        if rank == LIAR:
            ranges = received.handle[1]
            num_pairs = ranges.numel()
            hidden = hidden_words(list(received.handle))
            # The head, the rows sent, then the rows received.
            counts = hidden[4 + SHAPE.num_experts :][:num_pairs]
            assert counts.tolist() == (ranges.flatten() & 0xFFFFFFFF).tolist()
            ranges.zero_()
            counts.zero_()
        with pytest.raises(EPTransportError, match=f"rank {LIAR} returned other rows|gave"):
            combine_as(rank, buffer, received, received.handle)

    on_all_ranks(run)


def test_a_repeated_zero_copy_combine_asks_for_its_buffer_again() -> None:
    """A combine takes the other half of the staging memory than the one before, also after an error."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        received = dispatch(buffer, INPUTS[rank], SHAPE, MODE)
        combine(
            buffer, INPUTS[rank], received.handle, experts(received, rank), Mode(zero_copy=True)
        )
        with pytest.raises(EPUsageError, match="get_next_low_latency_combine_buffer"):
            send_back(buffer, INPUTS[rank], received, zero_copy=True)

    on_all_ranks(run)


@pytest.mark.parametrize("loses", [False, True], ids=["abandoned", "lost"])
def test_a_hook_that_is_never_called_does_not_lock_the_buffer(loses: bool) -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        _, _, hook = begin_dispatch(buffer, INPUTS[rank], SHAPE, Mode(hook=True))
        if rank != LIAR:
            hook()
        elif loses:
            del hook
            gc.collect()
            with pytest.warns(
                RuntimeWarning, match="the hook of low_latency_dispatch was lost"
            ) as w:
                dispatch(buffer, INPUTS[rank], SHAPE, MODE)
            assert [warning.filename for warning in w] == [support.exchange.__file__], (
                "whose line called"
            )
            return
        else:
            buffer.abandon_hook()
            with pytest.raises(EPUsageError, match="called or abandoned before"):
                hook()
            buffer.abandon_hook()  # nothing is pending
        dispatch(buffer, INPUTS[rank], SHAPE, MODE)

    on_all_ranks(run)


@pytest.mark.parametrize("way", ["combines", "combines with hooks", "a combine in between"])
def test_two_batches_overlap_and_each_hook_has_its_own_rows(way: str) -> None:
    """Both dispatches are open at once; some ranks call the hooks in order, others in reverse."""
    in_between, hooks_of_combine = way == "a combine in between", way == "combines with hooks"
    batches = [make_inputs(replace(SHAPE, seed=seed)) for seed in (1, 2)]

    def in_turn(rank: int, buffer: deep_ep.Buffer) -> list[torch.Tensor]:
        received = [dispatch(buffer, batch[rank], SHAPE, MODE) for batch in batches]
        pairs = zip(batches, received)
        return [send_back(buffer, batch[rank], rows)[0].cpu() for batch, rows in pairs]

    def overlapped(rank: int, buffer: deep_ep.Buffer) -> list[torch.Tensor]:
        begun = [begin_dispatch(buffer, batch[rank], SHAPE, Mode(hook=True)) for batch in batches]
        for _, _, hook in [] if in_between else begun if rank % 2 else reversed(begun):
            hook()
        combined = []
        for batch, (received, _, hook) in zip(batches, begun):
            if in_between:
                hook()
            returns = send_back(buffer, batch[rank], received, return_recv_hook=hooks_of_combine)
            combined.append(returns)
        for _, _, hook in combined if hooks_of_combine else []:
            hook()
        return [out.cpu() for out, _, _ in combined]

    with ranks_for(SHAPE) as ranks:
        for expected, got in zip(ranks.run(in_turn), ranks.run(overlapped)):
            for one, other in zip(expected, got):
                assert torch.equal(one, other)
        exchange_and_check(ranks, SHAPE, MODE)


def test_rows_without_copy_may_be_written_while_the_combine_of_the_other_batch_is_open() -> None:
    """They go to the half that nobody reads."""
    batches = [make_inputs(replace(SHAPE, seed=seed)) for seed in (1, 2)]

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        for batch in batches:
            received = dispatch(buffer, batch[rank], SHAPE, MODE)
            copied = send_back(buffer, batch[rank], received)[0]
            half = buffer.get_next_low_latency_combine_buffer(received.handle)
            half.copy_(received.recv_x)
            out, _, hook = send_back(
                buffer, batch[rank], received, zero_copy=True, return_recv_hook=True
            )
            following = buffer.get_next_low_latency_combine_buffer(received.handle)
            assert following.data_ptr() != half.data_ptr()
            following.fill_(torch.nan)
            hook()
            assert torch.equal(copied, out)

    on_all_ranks(run, go_on=False)


def with_two_open_hooks(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[deep_ep.Buffer, list[Any]], None]
) -> None:
    """run(buffer, hooks) on all ranks but the one for which they wait in vain."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "2")

    def on_rank(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank != LIAR:
            mode = Mode(hook=True)
            hooks = [begin_dispatch(buffer, INPUTS[rank], SHAPE, mode)[2] for _ in range(2)]
            run(buffer, hooks)

    on_all_ranks(on_rank, go_on=False)


@pytest.mark.exhaustive
def test_what_goes_wrong_in_an_open_batch_its_own_hook_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first batch is given up while the second one is sent, which says nothing of it."""

    def run(_: deep_ep.Buffer, hooks: list[Any]) -> None:
        ops = []
        for hook in hooks:
            with pytest.raises(EPTimeoutError, match="low_latency_dispatch") as raised:
                hook()
            ops.append(raised.value.op)
        assert ops[0] < ops[1]

    with_two_open_hooks(monkeypatch, run)


@pytest.mark.exhaustive
def test_all_open_hooks_are_abandoned_though_the_first_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(buffer: deep_ep.Buffer, hooks: list[Any]) -> None:
        with pytest.raises(EPTimeoutError):
            buffer.abandon_hook()
        for hook in hooks:
            with pytest.raises(EPUsageError, match="called or abandoned before"):
                hook()

    with_two_open_hooks(monkeypatch, run)
