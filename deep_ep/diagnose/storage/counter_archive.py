"""Counters on disk: a NumPy archive per rank, without pickle. For whoever cannot diagnose on the spot."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..collect.snapshot import Snapshot
from ..core import safe_files
from ..core.package import CounterSnapshot, EPArgumentError, codec
from . import foreign

SCHEMA = "deep_ep.counters/1"
FILE_PATTERN = "counters-rank*.npz"


@dataclass(frozen=True)
class Head:
    """What stands beside the parts of a `Snapshot`; of a kind of operation, the kind and "/" stand before their names."""

    schema: Annotated[str, foreign.schema(SCHEMA)]
    kinds: list[str]


# Ways to pack an entry. Others fail in words of their own.
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What a file may unpack to: rings of some thousand operations of 1,024 ranks.
_LARGEST = 512 * 2**20


def save(snapshots: Snapshot | Sequence[Snapshot], folder: Path | str) -> list[Path]:
    """Writes `FOLDER/counters-rank{N}.npz` for each snapshot, and returns these files; every rank may write its own.

    Args:
        snapshots: of one rank, or of several.
        folder: where to; made if it is not there.

    Raises:
        EPArgumentError: the name of a file is a link.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for snapshot in [snapshots] if isinstance(snapshots, Snapshot) else snapshots:
        of_rank = codec.to_plain(snapshot)
        kinds = of_rank.pop("operations")
        stored = {**codec.to_plain(Head(SCHEMA, list(kinds))), **of_rank}
        for kind, of_kind in kinds.items():
            stored.update({f"{kind}/{name}": value for name, value in of_kind.items()})
        arrays = {name: _array(value) for name, value in stored.items() if value is not None}
        written.append(folder / f"counters-rank{snapshot.rank}.npz")
        with safe_files.create(written[-1]) as file:
            np.savez_compressed(file, **arrays)
    return written


def _array(value: Any) -> Any:
    """An entry; only texts come in lists."""
    return np.array(value, dtype=np.str_) if isinstance(value, list) else value


def load(path: Path | str) -> list[Snapshot]:
    """What `save` wrote to a file, or to the `counters-rank*.npz` of a folder, in order of rank.

    Raises:
        EPArgumentError: nothing is there, or a file is damaged or of another version; names the file,
            the entry and what was expected.
    """
    path = Path(path)
    found = foreign.files_in(path, FILE_PATTERN) if path.is_dir() else [path]
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
            stored = _read_entries(archive)
    except Exception as error:  # noqa: BLE001 - zipfile and numpy raise anything at what nobody has written
        raise EPArgumentError(
            f"{file}: damaged ({error}); {expected}. Copy the file again."
        ) from None
    try:
        return _snapshot(stored)
    except codec.CodecError as error:
        raise foreign.refusal(error, str(file), "entry", SCHEMA) from None


def _read_entries(archive: zipfile.ZipFile) -> dict[str, Any]:
    """What np.load reads; but a ValueError where an array would be larger than its entry, before it is allocated."""
    entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > _LARGEST:
        raise ValueError(f"{unpacked} bytes when unpacked, where {_LARGEST} are allowed")
    if any(entry.compress_type not in _PACKED for entry in entries):
        raise ValueError("an entry is neither stored nor deflated")
    stored = {}
    for entry in entries:
        with archive.open(entry) as packed:
            data = io.BytesIO(packed.read(entry.file_size))
        _require_whole_array(data)
        array = np.lib.format.read_array(data, allow_pickle=False)
        stored[entry.filename.removesuffix(".npy")] = _plain(array)
    return stored


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
    """Raises CodecError with the name of the entry."""
    kinds = {}
    for kind in foreign.read(Head, stored).kinds:
        start = f"{kind}/"
        names = [name for name in stored if name.startswith(start)]
        kinds[kind] = {name[len(start) :]: stored[name] for name in names}
    try:
        snapshot = foreign.read(Snapshot, {**stored, "operations": kinds})
        for kind, counters in snapshot.operations.items():
            _require_growing(kind, counters)
    except codec.CodecError as error:
        if error.path[0] == "operations":
            error.path[:3] = ["/".join(map(str, error.path[1:3]))]
        raise
    return snapshot


def _require_growing(kind: str, counters: CounterSnapshot) -> None:
    totals = counters.totals
    if (totals < 0).any():
        field, source = np.argwhere(totals < 0)[0].tolist()
        raise codec.CodecError(
            f"is {totals[field, source]}; expected counters of at least 0; they wrapped, or two snapshots "
            f"were subtracted in the wrong order: see {counters.fields[field]} of source {source}",
            f"{kind}/totals",
        )
