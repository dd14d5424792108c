"""One line of the doctor: what was found, why it matters, and the command that repairs it."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TextIO

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"
_STYLES = {OK: "", WARN: "yellow", FAIL: "bold red"}
_INDENT = 7
_NAME_WIDTH = 22


@dataclass(frozen=True)
class Finding:
    """What one check has found; `ok`, `warn` and `fail` make one.

    Attributes:
        status: `OK`, `WARN` (it works, though badly or not everywhere) or `FAIL` (it cannot work).
        found: what is there, in words.
        why: what follows from it for a program.
        repair: a command, or what to do; empty where nothing is to be done.
        name: of what was looked at; a machine may have several findings of a name.
        agreed: what must be equal on all ranks, by name; not part of the line, so it is not compared.
    """

    status: Status
    found: str
    why: str = ""
    repair: str = ""
    name: str = ""
    agreed: Mapping[str, str] = field(default_factory=dict, compare=False)


ok, warn, fail = (functools.partial(Finding, status) for status in (OK, WARN, FAIL))


def exit_status(findings: Iterable[Finding]) -> int:
    """0 unless something cannot work, else 1."""
    return int(any(finding.status == FAIL for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    """One line at the end: how much of each, and what is bad by name."""
    bad = [
        f"{len(names)} {status}: {', '.join(dict.fromkeys(names))}"
        for status in (FAIL, WARN)
        if (names := [finding.name for finding in findings if finding.status == status])
    ]
    return "; ".join(bad) or f"all {len(findings)} lines are ok"


def show(findings: Sequence[Finding], stream: TextIO, *, verbose: bool = False) -> None:
    """Prints them in order, and the summary; if verbose also why the lines that are ok matter. Colours are for terminals."""
    write = _writer(stream)
    for finding in findings:
        line = f"{finding.status:<{_INDENT - 1}} {finding.name:<{_NAME_WIDTH}} {finding.found}\n"
        write(line, _STYLES[finding.status])
        why = finding.why if verbose or finding.status != OK else ""
        for label, text in (("why", why), ("repair", finding.repair)):
            # Commands must survive being copied, so long words and lines of a repair stay whole.
            if text:
                write(textwrap.indent(f"{label}: {text}\n", " " * _INDENT), "")
    write(f"\n{summary(findings)}\n", "bold")


def to_json(findings: Sequence[Finding]) -> str:
    """An object with the exit status, the summary and every finding."""
    return json.dumps(
        {
            "exit_status": exit_status(findings),
            "summary": summary(findings),
            "findings": [{"name": one.name, **asdict(one)} for one in findings],
        },
        indent=1,
    )


def _writer(stream: TextIO) -> Any:
    """write(text, style) that colours on a terminal, where rich is installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda text, style: stream.write(text)
    console = Console(file=stream)
    return lambda text, style: console.print(Text(text, style=style), end="", soft_wrap=True)
