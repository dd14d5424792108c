"""`python -m deep_ep.diagnose patch`: lets another project's kernels measure waiting, by lines added to its checkout.

A set of patches is a folder of `patches`: `FILES.sha256`, which says for which text of which files it was written, and for
each of them a patch that only adds lines. Such a patch fits anything, so nothing is written unless all hashes are right.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.package import EPArgumentError, printable

_HERE = Path(__file__).resolve()
# In an installed package, in a checkout.
FOLDERS = (_HERE.parents[1] / "patches", _HERE.parents[3] / "patches")

_HUNK = re.compile(rb"@@ -(\d+),0 \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True)
class Insertion:
    """Lines, with their ends, that come behind line `after` of the file; lines count from 1."""

    after: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class PatchedFile:
    """A file of the project: its path from the checkout, the SHA-256 that it must have, and what is inserted."""

    path: str
    sha256: str
    insertions: tuple[Insertion, ...]

    def with_insertions(self, text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        for insertion in reversed(self.insertions):
            lines[insertion.after : insertion.after] = insertion.lines
        return b"".join(lines)

    def without_insertions(self, text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        for insertion in self.insertions:
            del lines[insertion.after : insertion.after + len(insertion.lines)]
        return b"".join(lines)


@dataclass(frozen=True)
class PatchSet:
    """What is done to one version of one project: `title` names it, with its commit, and `name` its folder.

    `added` are files of ours, by their path from the checkout.
    """

    name: str
    title: str
    next_step: str
    files: tuple[PatchedFile, ...]
    added: Mapping[str, bytes]


@dataclass(frozen=True)
class _Look:
    """One file of a checkout: `state` is "original", "patched", "missing" or what it has instead."""

    path: str
    state: str
    text: bytes = b""


def patch(given: argparse.Namespace) -> int:
    """Applies the set that fits the checkout, takes it out again, or says whether one fits; returns the exit status."""
    found, looks = _fitting(given.checkout, patch_sets())
    is_patched = looks[0].state == "patched"
    if given.check:
        _say(f"{found.title}: {'patched' if is_patched else 'fits, not patched'}")
        return 0
    if is_patched != given.reverse:
        _say(f"{found.title}: {'already patched' if is_patched else 'not patched'}, nothing to do")
        return 0
    contents: dict[str, bytes | None] = {}
    for file, look in zip(found.files, looks):
        change = file.without_insertions if given.reverse else file.with_insertions
        contents[file.path] = change(look.text)
    for path, text in found.added.items():
        contents[path] = None if given.reverse else text
    try:
        _replace(given.checkout, contents)
    except OSError as error:
        where = printable(str(given.checkout))
        raise EPArgumentError(
            f"patch: nothing was changed. {where} must be writable: {error}"
        ) from None
    for file in found.files:
        count = sum(len(insertion.lines) for insertion in file.insertions)
        _say(f"{file.path}: {count} lines {'taken out' if given.reverse else 'inserted'}")
    for path in found.added:
        _say(f"{path}: {'removed' if given.reverse else 'added'}")
    if given.reverse:
        _say(f"{found.title}: as it was. Next: build it again")
    else:
        _say(f"{found.title}: patched. Next: {found.next_step}")
    return 0


def patch_sets() -> list[PatchSet]:
    """All sets of patches that came with this package, by name."""
    folder = next(filter(Path.is_dir, FOLDERS), None)
    if folder is None:
        raise EPArgumentError(
            "patch: this package came without its folder of patches; take a checkout or install the wheel again."
        )
    return [_read_set(path.parent) for path in sorted(folder.glob("*/FILES.sha256"))]


def _read_set(folder: Path) -> PatchSet:
    patches = dict(map(_read_patch, folder.glob("*.patch")))
    title, next_step, added, files = "", "", {}, []
    for line in (folder / "FILES.sha256").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "#":
            key, _, value = rest.partition(": ")
            if key == "for":
                title = value
            elif key == "next":
                next_step = value
            else:
                added[value] = (folder.parent / Path(value).name).read_bytes()
        else:
            name = rest.lstrip()
            files.append(PatchedFile(name, word, patches.pop(name, ())))
    if patches:
        raise EPArgumentError(f"patch: {folder.name} has no SHA-256 of {', '.join(patches)}.")
    return PatchSet(folder.name, title, next_step, tuple(files), added)


def _read_patch(path: Path) -> tuple[str, tuple[Insertion, ...]]:
    """The file that it is for, and what is inserted."""
    _, target, *lines = path.read_bytes().splitlines(keepends=True)
    insertions: list[Insertion] = []
    while lines:
        hunk = _HUNK.fullmatch(lines.pop(0).rstrip(b"\n"))
        count = int(hunk[2] or 1) if hunk else 0
        inserted = [line[1:] for line in lines[:count] if line.startswith(b"+")]
        if hunk is None or len(inserted) < count:
            raise EPArgumentError(f"patch: {path.name} is damaged: it does not only insert lines.")
        insertions.append(Insertion(int(hunk[1]), tuple(inserted)))
        del lines[:count]
    return target.rstrip(b"\n")[len(b"+++ b/") :].decode(), tuple(insertions)


def _fitting(checkout: Path, sets: list[PatchSet]) -> tuple[PatchSet, list[_Look]]:
    """The set that fits, and its files, which are all original or all patched."""
    if not checkout.is_dir():
        raise EPArgumentError(f"patch: {printable(str(checkout))} is no directory.")
    closest: tuple[int, PatchSet, list[_Look]] | None = None
    for one in sets:
        looks = [_look(checkout, file) for file in one.files]
        right = sum(look.state in ("original", "patched") for look in looks)
        there = sum(look.state != "missing" for look in looks)
        if right == len(looks) and len({look.state for look in looks}) == 1:
            _require_place(checkout, one, is_patched=looks[0].state == "patched")
            return one, looks
        if there and (closest is None or right > closest[0]):
            closest = (right, one, looks)
    where = printable(str(checkout))
    if closest is None:
        known = "; ".join(one.title for one in sets)
        raise EPArgumentError(
            f"patch: {where} has none of the files that patches are for: {known}."
        )
    _, one, looks = closest
    wrong = [look for look in looks if look.state not in ("original", "patched")] or looks
    said = "; ".join(f"{look.path} is {look.state}" for look in wrong)
    raise EPArgumentError(
        f"patch: nothing was changed. {where} comes closest to {one.title}, but {said}. Patches fit "
        "these versions alone; check one out, without changes of its own."
    )


def _look(checkout: Path, file: PatchedFile) -> _Look:
    path = checkout / file.path
    if not path.is_file():
        return _Look(file.path, "missing")
    if path.is_symlink() or checkout.resolve() not in path.resolve().parents:
        return _Look(file.path, "a link, or behind one")
    text = path.read_bytes()
    sha256 = _sha256(text)
    if sha256 == file.sha256:
        return _Look(file.path, "original", text)
    original = file.without_insertions(text)
    if _sha256(original) == file.sha256 and file.with_insertions(original) == text:
        return _Look(file.path, "patched", text)
    if _sha256(text.replace(b"\r\n", b"\n")) == file.sha256:
        return _Look(file.path, "one with lines that end in CRLF (git config core.autocrlf false)")
    return _Look(file.path, f"another one (SHA-256 {sha256}, expected {file.sha256})", text)


def _require_place(checkout: Path, one: PatchSet, *, is_patched: bool) -> None:
    """Files of ours are as we wrote them, and lie where nothing else does."""
    for name, text in one.added.items():
        path = checkout / name
        if path.is_symlink() or (path.exists() and path.read_bytes() != text):
            raise EPArgumentError(
                f"patch: nothing was changed. {printable(str(path))} is not the file that {one.title} gets."
            )
        if is_patched and not path.exists():
            raise EPArgumentError(
                f"patch: nothing was changed. {printable(str(path))} is missing, although lines of {one.title} use it."
            )


def _replace(checkout: Path, contents: Mapping[str, bytes | None]) -> None:
    """All files get their contents, None is none, or all keep what they have."""
    with tempfile.TemporaryDirectory(dir=checkout, prefix=".") as folder:
        new = {checkout / name: Path(folder, str(i)) for i, name in enumerate(contents)}
        for (path, prepared), text in zip(new.items(), contents.values()):
            if text is not None:
                prepared.write_bytes(text)
                prepared.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        # What was there is moved and not copied: it may be read-only, or of another owner.
        before = {path: prepared.with_suffix(".before") for path, prepared in new.items()}
        try:
            for path, prepared in new.items():
                if path.exists():
                    path.replace(before[path])
                if prepared.exists():
                    prepared.replace(path)
        except BaseException:
            for (path, prepared), text in zip(new.items(), contents.values()):
                if before[path].exists():
                    before[path].replace(path)
                elif text is not None and not prepared.exists():
                    path.unlink()
            raise


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
