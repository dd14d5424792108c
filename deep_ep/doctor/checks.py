"""The table of checks, and the lines that they make: what was found, why it matters, and what repairs it.

A row of the table is a function with a decorator, and one runner makes findings of what it sees or raises.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Literal, TextIO, TypeVar, Union

from deep_ep.base import env
from deep_ep.doctor.host import Host

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"
# Yellow; bold red.
_STYLES = {OK: "", WARN: "33", FAIL: "1;31"}
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
                lines += [seen] if isinstance(seen, Finding) else seen
        except Exception as error:  # noqa: BLE001
            lines.append(fail(chain(error), repair=self.repair or "report this error"))
        return [
            replace(
                one,
                name=one.name or self.name,
                why=one.why or self.why,
                repair=one.repair or ("" if one.status == OK else self.repair),
            )
            for one in lines
        ]


class Table(list[Check]):
    """The checks of one subject, in the order of the report."""

    def row(self, name: str, **row: Any) -> Callable[[LookT], LookT]:
        """Adds the function below it, as `look` of a `Check` with these attributes; its docstring is `why`."""

        def add(look: LookT) -> LookT:
            why = " ".join((look.__doc__ or "").split()).rstrip(".")
            self.append(Check(name, look, why, **row))
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


def report(findings: Sequence[Finding], stream: TextIO, *, as_json: bool = False) -> int:
    """Prints them in order, with why those matter that are not ok, and a summary; in colours on a terminal.

    Returns the exit status: 1 if something cannot work, else 0.
    """
    bad = [
        f"{len(names)} {status}: {', '.join(dict.fromkeys(names))}"
        for status in (FAIL, WARN)
        if (names := [one.name for one in findings if one.status == status])
    ]
    exit_status = int(any(one.status == FAIL for one in findings))
    summary = "; ".join(bad) or f"all {len(findings)} lines are ok"
    if as_json:
        lines = [{"name": one.name, **asdict(one)} for one in findings]
        said = {"exit_status": exit_status, "summary": summary, "findings": lines}
        stream.write(f"{json.dumps(said, indent=1)}\n")
        return exit_status
    for one in findings:
        line = f"{one.status:<{_INDENT - 1}} {one.name:<{_NAME_WIDTH}} {one.found}"
        style = _STYLES[one.status] if stream.isatty() else ""
        stream.write(f"\x1b[{style}m{line}\x1b[0m\n" if style else f"{line}\n")
        for label, text in (("why", one.why), ("repair", one.repair)):
            # Commands must survive being copied, so they stay in one line.
            if text and one.status != OK:
                stream.write(f"{' ' * _INDENT}{label}: {text}\n")
    stream.write(f"\n{summary}\n")
    return exit_status
