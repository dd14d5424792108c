"""A rank that does not come to `Buffer()` or to `destroy()`: the others say whom they wait for, and why."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPError, EPTimeoutError
from deep_ep.group import ThreadGroup, thread_groups
from deep_ep.membership import coordinator
from deep_ep.membership.monitored_group import Arrival, MonitoredGroup
from deep_ep.ops import construction
from support.launch import (
    DEVICE,
    HANG_S,
    Ranks,
    on_threads,
    outcomes,
    raise_failures,
    run_processes,
)
from support.waiting import eventually

UNKNOWN = "it cannot be known why: process gone, process stopped, host unreachable or elsewhere in its program"


def line_with(caplog: pytest.LogCaptureFixture, *words: str) -> str:
    """The first line of the log with all of these words, without the time of waiting; empty before that.

    On a busy machine other ranks may be late, too, and others may be said to be.
    """
    lines = (record.getMessage() for record in caplog.records)
    said = (line for line in lines if all(word in line for word in words))
    return next(said, "").rpartition(", for ")[0]


def comes_late(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Once the others have said whom they wait for."""
    assert eventually(lambda: line_with(caplog, *words) != "")


def make_buffer(group: Any, destroys: bool = False) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, num_nvl_bytes=1 << 20, explicitly_destroy=destroys)


@pytest.mark.exhaustive
def test_who_has_not_called_buffer_is_named_while_the_others_wait_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_WARN_S", "0.2")
    groups = thread_groups(3)
    named = "deep_ep: rank 1 has not called Buffer(); "

    def run(group: ThreadGroup) -> None:
        for words in ((named,), (named, "eventually")):
            if group.rank == 1:
                comes_late(caplog, *words)
            make_buffer(group)

    on_threads(run, groups)
    assert line_with(caplog, named) == f"{named}{UNKNOWN}; ranks 0, 2 wait for it"
    assert line_with(caplog, named, "eventually").startswith(f"{named}its thread")


def test_a_rank_that_does_not_get_on_in_buffer_is_named_with_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_WARN_S", "0.2")
    words = "rank 0 is behind the others", "eventually"
    offer = coordinator.offer

    def slow_offer(rank: int, *places: Any) -> Any:
        if rank == 0:
            comes_late(caplog, *words)
        return offer(rank, *places)

    monkeypatch.setattr(construction.coordinator, "offer", slow_offer)
    on_threads(make_buffer, thread_groups(2))
    assert line_with(caplog, *words).startswith(
        "deep_ep: rank 0 is behind the others in Buffer() (allocating memory)"
    )


def test_nobody_watches_an_exchange_that_is_over() -> None:
    """A thread that ends as the process does, and is the last that holds torch's group, ends the process by SIGABRT."""

    def run(group: ThreadGroup) -> None:
        monitored = MonitoredGroup(group)
        for _ in range(20):
            monitored.barrier()
            watching = [vars(thread).get("_group") for thread in threading.enumerate()]
            assert monitored not in watching

    on_threads(run, thread_groups(2, HANG_S))


def test_without_a_board_it_is_said_that_nobody_can_be_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_WARN_S", "0.2")
    groups = thread_groups(2)
    for group in groups:
        monkeypatch.setattr(group, "board", None)

    def run(group: ThreadGroup) -> None:
        if group.rank == 1:
            comes_late(caplog, "who they are cannot be known")
        make_buffer(group)

    on_threads(run, groups)


def test_who_has_waited_in_buffer_in_vain_names_the_rank() -> None:
    groups = thread_groups(3, timeout_s=2.0)
    *seen, other = outcomes(lambda group: None if group.rank == 2 else make_buffer(group), groups)
    assert other is None
    for error in seen:
        assert isinstance(error, EPTimeoutError)
        assert f"rank 2 has not called Buffer(); {UNKNOWN}; ranks 0-1 wait for it" in str(error)
        assert "rank 2 did not come to exchange" in str(error)
        assert error.verdict is not None
        assert error.verdict.ranks == error.missing_ranks == (2,)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[", "3", "[]", '{"buffer": "1"}', '{"pid": 1.5}', "[" * 100_000),
        *('{"offer": {"fd": 1e400}}', '{"offer": {"fd": 99999999999999999999}}'),
    ],
)
def test_what_is_no_note_on_a_board_counts_as_none(text: str | None) -> None:
    assert Arrival.of(text) is None
    groups = thread_groups(2)
    if text is not None:
        groups[0].board.put(1, text)
    verdict = MonitoredGroup(groups[0]).verdict(1.0)
    assert verdict is not None


# ---- processes


def build_with_somebody_missing(rank: int, group: dist.ProcessGroup, how: str) -> Any:
    """The second buffer of a group, to which rank 2 does not come; what the others raise."""
    store = dist.distributed_c10d._get_default_store()
    impatient = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    if how != "first":
        make_buffer(impatient)
    if rank == 2:
        if how == "ended":
            sys.exit(0)
        while store.add("raised", 0) < 2:
            time.sleep(0.05)
        return None
    with pytest.raises(EPTimeoutError) as raised:
        make_buffer(impatient)
    store.add("raised", 1)
    return str(raised.value), raised.value.missing_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("first", f"rank 2 has not called Buffer(); {UNKNOWN}"),
        ("sleeps", f"rank 2 has not called Buffer(); its main thread runs ({__file__} line"),
        ("ended", "rank 2 is dead: the process is gone"),
    ],
)
def test_processes_name_who_has_not_called_buffer(how: str, said: str) -> None:
    outcomes = run_processes(build_with_somebody_missing, 3, how)
    for text, missing in raise_failures(outcomes[:2]):
        assert missing == (2,)
        assert said in text


