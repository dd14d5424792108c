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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..core.package import EPArgumentError, printable

_HERE = Path(__file__).resolve()
# In an installed package, in a checkout.
FOLDERS = (_HERE.parents[1] / "patches", _HERE.parents[3] / "patches")

_HUNK = re.compile(rb"@@ -(\d+),0 \+\d+(?:,(\d+))? @@")


# Lines, with their ends, and behind which line of the file they come; lines count from 1.
Insertion = tuple[int, tuple[bytes, ...]]
_ORIGINAL, _PATCHED = "not patched", "patched"


@dataclass(frozen=True)
class PatchSet:
    """What is done to one version of one project.

    Attributes:
        name: of its folder.
        title: project, version and commit.
        next_step: when it is patched.
        hashes: the SHA-256 that each of its files must have, by their path from the checkout.
        insertions: into these.
        added: files of ours, by path.
    """

    name: str
    title: str
    next_step: str
    hashes: Mapping[str, str]
    insertions: Mapping[str, Sequence[Insertion]]
    added: Mapping[str, bytes]


class _Look(NamedTuple):
    """One file of a checkout: its state, and what it holds without our change and with it (`None`: there is no file)."""

    path: str
    state: str
    without: bytes | None = None
    changed: bytes | None = None


def patch(given: argparse.Namespace) -> int:
    """Applies the set that fits the checkout, takes it out again, or says whether one fits; returns the exit status."""
    found, looks = _fitting(given.checkout, patch_sets())
    is_patched = looks[0].state == _PATCHED
    if given.check:
        _say(f"{found.title}: {'patched' if is_patched else 'fits, not patched'}")
        return 0
    if is_patched != given.reverse:
        _say(f"{found.title}: {'already patched' if is_patched else 'not patched'}, nothing to do")
        return 0
    contents = {look.path: look.without if given.reverse else look.changed for look in looks}
    try:
        _replace(given.checkout, contents)
    except OSError as error:
        where = printable(str(given.checkout))
        raise EPArgumentError(
            f"patch: nothing was changed. {where} must be writable: {error}"
        ) from None
    for path in found.hashes:
        count = sum(len(lines) for _, lines in found.insertions[path])
        _say(f"{path}: {count} lines {'taken out' if given.reverse else 'inserted'}")
    for path in found.added:
        _say(f"{path}: {'removed' if given.reverse else 'added'}")
    done = (
        "as it was. Next: build it again" if given.reverse else f"patched. Next: {found.next_step}"
    )
    _say(f"{found.title}: {done}")
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
    said, hashes, added = {}, {}, {}
    for line in (folder / "FILES.sha256").read_text().splitlines():
        if line.startswith("# adds: "):
            path = line[len("# adds: ") :]
            added[path] = (folder.parent / Path(path).name).read_bytes()
        elif line.startswith("# "):
            key, _, said[key] = line.partition(": ")
        else:
            sha256, path = line.split()
            hashes[path] = sha256
    insertions = dict(map(_read_patch, sorted(folder.glob("*.patch"))))
    return PatchSet(folder.name, said["# for"], said["# next"], hashes, insertions, added)


def _read_patch(path: Path) -> tuple[str, list[Insertion]]:
    """The file that it is for, and what is inserted."""
    _, target, *lines = path.read_bytes().splitlines(keepends=True)
    insertions = []
    while lines:
        hunk = _HUNK.fullmatch(lines.pop(0).rstrip(b"\n"))
        count = int(hunk[2] or 1) if hunk else 0
        inserted = tuple(line[1:] for line in lines[:count] if line.startswith(b"+"))
        if hunk is None or len(inserted) < count:
            raise EPArgumentError(f"patch: {path.name} is damaged: it does not only insert lines.")
        insertions.append((int(hunk[1]), inserted))
        del lines[:count]
    return target.rstrip(b"\n")[len(b"+++ b/") :].decode(), insertions


def _fitting(checkout: Path, sets: list[PatchSet]) -> tuple[PatchSet, list[_Look]]:
    """The set that fits, and its files and ours, which are all original or all patched."""
    where = printable(str(checkout))
    if not checkout.is_dir():
        raise EPArgumentError(f"patch: {where} is no directory.")
    most, said = 0, ""
    for one in sets:
        looks = [_look(checkout, one, path) for path in (*one.hashes, *one.added)]
        if len({look.state for look in looks}) == 1 and looks[0].state in (_ORIGINAL, _PATCHED):
            return one, looks
        theirs = looks[: len(one.hashes)]
        # Any of its files counts, and one that fits counts more than all that differ.
        score = sum(look.state != "missing" for look in theirs)
        score += len(theirs) * sum(look.state in (_ORIGINAL, _PATCHED) for look in theirs)
        if score > most:
            wrong = [look for look in looks if look.state not in (_ORIGINAL, _PATCHED)] or looks
            states = "; ".join(f"{look.path} is {look.state}" for look in wrong)
            most, said = score, f"{one.title}, but {states}"
    if not said:
        known = "; ".join(one.title for one in sets)
        raise EPArgumentError(
            f"patch: {where} has none of the files that patches are for: {known}."
        )
    raise EPArgumentError(
        f"patch: nothing was changed. {where} comes closest to {said}. Patches fit "
        "these versions alone; check one out, without changes of its own."
    )


def _look(checkout: Path, one: PatchSet, path: str) -> _Look:
    """At a file of the project, or at one of ours, which is not there before and is as we wrote it afterwards."""
    file = checkout / path
    if file.is_symlink() or checkout.resolve() not in file.resolve().parents or file.is_dir():
        return _Look(path, "a link, or behind one, or a directory")
    text = file.read_bytes() if file.exists() else None
    without: bytes | None = None
    if path in one.added:
        changed = one.added[path]
        expected, is_known = _sha256(changed), True
    elif text is None:
        return _Look(path, "missing")
    else:
        expected, insertions = one.hashes[path], one.insertions[path]
        without = text if _sha256(text) == expected else _without(text, insertions)
        changed = _with(without, insertions)
        is_known = _sha256(without) == expected
    if is_known and text in (without, changed):
        return _Look(path, _ORIGINAL if text == without else _PATCHED, without, changed)
    return _Look(path, f"another one (SHA-256 {_sha256(text or b'')}, expected {expected})")


def _with(text: bytes, insertions: Sequence[Insertion]) -> bytes:
    lines = text.splitlines(keepends=True)
    for after, inserted in reversed(insertions):
        lines[after:after] = inserted
    return b"".join(lines)


def _without(text: bytes, insertions: Sequence[Insertion]) -> bytes:
    lines = text.splitlines(keepends=True)
    for after, inserted in insertions:
        del lines[after : after + len(inserted)]
    return b"".join(lines)


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
