"""The table of checks, and the lines that they make: what was found, why it matters, and what repairs it.

A row of the table is a function with a decorator, and one runner makes findings of what it sees or raises.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Literal, TextIO, TypeVar, Union

from deep_ep.base import env
from deep_ep.doctor.host import Host

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


# ---- the table

Look = Callable[[Host], Union[Finding, Iterable[Finding]]]
LookT = TypeVar("LookT", bound=Look)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        name: of its lines; a line may have its own, as for the next two.
        look: what there is, in lines made by `ok`, `warn` and `fail`.
        why: what follows from it for a program.
        repair: of lines that are not ok.
        when: what there is to look at, as something that is true; else there is no line.
    """

    name: str
    look: Look
    why: str = ""
    repair: str = ""
    when: Callable[[Host], object] = lambda host: True

    def run(self, host: Host) -> list[Finding]:
        """Its lines; an error is the last of them, so that the other checks still have their say."""
        lines: list[Finding] = []
        try:
            if self.when(host):
                seen = self.look(host)
                for one in [seen] if isinstance(seen, Finding) else seen:
                    name, why = one.name or self.name, one.why or self.why
                    repair = one.repair or ("" if one.status == OK else self.repair)
                    lines.append(replace(one, name=name, why=why, repair=repair))
        except Exception as error:  # noqa: BLE001
            found = f"the check failed: {chain(error)}"
            why = "what this check looks at is not judged"
            lines.append(fail(found, why, "report this error", self.name))
        return lines


class Table(list[Check]):
    """The checks of one subject, in the order of the report."""

    def row(self, name: str, **row: Any) -> Callable[[LookT], LookT]:
        """Adds the function below it, as `look` of a `Check` with these attributes."""

        def add(look: LookT) -> LookT:
            self.append(Check(name, look, **row))
            return look

        return add


def examine(checks: Iterable[Check], host: Host) -> list[Finding]:
    """Runs them one after another; variables are those of the host."""
    with env.read_from(host.environment):
        return [finding for check in checks for finding in check.run(host)]


def chain(error: BaseException) -> str:
    """An error and what caused it, in one line."""
    parts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(parts) < 5:
        parts.append(f"{type(link).__name__}: {' '.join(str(link).split())}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return ", because of ".join(parts)


# ---- the report


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
