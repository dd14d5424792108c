"""`python -m deep_ep.diagnose patch`, on sets of patches and checkouts that are made up."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli import patch

KERNEL = b"one\n\ntwo\r\nthree\n"  # Lines may end in anything.
BINDING = b"first\nlast"  # And the last one in nothing.
HEADER = b"// ours\n"
TREE = {"src/kernel.cu": KERNEL, "src/binding.cpp": BINDING, "other.txt": b"left alone\n"}
PATCHED = {
    "src/kernel.cu": b"one\n  a\n  b\n\ntwo\r\nthree\n  c\n",
    "src/binding.cpp": b"  d\nfirst\nlast",
    "src/watch.cuh": HEADER,
    "other.txt": b"left alone\n",
}
KERNEL_PATCH = (
    "--- a/src/kernel.cu\n+++ b/src/kernel.cu\n@@ -1,0 +2,2 @@\n+  a\n+  b\n@@ -4,0 +7 @@\n+  c\n"
)
BINDING_PATCH = "--- a/src/binding.cpp\n+++ b/src/binding.cpp\n@@ -0,0 +1 @@\n+  d\n"


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def add_set(folder: Path, name: str, title: str, kernel: bytes, binding: bytes) -> None:
    (folder / name).mkdir(parents=True)
    (folder / "watch.cuh").write_bytes(HEADER)
    (folder / name / "kernel.patch").write_text(KERNEL_PATCH)
    (folder / name / "binding.patch").write_text(BINDING_PATCH)
    (folder / name / "FILES.sha256").write_text(
        f"# for: {title}\n# next: build\n# adds: src/watch.cuh\n"
        f"{sha256(binding)}  src/binding.cpp\n{sha256(kernel)}  src/kernel.cu\n"
    )


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets for two versions, which have the same binding."""
    folder = tmp_path / "patches"
    add_set(folder, "project-1", "Project 1", KERNEL, BINDING)
    add_set(folder, "project-2", "Project 2", KERNEL + b"four\n", BINDING)
    monkeypatch.setattr(patch, "FOLDERS", (tmp_path / "not there", folder))
    return folder


@pytest.fixture
def checkout(tmp_path: Path, patches: Path) -> Path:
    folder = tmp_path / "checkout"
    write(folder, TREE)
    return folder


