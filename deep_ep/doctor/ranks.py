"""All ranks of a job: each publishes its findings in the job's store, and the lowest that came reports what they say together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Optional

from deep_ep.base.text import counted, printable
from deep_ep.doctor import exchange
from deep_ep.doctor.checks import OK, Finding, fail, ok, warn
from deep_ep.doctor.job import Meeting
from deep_ep.errors import ranks_text

# Ranks that differ in these cannot make a Buffer.
_MUST_AGREE = {
    "deep_ep",
    "DEEP_EP_RANKS_PER_NODE",
    "DEEP_EP_VERIFY",
    "DEEP_EP_DIAGNOSE",
    "DEEP_EP_BACKEND",
}


@dataclass(frozen=True)
class RankReport:
    """What one rank has published: where it runs, what it found, and what it saw of the exchange, if one was tried."""

    host: str
    findings: Sequence[Finding]
    tried: Optional[exchange.Tried] = None  # noqa: UP045 - read by the codec, also in Python 3.9


def gather(meeting: Meeting, said: RankReport) -> dict[int, RankReport] | None:
    """Publishes, waits for the others, and returns what each rank has said; `None` on ranks that need not report."""
    absent = meeting.absent("report", json.dumps(asdict(said)))
    came = [rank for rank in range(meeting.job.size) if rank not in absent]
    everything = None
    # A lower one may have come after another has given it up.
    if meeting.job.rank == min(came) and meeting.store.add("reporters", 1) == 1:
        everything = {rank: _received(meeting.text("report", rank)) for rank in came}
    meeting.leave(absent)
    return everything


def _received(published: bytes) -> RankReport:
    """What a rank has published: any program that reaches the store, or a doctor of another version."""
    try:
        return exchange.read(RankReport, published)
    except ValueError as error:
        begin = published[:80].decode(errors="replace")
        found = printable(
            f"it published {begin!r}, which this version does not understand: {error}"
        )
    why, repair = "the doctors of a job must be of one version", "install one version of deep_ep"
    return RankReport("?", [fail(found, why, repair, name="other doctor")])


def together(said: Mapping[int, RankReport], size: int) -> list[Finding]:
    """What the ranks that came have found, as one list.

    Lines that are ok are those of the lowest rank; of the others each stands once, with its ranks.
    """
    findings = [_attendance(said, size), *_differences(said)]
    findings += [finding for finding in said[min(said)].findings if finding.status == OK]
    ranks_of: dict[Finding, list[int]] = {}
    for rank in sorted(said):
        for one in said[rank].findings:
            if one.status != OK:
                ranks_of.setdefault(one, []).append(rank)
    for one, ranks in ranks_of.items():
        where = "" if len(ranks) == len(said) else f"{ranks_text(ranks)}: "
        findings.append(replace(one, found=f"{where}{one.found}", agreed={}))
    tried = {rank: one.tried for rank, one in said.items() if one.tried is not None}
    return findings + (exchange.judge(tried, size) if tried else [])


def _attendance(said: Mapping[int, RankReport], size: int) -> Finding:
    hosts = counted(len({one.host for one in said.values()}), "host")
    missing = [rank for rank in range(size) if rank not in said]
    why = "a job waits for all of its ranks"
    if not missing:
        return ok(f"all {size} came, on {hosts}", why, name="ranks")
    return fail(
        f"{ranks_text(missing)} did not come; {ranks_text(said)} did, on {hosts}",
        f"{why}; those that did not come could not start, or cannot reach MASTER_ADDR and MASTER_PORT",
        "read what these ranks printed (torchrun --redirects 3 --log-dir DIR), and run "
        "python -m deep_ep.doctor on their hosts",
        name="ranks",
    )


def _differences(said: Mapping[int, RankReport]) -> list[Finding]:
    """What should be equal on all ranks and is not."""
    agreed = {
        rank: dict(pair for one in said[rank].findings for pair in one.agreed.items())
        for rank in sorted(said)
    }
    findings = []
    for name in sorted({name for values in agreed.values() for name in values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in agreed.items():
            # A doctor of another version says nothing that could differ.
            if values:
                ranks_of.setdefault(values.get(name, "not there"), []).append(rank)
        if len(ranks_of) > 1:
            texts = [f"{text} on {ranks_text(ranks)}" for text, ranks in ranks_of.items()]
            found, why = f"{name}: {'; '.join(texts)}", "ranks of one job must not differ in it"
            repair = f"make {name} the same on all ranks"
            judge = fail if name in _MUST_AGREE else warn
            findings.append(judge(found, why, repair, name="ranks differ"))
    return findings
