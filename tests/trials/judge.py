"""Whether what the healthy ranks of a trial saw is what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deep_ep.hang.cause import HangCause, HangVerdict
from support.launch import Outcome
from trials.rank import Seen, Trial


@dataclass(frozen=True)
class Judged:
    """One trial.

    Attributes:
        trial: what was done.
        named: by victim, whether it was named with a right class.
        accused: ranks that were accused and are fine.
        complaints: what else was wrong; empty: nothing.
        first_line_s: from the begin of the step to the first line; `None`: there was none.
        said: the sentences, for whoever looks.
    """

    trial: Trial
    named: dict[int, bool]
    accused: tuple[int, ...]
    complaints: tuple[str, ...]
    first_line_s: float | None
    said: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether all victims are named, nobody else, and nothing else is wrong."""
        return all(self.named.values()) and not self.accused and not self.complaints


def judge(trial: Trial, outcomes: Sequence[Outcome]) -> Judged:
    """The trial, from how its ranks ended."""
    faults = trial.faults()
    seen: dict[int, Seen] = {
        rank: outcome.value
        for rank, outcome in enumerate(outcomes)
        if isinstance(outcome.value, Seen)
    }
    complaints = [
        f"rank {rank} ended with {outcome.exit_code}: {outcome.error_type} {outcome.error}"
        for rank, outcome in enumerate(outcomes)
        if rank not in seen and not (rank in faults and faults[rank].ends)
    ]
    lines = [line for one in seen.values() for line in one.verdicts]
    verdicts = [verdict for verdict, _ in lines]
    verdicts += [one.verdict for one in seen.values() if one.verdict is not None]
    causes: list[HangCause] = [c for plain in verdicts for c in HangVerdict.of(plain).causes]
    # A death ends the operation before anybody can tell what else is wrong, if rank 0 can say who died.
    ends_all = any(fault.name == "killed" for fault in faults.values())
    ends_all = ends_all and not (0 in faults and faults[0].silences)
    named = {}
    for rank, fault in faults.items():
        texts = [one.error for r, one in seen.items() if r != rank]
        by_cause = any(fault.is_named_by(cause, rank) for cause in causes)
        by_error = fault.raises and any(_names(text, rank) for _, text in texts)
        if fault.name == "killed":
            by_error = any(f"rank {rank} is dead" in text for _, text in texts)
        hidden = ends_all and fault.name != "killed"
        named[rank] = by_cause or by_error or hidden
    accused = {rank for cause in causes for rank in cause.ranks} - faults.keys()
    for rank, one in seen.items():
        if not one.is_right:
            complaints.append(f"rank {rank} has a wrong result")
        if one.meets_again is False:
            complaints.append(f"rank {rank} cannot go on")
        recovers = all(fault.recovers for fault in faults.values())
        if recovers and one.error[0]:
            complaints.append(f"rank {rank} raised {one.error}")
    return Judged(
        trial,
        named,
        tuple(sorted(accused)),
        tuple(complaints),
        min((after for _, after in lines), default=None),
        tuple(sorted({f"{one.error[0]}: {one.error[1]}" for one in seen.values()})),
    )


def _names(text: str, rank: int) -> bool:
    behind = text.partition(": ")[2]
    return f"rank {rank} " in behind or f"ranks {rank}" in behind
