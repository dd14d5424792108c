"""Counters on disk: a NumPy archive per rank, without pickle. For whoever cannot diagnose on the spot."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..collect.snapshot import Snapshot
from ..core import safe_files
from ..core.package import CounterSnapshot, EPArgumentError
from .codec import TEXT, Int64Array, Integer, List, Maybe, Object, Schema, Wrong, not_as_expected

SCHEMA = "deep_ep.counters/1"
FILE_PATTERN = "counters-rank*.npz"

_COUNT = Integer()
# What is of all kinds of operations.
HEAD = Object(
    dict,
    (Schema(SCHEMA), "schema"),
    (_COUNT, "rank"),
    (Integer(least=1), "num_ranks"),
    (TEXT, "device", "host"),
    (_COUNT, "device_index", "node"),
    (Maybe(Int64Array((None, "pair")), absent=None, left_out=True), "calls"),
    (Maybe(Int64Array((None, "triple")), absent=None, left_out=True), "parts"),
    (List(TEXT), "kinds"),
)
# Of each kind; its name and "/" stand before those of the entries.
COUNTERS = Object(
    CounterSnapshot,
    (List(TEXT, "fields", tuple), "fields"),
    (List(TEXT, "own_fields", tuple), "own_fields"),
    (List(TEXT, "ring_source_fields", tuple), "ring_source_fields"),
    (List(TEXT, "ring_own_fields", tuple), "ring_own_fields"),
    (List(TEXT, make=tuple), "estimated"),
    (Int64Array(("fields", "num_ranks")), "totals"),
    (Int64Array(("own_fields",)), "own"),
    (Int64Array((None, "num_sources", ("ring_source_fields", "ring_own_fields"))), "ring"),
    (_COUNT, "lost"),
)
# RuntimeError: encrypted, or packed in a way that zipfile does not know.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, OverflowError)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What a file may unpack to: rings of some thousand operations of 1,024 ranks.
_LARGEST = 512 * 2**20


def save(snapshots: Snapshot | Sequence[Snapshot], folder: Path | str) -> list[Path]:
    """Writes `FOLDER/counters-rank{N}.npz` for each snapshot; every rank may write its own.

    Args:
        snapshots: of one rank, or of several.
        folder: where to; made if it is not there.

    Returns:
        The files.

    Raises:
        EPArgumentError: the name of a file is a link.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for snapshot in [snapshots] if isinstance(snapshots, Snapshot) else snapshots:
        kinds = snapshot.operations
        stored = HEAD.write({**vars(snapshot), "schema": SCHEMA, "kinds": kinds})
        for kind, counters in kinds.items():
            of_kind = COUNTERS.write(counters)
            stored.update({f"{kind}/{name}": value for name, value in of_kind.items()})
        written.append(folder / f"counters-rank{snapshot.rank}.npz")
        with safe_files.create(written[-1]) as file:
            np.savez_compressed(file, **{name: _array(value) for name, value in stored.items()})
    return written


def _array(value: Any) -> Any:
    """An entry; only texts come in lists."""
    return np.array(value, dtype=np.str_) if isinstance(value, list) else value


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
    found = sorted(path.glob(FILE_PATTERN)) if path.is_dir() else [path]
    if not found:
        raise EPArgumentError(
            f"{path}: there is no {FILE_PATTERN} in this folder; expected one per rank, as "
            "diagnose.save() writes them. Pass that folder, or a file."
        )
    return sorted((_load_file(file) for file in found), key=lambda snapshot: snapshot.rank)


def _load_file(file: Path) -> Snapshot:
    expected = f"expected a whole {SCHEMA!r} archive, as diagnose.save() writes"
    if not zipfile.is_zipfile(file):
        raise EPArgumentError(
            f"{file}: no archive, or cut off; {expected}. Was the program stopped while it wrote?"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            arrays = _read_arrays(archive)
    except (ValueError, EOFError, KeyError, *_DAMAGED) as error:
        raise EPArgumentError(
            f"{file}: damaged ({error}); {expected}. Copy the file again."
        ) from None
    try:
        return _snapshot({name: _plain(value) for name, value in arrays.items()})
    except Wrong as wrong:
        raise wrong.refusal(str(file), "entry", SCHEMA) from None


def _read_arrays(archive: zipfile.ZipFile) -> dict[str, Any]:
    """What np.load reads; but an array that would be larger than its entry is never allocated.

    Raises:
        ValueError: an entry is no array, or all together are too large.
    """
    entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > _LARGEST:
        raise ValueError(f"{unpacked} bytes when unpacked, where {_LARGEST} are allowed")
    arrays = {}
    for entry in entries:
        with archive.open(entry) as packed:
            data = io.BytesIO(packed.read(entry.file_size))
        _require_whole_array(data)
        arrays[entry.filename.removesuffix(".npy")] = np.lib.format.read_array(
            data, allow_pickle=False
        )
    return arrays


def _require_whole_array(data: io.BytesIO) -> None:
    """Leaves it at its beginning."""
    version = np.lib.format.read_magic(data)
    if version not in _HEADERS:
        raise ValueError(f"an array of version {version}")
    shape, _, dtype = _HEADERS[version](data)
    count = math.prod(shape)
    size = count * dtype.itemsize
    left = data.getbuffer().nbytes - data.tell()
    # Texts without characters take no bytes, any number of them.
    if count > max(left, 1) or (size != left and not dtype.hasobject):
        raise ValueError(f"{dtype} of shape {list(shape)} in {left} bytes")
    data.seek(0)


def _plain(value: Any) -> Any:
    """An entry that is a text, an integer, or a list of texts; any other as it is."""
    is_plain = value.dtype.kind == "U" or (value.dtype.kind == "i" and not value.shape)
    return value.tolist() if is_plain else value


def _snapshot(stored: dict[str, Any]) -> Snapshot:
    """Raises Wrong with the name of the entry."""
    head = HEAD.read(stored, {"pair": 2, "triple": 3})
    del head["schema"]
    kinds, rank, num_ranks = head.pop("kinds"), head["rank"], head["num_ranks"]
    if rank >= num_ranks:
        raise not_as_expected(rank, f"a rank below num_ranks = {num_ranks}").at("rank")
    return Snapshot(**head, operations={kind: _counters(stored, kind, num_ranks) for kind in kinds})


def _counters(stored: dict[str, Any], kind: str, num_ranks: int) -> CounterSnapshot:
    of_kind = {
        name: stored[f"{kind}/{name}"] for name in COUNTERS.fields if f"{kind}/{name}" in stored
    }
    try:
        counters: CounterSnapshot = COUNTERS.read(
            of_kind, {"num_ranks": num_ranks, "num_sources": num_ranks + 1}
        )
        _require_growing(counters)
    except Wrong as wrong:
        wrong.path[0] = f"{kind}/{wrong.path[0]}"
        raise
    return counters


def _require_growing(counters: CounterSnapshot) -> None:
    totals = counters.totals
    if (totals < 0).any():
        field, source = np.argwhere(totals < 0)[0].tolist()
        raise not_as_expected(
            int(totals[field, source]),
            "counters of at least 0; they wrapped, or two snapshots were subtracted in the "
            f"wrong order: see {counters.fields[field]} of source {source}",
        ).at("totals")
