"""Dumps: for every rank a file that torch's `torchfrtrace` reads, and our JSON with states and verdict."""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deep_ep.base import env, files
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.states import NOTIFY, OPERATIONS, Call, RankState, numbered

# Of torch's format, the one in which its own recorder writes. It reads dumps of all ranks only if all have it.
VERSION = "2.10"
_PREFIX = "deep_ep_rank_"
STATE_FORMAT, VERDICT_FORMAT = "deep_ep.hang.state", "deep_ep.hang.verdict"
# Torch's tool knows only these backends and types. Dispatch and combine differ in type, so that it sees one
# in the place of the other; what follows the type it shows and does not compare.
_BACKEND, _DISPATCH, _COMBINE, _OTHER = "nccl", "all_to_all", "all_to_all_single", "barrier"
_DTYPES = {
    "bf16": "BFloat16",
    "fp8": "Float8_e4m3fn",
    "bfloat16": "BFloat16",
    "float16": "Half",
    "float32": "Float",
    "float8_e4m3fn": "Float8_e4m3fn",
}


def default_folder() -> Path | None:
    """Where dumps of operations that time out go; `None`: nowhere.

    Where torch's recorder writes `NAME<rank>`, ours go into a directory `NAMEdeep_ep` beside that: its tool
    must not meet both in one.
    """
    torch_prefix = env.torch_dump_prefix()
    return env.dump_dir() or (Path(f"{torch_prefix}deep_ep") if torch_prefix else None)


def write_dump(
    directory: Path | str, states: Mapping[int, RankState], verdict: HangVerdict
) -> tuple[Path, ...]:
    """Writes the states of all ranks of one buffer, also of those that are dead or were never heard of.

    Nothing here waits for a rank. Each file appears as a whole. A second dump into the same place replaces
    the first one, so each buffer needs its own directory.

    Args:
        directory: is made if it is not there, for this user only, as are the files.
        states: by rank.
        verdict: on these states.

    Returns:
        The files: `deep_ep_rank_<rank>` and `<rank>.hang.json` of each global rank, and `verdict.hang.json`.

    Raises:
        OSError: a file cannot be written.
    """
    directory = Path(directory)
    files.make_folder(directory)
    states = {
        rank: states.get(rank)
        or RankState(rank, verdict.num_ranks, verdict.buffer, process="unknown")
        for rank in range(verdict.num_ranks)
    }
    written: dict[Path, bytes] = {}
    global_ranks = _global_ranks(states, verdict.num_ranks)
    for rank, trace in _traces(states, verdict, global_ranks).items():
        written[directory / f"{_PREFIX}{global_ranks[rank]}"] = pickle.dumps(trace, protocol=2)
        name = f"{global_ranks[rank]}.hang.json"
        written[directory / name] = _json(STATE_FORMAT, states[rank].plain())
    written[directory / "verdict.hang.json"] = _json(VERDICT_FORMAT, verdict.plain())
    for path, data in written.items():
        files.replace(path, data)
    return tuple(written)


def _json(kind: str, plain: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **plain}, separators=(",", ":")).encode() + b"\n"


def _global_ranks(states: Mapping[int, RankState], num_ranks: int) -> list[int]:
    """By rank; the ranks themselves where not all can be known."""
    known = {rank: state.global_rank for rank, state in states.items() if state.global_rank >= 0}
    if len(set(known.values())) == num_ranks:
        return [known[rank] for rank in range(num_ranks)]
    offsets = {value - rank for rank, value in known.items()}
    offset = max(0, *offsets) if len(offsets) == 1 else 0
    return [rank + offset for rank in range(num_ranks)]


# ---- torch's format


def _traces(
    states: Mapping[int, RankState], verdict: HangVerdict, global_ranks: list[int]
) -> dict[int, dict[str, Any]]:
    name = verdict.buffer or "deep_ep"
    config: dict[str, dict[str, str]] = {}
    entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in states}
    others = {call.series for state in states.values() for call in state.calls} - {OPERATIONS}
    for series in (OPERATIONS, *sorted(others)):
        # What is numbered by itself is a group of its own, behind all operations; where a rank has none of these,
        # torch's tool would take its first barrier for the beginning of all.
        if config and not all(entries.values()):
            break
        group = (f"{name}/{series}", f"deep_ep {series}")
        if series == OPERATIONS:
            group = (name, "deep_ep")
        config[group[0]] = {"name": group[0], "desc": group[1], "ranks": str(sorted(global_ranks))}
        by_rank = _entries(states, series, group)
        # Rings begin where they have room for; the tool compares what all of them hold.
        begin = max((min(found) for found in by_rank.values() if found), default=0)
        base = max((found[-1]["record_id"] for found in entries.values() if found), default=-1)
        for rank, found in by_rank.items():
            numbers = [number for number in sorted(found) if number >= begin]
            entries[rank] += [{**found[n], "record_id": base + n} for n in numbers]
    return {
        rank: {
            "version": VERSION,
            "pg_config": config,
            "entries": entries[rank],
            "deep_ep": states[rank].plain(),
        }
        for rank in states
    }


def _entries(
    states: Mapping[int, RankState], series: str, group: tuple[str, str]
) -> dict[int, dict[int, dict[str, Any]]]:
    """By rank and number, what it has called; of one that does not answer also what others have finished, which takes all ranks.

    Its own last word, if there is any, may be older than the rings of the others, and torch's tool takes what a file
    does not name for what the rank has not called.
    """
    own: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, state in states.items():
        by_number: dict[int, list[Call]] = defaultdict(list)
        for number, call in numbered(state, series):
            by_number[number].append(call)
        own[rank] = {
            number: _entry(number, calls, group, state.num_ranks)
            for number, calls in by_number.items()
        }
    finished = {
        number: {**entry, "frames": []}
        for rank, state in states.items()
        if not state.masked
        for number, entry in own[rank].items()
        if entry["state"] == "completed"
    }
    for rank, state in states.items():
        if state.process != "alive":
            own[rank].update(finished)
    return own


def _entry(
    number: int, calls: list[Call], group: tuple[str, str], num_ranks: int
) -> dict[str, Any]:
    """One operation. Both kernels of a normal dispatch are one: torch takes two of a number for a batch."""
    first, last = calls[0], calls[-1]
    name = re.sub(r"[^\w.]", "_", last.name)  # the tool splits it at colons and blanks
    sizes, dtypes = [_sizes(last, num_ranks)], [_dtype(last.dtype)]
    is_completed = bool(last.finished_ns) and not last.failed and last.name != NOTIFY
    has_started = any(call.has_entered for call in calls)
    return {
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": f"{_BACKEND}:{_type(first)} deep_ep.{name}",
        "time_created_ns": max(1, first.called_ns),
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "completed" if is_completed else "started" if has_started else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": bool(last.finished_ns),
        "frames": [
            {"name": frame.function, "filename": frame.file, "line": frame.line}
            for frame in first.frames
        ],
    }


def _type(call: Call) -> str:
    if call.series != OPERATIONS:
        return _OTHER
    return _COMBINE if "combine" in call.name else _DISPATCH


def _sizes(call: Call, num_ranks: int) -> list[int]:
    hidden, capacity = (call.sizes.get(n) for n in ("hidden", "num_max_dispatch_tokens_per_rank"))
    if hidden is not None and capacity is not None:
        return [num_ranks * capacity, hidden]
    return [call.sizes[name] for name in call.agreed if name in call.sizes]


def _dtype(name: str) -> str:
    return _DTYPES.get(name.rpartition(".")[2].partition(" ")[0], name or "Byte")
