"""Counters on disk: a NumPy archive per rank, without pickle. For whoever cannot diagnose on the spot."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..collect.snapshot import Snapshot
from ..core import safe_files
from ..core.package import EPArgumentError, codec
from . import foreign

SCHEMA = "deep_ep.counters/1"
FILE_PATTERN = "counters-rank*.npz"


@dataclass(frozen=True)
class Head:
    """What stands beside the parts of a `Snapshot`; of a kind of operation, the kind and "/" stand before their names."""

    schema: Annotated[str, foreign.schema(SCHEMA)]
    kinds: list[str]


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
        OSError: a file cannot be read.
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
    # Of a name alone, `is_zipfile` takes what cannot be opened for no archive.
    with file.open("rb") as opened:
        is_archive = zipfile.is_zipfile(opened)
    if not is_archive:
        raise EPArgumentError(
            f"{file}: no archive, or cut off; {expected}. Was the program stopped while it wrote?"
        )
    try:
        stored = _read_entries(file)
    except Exception as error:  # noqa: BLE001 - zipfile and numpy raise anything at what nobody has written
        raise EPArgumentError(
            f"{file}: damaged ({error}); {expected}. Copy the file again."
        ) from None
    try:
        return _snapshot(stored)
    except codec.CodecError as error:
        raise foreign.refusal(error, str(file), "entry", SCHEMA) from None


def _read_entries(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as archive:
        unpacked = sum(entry.file_size for entry in archive.zip.infolist())
        if unpacked > _LARGEST:
            raise ValueError(f"{unpacked} bytes when unpacked, where {_LARGEST} are allowed")
        return {name: _plain(archive[name]) for name in archive.files}


def _plain(array: Any) -> Any:
    """An entry that is a text, an integer, or a list of texts; any other as it is."""
    if array.size > max(
        array.nbytes, 1
    ):  # texts without characters take no bytes, any number of them
        raise ValueError(f"{array.dtype} of shape {list(array.shape)}")
    is_plain = array.dtype.kind == "U" or (array.dtype.kind == "i" and not array.shape)
    return array.tolist() if is_plain else array


def _snapshot(stored: dict[str, Any]) -> Snapshot:
    """Raises CodecError with the name of the entry."""
    kinds = {}
    for kind in foreign.read(Head, stored).kinds:
        start = f"{kind}/"
        names = [name for name in stored if name.startswith(start)]
        kinds[kind] = {name[len(start) :]: stored[name] for name in names}
    try:
        return foreign.read(Snapshot, {**stored, "operations": kinds})
    except codec.CodecError as error:
        if error.path[0] == "operations":
            error.path[:3] = ["/".join(map(str, error.path[1:3]))]
        raise
