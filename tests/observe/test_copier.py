"""Counters of a GPU are read beside the program: on a stream of their own, with only the reader waiting, and whatever
is being captured. torch's CUDA and the driver are stand-ins that record who asked for what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deep_ep.errors import EPUsageError
from deep_ep.observe import copier as copiers
from deep_ep.observe import counters as counters_module
from deep_ep.observe.copier import DeviceCopier, HostCopier

RELAXED, GLOBAL = 2, 0
NUM_SLOTS, NUM_RANKS, OP_FIELD = 4, 3, 1


class Stream:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def query(self) -> bool:
        return True

    def record_event(self) -> str:
        self.machine.calls.append(f"record on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.machine.calls.append(f"{self.name} waits for {event}")


class Machine:
    """One GPU, and the thread that reads its counters."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capture_mode = GLOBAL
        self.is_capturing = False
        self.program = self.current = Stream(self, "the program's stream")

    def note(self, call: str) -> None:
        """Work of the device, or a wait: on which stream, and in which mode of capturing."""
        mode = "relaxed" if self.capture_mode == RELAXED else "global"
        self.calls.append(f"{call} on {self.current.name}, {mode}")

    # ---- torch.cuda

    @contextlib.contextmanager
    def device(self, _: object) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def ExternalStream(self, _: object) -> Stream:  # noqa: N802 - torch's name
        return Stream(self, "the side stream")

    def Event(self, blocking: bool) -> Any:  # noqa: N802 - torch's name
        assert blocking, "a reader that spins takes a core from the program"
        machine = self

        class Event:
            def record(self, stream: Stream) -> None:
                machine.note(f"record the copies of {stream.name}")

            def synchronize(self) -> None:
                machine.note("the host waits for the copies")

        return Event()

    # ---- the driver

    def cuStreamCreate(self, _: object, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 1, "it would be ordered with the default stream"
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - the driver's name
        before, self.capture_mode = self.capture_mode, mode._obj.value
        mode._obj.value = before
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()

    def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
        machine.note("allocate")
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    for name in (
        "device", "stream", "current_stream", "is_current_stream_capturing", "ExternalStream", "Event",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(machine, name))
    monkeypatch.setattr(copiers, "driver", lambda: machine)
    monkeypatch.setattr(copiers, "_pinned_like", pinned_like)
    copiers._side_stream.cache_clear()
    yield machine
    copiers._side_stream.cache_clear()


def counters() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Totals, the rank's own, and a ring whose slots hold operations 0, 10, 20, 30."""
    ring = torch.zeros(NUM_SLOTS, NUM_RANKS + 1, 5, dtype=torch.int64)
    ring[:, -1, OP_FIELD] = torch.arange(NUM_SLOTS) * 10
    return torch.arange(6).view(2, 3), torch.arange(4), ring


def test_a_reading_holds_what_is_there_and_no_stream_of_the_program_is_touched(
    machine: Machine,
) -> None:
    totals, own, ring = counters()
    copier = DeviceCopier(totals, own, ring, OP_FIELD)
    machine.calls.clear()
    reading = copier.reading()
    assert np.array_equal(reading.totals, totals.numpy())
    assert np.array_equal(reading.own, own.numpy())
    assert reading.op_of_slot.tolist() == [0, 10, 20, 30]
    assert np.array_equal(copier.ring(), ring.numpy())
    # Recorded before it is waited for, each time anew, where a capture elsewhere is not broken.
    one = [
        "record the copies of the side stream on the side stream, relaxed",
        "the host waits for the copies on the side stream, relaxed",
    ]
    assert machine.calls == one * 2
    assert machine.capture_mode == GLOBAL, "the thread's mode is put back"
    assert machine.current is machine.program


def test_later_counts_do_not_change_an_earlier_reading(machine: Machine) -> None:
    totals, own, ring = counters()
    copier = DeviceCopier(totals, own, ring, OP_FIELD)
    before = copier.reading()
    totals += 1
    assert (copier.reading().totals - before.totals == 1).all()


def test_a_reading_that_waits_follows_what_the_program_has_queued(machine: Machine) -> None:
    copier = DeviceCopier(*counters(), OP_FIELD)
    machine.calls.clear()
    copier.wait_for_current_stream()
    assert machine.calls == [
        "record on the program's stream",
        "the side stream waits for event of the program's stream",
    ]


def test_the_mode_of_captures_is_put_back_when_a_copy_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = DeviceCopier(*counters(), OP_FIELD)

    def fail(_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(copier._done, "record", fail)
    with pytest.raises(RuntimeError, match="gone"):
        copier.reading()
    assert machine.capture_mode == GLOBAL


def test_what_a_capture_would_break_is_refused_before_anything_is_asked_of_the_device(
    machine: Machine,
) -> None:
    copier = DeviceCopier(*counters(), OP_FIELD)
    machine.is_capturing = True
    machine.calls.clear()
    with pytest.raises(EPUsageError, match="pass wait=False"):
        copier.wait_for_current_stream()
    with pytest.raises(EPUsageError, match="RecvCounters: .* Make them before the capture"):
        DeviceCopier(*counters(), OP_FIELD)
    assert machine.calls == []
    copier.reading()  # a capture of the program's stream does not concern the side stream


def test_copiers_of_a_device_share_one_stream(machine: Machine) -> None:
    one, other = (DeviceCopier(*counters(), OP_FIELD) for _ in range(2))
    assert one._stream is other._stream


def test_a_copy_to_the_host_is_made_beside_the_program_as_well(machine: Machine) -> None:
    class OnDevice:
        device = SimpleNamespace(type="cuda", index=0)

        def cpu(self) -> torch.Tensor:
            machine.note("copy")
            return torch.arange(3)

    copies = copiers.to_host(OnDevice(), OnDevice())  # type: ignore[arg-type]
    assert [copied.tolist() for copied in copies] == [[0, 1, 2]] * 2
    assert machine.calls == ["copy on the side stream, relaxed"] * 2
    assert machine.capture_mode == GLOBAL


def test_a_copy_of_what_is_on_the_host_does_not_change_later() -> None:
    live = torch.arange(3)
    (copied,) = copiers.to_host(live)
    live += 1
    assert copied.tolist() == [0, 1, 2]


def test_what_copies_counters_is_made_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates pinned memory, which on a GPU waits for the kernels of a job that runs by then."""
    made = []

    class Copier(HostCopier):
        def __init__(self, *tensors: Any) -> None:
            made.append(self)
            super().__init__(*tensors)

    monkeypatch.setattr(counters_module, "HostCopier", Copier)
    counted = counters_module.RecvCounters(2, device="cpu")
    assert len(made) == 1
    counted.snapshot()
    assert len(made) == 1
