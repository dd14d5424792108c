"""What is new since the window before, in lines for a log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.diagnosis import Diagnosis, Subject, Verdict
from ..render import wording

# A cause is gone when it was not seen for so many windows; chosen.
WINDOWS_WITHOUT = 2

_Cause = tuple[str, str, Subject]


@dataclass
class _Standing:
    """A cause that was said: its verdicts when last seen, and the windows since."""

    verdicts: list[Verdict]
    missed: int = 0


class Changes:
    """What was said about a group, so that nothing is said twice."""

    def __init__(self) -> None:
        self._standing: dict[_Cause, _Standing] = {}
        self._remarks: set[str] = set()

    def verdicts(self, diagnosis: Diagnosis) -> list[str]:
        """A line for each cause that is new, and for each that is gone. A cause may show in several
        operations; it is one line.
        """
        seen: dict[_Cause, list[Verdict]] = {}
        for verdict in diagnosis.verdicts:
            seen.setdefault((verdict.kind, verdict.cause, verdict.subject), []).append(verdict)
        lines = []
        for cause, verdicts in seen.items():
            if cause not in self._standing:
                lines.append(verdict_line(diagnosis, verdicts))
            self._standing[cause] = _Standing(verdicts)
        for cause in [cause for cause in self._standing if cause not in seen]:
            standing = self._standing[cause]
            standing.missed += 1
            if standing.missed >= WINDOWS_WITHOUT:
                lines.append(f"resolved: {wording.cause(standing.verdicts)}")
                del self._standing[cause]
        return lines

    def remarks(self, remarks: Sequence[str], *, whatever_the_numbers: bool = False) -> list[str]:
        """Those that were not made before, or only with other numbers in them."""
        new = []
        for remark in remarks:
            pattern = re.sub(r"\d[\d.,:]*", "0", remark) if whatever_the_numbers else remark
            if pattern not in self._remarks:
                self._remarks.add(pattern)
                new.append(remark)
        return new


def verdict_line(diagnosis: Diagnosis, verdicts: Sequence[Verdict]) -> str:
    """One cause in one line; `verdicts` are of this cause, per operation in which it shows."""
    parts = [f"{v.operation} {wording.effect(diagnosis, v)}" for v in verdicts]
    saving = wording.saving(diagnosis, verdicts[0])
    advice = verdicts[0].next_step.rstrip(". ")
    parts += [saving] * bool(saving) + [f"next: {advice}"] * bool(advice)
    return f"{wording.cause(verdicts)}, {'; '.join(parts)}"
