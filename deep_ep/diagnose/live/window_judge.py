"""What the ranks said of a window becomes a verdict, lines in the log, and a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Optional

import numpy as np

from ..analyze.baseline import History
from ..analyze.engine import judge
from ..collect.group_matrices import gather
from ..collect.rank_summary import Summary
from ..core.package import EPArgumentError, codec
from . import wire
from .window_log import WindowLog

if TYPE_CHECKING:
    from pathlib import Path

# Operations that the ranks of a window may tell of together, for each that rank 0 keeps; and at least. Chosen.
_OPERATIONS_PER_OWN, _LEAST_OPERATIONS = 2, 2048
# Of what a rank says besides numbers.
_MOST_REMARKS = 64


@dataclass(frozen=True)
class Share:
    """A rank to rank 0: what it saw in a window, or nothing, because it stopped."""

    summary: Optional[Summary]  # noqa: UP045 - read at run time, by Python 3.9 as well
    remarks: Annotated[tuple[str, ...], codec.Most(_MOST_REMARKS)] = ()


@dataclass(frozen=True)
class WindowShares:
    """What rank 0 heard of a window.

    Attributes:
        number: from 1.
        time_s: when it ended, seconds since the epoch.
        own: rank 0's share.
        others: shares of the others as they came, by rank.
        absent: which ranks are not in it, and why.
    """

    number: int
    time_s: float
    own: Share
    others: dict[int, bytes]
    absent: Sequence[str] = ()


class WindowJudge:
    """Judges the windows of one group. It can be pickled, and goes on where that is read."""

    def __init__(self, folder: Path | None) -> None:
        """Nothing is written yet.

        Args:
            folder: where records go; `None`: nowhere.
        """
        self._log = WindowLog(folder)
        self._history = History()

    def judge(self, window: WindowShares) -> list[int]:
        """Logs what is new in a window, and appends its record; returns the ranks that send no more."""
        limits = ShareLimits(window.own)
        shares, refused = {0: window.own}, []
        for rank, data in window.others.items():
            where = f"diagnose: window {window.number}, from rank {rank}"
            try:
                shares[rank] = limits.share_of(rank, data, where)
            except EPArgumentError as error:
                refused.append(f"what came for rank {rank} is left out: {error}")
        summaries = [share.summary for share in shares.values() if share.summary is not None]
        said = [remark for share in shares.values() for remark in share.remarks]
        diagnosis = judge(gather(summaries), None, self._history)
        diagnosis = replace(diagnosis, remarks=[*diagnosis.remarks, *said])
        self._log.tell(
            window.number, window.time_s, diagnosis, refused=refused, absent=window.absent
        )
        return [rank for rank, share in shares.items() if share.summary is None]


class ShareLimits:
    """What the other ranks may say about a window, given what rank 0 saw in it."""

    def __init__(self, own: Share) -> None:
        assert own.summary is not None  # rank 0 looks at its counters before it asks the others
        self._num_ranks = own.summary.num_ranks
        self._ops = {kind: of_kind.ops for kind, of_kind in own.summary.kinds.items()}
        kept = max((ops.size for ops in self._ops.values()), default=0)
        self._most = max(_OPERATIONS_PER_OWN * kept, _LEAST_OPERATIONS)

    def share_of(self, rank: int, data: bytes, where: str) -> Share:
        """The share in a message.

        Raises:
            EPArgumentError: the message is none, of another rank, or would make matrices too large.
        """
        share = wire.decode(Share, data, where, {"num_ranks": self._num_ranks})
        summary = share.summary
        if summary is None:
            return share
        if (summary.rank, summary.num_ranks) != (rank, self._num_ranks):
            raise EPArgumentError(
                f"{where}: the share is of rank {summary.rank} of {summary.num_ranks}; it must be of rank "
                f"{rank} of {self._num_ranks}. Let nobody else write to the store of the job."
            )
        ops = {
            kind: np.union1d(self._ops.get(kind, of_kind.ops), of_kind.ops)
            for kind, of_kind in summary.kinds.items()
        }
        largest = max((numbers.size for numbers in ops.values()), default=0)
        if largest > self._most:
            raise EPArgumentError(
                f"{where}: with it the window has {largest} operations of one kind; at most {self._most} "
                "may be told of. Let nobody else write to the store of the job."
            )
        self._ops.update(ops)
        return share
