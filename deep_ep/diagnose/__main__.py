"""`python -m deep_ep.diagnose show | watch | prometheus | hang | dump | trace | run | patch`: reads what was measured and tells about it."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .cli.dump import dump
from .cli.hang import CAUSES, hang
from .cli.link_limit import KNOWN, parse
from .cli.patch import patch
from .cli.run import run
from .cli.show import VERDICTS, show
from .cli.trace import trace
from .cli.watch import watch
from .core.package import EPArgumentError, EPError, open_closed_streams, printable
from .render import prometheus
from .storage.loader import read_any
from .storage.log_follower import Follower
from .storage.record import Record

# As it was called: this is run as deep_ep_diagnose, too.
_PROGRAM = f"python -m {__package__}"
# As rich ends a program whose output nobody takes.
_CUT_SHORT = 1
_BAD_INPUT = 2
_ADVICE = {
    errno.ENOENT: "Check the name; the folder of a file to write must be there.",
    errno.EACCES: "Do it as a user who may, or name another one.",
    errno.EISDIR: "Name a file.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    open_closed_streams()
    given = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal cannot show must not end the report.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = int(given.run(given))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough (`| head`); what is left must not fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_SHORT
    except (EPError, OSError) as error:
        _complain(_of_a_file(error) if isinstance(error, OSError) else str(error))
        return _BAD_INPUT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Tells who waited for whom, and why.",
        epilog="Exit status: 0 read and shown; 2 bad input or arguments; 3 with show --check or hang "
        "--check when there are verdicts; 4 when dump has asked a process that has written nothing.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what, add_arguments in (
        ("show", "print one window, or write it to a page or picture", _add_show),
        ("watch", "follow a running job", _add_watch),
        ("prometheus", "write or serve metrics for Prometheus", _add_prometheus),
        ("hang", "say why operations hang, from dumps or logs", _add_hang),
        ("dump", "ask running processes for a dump", _add_dump),
        ("trace", "dispatch and combine in profiler traces", _add_trace),
        ("run", "start a program of other kernels, and watch it", _add_run),
        ("patch", "let other kernels measure waiting, in a checkout of them", _add_patch),
    ):
        add_arguments(commands.add_parser(name, help=what))
    return parser


def _add_patch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Inserts lines into a checkout of another project, of a version that is known by the hashes of its files, so "
        "that its kernels measure waiting once they are built again. Changes all files or none."
    )
    parser.add_argument(
        "checkout", type=_path, metavar="CHECKOUT", help="the project's root directory"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--check", action="store_true", help="only say whether patches fit, or are there"
    )
    how.add_argument("--reverse", action="store_true", help="take the lines out again")
    parser.set_defaults(run=patch)


def _add_hang(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads directories of dumps and prints which rank is waited for and why, who waits for whom, the "
        "newest operations of all ranks, and Python stacks. Dumps of torch's flight recorder that lie "
        "there are part of the story. A file that is no dump is read as a log of DeepEP, NVSHMEM, NCCL, torch, "
        "vLLM or SGLang, whichever kernels the program uses."
    )
    parser.add_argument(
        "paths",
        type=_path,
        nargs="+",
        metavar="DIR_OR_LOG",
        help="where dumps were written, or the logs of all ranks",
    )
    parser.add_argument(
        "--svg",
        type=_path,
        metavar="OUT",
        help="also write the graph of the first buffer as a picture",
    )
    _add_page_and_width(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with status {CAUSES} when something hangs",
    )
    parser.set_defaults(run=hang)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads traces of the torch profiler (JSON, or gzip of it), of one rank or of all, and prints what dispatch "
        "and combine take, how much of it is exposed, and the bandwidth that they reach; with all ranks' traces "
        "also who came last, and the bandwidth without waiting."
    )
    parser.add_argument(
        "paths", type=_path, nargs="+", metavar="FILE_OR_DIR", help="a trace of each rank"
    )
    _add_links(parser)
    _add_page_and_width(parser)
    parser.add_argument("--csv", action="store_true", help="print the operators as CSV instead")
    parser.add_argument(
        "--record",
        type=_path,
        metavar="DIR",
        help="also append what was found of all ranks to a record there, which `show` and `prometheus` read",
    )
    parser.set_defaults(run=trace)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts a program, and watches its buffers by the waiting that their kernels count (DeepEP V1, UCCL, NIXL EP, "
        "sgl-kernel-npu). Nothing in the program changes. Verdicts come in rank 0's log."
    )
    parser.add_argument(
        "--interval",
        type=_positive_float,
        metavar="SECONDS",
        help="length of a window; what DEEP_EP_DIAGNOSE=async:SECONDS says by default, or 1",
    )
    parser.add_argument(
        "--dir",
        type=_path,
        metavar="DIR",
        help="where records go, which show, watch and prometheus read; by default DEEP_EP_DIAGNOSE_DIR",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM ...",
        help="what you start without this, torchrun included",
    )
    parser.set_defaults(run=run)


def _add_dump(parser: argparse.ArgumentParser) -> None:
    parser.description = "Asks processes of this user and host for a dump of their buffers, and waits until it is written."
    parser.add_argument(
        "whom",
        nargs="?",
        metavar="PID_OR_DIR",
        help="a process, or the directory into which a job writes dumps; by default all processes with buffers",
    )
    parser.add_argument(
        "--into", type=_path, metavar="DIR", help="where to write; by default where the job does"
    )
    parser.add_argument(
        "--timeout",
        type=_positive_float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for each process (default: 10)",
    )
    parser.set_defaults(run=dump)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints heatmaps, verdicts and bandwidths of one window. Reads records (diagnose-*.jsonl), "
        "saved counters (counters-rank*.npz), and logs of cumulative-wait matrices with a line "
        '"[time] rank=R [wait wait ...]" per rank.'
    )
    parser.add_argument("path", type=_path, metavar="FILE_OR_DIR", help="what to read")
    parser.add_argument(
        "--window",
        default=None,
        metavar="N|last|all",
        help="which window; by default the last one with a verdict, else the last one",
    )
    parser.add_argument("--group", help="only windows of this group of ranks")
    _add_links(parser)
    _add_page_and_width(parser)
    parser.add_argument("--png", type=_path, metavar="OUT", help="also write a picture")
    parser.add_argument("--svg", type=_path, metavar="OUT", help="also write a picture")
    parser.add_argument(
        "--speed-profile",
        type=_path,
        metavar="OUT",
        help="also write speed and waiting of each rank and GPU as JSON, medians over the windows shown",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with status {VERDICTS} when a window shown has verdicts",
    )
    parser.set_defaults(run=show)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Follows the records of a running job: prints what changes, and on a terminal the current "
        "heatmaps. Ctrl-C ends it."
    )
    parser.add_argument("path", type=_path, metavar="DIR", help="what DEEP_EP_DIAGNOSE_DIR names")
    parser.add_argument(
        "--interval",
        type=_positive_float,
        default=2.0,
        metavar="SECONDS",
        help="how often to look (default: 2)",
    )
    parser.set_defaults(run=watch)


def _add_prometheus(parser: argparse.ArgumentParser) -> None:
    parser.description = "Metrics of the latest window of each group, in Prometheus' text format."
    parser.add_argument("path", type=_path, metavar="FILE_OR_DIR", help="what to read")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--out",
        type=_path,
        metavar="FILE.prom",
        help="write a file for node-exporter's textfile collector; it is replaced as a whole",
    )
    how.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve /metrics, such as on 127.0.0.1:9477, until Ctrl-C; follows a running job",
    )
    parser.set_defaults(run=_prometheus)


def _prometheus(given: argparse.Namespace) -> int:
    if given.out is not None:
        log = read_any(given.path)
        for remark in log.remarks:
            _complain(remark)
        prometheus.write_textfile(log, given.out)
        return 0
    follower = Follower(given.path)

    def new_records() -> Iterator[Record]:
        for found in follower.catch_up():
            if isinstance(found, str):
                _complain(found)
            else:
                yield found

    try:
        server = prometheus.serve(prometheus.Metrics(new_records), *given.listen)
    except (OSError, UnicodeError) as error:
        host, port = given.listen
        # The latter of Python's encoding of names.
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise EPArgumentError(
            f"--listen is {host}:{port}, where nothing can be served ({why}). Name an address of this "
            "machine and a port that is free, such as 127.0.0.1:9477."
        ) from None
    host, port = server.server_address[:2]
    waiting = "" if given.path.exists() else f", waiting for {given.path}"
    Console().print(Text(f"serving http://{host}:{port}/metrics{waiting}"), soft_wrap=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.shutdown()
        server.server_close()
    return 0


def _complain(message: str) -> None:
    """One line for whoever started the program."""
    sys.stderr.write(f"{_PROGRAM}: {printable(' '.join(message.split()))}\n")


def _of_a_file(error: OSError) -> str:
    """Which file, what the system says of it, and what to do; without a file as Python says it."""
    if error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}. {_ADVICE.get(error.errno or 0, '')}"


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not (separator and port.isdecimal() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9477")
    return host.strip("[]"), int(port)


def _add_page_and_width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", type=_path, metavar="OUT", help="also write a page that needs no network"
    )
    parser.add_argument(
        "--width",
        type=_positive_int,
        help="columns to print; the terminal's by default, without one as many as it takes",
    )


def _add_links(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links",
        type=parse,
        metavar="NAME|NVLINK:NIC",
        help=f"also say how far operations are from the limit of the links: {', '.join(KNOWN)}, or GB/s one way "
        "such as 450:50",
    )


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def _path(text: str) -> Path:
    """Refuses what a shell makes of a variable that is not set: `Path("")` is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above 0 (and below 1e9)"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
