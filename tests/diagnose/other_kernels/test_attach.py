"""Attaching: what each wheel is passed, what is read of it, and what it says that it cannot."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import deep_ep
from deep_ep.diagnose.core.causes import COMP_SLOW
from deep_ep.diagnose.live.wait_sampler import UNKNOWN, Window
from deep_ep.diagnose.other_kernels import attach as attaching
from deep_ep.diagnose.other_kernels import entries
from deep_ep.diagnose.other_kernels.attach import Attached, attach, watch
from deep_ep.diagnose.other_kernels.entries import EntryWaits
from deep_ep.diagnose.other_kernels.wheels import WHEELS, wheel_of
from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.errors import EPArgumentError, EPTypeError
from deep_ep.group import ThreadGroup, thread_groups
from support import wheels
from support.launch import on_threads
from support.waiting import eventually

NEVER_S = 1e4
EXPERTS, TOKENS = 256, 128


class _OfSize(ThreadGroup):
    """A rank of a group whose others do not come: exchanges give its own part for all."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self._size

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self._size

    def barrier(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _says_all(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "deep_ep.diagnose")
    monkeypatch.setattr(attaching, "_told", set())


@pytest.fixture
def alone() -> ThreadGroup:
    return thread_groups(1)[0]


def attached(buffer: Any, **options: Any) -> Attached:
    """Without windows, whatever time a test takes."""
    return attach(buffer, interval_s=NEVER_S, **options)


def growing(num_ranks: int) -> Any:
    """A buffer of NIXL EP that is watched from its start, of 32 experts a rank."""
    module = types.ModuleType("nixl_ep")
    module.Buffer = wheels.as_of("nixl_ep.buffer", wheels.NixlBuffer, "Buffer")  # type: ignore[attr-defined]
    watch(module)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    buffer = module.Buffer(rank=0, tcp_store_group=store)
    buffer.update_memory_buffers(num_ranks, num_experts_per_rank=32, num_rdma_bytes=0)
    return buffer


def buffer_of(cls: type, group: Any, module: str = "deep_ep.buffer", name: str = "Buffer") -> Any:
    return wheels.as_of(module, cls, name)(group)


def dispatch(buffer: Any, **more: Any) -> Any:
    return buffer.low_latency_dispatch(None, None, TOKENS, EXPERTS, **more)


def combine(buffer: Any, **more: Any) -> Any:
    return buffer.low_latency_combine(None, None, None, None, **more)


def read(by: Attached, method: str) -> tuple[list[float], int]:
    """Microseconds that each rank was waited for, and operations."""
    waits, operations = by.counted[method].take(1.0)
    return (waits / 1e3).tolist(), operations


def test_cycles_of_all_local_experts_become_the_waiting_of_an_operation() -> None:
    buffer = buffer_of(wheels.Buffer, _OfSize(8))
    buffer.waits_us = [0.0, 7.0, 7.0, 57.0, 7.0, 7.0, 7.0, 7.0]
    by = attached(buffer)
    for _ in range(3):
        dispatch(buffer)
        combine(buffer)
    expected = [3 * us for us in buffer.waits_us]
    for method in ("low_latency_dispatch", "low_latency_combine"):
        waits, operations = read(by, method)
        # The own rank takes a cycle for a poll.
        np.testing.assert_allclose(waits, expected, atol=0.01)
        assert operations == 3
    assert read(by, "low_latency_dispatch") == ([0.0] * 8, 0)


def test_the_clock_of_both_ends_of_a_window_counts(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    buffer.waits_us = [100.0]
    by = attached(buffer)
    counted = by.counted["low_latency_dispatch"]
    counted.take(1.0)
    dispatch(buffer)
    waits, _ = counted.take(0.5)
    assert waits.tolist() == [pytest.approx(75e3, rel=1e-3)]


def test_one_tensor_serves_for_life_however_arguments_are_passed(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    attached(buffer)
    for _ in range(3):
        dispatch(buffer)
    seen, use_fp8 = buffer.low_latency_dispatch("rows", None, TOKENS, EXPERTS, None, None, False)
    assert (seen, use_fp8) == ("rows", False)
    first, *others = buffer.passed["dispatch"]
    assert first is not None
    assert all(tensor is first for tensor in others)


def test_a_tensor_of_the_program_is_adopted_and_may_be_reset(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    buffer.waits_us = [40.0]
    by = attached(buffer)
    own = torch.full((1,), 10**9)
    dispatch(buffer, dispatch_wait_recv_cost_stats=own)
    assert buffer.passed["dispatch"] == [own]
    # What was in it before is nobody's waiting.
    assert read(by, "low_latency_dispatch")[0] == [0.0]
    dispatch(buffer, dispatch_wait_recv_cost_stats=own)
    assert read(by, "low_latency_dispatch")[0] == [pytest.approx(40.0, abs=0.01)]
    own.zero_()
    dispatch(buffer, dispatch_wait_recv_cost_stats=own)
    assert read(by, "low_latency_dispatch")[0] == [pytest.approx(40.0, abs=0.01)]


def test_replays_of_a_graph_are_read_without_a_number_of_operations(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    buffer.waits_us = [40.0]
    by = attached(buffer)
    dispatch(buffer)
    assert read(by, "low_latency_dispatch")[1] == 1
    # A replay has the address, and calls nobody; a call's kernel may end in the window after it.
    for expected in (0, UNKNOWN):
        buffer.passed["dispatch"][0].add_(10**6)
        waits, operations = read(by, "low_latency_dispatch")
        assert waits[0] > 0
        assert operations == expected
    dispatch(buffer)
    assert read(by, "low_latency_dispatch")[1] == UNKNOWN


def test_a_wheel_that_refuses_the_tensor_goes_on_without(
    alone: ThreadGroup, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = buffer_of(wheels.MoriBuffer, alone)
    by = attached(buffer)
    assert [dispatch(buffer)[1] for _ in range(3)] == [True] * 3
    assert buffer.passed["dispatch"] == [None] * 3
    combine(buffer)
    assert read(by, "low_latency_combine")[1] == 1
    said = [r.getMessage() for r in caplog.records if "does not count" in r.getMessage()]
    assert len(said) == 1
    assert "low_latency_dispatch" in said[0]


def test_a_handle_that_is_another_one_does_not_stop_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = growing(4)
    assert [buffer.low_latency_combine("rows", None, None, handle) for handle in "ab"] == [
        "rows"
    ] * 2
    assert buffer.passed["combine"] == [None] * 2
    assert caplog.text.count("low_latency_combine does not count what it waits") == 1
    vars(buffer)["_deep_ep_diagnose"].detach()


def test_an_error_of_the_wheel_reaches_the_program(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    attached(buffer)
    with pytest.raises(TypeError, match="nonsense"):
        dispatch(buffer, nonsense=1)


def test_microseconds_of_each_expert_run_over(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.NpuBuffer, _OfSize(4))
    buffer.waits_us = [0.0, 5.0, 5.0, 55.0]
    by = attached(buffer)
    counted = by.counted["dispatch"]
    of_experts = torch.zeros(64, dtype=torch.int32)
    # A microsecond short of running over.
    counted.ours.fill_(2**31 - 1)
    buffer.dispatch(None, num_tokens_per_expert=of_experts)
    by.counted["dispatch"].take(1.0)
    for _ in range(2):
        # The second has a handle, and tells no number.
        buffer.dispatch(None, num_tokens_per_expert=of_experts)
    buffer.dispatch(None, "handle")
    assert read(by, "dispatch") == ([0.0, 15.0, 15.0, 165.0], 3)
    assert [t.numel() for t in buffer.passed["dispatch"]] == [64] * 4
    buffer.combine(None)
    # What it takes to send tells nothing of who is waited for.
    assert buffer.passed["combine"] == [None]


def test_a_group_that_grows_gets_as_many_entries_as_a_call_has_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = growing(8)
    by: Attached = vars(buffer)["_deep_ep_diagnose"]
    buffer.waits_us = [9.0] * 4
    for num_ranks in (4, 4, 8):
        _, handle = buffer.low_latency_dispatch(None, None, TOKENS, 32 * num_ranks)
        buffer.low_latency_combine(None, None, None, handle)
    tensors = buffer.passed["dispatch"] + buffer.passed["combine"]
    assert [tensor.numel() for tensor in tensors] == [4, 4, 8] * 2
    assert len({tensor.data_ptr() for tensor in tensors}) == 2
    waits, operations = read(by, "low_latency_dispatch")
    np.testing.assert_allclose(waits, [27.0] * 4 + [0.0] * 4, atol=0.01)
    assert operations == 3
    # Its memory may be made anew, when ranks join.
    buffer.update_memory_buffers(num_ranks=8, num_experts_per_rank=32, num_rdma_bytes=1)
    assert vars(buffer)["_deep_ep_diagnose"] is by
    by.detach()


@pytest.mark.parametrize("num_ranks", [0, 9])
def test_a_group_that_has_grown_beyond_its_memory_counts_no_more(
    num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = growing(8)
    buffer.low_latency_dispatch(None, None, TOKENS, 32 * num_ranks)
    assert buffer.passed["dispatch"] == [None]
    assert f"a call needs {num_ranks} entries; there are 8" in caplog.text
    vars(buffer)["_deep_ep_diagnose"].detach()


def test_more_experts_than_entries_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    buffer = buffer_of(wheels.NpuBuffer, _OfSize(6))
    by = attached(buffer)
    buffer.dispatch(None, num_tokens_per_expert=torch.zeros(8192, dtype=torch.int32))
    assert buffer.passed["dispatch"] == [None]
    assert "a call needs 8192 entries; there are 4096" in caplog.text
    # What else is counted is still read.
    assert read(by, "dispatch")[0] == [0.0] * 6


@pytest.mark.parametrize(
    "make", [lambda: buffer_of(wheels.Buffer, _OfSize(4)), lambda: growing(4)], ids=["V1", "NIXL"]
)
def test_a_buffer_goes_when_the_program_lets_it_go(make: Callable[[], Any]) -> None:
    """Its memory is the GPU's, so no reference of ours may outlast the program's, nor make a circle."""
    buffer = make()
    ended = weakref.finalize(attached(buffer), int)
    gone = weakref.ref(buffer)
    gc.disable()
    try:
        del buffer
        assert gone() is None
        assert not ended.alive
    finally:
        gc.enable()


SILENT = {
    "ElasticBuffer": "deep_ep.buffers.elastic",
    "HybridEPBuffer": "deep_ep.hybrid_ep_buffer",
    "Buffer": "mooncake.mooncake_ep_buffer",
}


@pytest.mark.parametrize("name", SILENT)
def test_classes_that_count_nothing_say_so(
    name: str, alone: ThreadGroup, caplog: pytest.LogCaptureFixture
) -> None:
    cls = wheels.as_of(SILENT[name], wheels.ElasticBuffer, name)
    with pytest.raises(EPTypeError, match=r"It counts .*profile it"):
        attach(cls(alone))
    module = types.ModuleType(SILENT[name])
    setattr(module, name, cls)
    watch(module)
    assert [cls(alone).dispatch(i) for i in range(2)] == [0, 1]
    assert [r.getMessage().count("is not watched") for r in caplog.records] == [1]


def test_a_class_that_holds_nothing_more_is_made_as_before(
    alone: ThreadGroup, caplog: pytest.LogCaptureFixture
) -> None:
    class Buffer:
        __slots__ = ("group",)
        __module__ = "deep_ep.buffer"
        low_latency_dispatch = wheels.Buffer.low_latency_dispatch

        def __init__(self, group: Any) -> None:
            self.group = group

    module = types.ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    watch(module)
    Buffer(alone)
    assert "a buffer of DeepEP is not watched: TypeError" in caplog.text


def test_classes_that_a_program_makes_from_a_wheel_s_are_watched(alone: ThreadGroup) -> None:
    module = types.ModuleType("deep_ep")
    module.Buffer = wheels.as_of("deep_ep.buffer", wheels.Buffer, "Buffer")  # type: ignore[attr-defined]
    watch(module)

    class Own(module.Buffer):  # type: ignore[name-defined, misc]
        pass

    buffer = Own(alone)
    dispatch(buffer)
    assert buffer.passed["dispatch"] != [None]


def test_each_wheel_is_found_where_programs_import_it_from() -> None:
    for wheel in WHEELS:
        for module in (wheel.package, f"{wheel.package}.buffer"):
            assert wheel_of(type(wheel.name, (), {"__module__": module})) is not None
    assert wheel_of(type("Buffer", (), {"__module__": "deep_epilogue"})) is None
    assert wheel_of(type("Other", (), {"__module__": "deep_ep"})) is None


V1 = ("deep_ep.buffer", wheels.Buffer, "Buffer")


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (lambda group: object(), {}, EPTypeError, "DEEP_EP_DIAGNOSE=1"),
        (wheels.as_of("deep_ep.buffer", wheels.OldBuffer, "Buffer"), {}, EPTypeError, "It counts nothing in this version"),
        (wheels.as_of(*V1), {"interval_s": 0.0}, EPArgumentError, "interval_s is .*above 0"),
        (wheels.as_of(*V1), {"interval_s": float("nan")}, EPArgumentError, "interval_s is .*above 0"),
        (wheels.as_of(*V1), {"interval_s": float("inf")}, EPArgumentError, "interval_s is .*above 0"),
        (wheels.as_of(*V1), {"group": _OfSize(4)}, EPArgumentError, "group has 4 ranks, the buffer 1"),
        (lambda group: wheels.as_of("nixl_ep.buffer", wheels.NixlBuffer, "Buffer")(0, None), {}, EPArgumentError, "install"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_refused(
    make: Any, options: dict[str, Any], error: type[Exception], said: str, alone: ThreadGroup
) -> None:
    with pytest.raises(error, match=said):
        attach(make(alone), **options)


def test_our_own_buffers_watch_themselves() -> None:
    assert wheel_of(deep_ep.Buffer) is None


def test_a_buffer_without_a_group_needs_one(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    buffer.group = None
    with pytest.raises(EPArgumentError, match="Pass the process group"):
        attach(buffer)
    attached(buffer, group=alone)


def test_a_buffer_is_attached_to_once(alone: ThreadGroup) -> None:
    buffer = buffer_of(wheels.Buffer, alone)
    by = attached(buffer)
    assert attached(buffer) is by
    by.detach()
    dispatch(buffer)
    assert buffer.passed["dispatch"] == [None]
    again = attached(buffer)
    assert again is not by
    dispatch(buffer)
    assert read(again, "low_latency_dispatch")[1] == 1


def test_other_buffers_of_the_class_are_left_alone(alone: ThreadGroup) -> None:
    cls = wheels.as_of("deep_ep.buffer", wheels.Buffer, "Buffer")
    watched, other = cls(alone), cls(alone)
    attached(watched)
    dispatch(other)
    assert other.passed["dispatch"] == [None]


def test_what_fails_is_said_and_the_program_goes_on(
    alone: ThreadGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("deep_ep")
    module.Buffer = wheels.as_of("deep_ep", wheels.Buffer, "Buffer")  # type: ignore[attr-defined]
    watch(module)
    watch(module)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no store")

    monkeypatch.setattr(attaching, "open_mailbox", broken)
    buffer = module.Buffer(alone)
    assert dispatch(buffer)[1] is True
    said = [r.getMessage() for r in caplog.records]
    assert said == ["deep_ep.diagnose: a buffer of DeepEP is not watched: RuntimeError: no store"]


NUM_RANKS, LATE = 6, 4


def test_a_late_rank_is_named_in_the_log_and_in_records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = watched_lines(["dispatch", "combine"], caplog, monkeypatch, tmp_path)
    assert "watches a buffer of DeepEP, 6 ranks: waiting in dispatch, combine" in lines[0]


def test_patched_kernels_name_who_comes_late_to_normal_operations(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = ["normal dispatch", "normal combine"]
    # Ranks that are threads share what a process has one of.
    cells = torch.zeros(NUM_RANKS, len(kinds), NUM_RANKS, 2, dtype=torch.int64)

    def entries_of(_buffer: Any, _size: int, rank: int, _device: Any) -> list[EntryWaits]:
        return [EntryWaits(kind, cells[rank, i], rank) for i, kind in enumerate(kinds)]

    def kernels(rank: int, waits_us: list[float]) -> None:
        cells[rank, :, :, 0] += (torch.tensor(waits_us) * 1e3).to(torch.int64)
        cells[rank, :, :, 1] += 1

    monkeypatch.setattr(attaching, "entries", entries_of)
    lines = watched_lines(kinds, caplog, monkeypatch, tmp_path, kernels)
    assert "waiting in dispatch, combine, normal dispatch, normal combine" in lines[0]


def watched_lines(
    kinds: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    kernels: Callable[[int, list[float]], None] | None = None,
) -> list[str]:
    """What is said of six ranks, one of them late, in operations of these kinds; all of it is about that rank."""
    monkeypatch.setenv("DEEP_EP_DIAGNOSE_DIR", str(folder))
    cls = wheels.as_of("deep_ep.buffer", wheels.Buffer, "Buffer")

    def named() -> bool:
        try:
            records = diagnosis_log.read(folder)
        except EPArgumentError:  # nothing has been written yet
            return False
        verdicts = [verdict for record in records for verdict in record.diagnosis.verdicts]
        assert {(v.rank, v.kind) for v in verdicts} <= {(LATE, COMP_SLOW)}
        return {verdict.operation for verdict in verdicts} == set(kinds)

    def program(group: ThreadGroup) -> None:
        buffer = cls(group)
        by = attach(buffer, interval_s=0.05)
        usual = [20.0 + (group.rank + other) % 3 for other in range(NUM_RANKS)]
        late = usual[:LATE] + [5e4] + usual[LATE + 1 :]
        # Who is late finds all that the others sent.
        waits_us = [0.0] * NUM_RANKS if group.rank == LATE else late

        def step() -> None:
            for _ in range(4):
                if kernels is not None:
                    kernels(group.rank, waits_us)
                    continue
                buffer.waits_us = waits_us
                dispatch(buffer)
                combine(buffer)

        assert eventually(named, meanwhile=step)
        group.barrier()
        by.detach()

    on_threads(program, thread_groups(NUM_RANKS, 60))
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    about = [line for line in lines if "Comp-Slow" in line]
    assert about
    assert all(f"rank {LATE}" in line for line in about)
    return lines


def test_who_is_missing_is_said_once_of_all_operations(caplog: pytest.LogCaptureFixture) -> None:
    judge = attaching._judge_of(1, ["dispatch", "normal dispatch"])
    none, silent = np.zeros((2, 4, 4)), {2: (7, 0.0)}
    judge(Window(8, none, np.zeros(2), ["a"] * 4, silent, ["rank 3: nonsense"]))
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition("rank ")[2][0] for line in said] == ["3", "2"]


class _Extension:
    """What a patched extension has; `cells` is what its kernels write to."""

    def __init__(self, num_ranks: int = 4, *, has_elastic: bool = False) -> None:
        self.cells: Any = None
        self._num_ranks = num_ranks
        hops = "dispatch_entry dispatch_rows combine_entry"
        if has_elastic:
            self.ep_watch_elastic_hops = lambda: hops
        else:
            self.ep_watch_hops = lambda: hops

    def ep_watch_set(self, address: int, *_rank_in_group: int) -> None:
        memory = (ctypes.c_int64 * (3 * self._num_ranks * 2)).from_address(address)
        self.cells = np.ctypeslib.as_array(memory).reshape(3, self._num_ranks, 2)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> _Extension:
    patched = _Extension()
    monkeypatch.setattr(entries, "_of_extensions", {})
    monkeypatch.setitem(sys.modules, entries.EXTENSIONS[0], patched)  # type: ignore[arg-type]
    return patched


CPU = torch.device("cpu")


def test_hops_of_patched_kernels_are_read_at_the_entries(extension: _Extension) -> None:
    at_dispatch, at_combine = entries.entries(None, 4, 1, CPU)
    extension.cells[0] = [[3000, 5], [90, 5], [7000, 5], [8000, 5]]
    extension.cells[2] = [[100, 2], [1, 2], [200, 2], [300, 2]]
    waits, operations = at_dispatch.take(1.0)
    # What a look at the own word takes is no waiting; how many there were is how many operations.
    assert (waits.tolist(), operations) == ([3000, 0, 7000, 8000], 5)
    waits, operations = at_combine.take(1.0)
    assert (waits.tolist(), operations) == ([100, 0, 200, 300], 2)
    extension.cells[0, 2] += [500, 1]
    assert at_dispatch.take(1.0)[0].tolist() == [0, 0, 500, 0]


def test_an_extension_with_one_address_counts_for_one_group(extension: _Extension) -> None:
    assert len(entries.entries(None, 4, 1, CPU)) == 2
    cells = extension.cells
    assert entries.entries(None, 8, 1, CPU) == entries.entries(None, 4, 2, CPU) == []
    again = entries.entries(None, 4, 1, CPU)
    assert [one.operation for one in again] == ["normal dispatch", "normal combine"]
    assert extension.cells is cells


def test_a_patched_elastic_buffer_is_watched(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("deep_ep._C")
    module.ep_watch_elastic_hops = _Extension(has_elastic=True).ep_watch_elastic_hops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep._C", module)
    cls = wheels.as_of("deep_ep.buffers.elastic", wheels.ElasticBuffer, "ElasticBuffer")
    buffers = [cls(_OfSize(4)) for _ in range(2)]
    for buffer in buffers:
        buffer.runtime = _Extension()
        by = attached(buffer)
        assert by.operations == ["normal dispatch", "normal combine"]
        assert attached(buffer) is by
    # Each has an address of its own.
    assert len({one.runtime.cells.ctypes.data for one in buffers}) == 2
    assert "waiting in normal dispatch, normal combine" in caplog.text
    attached(buffers[0]).detach()
    assert buffers[0].dispatch("rows") == "rows"


def test_an_extension_that_is_not_patched_counts_no_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, entries.EXTENSIONS[0], types.ModuleType("deep_ep_cpp"))
    assert entries.entries(None, 4, 1, CPU) == []
    assert not entries.counts_entries(None)
