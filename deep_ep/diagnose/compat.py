"""The interface of the existing analyser: sums of waiting per source, compared with their mean.

    from deep_ep import diagnose as ds

    d = ds.Diagnose(group=group)
    dispatch_stats, combine_stats = d.get_stats_ll_stats_tensor()
    ...          # pass them as dispatch_wait_recv_cost_stats and combine_wait_recv_cost_stats
    d.diagnose_ll_sync()      # every step, on every rank; or d.start_async_diagnose() once

Its rule, `diagnose_matrix`, is kept as it is, with what it cannot see; every result carries our own
verdicts beside it, of those who stand out in nearly all of the latest windows. They rest on the same
sums; with the counters of a Buffer, `diagnose.run` and `DEEP_EP_DIAGNOSE` see more.
"""

from __future__ import annotations

import functools
import io
import logging
import logging.handlers
import math
import socket
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .analyze.waits_only.judge import judge_waits
from .analyze.waits_only.sampling import LEAST_STEPS, Windows, since
from .analyze.waits_only.square import square_matrix
from .core import quantities, safe_files
from .core.causes import TITLES
from .core.diagnosis import FloatArray, IntArray
from .core.package import EPArgumentError, Group, as_group, env, ranks_text, to_host
from .live.mailbox import open_mailbox
from .live.wait_sampler import UNKNOWN, Waited, WaitSampler, Window
from .other_kernels.waiting import kernel_device
from .render import wording

Result = dict[str, Any]

# Keeps the quotients of an empty matrix finite; part of the rule.
_EPSILON = 1e-8
_KINDS = ("dispatch", "combine")


def diagnose_matrix(
    mat: Any,
    thres_col: float = 3.0,
    thres_row: float = 3.0,
    thres_point: float = 5.0,
    suppress_points_in_strong_rowscols: bool = True,
    excluding_zeros: int = 0,
) -> Result:
    """The mean-normalised rule.

    Args:
        mat: [n, n] numbers >= 0 (list, array, tensor), rows wait, columns are waited for.
        thres_col, thres_row: a column or row is abnormal when its mean is more than so many times
            the mean of all cells.
        thres_point: likewise a cell.
        suppress_points_in_strong_rowscols: leaves out cells of abnormal columns and rows.
        excluding_zeros: 1: cells are compared with the mean of those that are not 0.

    Returns:
        `abnormal_cols` and `abnormal_rows`, lists of [index, mean, normalised], and
        `abnormal_points`, a list of [row, column, value, normalised]; ascending by index.

    Raises:
        EPArgumentError: not a square matrix of finite numbers >= 0.
    """
    matrix = square_matrix("diagnose_matrix", mat)
    mean = float(matrix.mean()) + _EPSILON
    columns = _above(matrix.mean(axis=0), mean, thres_col)
    rows = _above(matrix.mean(axis=1), mean, thres_row)
    used = matrix[matrix != 0] if excluding_zeros else matrix
    normalised = matrix / ((float(used.mean()) if used.size else 0.0) + _EPSILON)
    points = normalised > thres_point
    if suppress_points_in_strong_rowscols:
        points[:, [int(column[0]) for column in columns]] = False
        points[[int(row[0]) for row in rows]] = False
    return {
        "abnormal_cols": columns,
        "abnormal_rows": rows,
        "abnormal_points": [
            [int(i), int(j), float(matrix[i, j]), float(normalised[i, j])]
            for i, j in np.argwhere(points)
        ],
    }


def _above(means: FloatArray, mean: float, threshold: float) -> list[list[Any]]:
    normalised = means / mean
    return [
        [int(i), float(means[i]), float(normalised[i])]
        for i in np.flatnonzero(normalised > threshold)
    ]


