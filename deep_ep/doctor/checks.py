"""The table of checks: a row is a function with a decorator, and one runner makes findings of what it sees or raises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Callable, TypeVar, Union

from deep_ep.base import env
from deep_ep.doctor.finding import OK, Finding, fail
from deep_ep.doctor.host import Host

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
