"""Counters on disk: a NumPy archive per rank, without pickle. For whoever cannot diagnose on the spot."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deep_ep.counters import CounterSnapshot
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.errors import EPArgumentError

SCHEMA = "deep_ep.counters/1"
FILE_PATTERN = "counters-rank*.npz"

_NAMES = ("fields", "own_fields", "ring_source_fields", "ring_own_fields", "estimated")
_ARRAYS = ("totals", "own", "ring")
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error)


def save(snapshots: Snapshot | Sequence[Snapshot], folder: Path | str) -> list[Path]:
    """Writes `FOLDER/counters-rank{N}.npz` for each snapshot; every rank may write its own.

    Args:
        snapshots: of one rank, or of several.
        folder: where to; made if it is not there.

    Returns:
        The files.

    Raises:
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for snapshot in [snapshots] if isinstance(snapshots, Snapshot) else snapshots:
        stored: dict[str, Any] = {
            "schema": SCHEMA,
            "rank": snapshot.rank,
            "num_ranks": snapshot.num_ranks,
            "device": snapshot.device,
            "host": snapshot.host,
            "device_index": snapshot.device_index,
            "node": snapshot.node,
            "kinds": np.array(list(snapshot.operations), dtype=np.str_),
        }
        for kind, counters in snapshot.operations.items():
            for name in _NAMES:
                stored[f"{kind}/{name}"] = np.array(getattr(counters, name), dtype=np.str_)
            for name in _ARRAYS:
                stored[f"{kind}/{name}"] = getattr(counters, name)
            stored[f"{kind}/lost"] = counters.lost
        files.append(folder / f"counters-rank{snapshot.rank}.npz")
        with files[-1].open("wb") as file:
            np.savez_compressed(file, **stored)
    return files


def load(path: Path | str) -> list[Snapshot]:
    """Reads what `save` wrote.

    Args:
        path: a file, or a folder with `counters-rank*.npz` files.

    Returns:
        A snapshot per file, in order of rank.

    Raises:
        EPArgumentError: nothing is there, or a file is damaged or of another version; names the file,
            the entry and what was expected.
        OSError: a file cannot be read.
    """
    path = Path(path)
    files = sorted(path.glob(FILE_PATTERN)) if path.is_dir() else [path]
    if not files:
        raise EPArgumentError(
            f"{path}: there is no {FILE_PATTERN} in this folder; expected one per rank, as "
            "diagnose.save() writes them. Pass that folder, or a file."
        )
    return sorted((_load_file(file) for file in files), key=lambda snapshot: snapshot.rank)


def _load_file(file: Path) -> Snapshot:
    expected = f"expected a whole {SCHEMA!r} archive, as diagnose.save() writes"
    if not zipfile.is_zipfile(file):
        raise EPArgumentError(
            f"{file}: no archive, or cut off; {expected}. Was the program stopped while it wrote?"
        )
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, KeyError, NotImplementedError, *_DAMAGED) as error:
        raise EPArgumentError(
            f"{file}: damaged ({error}); {expected}. Copy the file again."
        ) from None
    return _Archive(file, arrays).snapshot()


class _Archive:
    """The arrays of one file while they are checked."""

    def __init__(self, file: Path, arrays: dict[str, Any]) -> None:
        self.file = file
        self.arrays = arrays

    def snapshot(self) -> Snapshot:
        schema = self.text("schema")
        if schema != SCHEMA:
            raise EPArgumentError(
                f"{self.file}: schema is {schema!r}; this version reads {SCHEMA!r} only. "
                "Read the file with the version of deep_ep that wrote it."
            )
        num_ranks = self.number("num_ranks", least=1)
        rank = self.number("rank", least=0)
        if rank >= num_ranks:
            raise self.error("rank", f"a rank below num_ranks = {num_ranks}", rank)
        return Snapshot(
            rank=rank,
            num_ranks=num_ranks,
            device=self.text("device"),
            host=self.text("host"),
            operations={kind: self.counters(kind, num_ranks) for kind in self.texts("kinds")},
            device_index=self.number("device_index", least=0),
            node=self.number("node", least=0),
        )

    def counters(self, kind: str, num_ranks: int) -> CounterSnapshot:
        names = {name: self.texts(f"{kind}/{name}") for name in _NAMES}
        columns = max(len(names["ring_source_fields"]), len(names["ring_own_fields"]))
        totals = self.integers(f"{kind}/totals", (len(names["fields"]), num_ranks))
        counters = CounterSnapshot(
            **names,
            totals=totals,
            own=self.integers(f"{kind}/own", (len(names["own_fields"]),)),
            ring=self.integers(f"{kind}/ring", (None, num_ranks + 1, columns)),
            lost=self.number(f"{kind}/lost", least=0),
        )
        if (totals < 0).any():
            field, source = np.argwhere(totals < 0)[0].tolist()
            raise self.error(
                f"{kind}/totals",
                "counters of at least 0; they wrapped, or two snapshots were subtracted in the "
                f"wrong order: see {names['fields'][field]} of source {source}",
                totals[field, source],
            )
        return counters

    def get(self, name: str, expected: str) -> Any:
        if name not in self.arrays:
            raise EPArgumentError(
                f"{self.file}: entry {name} is missing; expected {expected} ({SCHEMA}). "
                "The file is damaged or was written by something else."
            )
        return self.arrays[name]

    def error(self, name: str, expected: str, given: object) -> EPArgumentError:
        return EPArgumentError(
            f"{self.file}: entry {name} is {given}; expected {expected} ({SCHEMA}). "
            "The file is damaged or was written by something else."
        )

    def text(self, name: str) -> str:
        value = self.get(name, "a text")
        if value.shape or value.dtype.kind != "U":
            raise self.error(name, "a text", _kind_of(value))
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name, "a list of texts")
        if value.ndim != 1 or value.dtype.kind != "U":
            raise self.error(name, "a list of texts", _kind_of(value))
        return tuple(value.tolist())

    def number(self, name: str, least: int) -> int:
        value = self.get(name, "an integer")
        if value.shape or value.dtype.kind != "i" or value < least:
            raise self.error(name, f"an integer of at least {least}", _kind_of(value))
        return int(value)

    def integers(self, name: str, shape: tuple[int | None, ...]) -> Any:
        expected = f"int64 of shape {list(shape)}".replace("None", "any")
        value = self.get(name, expected)
        fits = value.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, value.shape)
        )
        if not fits or value.dtype != np.int64:
            raise self.error(name, expected, _kind_of(value))
        return value


def _kind_of(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if value.shape else str(value)
