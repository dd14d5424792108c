"""Copies counters while kernels write them: what comes out is the state between two operations.

A kernel adds to the totals at the end of an operation, within microseconds; the ring takes longer to
copy than that. So the small part is read until two readings agree, then the ring is copied, and
slots that were written meanwhile are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deep_ep.errors import EPUsageError

Int64Array = npt.NDArray[np.int64]

# Readings before the last one is taken as it is, and the pauses between them; a writer that lost
# its core comes back within a few of these. Chosen.
_READINGS = 24
_FIRST_PAUSE_S, _LAST_PAUSE_S = 20e-6, 10e-3


class Reading(NamedTuple):
    """The part of the counters that is read in one go.

    Attributes:
        totals: as `CounterSnapshot.totals`.
        own: as `CounterSnapshot.own`.
        op_of_slot: `[capacity]` int64, operation number in each slot of the ring.
    """

    totals: Int64Array
    own: Int64Array
    op_of_slot: Int64Array


class Copier(Protocol):
    """Reads live counters. A reading may be torn."""

    def reading(self) -> Reading:
        """Totals, own and the operation numbers of the ring."""

    def ring(self) -> Int64Array:
        """A copy of the whole ring."""


def copy_between_operations(
    copier: Copier,
    consistent: Callable[[Reading], bool],
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Reading, Int64Array, int]:
    """The state of the counters between two operations.

    Takes at most about 0.3 s when operations are counted all the time; the last reading that may be such a
    state is returned then, or else the last one, in which one operation may be counted in part.

    Args:
        copier: where from.
        consistent: whether a reading can be the state between two operations.
        pause: waits for so many seconds.

    Returns:
        The reading, the ring with slots written later zeroed, and the largest operation number that
        was in one of these; 0: none.
    """
    before = _settled(copier, consistent, pause)
    ring = copier.ring()
    if not ring.shape[0]:
        return before, ring, 0
    after = _settled(copier, consistent, pause)
    overwritten = after.op_of_slot != before.op_of_slot
    ring[overwritten] = 0
    return before, ring, int(before.op_of_slot[overwritten].max(initial=0))


def _settled(
    copier: Copier, consistent: Callable[[Reading], bool], pause: Callable[[float], None]
) -> Reading:
    seen = copier.reading()
    whole = seen if consistent(seen) else None
    pause_s = _FIRST_PAUSE_S
    for _ in range(_READINGS - 1):
        pause(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        again = copier.reading()
        if consistent(again):
            if all(map(np.array_equal, again, seen)):
                return again
            whole = again
        seen = again
    return seen if whole is None else whole


class HostCopier:
    """Counters of the cpu backend, and those that live on the host for another reason."""

    def __init__(
        self, totals: torch.Tensor, own: torch.Tensor, ring: torch.Tensor, op_field: int
    ) -> None:
        self._ring = ring
        self._small = own, totals, ring[:, -1, op_field]

    def reading(self) -> Reading:
        # Own comes first here and last in kernels, so an operation that is being counted shows in the totals alone.
        own, totals, op_of_slot = (tensor.numpy(force=True).copy() for tensor in self._small)
        return Reading(totals, own, op_of_slot)

    def ring(self) -> Int64Array:
        ring: Int64Array = self._ring.numpy(force=True).copy()
        return ring


class DeviceCopier:
    """Counters on a GPU, through pinned memory and a stream that nothing else uses.

    No other stream waits for it, and the host waits for it alone. Stream captures elsewhere in the
    process neither see the copies nor are broken by them. Making it allocates.
    """

    def __init__(
        self, totals: torch.Tensor, own: torch.Tensor, ring: torch.Tensor, op_field: int
    ) -> None:
        _refuse_capture("RecvCounters", "they allocate memory", "Make them before the capture.")
        self._device = totals.device
        self._stream = _side_stream(totals.device.index)
        self._lock = threading.Lock()
        with _aside(self._stream):
            op_of_slot = torch.empty(ring.shape[0], dtype=torch.int64, device=self._device)
            self._op_in_ring, self._op_of_slot = ring[:, -1, op_field], op_of_slot
            # As in `HostCopier.reading`.
            self._small = [(t, _pinned_like(t)) for t in (own, totals, op_of_slot)]
            self._large = (ring, _pinned_like(ring))
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait_for_current_stream(self) -> None:
        """Orders the next copy after what is queued on the caller's stream, which does not wait.

        Raises:
            EPUsageError: the caller's stream is being captured.
        """
        with torch.cuda.device(self._device):
            _refuse_capture(
                "RecvCounters.snapshot",
                "wait is True, and what is queued does not run before the graph does",
                "Take it after the capture, or pass wait=False for what has run so far.",
            )
            queued = torch.cuda.current_stream().record_event()
        self._stream.wait_event(queued)

    def reading(self) -> Reading:
        with self._lock, _aside(self._stream):
            # Within the device first: torch copies to the host only what is contiguous.
            self._op_of_slot.copy_(self._op_in_ring)
            own, totals, op_of_slot = self._fetch(self._small)
        return Reading(totals, own, op_of_slot)

    def ring(self) -> Int64Array:
        with self._lock, _aside(self._stream):
            return self._fetch([self._large])[0]

    def _fetch(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Int64Array]:
        for source, pinned in pairs:
            pinned.copy_(source, non_blocking=True)
        self._done.record(self._stream)
        self._done.synchronize()
        return [pinned.numpy().copy() for _, pinned in pairs]


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def _refuse_capture(what: str, why: str, advice: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise EPUsageError(
            f"{what}: the current stream is being captured into a graph; that must not "
            f"be, because {why}. {advice}"
        )


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    """One per device and process. torch's own come from a pool and may be somebody's, captured."""
    non_blocking = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
    handle = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().query()  # makes the context current in this thread
        _check(driver().cuStreamCreate(ctypes.byref(handle), non_blocking), "cuStreamCreate")
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]
        return stream


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what these hold now, without waiting for any stream; on a GPU as `DeviceCopier`, but for pinned memory.

    Args:
        tensors: of one device; contiguous, or to copy them takes a kernel.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    with _aside(_side_stream(device.index)):
        return [tensor.cpu() for tensor in tensors]


@contextlib.contextmanager
def _aside(side: torch.cuda.Stream) -> Iterator[None]:
    # The device of a stream becomes the current one with it.
    with ignoring_captures(), torch.cuda.stream(side):
        yield


@contextlib.contextmanager
def ignoring_captures() -> Iterator[None]:
    """Lets this thread wait for its own events while others capture.

    A capture in global mode, torch's default, forbids that to all threads but those that say that
    they know what they do, and breaks when they do it all the same.
    """
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = driver().cuThreadExchangeStreamCaptureMode
    _check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, call: str) -> None:
    if result != 0:
        raise EPUsageError(
            f"RecvCounters.snapshot: {call} returned CUDA error {result}; it must succeed. "
            "Read the first CUDA error of this process; later ones follow from it."
        )
