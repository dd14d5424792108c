"""What a Diagnosis says, in words: the same in pages, pictures and wherever else a sentence is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deep_ep.diagnose.findings import COMM_SLOW, COMP_SLOW, MIXED_SLOW, Diagnosis, Event, Verdict

TITLES = {COMP_SLOW: "Comp-Slow", COMM_SLOW: "Comm-Slow", MIXED_SLOW: "Mixed-Slow"}

# The host of ranks in matrices from elsewhere.
UNKNOWN_HOST = "?"

_CLAIMS = {
    "late": "comes late",
    "slow send": "takes long to send",
    "slow receive": "takes long to receive",
    "hot experts": "is sent more than the others",
    "early": "comes before the others and waits for them",
    "path": "is slow",
    "ingress": "receives slowly from everybody",
    "egress": "reaches everybody slowly",
    "node pair": "is slow between all their ranks",
    "rail": "is slow on every node",
    "everywhere": "is slower than it used to be",
    "sender side": "is waited for by everybody",
    "receiver side": "waits for everybody",
    "pair": "is slow",
}


def rank_name(diagnosis: Diagnosis, rank: int) -> str:
    """`rank 5 (node1 cuda:1)`, `rank 5 (missing)`, or `rank 5` where no host is known."""
    where = place(diagnosis, rank)
    return f"rank {rank} ({where})" if where else f"rank {rank}"


def place(diagnosis: Diagnosis, rank: int) -> str:
    """`node1 cuda:1`: host and local device; `missing`; nothing where no host is known at all."""
    host, device = diagnosis.hosts[rank], diagnosis.devices[rank]
    if host == UNKNOWN_HOST:
        return ""
    if not host:
        return "missing" if any(diagnosis.hosts) else ""
    return f"{host} {diagnosis.device or 'device'}:{device}" if device >= 0 else host


def missing_ranks(diagnosis: Diagnosis) -> Sequence[int]:
    """Ranks from which nothing came; none where hosts are not known, as in logs from elsewhere."""
    if not any(diagnosis.hosts):
        return ()
    return [rank for rank, host in enumerate(diagnosis.hosts) if not host]


def subject(verdict: Verdict) -> str:
    """`rank 5`, `path 2 > 5`, `nodes 0 > 1`, `rail 3` or `all ranks`."""
    if verdict.edge is not None:
        return f"path {verdict.edge[0]} > {verdict.edge[1]}"
    if verdict.nodes is not None:
        return f"nodes {verdict.nodes[0]} > {verdict.nodes[1]}"
    if verdict.rail is not None:
        return f"rail {verdict.rail}"
    return "all ranks" if verdict.rank is None else f"rank {verdict.rank}"


def sentence(diagnosis: Diagnosis, verdict: Verdict) -> str:
    """One cause as a sentence a person can act on."""
    where = f" ({verdict.where})" if verdict.where else ""
    claim = _CLAIMS.get(verdict.cause, verdict.cause)
    text = f"{TITLES[verdict.kind]}: {subject(verdict)}{where} {claim} in {verdict.operation}, "
    text += f"{effect(verdict)} {per(diagnosis, verdict.operation)}, "
    text += f"{percent(verdict.share)} of all waiting there."
    if math.isfinite(verdict.saving_us) and math.isfinite(verdict.duration_us):
        text += f" {without('it', verdict.operation, verdict.saving_us, verdict.duration_us)}."
    return text


def per(diagnosis: Diagnosis, operation: str) -> str:
    """What times refer to; logs from elsewhere do not say how many operations they cover."""
    measured = diagnosis.measured.get(operation)
    known = measured is None or measured.num_operations
    return "per operation" if known else "in the whole window"


def effect(verdict: Verdict) -> str:
    """`+512 us (95 %: 500 to 524)`."""
    low, high = verdict.interval_us
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"+{microseconds(verdict.effect_us)}"
    return f"+{microseconds(verdict.effect_us)} (95 %: {number(low)} to {number(high)})"


def without(what: str, operation: str, saving_us: float, duration_us: float) -> str:
    """What the operation would take without `what`."""
    rest_us = max(duration_us - saving_us, 0.0)
    return (
        f"Without {what} {operation} would take {microseconds(rest_us)} "
        f"instead of {microseconds(duration_us)}"
    )


def savings(diagnosis: Diagnosis) -> list[str]:
    """What removing all causes of an operation would save, where there is more than one."""
    said = []
    for operation, saving_us in diagnosis.savings_us.items():
        causes = [verdict for verdict in diagnosis.verdicts if verdict.operation == operation]
        measured = diagnosis.measured.get(operation)
        if len(causes) > 1 and measured is not None and math.isfinite(saving_us):
            what = f"all {len(causes)} causes together"
            said.append(without(what, operation, saving_us, measured.duration_us) + ".")
    return said


def event(diagnosis: Diagnosis, found: Event) -> str:
    """One operation that stood out, as a sentence."""
    return (
        f"{found.operation} {found.number}: everybody waited {microseconds(found.effect_us)} longer "
        f"for {rank_name(diagnosis, found.rank)} than for the others."
    )


def headlines(diagnosis: Diagnosis) -> list[str]:
    """The answer first: a sentence per cause, or why there is none."""
    if diagnosis.verdicts:
        causes = [sentence(diagnosis, verdict) for verdict in by_effect(diagnosis)]
        return causes + savings(diagnosis)
    undecided = [remark for remark in diagnosis.remarks if remark.startswith("undecided")]
    if undecided:
        return [remark[0].upper() + remark[1:] for remark in undecided]
    if not diagnosis.measured:
        return ["Nothing measured: see the notes."]
    if diagnosis.remarks:
        return ["No anomaly found; see the notes for what could not be judged."]
    return ["No anomaly: nothing stands out of the noise."]


def by_effect(diagnosis: Diagnosis) -> list[Verdict]:
    """Verdicts, the largest effect first; what has no number comes last."""
    return sorted(
        diagnosis.verdicts,
        key=lambda v: -v.effect_us if math.isfinite(v.effect_us) else math.inf,
    )


def percent(part: float) -> str:
    """0.5 -> "50 %"; close to one is not rounded to certainty."""
    if not math.isfinite(part):
        return "not known"
    if 0.9995 < part < 1:
        return "> 99.9 %"
    return f"{part:.1%}".replace(".0%", "%").replace("%", " %")


def microseconds(us: float) -> str:
    """`512 us`, or `not known`."""
    return f"{number(us)} us" if math.isfinite(us) else "not known"


def number(value: float) -> str:
    """Three to four digits where there is a fraction, all of them where there is none."""
    if not math.isfinite(value):
        return "not known"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
