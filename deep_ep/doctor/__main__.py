"""`python -m deep_ep.doctor`: examines this installation and this machine, and under torchrun the whole job.

Exit status: 0 nothing is wrong or only warned of, 1 something cannot work, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import functools
import io
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from deep_ep.base import env
from deep_ep.base.files import open_closed_streams
from deep_ep.doctor import (
    container,
    exchange,
    gpu,
    network,
    package,
    ranks,
    settings,
    sizes,
)
from deep_ep.doctor.checks import OK, Check, Finding, examine, fail, report
from deep_ep.doctor.host import Host
from deep_ep.doctor.job import Meeting, job_of

_PROGRAM = "python -m deep_ep.doctor"
# In the order of the report.
_SUBJECTS = (package, gpu, network, container, settings)
_BAD_ARGUMENTS = 2
_MODEL = {
    "tokens": "most tokens a rank dispatches at once",
    "hidden": "channels of a token",
    "experts": "experts in total",
    "topk": "experts of a token",
    "ranks": "size of the group",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    open_closed_streams()
    parser = _parser()
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal cannot show must not end the report.
        sys.stdout.reconfigure(errors="replace")
    host = Host()
    checks = [check for subject in _SUBJECTS for check in subject.CHECKS]
    model = {name: value for name in _MODEL if (value := getattr(given, name)) is not None}
    if model:
        missing = [f"--{name}" for name in _MODEL if name not in model]
        if missing:
            parser.error(f"a model takes {', '.join(missing)} too")
        checks.append(sizes.check(model, given.ranks_per_node))
    job = job_of(host)
    if job is None:
        if given.test:
            look = functools.partial(exchange.on_this_machine, seconds=given.deadline)
            checks.append(Check("exchange", look))
        return _report(examine(checks, host), as_json=given.json)
    # A launcher ends all ranks when one has failed: the others still say what they know.
    hurry = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: hurry.set())
    findings = examine(checks, host)
    try:
        store = job.open_store(given.deadline, "deep_ep.doctor")
        meeting = Meeting(store, job, given.deadline, hurry)
        tried = None
        if given.test and not meeting.absent("ready"):
            tried = exchange.try_rank(host.environment, job, given.deadline, hurry)
        said = ranks.gather(meeting, ranks.RankReport(socket.gethostname(), findings, tried))
    except (ImportError, OSError, RuntimeError) as error:
        found, why, repair = job.unreachable(error)
        alone = [finding for finding in findings if finding.status != OK]
        return _report([*alone, fail(found, why, repair, name="ranks")], as_json=given.json)
    # The exit status of the rank that reports is the job's.
    return 0 if said is None else _report(ranks.together(said, job.size), as_json=given.json)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    try:
        status = report(findings, sys.stdout, as_json=as_json)
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"{_PROGRAM}: standard output: {error.strerror}\n")
        return _BAD_ARGUMENTS
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Examines the installation, the machine and the environment. Every line says ok, warn "
        "or fail, and what repairs it.",
        epilog="Exit status: 0 nothing fails; 1 something does; 2 bad arguments.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with why all lines matter")
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=60,
        metavar="SECONDS",
        help="how long to wait for ranks that do not come, and in --test (default: 60)",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="also let ranks exchange rows: those of the job, or one for each GPU of this machine, or "
        "four on its CPU",
    )
    model = parser.add_argument_group("a model, whose needs are counted; all five or none")
    for name, meaning in _MODEL.items():
        model.add_argument(f"--{name}", type=_positive, help=meaning)
    model.add_argument(
        "--ranks-per-node", type=_positive, default=8, help="of an NVLink domain (default: 8)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def _seconds(text: str) -> int:
    """Ranks are told by `DEEP_EP_TIMEOUT_S`."""
    seconds = _positive(text)
    if not env.timeout_s.kind.holds(seconds):
        raise argparse.ArgumentTypeError(f"{text!r} is not {env.timeout_s.kind.allowed}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