# ---- the end


def test_who_has_not_called_destroy_is_named_while_the_others_wait_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_WARN_S", "0.2")
    named = "deep_ep: rank 2 has not called destroy(); its thread"

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 2:
            comes_late(caplog, named, "eventually", "ranks 0-1 wait for it")
        buffer.destroy()

    with Ranks(3, 8, 256, 3) as ranks:
        ranks.run(run)


# Whatever a Buffer reads, and values that are not allowed.
WRONG = {
    **dict.fromkeys(("NVSHMEM_QP_DEPTH", "DEEP_EP_INJECT"), "x"),
    "DEEP_EP_CLOCK_INTERVAL_S": "-1",
    "DEEP_EP_LAUNCH_SHAPE": "0x0",
    "DEEP_EP_RECORDER_FRAMES": "-1",
    "DEEP_EP_WARN_S": "nan",
}


def build_with_a_wrong_variable(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """Rank 1 has it; what is raised, by variable."""
    said = {}
    for name, text in WRONG.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setenv(name, text)
            with pytest.raises(EPError) as caught:
                make_buffer(group, destroys=True)
        said[name] = str(caught.value)
    return said


def test_a_variable_that_is_wrong_on_one_rank_is_told_to_all() -> None:
    said = raise_failures(run_processes(build_with_a_wrong_variable, 2, timeout_s=30))
    for name, text in said[0].items():
        assert "rank 1 failed, first: " in text
        assert ". All ranks must succeed" in text
        assert ".." not in text
        assert name in text or name == "DEEP_EP_INJECT" and "'x' is not a fault" in text


def destroy_while_the_others_meet(rank: int, group: dist.ProcessGroup) -> list[str]:
    """Rank 0 destroys its buffer while the others are in a barrier, and they do so after it; what destroy() warns of."""
    buffer = make_buffer(group, destroys=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            buffer.destroy()
        group.barrier().wait()
        buffer.destroy()
    return [str(w.message) for w in caught if "not all ranks came" in str(w.message)]


def test_destroy_waits_no_longer_than_an_operation() -> None:
    """gloo itself would wait for half an hour."""
    env = {"DEEP_EP_TIMEOUT_S": "2"}
    said = raise_failures(run_processes(destroy_while_the_others_meet, 3, env=env))
    assert said[1:] == [[], []]
    (warned,) = said[0]
    waited = re.search(r"ranks 1-2 did not call it within (\S+) s", warned)
    assert waited is not None, warned
    assert 2.0 <= float(waited[1]) < HANG_S


def end_while_the_others_destroy(rank: int, group: dist.ProcessGroup, dies: bool) -> list[str]:
    """What destroy() warns of."""
    buffer = make_buffer(group, destroys=True)
    group.barrier().wait()
    if rank == 1:
        time.sleep(0.5)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.destroy()
    return [str(w.message) for w in caught if "not all ranks came" in str(w.message)]


@pytest.mark.parametrize(
    ("dies", "said"),
    [
        (True, "(rank 1 died)"),
        (False, f"(rank 1 ended before; rank 1 raised KeyboardInterrupt at {__file__}:"),
    ],
    ids=["dies", "raises"],
)
def test_how_a_rank_ended_while_the_others_destroy_is_said(dies: bool, said: str) -> None:
    ended = run_processes(end_while_the_others_destroy, 3, dies)
    for (warned,) in raise_failures([ended[0], ended[2]]):
        assert said in warned


@pytest.mark.parametrize(
    ("on_a_gpu", "memory"),
    [(False, "released all the same"), (True, "kept until this process ends")],
    ids=["cpu", "gpu"],
)
def test_who_waited_in_destroy_in_vain_says_for_whom(
    on_a_gpu: bool, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WARN_S", "0.2"), ("TIMEOUT_S", "3")):
        monkeypatch.setenv(f"DEEP_EP_{name}", value)

    given_up = threading.Event()

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(type(buffer.communicator.backend), "runs_in_streams", on_a_gpu)
                buffer.destroy()
            given_up.set()
        else:
            assert given_up.wait(HANG_S)

    with warnings.catch_warnings(record=True) as caught, Ranks(2, 8, 256, 2) as ranks:
        warnings.simplefilter("always")
        ranks.run(run)
        (said,) = [str(w.message) for w in caught if "not all ranks came" in str(w.message)]
        assert "rank 1 has not called destroy(); its thread" in said
        assert said.endswith(f"local memory is {memory}")
        ranks.run(lambda rank, buffer: None)


@pytest.mark.parametrize("is_asked", [False, True], ids=["not-asked", "asked"])
def test_what_no_call_could_raise_is_raised_on_request_or_told_by_destroy(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, kernels fail when their calls have returned."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "1")
    failed = threading.Event()

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 0:
            x = torch.zeros(4, 256, dtype=torch.bfloat16, device=DEVICE)
            topk_idx = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
            with mock.patch.object(type(buffer.communicator), "raise_failure"):
                buffer.low_latency_dispatch(x, topk_idx, 4, 2)
            if is_asked:
                with pytest.raises(EPTimeoutError, match="low_latency_dispatch"):
                    buffer.raise_failure()
                buffer.raise_failure()
            failed.set()
        assert failed.wait(HANG_S)
        buffer.destroy()

    with warnings.catch_warnings(record=True) as caught, Ranks(2, 4, 256, 2) as ranks:
        warnings.simplefilter("always")
        ranks.run(run)
        said = [str(w.message) for w in caught if "destroy on rank" in str(w.message)]
    if is_asked:
        assert said == []
    else:
        (warned,) = said
        assert "destroy on rank 0: low_latency_dispatch (operation 1) on rank 0" in warned
