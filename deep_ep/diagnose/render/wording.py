"""What a Diagnosis says, in words: the same in pages, pictures and wherever else a sentence is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core import quantities
from ..core.causes import CAUSES, TITLES
from ..core.diagnosis import Diagnosis, Measured, Subject, Verdict
from ..core.package import counted, listed

# The host of ranks in matrices from elsewhere.
_UNKNOWN_HOST = "?"
_MOST_CERTAIN = 0.9999


def rank_name(diagnosis: Diagnosis, rank: int) -> str:
    """`rank 5 (node1 cuda:1)`, `rank 5 (missing)`, or `rank 5` where no host is known."""
    host, device = diagnosis.hosts[rank], diagnosis.devices[rank]
    if host == _UNKNOWN_HOST or not any(diagnosis.hosts):
        return f"rank {rank}"
    where = host or "missing"
    if host and device >= 0:
        where += f" {diagnosis.device or 'device'}:{device}"
    return f"rank {rank} ({where})"


def missing_ranks(diagnosis: Diagnosis) -> Sequence[int]:
    """Ranks from which nothing came; none where hosts are not known, as in logs from elsewhere."""
    if not any(diagnosis.hosts):
        return ()
    return [rank for rank, host in enumerate(diagnosis.hosts) if not host]


def size(diagnosis: Diagnosis) -> str:
    """`8 ranks on 1 host, 2 NVLink domains, 1 missing`: what is known of the group."""
    hosts = set(diagnosis.hosts) - {"", _UNKNOWN_HOST}
    text = counted(diagnosis.num_ranks, "rank")
    if hosts:
        text += f" on {counted(len(hosts), 'host')}"
        nodes = set(diagnosis.nodes) - {-1}
        if nodes and len(nodes) != len(hosts):
            text += f", {counted(len(nodes), 'NVLink domain')}"
    missing = len(missing_ranks(diagnosis))
    return f"{text}, {missing} missing" if missing else text


def subject(verdict: Verdict) -> str:
    """`rank 5`, `path 2 > 5`, `node 1`, `nodes 0 > 1`, `rail 3` or `all ranks`."""
    if verdict.edge is not None:
        return f"path {verdict.edge[0]} > {verdict.edge[1]}"
    if verdict.nodes is not None:
        return f"nodes {verdict.nodes[0]} > {verdict.nodes[1]}"
    if verdict.node is not None:
        return f"node {verdict.node}"
    if verdict.rail is not None:
        return f"rail {verdict.rail}"
    return "all ranks" if verdict.rank is None else f"rank {verdict.rank}"


def placed(verdict: Verdict) -> str:
    """`rank 5 (node1 cuda:1)`: the subject and where it is."""
    return f"{subject(verdict)} ({verdict.where})" if verdict.where else subject(verdict)


def cause(verdicts: Sequence[Verdict]) -> str:
    """`Comp-Slow rank 5 (node1 cuda:1): late`, of verdicts that name the same thing."""
    first = verdicts[0]
    names = ", ".join(dict.fromkeys(verdict.cause for verdict in verdicts))
    return f"{TITLES[first.kind]} {placed(first)}: {names}"


def causes(diagnosis: Diagnosis) -> list[list[Verdict]]:
    """Verdicts of all operations that name the same thing together, the largest effect first."""
    by_effect = sorted(
        diagnosis.verdicts,
        # What has no number comes last.
        key=lambda v: -v.effect_us if math.isfinite(v.effect_us) else math.inf,
    )
    together: dict[tuple[str, Subject], list[Verdict]] = {}
    for verdict in by_effect:
        together.setdefault(verdict.key, []).append(verdict)
    return list(together.values())


def sentence(diagnosis: Diagnosis, verdicts: Sequence[Verdict]) -> str:
    """One cause as a sentence a person can act on; `verdicts` are of this cause, per operation in which it shows."""
    first = verdicts[0]
    text = f"{TITLES[first.kind]}: {placed(first)}"
    said = ""
    for verdict in verdicts:
        row = CAUSES.get(verdict.cause)
        claim = row.claim if row else verdict.cause  # of a later version
        joint = " " if not said else "; " if claim != said else ", and "
        text += f"{joint}{claim} " if claim != said else joint
        text += f"in {verdict.operation}, {effect(diagnosis, verdict)}"
        said = claim
    saved = saving(diagnosis, first)
    return f"{text}. {saved[0].upper()}{saved[1:]}." if saved else f"{text}."


def per(diagnosis: Diagnosis, operation: str) -> str:
    """What times refer to; logs from elsewhere do not say how many operations they cover."""
    measured = diagnosis.measured.get(operation)
    known = measured is None or measured.num_operations
    return "per operation" if known else "in the whole window"


def operations(m: Measured) -> str:
    """`120 operations (1201 to 1440)`."""
    if not m.num_operations:
        return "operations not counted"
    text = f"{m.num_operations:,} operations"
    return f"{text} ({m.first_operation} to {m.last_operation})" if m.last_operation else text


def effect(diagnosis: Diagnosis, verdict: Verdict) -> str:
    """`+512 us (95 %: 500 to 524) per operation, 98 % of all waiting`."""
    text = f"+{quantities.microseconds(verdict.effect_us)}"
    low, high = verdict.interval_us
    if math.isfinite(low) and math.isfinite(high):
        text += f" (95 %: {quantities.number(low)} to {quantities.number(high)})"
    text += f" {per(diagnosis, verdict.operation)}"
    if math.isfinite(verdict.share):
        text += f", {quantities.percent(verdict.share)} of all waiting"
    return text


def saving(diagnosis: Diagnosis, verdict: Verdict) -> str:
    """What the program would gain without this cause alone; nothing where that is not known."""
    text = _without(diagnosis, "it", verdict.operation, verdict.saving_us)
    if not text or not is_hidden(diagnosis, verdict):
        return text
    text += " while the other causes last, which hide it"
    if not math.isfinite(verdict.alone_us) or quantities.number(verdict.alone_us) == "0":
        return text
    gain = _less(diagnosis, verdict.operation, verdict.alone_us)
    return f"{text}; once they are gone, {gain}"


def is_hidden(diagnosis: Diagnosis, verdict: Verdict) -> bool:
    """Whether other causes pass at the same time and take longer, so that nothing is gained without this one alone."""
    together = diagnosis.savings_us.get(verdict.operation, 0.0)
    return quantities.number(verdict.saving_us) == "0" != quantities.number(together)


def savings(diagnosis: Diagnosis) -> list[str]:
    """What it would gain without all causes, where there is more than one."""
    together: dict[float, list[str]] = {}
    for operation, saving_us in diagnosis.savings_us.items():
        together.setdefault(saving_us, []).append(operation)
    said = []
    # Operations of one program follow each other and save the same.
    for saving_us, operations in together.items():
        if len({v.key for v in diagnosis.verdicts if v.operation in operations}) > 1:
            said.append(_without(diagnosis, "all causes together", operations[0], saving_us))
    return [text for text in said if text]


def _without(diagnosis: Diagnosis, what: str, operation: str, saving_us: float) -> str:
    if not math.isfinite(saving_us):
        return ""
    if diagnosis.source == "waits":
        gain = quantities.microseconds(saving_us)
        return f"without {what}: a rank waits {gain} less {per(diagnosis, operation)}"
    if quantities.number(saving_us) == "0":
        return f"without {what}: nothing gained"
    return f"without {what}: {_less(diagnosis, operation, saving_us)}"


def _less(diagnosis: Diagnosis, operation: str, saving_us: float) -> str:
    """`12 us less per operation (mean of dispatch and combine; 24 us for one of each)`."""
    text = f"{quantities.microseconds(saving_us)} less"
    kinds = _saving_together(diagnosis, operation)
    if len(kinds) == 1:
        return f"{text} per {operation}"
    text += f" {per(diagnosis, operation)}"
    if not kinds:
        return text
    text += f" (mean of {listed(kinds, 'and')}"
    known = [
        diagnosis.measured[kind].num_operations for kind in kinds if kind in diagnosis.measured
    ]
    # A window may end between one and the other.
    if len(known) == len(kinds) and 0 < max(known) <= min(known) + 1:
        text += f"; {quantities.microseconds(saving_us * len(kinds))} for one of each"
    return f"{text})"


def _saving_together(diagnosis: Diagnosis, operation: str) -> list[str]:
    """Kinds of operations over which a saving is the mean; operations that follow each other save the same."""
    saved = diagnosis.savings_us.get(operation)
    return [kind for kind, saving_us in diagnosis.savings_us.items() if saving_us == saved]


def details(diagnosis: Diagnosis, verdicts: Sequence[Verdict]) -> list[str]:
    """What is known of one cause, a line each: its effect in each operation, what it costs, why, and what to do next."""
    first = verdicts[0]
    lines = []
    for verdict in verdicts:
        told = [f"{verdict.operation}: {effect(diagnosis, verdict)}"]
        if math.isfinite(verdict.seen_in):
            told.append(f"in {quantities.percent(verdict.seen_in)} of operations")
        if math.isfinite(verdict.certainty):
            # Nobody is certain to the last digit.
            certainty = quantities.percent(min(verdict.certainty, _MOST_CERTAIN))
            told.append(f"certainty {certainty}")
        lines.append(", ".join(told))
    saved = saving(diagnosis, first)
    # What a saving is to be compared with.
    takes = [
        f"{v.operation} takes {quantities.microseconds(v.duration_us)}"
        for v in verdicts
        if math.isfinite(v.duration_us)
    ]
    if saved:
        lines.append(f"{saved}; now {', '.join(takes)}" if takes else saved)
    because = evidence(first)
    if because:
        lines.append(f"because, in {first.operation}: {because}")
    if first.next_step:
        lines.append(f"next: {first.next_step}")
    return lines


def evidence(verdict: Verdict) -> str:
    """`own time over median 2,020 us, error 12.2 us`: what is known of it."""
    told = []
    for name, value in verdict.evidence.items():
        if math.isfinite(value):
            words = name.replace("_", " ")
            plain, unit = (words[:-3], " us") if words.endswith(" us") else (words, "")
            told.append(f"{plain} {quantities.number(value)}{unit}")
    return ", ".join(told)


def outliers(diagnosis: Diagnosis, most: int) -> list[str]:
    """Operations that stood out, a sentence each; of many so many, and how many more."""
    said = [
        f"{found.operation} {found.number}: everybody waited {quantities.microseconds(found.effect_us)} longer "
        f"for {rank_name(diagnosis, found.rank)} than for the others."
        for found in diagnosis.events[:most]
    ]
    more = len(diagnosis.events) - most
    return [*said, f"and {more} more"] if more > 0 else said


def headlines(diagnosis: Diagnosis) -> list[str]:
    """Why there is no verdict."""
    if undecided(diagnosis):
        return [f"{remark[0].upper()}{remark[1:]}." for remark in undecided(diagnosis)]
    if not diagnosis.measured:
        return ["Nothing measured."]
    if diagnosis.remarks:
        return ["No anomaly found in what could be judged; see the notes."]
    return ["No anomaly: nothing stands out of the noise."]


def undecided(diagnosis: Diagnosis) -> list[str]:
    """Notes that are the answer, where there is no verdict."""
    said = [remark for remark in diagnosis.remarks if "undecided" in remark]
    return [] if diagnosis.verdicts else said


def notes(diagnosis: Diagnosis) -> list[str]:
    """The other notes."""
    answers = undecided(diagnosis)
    return [remark for remark in diagnosis.remarks if remark not in answers]