class Diagnose:
    """The existing analyser's class. Every rank of the group makes one.

    With `DEEPEP_DIAGNOSE_ENABLE=0` it does nothing: tensors and results are `None`.

    Attributes:
        group: as given to the constructor; programs compare it with the one they have now.
    """

    diagnose_matrix = staticmethod(diagnose_matrix)

    def __init__(
        self,
        group: Any = None,
        interval: float | None = None,
        enable_ll_diagnose: bool = True,
        enable_normal_diagnose: bool = False,
        enable_async: bool = False,
    ) -> None:
        """Allocates the tensors. Collective only with `enable_async`.

        Args:
            group: a process group, an mpi4py communicator or a `deep_ep.group.Group`; the default
                process group unless given.
            interval: seconds between asynchronous diagnoses; `DEEPEP_DIAGNOSE_INTERVAL` unless given.
            enable_ll_diagnose: for the low-latency kernels.
            enable_normal_diagnose: for the normal kernels.
            enable_async: calls `start_async_diagnose()`.

        Raises:
            EPArgumentError: there is no group, the interval is not above 0, a variable of the
                environment cannot be read, the log folder cannot be made, or the log is a link.
        """
        self._interval_s = env.classic_interval_s() if interval is None else float(interval)
        if not 0 < self._interval_s < math.inf:
            raise EPArgumentError(
                f"Diagnose: interval is {interval}; it must be a number of seconds above 0. "
                "Leave it out for DEEPEP_DIAGNOSE_INTERVAL."
            )
        self._sync_step = env.classic_sync_step()
        warming_time_s = env.classic_warming_time_s()
        self._warming_time_s = self._interval_s if warming_time_s is None else warming_time_s
        self.group = group
        self._group = _group(group)
        self._instance_id = f"diagnose-rank{self._group.rank}-{uuid.uuid4().hex[:12]}"
        self._created = time.monotonic()
        self._worker: WaitSampler | None = None
        self._waits: dict[str, _Waits] = {}
        if not env.classic_enable():
            return
        sides, device = (len(_KINDS), self._group.size), kernel_device()
        for name, wanted in (("ll", enable_ll_diagnose), ("normal", enable_normal_diagnose)):
            if wanted:
                self._waits[name] = _Waits(torch.zeros(sides, dtype=torch.int64, device=device))
        self._log = _log(env.classic_log_path(), self._group.rank, self._instance_id)
        weakref.finalize(self, self._log.handlers[0].close)
        self._judge = _Judge(self._log)
        if enable_async:
            self.start_async_diagnose()

    def get_stats_ll_stats_tensor(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dispatch, combine) of the low-latency kernels, [num_ranks] int64 each, nanoseconds.

        They live on the backend's device and stay the same for life. `(None, None)`, which the
        operations take for "do not count", when the mode is off.
        """
        return self._tensors("ll")

    def get_stats_normal_stats_tensor(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The same for the normal kernels."""
        return self._tensors("normal")

    def get_all_stats_tensor(self) -> tuple[torch.Tensor | None, ...]:
        """(low-latency dispatch, low-latency combine, normal dispatch, normal combine)."""
        return (*self._tensors("ll"), *self._tensors("normal"))

    def get_instance_id(self) -> str:
        """A text no other instance has, on this rank or another."""
        return self._instance_id

    def diagnose_ll_sync(self, diagnose_step: int = 0) -> list[Result] | None:
        """Counts a step, and compares the ranks when one is due. Call it on every rank, each step.

        Due is every `diagnose_step`-th call, or every `DEEPEP_DIAGNOSE_SYNC_STEP`-th if it is 0; then
        it is collective. What was measured before, and never judged, is the window. In the second
        case the first windows are dropped until `DEEPEP_DIAGNOSE_WARMING_TIME` is over on rank 0.

        Args:
            diagnose_step: steps of a window, equal on all ranks; 0: from the environment.

        Returns:
            On rank 0, when due, a list of two: dispatch and combine. Each has the keys of
            `diagnose_matrix`, and "verdicts", a list of `Verdict` of `judge_waits` from this window and
            the ones before: none until there are five of 16 steps or more. `None` otherwise.

        Raises:
            EPArgumentError: `diagnose_step` is negative.
        """
        return self._sync("ll", diagnose_step)

    def diagnose_normal_sync(self, diagnose_step: int = 0) -> list[Result] | None:
        """The same for the normal kernels."""
        return self._sync("normal", diagnose_step)

    def start_async_diagnose(self) -> None:
        """Compares the ranks every interval, in a thread, until stopped. Collective.

        Results go to the log of rank 0. Starting what is started does nothing. The thread talks
        through a store of its own and never uses the group. If it fails, it says so in the log once
        and ends; the program goes on.
        """
        if self._worker is not None or not self._waits:
            return
        self._worker = WaitSampler(
            open_mailbox(self._group, "diagnose"),
            functools.partial(_take, [_Waits(waits.stats) for waits in self._waits.values()]),
            functools.partial(self._judge.window, list(self._waits)),
            functools.partial(_failed, self._log),
            self._interval_s,
            self._warming_time_s,
        )
        # At the end of the program, too; after that no thread may wait for a store.
        self._finalize_worker = weakref.finalize(self, self._worker.stop)

    def stop_async_diagnose(self) -> None:
        """Ends the thread and waits for it. Not collective; stopping twice does nothing."""
        if self._worker is not None:
            self._finalize_worker()
            self._worker = None

    def _tensors(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        waits = self._waits.get(name)
        return (None, None) if waits is None else (waits.stats[0], waits.stats[1])

    def _sync(self, name: str, diagnose_step: int) -> list[Result] | None:
        if diagnose_step < 0:
            raise EPArgumentError(
                f"diagnose_{name}_sync: diagnose_step is {diagnose_step}; it must be the number of steps of a "
                "window, or 0 for DEEPEP_DIAGNOSE_SYNC_STEP. Correct it on all ranks."
            )
        waits = self._waits.get(name)
        if waits is None:
            return None
        period = diagnose_step or self._sync_step
        waits.steps += 1
        if waits.steps < period:
            return None
        waits.steps = 0
        gathered = self._group.all_gather_object((socket.gethostname(), waits.take()))
        # Clocks differ between ranks: what depends on one comes after the exchange, on rank 0.
        warm = diagnose_step > 0 or time.monotonic() - self._created >= self._warming_time_s
        if self._group.rank != 0 or not warm:
            return None
        hosts = [host for host, _ in gathered]
        matrices = np.stack([rows for _, rows in gathered], axis=1).astype(np.float64)
        return self._judge.results(name, matrices, hosts, period)


class _Waits:
    """What the kernels of one sort added to tensors since the last look. The tensors are only read.

    Attributes:
        stats: `[2, num_ranks]` int64, waiting in dispatch and combine.
        steps: of the program, since the last synchronous diagnosis.
    """

    def __init__(self, stats: torch.Tensor) -> None:
        self.stats = stats
        self.steps = 0
        self._before: IntArray = np.zeros(tuple(stats.shape), np.int64)

    def take(self, *, aside: bool = False) -> IntArray:
        """As `stats`; the next window begins here.

        Args:
            aside: reads what is there now; otherwise after what is queued on the current stream.
        """
        now = (to_host(self.stats)[0] if aside else self.stats.cpu()).numpy().copy()
        window = since(self._before, now)
        self._before = now
        return window


def _take(all_waits: Sequence[_Waits]) -> Waited:
    rows = np.concatenate([waits.take(aside=True) for waits in all_waits])
    return Waited(rows, np.full(len(rows), UNKNOWN))


def _failed(log: logging.Logger, error: Exception) -> None:
    log.error("the asynchronous diagnosis failed and has ended", exc_info=error)


class _Judge:
    """Rank 0: matrices to results, and to lines of the log."""

    def __init__(self, log: logging.Logger) -> None:
        """Takes its limits from the environment; they are arguments of `diagnose_matrix`."""
        self._limits: dict[str, Any] = {
            "thres_col": env.classic_threshold_col(),
            "thres_row": env.classic_threshold_row(),
            "thres_point": env.classic_threshold_point(),
            "excluding_zeros": int(env.classic_excluding_zeros()),
        }
        self._logs_details = env.classic_log_details()
        self._log = log
        self._windows: dict[str, Windows] = {}
        self._refused: set[str] = set()

    def window(self, names: Sequence[str], window: Window) -> None:
        """What a thread has collected, two kinds of operation for each name."""
        for error in window.refused:
            whom = error.partition(":")[0]
            if whom not in self._refused:
                self._refused.add(whom)
                self._log.warning("Diagnose: an answer is left out. %s", error)
        for name, matrices in zip(names, np.split(window.waits, len(names))):
            self.results(name, matrices, window.hosts)

    def results(
        self, name: str, waits: FloatArray, hosts: Sequence[str], steps: int = LEAST_STEPS
    ) -> list[Result]:
        """One result for dispatch and one for combine.

        Args:
            name: "ll" or "normal".
            waits: [2, num_ranks, num_ranks], rows wait; NaN rows: that rank did not answer.
            hosts: [num_ranks], host names; "" where the rank did not answer.
            steps: of this window; an interval of the thread is taken for long enough.
        """
        windows = self._windows.setdefault(name, Windows())
        windows.add(waits, steps)
        prefix = "" if name == "ll" else f"{name} "
        kinds = [prefix + kind for kind in _KINDS]
        # A group without a name for every host is looked at as if it had none.
        known = hosts if all(hosts) else None
        found = judge_waits(dict(zip(kinds, windows.latest())), hosts=known, unit_ns=1.0)
        undecided = wording.undecided(found)
        results = []
        for kind, matrix in zip(kinds, waits):
            result = diagnose_matrix(np.nan_to_num(matrix), **self._limits)
            result["verdicts"] = [v for v in found.verdicts if v.operation == kind]
            self._write(kind, matrix, result, undecided)
            results.append(result)
        return results

    def _write(
        self, operation: str, matrix: FloatArray, result: Result, undecided: list[str]
    ) -> None:
        missing = np.flatnonzero(np.isnan(matrix).all(axis=1))
        if missing.size:
            self._log.warning("%s: %s did not answer", operation, ranks_text(map(int, missing)))
        if self._logs_details:
            # The format of heat-map tools; other operations than the usual one are named.
            suffix = "" if operation == "dispatch" else f" {operation}"
            for rank in np.flatnonzero(~np.isnan(matrix).all(axis=1)):
                row = " ".join(str(int(value)) for value in matrix[rank])
                self._log.info("rank=%d [%s]%s", rank, row, suffix)
        for verdict in result["verdicts"]:
            # Effects are of the window: how many operations it has is not known.
            self._log.info(
                f"{operation}: {TITLES[verdict.kind]}, {verdict.cause}: {wording.placed(verdict)}, "
                f"{quantities.microseconds(verdict.effect_us)} in a window, {quantities.percent(verdict.share)} "
                f"of all waiting. {verdict.next_step}"
            )
        abnormal = {key: result[key] for key in result if key != "verdicts" and result[key]}
        for key, entries in abnormal.items():
            self._log.info("%s: %s %s", operation, key, entries)
        for remark in undecided:
            self._log.info("%s: %s", operation, remark)
        if not abnormal and not result["verdicts"] and not undecided:
            self._log.info("%s: no anomaly", operation)


def _group(given: Any) -> Group:
    if given is not None:
        return as_group(given)
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise EPArgumentError(
            "Diagnose: group is None and torch.distributed is not initialised; there must be a group "
            "of ranks to compare. Pass one, or call torch.distributed.init_process_group first."
        )
    return as_group(dist.group.WORLD)


def _log(folder: Path, rank: int, name: str) -> logging.Logger:
    """A logger that nothing else knows, into `diagnose_rank{N}.log`, a new file every day."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EPArgumentError(
            f"environment: DEEPEP_DIAGNOSE_LOG_PATH is {str(folder)!r}, which cannot be made "
            f"({error.strerror}); it must be a folder that can be written to. Choose another one."
        ) from error
    path = folder / f"diagnose_rank{rank}.log"
    # Later it would be told with every line.
    safe_files.require_own(path)
    handler = _LogFile(path, when="midnight", delay=True, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter("[%(asctime)s.%(msecs)03d] %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    log = logging.Logger(name)  # noqa: LOG001 - one per instance; getLogger keeps them for ever
    log.addHandler(handler)
    return log


class _LogFile(logging.handlers.TimedRotatingFileHandler):
    """A log that is not written through a link."""

    def _open(self) -> io.TextIOWrapper:
        file = io.BufferedWriter(safe_files.open_to_append(self.baseFilename))
        return io.TextIOWrapper(file, self.encoding)
