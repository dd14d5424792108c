"""Reads dumps: ours, torch's, and whatever else lies in a directory; what is no dump is read as a log."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deep_ep.base import codec, files
from deep_ep.errors import EPArgumentError
from deep_ep.hang import plain_pickle
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.log_verdict import LogFile, read_log, verdicts
from deep_ep.hang.states import RankState
from deep_ep.hang.torch_dumps import Hanging, TorchDump, hanging
from deep_ep.hang.traces import STATE_FORMAT, VERDICT_FORMAT
from deep_ep.hang.verdict import judge

# Ours lie in a folder beside torch's, so folders within folders are looked at, so deep; and so many files.
_DEPTH, _MOST_FILES = 2, 1 << 14
_RANK = re.compile(r"(\d+)(?:\.json)?$")


@dataclass(frozen=True)
class BufferDump:
    """What is known of one buffer, or what logs say.

    Attributes:
        title: of what it is.
        states: by rank; none of a log.
        verdict: made of these states, here and now.
    """

    title: str
    states: Mapping[int, RankState]
    verdict: HangVerdict


@dataclass(frozen=True)
class Folder:
    """What was read.

    Attributes:
        buffers: that of which most is waited for first; then what logs say.
        collectives: of torch, that do not end.
        remarks: what could not be read, and what does not fit: file, position, reason.
    """

    buffers: tuple[BufferDump, ...]
    collectives: tuple[Hanging, ...]
    remarks: tuple[str, ...]


@dataclass
class _Read:
    states: list[tuple[Path, RankState]] = field(default_factory=list)
    verdicts: list[HangVerdict] = field(default_factory=list)
    torch: dict[int, TorchDump] = field(default_factory=dict)
    logs: list[LogFile] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_folder(*names: Path | str) -> Folder:
    """Reads and judges all that can be read of directories and files.

    Raises:
        EPArgumentError: one does not exist, or nothing can be read.
    """
    read = _Read()
    paths: list[Path] = []
    for named in map(Path, names):
        if not named.exists():
            raise EPArgumentError(
                f"{named}: there is no such directory or file; expected one with dumps (<rank>.hang.json), or a log. "
                "Name what the log or the exception says that was written."
            )
        paths += _files(named, read.remarks) if named.is_dir() else [named]
    for path in paths:
        try:
            _read_file(path, read)
        except (ValueError, TypeError, OverflowError, OSError) as error:
            read.remarks.append(f"{path}: left out: {error}")
    found, notes = verdicts(read.logs)
    buffers = _buffers(read) + tuple(BufferDump(f"logs: {v.buffer}", {}, v) for v in found)
    read.remarks += notes
    if read.logs and not found:
        read.remarks.append("in the logs nobody says that it waits")
    if not buffers and not read.torch and not read.logs:
        why = f"; {read.remarks[0]}" if read.remarks else ""
        raise EPArgumentError(
            f"{', '.join(map(str, names))}: no dump can be read; expected <rank>.hang.json of this package, files of "
            "torch's flight recorder, or logs with a known message. Name the directory in which they were "
            f"written; `show` reads records (diagnose-*.jsonl){why}"
        )
    return Folder(buffers, tuple(hanging(read.torch)), tuple(read.remarks))


def _files(directory: Path, remarks: list[str]) -> list[Path]:
    def leave_out(error: OSError) -> None:
        remarks.append(f"{error.filename}: left out: {error}")

    found: list[Path] = []
    for folder, folders, names in os.walk(directory, onerror=leave_out):
        is_deep = len(Path(folder).relative_to(directory).parts) == _DEPTH
        folders[:] = [] if is_deep else sorted(folders)
        found += [Path(folder, name) for name in sorted(names)]
    if len(found) > _MOST_FILES:
        remarks.append(f"{directory}: only the first {_MOST_FILES} files are read")
    return found[:_MOST_FILES]


def _read_file(path: Path, read: _Read) -> None:
    try:
        _take(path, _plain(files.read(path)), read)
    except ValueError:
        log = read_log(path)
        if not log.lines:
            raise
        read.logs.append(log)


def _plain(data: bytes) -> Any:
    if data.startswith(b"\x80"):
        return plain_pickle.loads(data)
    if data.lstrip()[:1] == b"{":
        return codec.loads(data)
    raise ValueError(
        "byte 0: it is neither a pickle nor a JSON object, so it is no dump; nor has it a line that logs are read for"
    )


def _take(path: Path, plain: Any, read: _Read) -> None:
    keys = plain.keys() if isinstance(plain, dict) else set()
    kind = plain["kind"] if "kind" in keys else None
    if kind == STATE_FORMAT:
        read.states.append((path, RankState.of(plain)))
    elif kind == VERDICT_FORMAT:
        read.verdicts.append(HangVerdict.of(plain))
    elif not keys >= {"entries", "version"}:
        raise ValueError("it is no dump: neither the keys of ours nor of torch's are in it")
    elif "deep_ep" in keys:  # ours in torch's format
        read.states.append((path, RankState.of(plain["deep_ep"])))
    else:
        rank = _RANK.search(path.name)
        if rank is None:
            raise ValueError("its name does not end in a rank")
        dump = codec.from_plain(TorchDump, plain, is_strict=False)
        if int(rank[1]) in read.torch:
            raise ValueError(f"another file is of rank {int(rank[1])} as well")
        read.torch[int(rank[1])] = dump


def _buffers(read: _Read) -> tuple[BufferDump, ...]:
    groups = _groups(read)
    nodes = {(v.buffer, v.num_ranks): v.ranks_per_node for v in read.verdicts}
    of_process: dict[tuple[str, int], list[RankState]] = defaultdict(list)
    for states in groups.values():
        for state in states.values():
            of_process[state.host, state.pid].append(state)
    found = []
    for key, states in groups.items():
        processes = {(s.host, s.pid): rank for rank, s in states.items() if s.pid}
        elsewhere = {
            rank: [s for s in of_process[process] if (s.buffer, s.num_ranks) != key]
            for process, rank in processes.items()
        }
        title = f"buffer {key[0] or 'without a name'}, {key[1]} ranks"
        found.append(BufferDump(title, states, judge(states, nodes.get(key, 0), elsewhere)))
    return tuple(sorted(found, key=lambda buffer: -len(buffer.verdict.waiting)))


def _groups(read: _Read) -> dict[tuple[str, int], dict[int, RankState]]:
    """States by buffer; of several of a rank the newest."""
    groups: dict[tuple[str, int], dict[int, RankState]] = defaultdict(dict)
    for path, state in sorted(read.states, key=lambda item: item[1].taken_ns):
        group = groups[state.buffer, state.num_ranks]
        if group.get(state.rank, state) != state:
            read.remarks.append(
                f"{path}: taken instead of an older state of rank {state.rank} of buffer {state.buffer}"
            )
        group[state.rank] = state
    sizes: dict[str, list[str]] = defaultdict(list)
    for name, num_ranks in sorted(groups):
        sizes[name].append(str(num_ranks))
    read.remarks += [
        f"states of buffer {name} are of groups of {' and '.join(found)} ranks: dumps of several jobs are mixed, and "
        "judged apart"
        for name, found in sizes.items()
        if len(found) > 1
    ]
    return groups