def write(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Without a text there is no such file."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(text)


def read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["patch", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_lines_go_in_and_out_again(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, checkout)
    assert status == 0
    assert read(checkout) == PATCHED
    assert "src/kernel.cu: 3 lines inserted" in out
    assert "src/watch.cuh: added" in out
    assert "Project 1: patched. Next: build" in out

    status, out, _ = run(capsys, checkout, "--reverse")
    assert status == 0
    assert read(checkout) == TREE
    assert "src/kernel.cu: 3 lines taken out" in out
    assert "src/watch.cuh: removed" in out


def test_check_says_what_is_there_and_changes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, checkout, "--check") == (0, "Project 1: fits, not patched\n", "")
    assert read(checkout) == TREE
    run(capsys, checkout)
    assert run(capsys, checkout, "--check") == (0, "Project 1: patched\n", "")
    assert read(checkout) == PATCHED


def test_what_is_done_already_is_not_done_again(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, checkout, "--reverse")[:2] == (0, "Project 1: not patched, nothing to do\n")
    assert read(checkout) == TREE
    run(capsys, checkout)
    assert run(capsys, checkout)[:2] == (0, "Project 1: already patched, nothing to do\n")
    assert read(checkout) == PATCHED


def test_the_set_is_chosen_by_hashes(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(checkout, {"src/kernel.cu": KERNEL + b"four\n"})
    assert "Project 2: patched" in run(capsys, checkout)[1]


CHANGED = KERNEL.replace(b"two", b"2")
OPTIONS = [(), ("--check",), ("--reverse",)]


@pytest.mark.parametrize(
    ("path", "text", "state"),
    [
        # A patch without context would go into any text.
        pytest.param(
            "src/kernel.cu",
            CHANGED,
            f"another one (SHA-256 {sha256(CHANGED)}, expected {sha256(KERNEL)})",
            id="another text",
        ),
        pytest.param("src/kernel.cu", None, "missing", id="a missing file"),
        pytest.param("src/watch.cuh", b"theirs", "another one", id="a file in our place"),
    ],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_that_differs_is_named_and_nothing_is_changed(
    option: tuple[str, ...],
    path: str,
    text: bytes | None,
    state: str,
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(checkout, {path: text})
    before = read(checkout)
    status, _, err = run(capsys, checkout, *option)
    assert status == 2
    assert f"closest to Project 1, but {path} is {state}" in err
    assert "binding.cpp" not in err
    assert read(checkout) == before


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"src/kernel.cu": TREE["src/kernel.cu"]}, id="one file without its lines"),
        pytest.param(
            {"src/kernel.cu": PATCHED["src/kernel.cu"].replace(b"  b", b"  B")},
            id="an inserted line that was edited",
        ),
        pytest.param({"src/watch.cuh": b"// edited\n"}, id="a header that was edited"),
        pytest.param({"src/watch.cuh": None}, id="a missing header"),
    ],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_half_a_patch_is_refused(
    changes: dict[str, bytes | None],
    option: tuple[str, ...],
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(capsys, checkout)
    write(checkout, changes)
    before = read(checkout)
    status, _, err = run(capsys, checkout, *option)
    assert status == 2
    assert "nothing was changed" in err
    assert next(iter(changes)) in err
    assert read(checkout) == before


def test_links_are_not_written_through(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(checkout / "src", elsewhere)
    (checkout / "src").symlink_to(elsewhere)
    before = read(elsewhere)
    status, _, err = run(capsys, checkout)
    assert status == 2
    assert "src/kernel.cu is a link, or behind one" in err
    assert read(elsewhere) == before


def test_other_trees_are_told_what_patches_are_for(
    patches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, tmp_path)
    assert status == 2
    assert "none of the files that patches are for: Project 1; Project 2" in err
    status, _, err = run(capsys, tmp_path / "nowhere")
    assert status == 2
    assert "nowhere is no directory" in err


def test_all_files_are_changed_or_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a file may be replaced and not written, as one that is read-only."""
    replaced = []
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        replaced.append(target)
        if len(replaced) == 3:
            raise OSError("no space left")
        return replace(self, target)

    write_bytes = Path.write_bytes

    def read_only(self: Path, text: bytes) -> int:
        if (checkout / "src") in self.parents:
            raise PermissionError(self)
        return write_bytes(self, text)

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(Path, "write_bytes", read_only)
    status, _, err = run(capsys, checkout)
    assert status == 2
    assert "nothing was changed" in err
    assert "no space left" in err
    assert read(checkout) == TREE


def test_permissions_stay(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "src/kernel.cu").chmod(0o640)
    run(capsys, checkout)
    assert (checkout / "src/kernel.cu").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(("@@ -1,0 +2,2 @@", "@@ -1,0 +2,2 @@ one"), id="text behind the hunk"),
        pytest.param(("+  b", " one"), id="context"),
        pytest.param(("+  b", "-one"), id="a removed line"),
        pytest.param(("+  c\n", ""), id="cut"),
    ],
)
def test_patches_that_do_more_than_insert_are_refused(
    damage: tuple[str, str], patches: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (patches / "project-1/kernel.patch").write_text(KERNEL_PATCH.replace(*damage))
    status, _, err = run(capsys, checkout)
    assert status == 2
    assert "kernel.patch" in err
    assert read(checkout) == TREE


def test_patches_are_found_in_this_package() -> None:
    assert "deepep-v1.2.1" in [one.name for one in patch.patch_sets()]


def test_without_its_patches_a_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patch, "FOLDERS", (tmp_path / "nowhere",))
    status, _, err = run(capsys, tmp_path)
    assert status == 2
    assert "without its folder of patches" in err
