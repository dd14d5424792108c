"""The folder `patches`: its form, our header alone, and, where `DEEP_EP_UPSTREAM` names checkouts, what they do there.

    DEEP_EP_UPSTREAM=CHECKOUT[:CHECKOUT] pytest tests/build/test_patches.py -s

Checkouts are read and never changed; what is applied and compiled is a copy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_ep.diagnose.cli import patch

PATCHES = Path(__file__).resolve().parents[2] / "patches"
SETS = sorted(path.parent.name for path in PATCHES.glob("*/FILES.sha256"))
UPSTREAM = [Path(path) for path in os.environ.get("DEEP_EP_UPSTREAM", "").split(os.pathsep) if path]
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


def patches_of(name: str) -> list[Path]:
    return sorted((PATCHES / name).glob("*.patch"))


ALL = [path for name in SETS for path in patches_of(name)]


# ---------------------------------------------------------------------------------------- form


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_patch_holds_nothing_but_lines_of_ours(path: Path) -> None:
    """Neither context nor removed lines, nor what git writes behind the second @@."""
    old, new, *lines = path.read_text().splitlines()
    assert old.startswith("--- a/")
    assert new == f"+++ b/{old[len('--- a/') :]}"
    after, shift = 0, 0
    while lines:
        hunk = HUNK.fullmatch(lines.pop(0))
        assert hunk is not None
        count = int(hunk[3] or 1)
        assert all(re.fullmatch(r"\+[^\t]*\S", line) for line in lines[:count])
        assert len(lines) >= count
        del lines[:count]
        assert int(hunk[1]) > after, "hunks stand in the order of the file"
        after = int(hunk[1])
        assert int(hunk[2]) == after + shift + 1, "the second number follows from what stands above"
        shift += count
    assert shift > 0


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_inserted_lines_call_our_header_and_define_nothing(path: Path) -> None:
    """No signature, no launch, no macro: a line includes the header or names what it has."""
    for line in path.read_text().splitlines()[2:]:
        if line.startswith("+"):
            assert re.search(r"ep_watch|\b\w+\.(look|end)\(|^\+\s*\}$", line), line
            assert not re.match(r"\+\s*#(?!include )", line), line


@pytest.mark.parametrize("name", SETS)
def test_every_patched_file_has_its_hash(name: str) -> None:
    lines = (PATCHES / name / "FILES.sha256").read_text().splitlines()
    keys = [line.split(": ")[0] for line in lines if line.startswith("#")]
    assert set(keys) == {"# for", "# next", "# adds"}
    hashes = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[0-9a-f]{64}  \S+", line) for line in hashes)
    targets = [path.read_text().splitlines()[1][len("+++ b/") :] for path in patches_of(name)]
    assert sorted(line.split()[1] for line in hashes) == sorted(targets)
    assert "ibgda_device.cuh" not in " ".join(targets), "under NVIDIA's terms"


@pytest.mark.parametrize("name", SETS)
def test_the_readme_names_version_commit_and_every_hop(name: str) -> None:
    readme = (PATCHES / "README.md").read_text()
    title = next(one.title for one in patch.patch_sets() if one.name == name)
    version, commit = title.split(", commit ")
    assert f"`{name}`" in readme
    assert version in readme
    assert commit in readme
    for header in {Path(path).name for one in patch.patch_sets() for path in one.added}:
        hops = re.search(r'return\s+((?:"[\w ]+"\s*)+);', (PATCHES / header).read_text())
        assert hops is not None
        for hop in re.findall(r"\w+", hops[1]):
            assert f"`{hop}`" in readme, f"{header}: {hop}"


# ---------------------------------------------------------------------------------------- in the package


@pytest.mark.exhaustive
def test_a_wheel_has_all_patches_where_the_command_looks(tmp_path: Path) -> None:
    built = tmp_path / "lib"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)],
        cwd=PATCHES.parent,
        check=True,
        capture_output=True,
    )
    module = built / Path(patch.__file__).relative_to(PATCHES.parent)
    assert files_of(module.parents[1] / "patches") == files_of(PATCHES)
    assert patch.FOLDERS[0] == Path(patch.__file__).parents[1] / "patches"
    assert "graft patches" in (PATCHES.parent / "MANIFEST.in").read_text().splitlines()


# ---------------------------------------------------------------------------------------- our headers alone


@pytest.mark.parametrize("header", sorted(path.name for path in PATCHES.glob("*.cuh")))
@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("g++ -fsyntax-only -Wall -Wextra -Werror -x c++", id="g++"),
        pytest.param(
            "nvcc -arch=sm_90a -rdc=true -cubin -o /dev/null -Werror all-warnings -x cu",
            id="nvcc",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_header_compiles_alone(header: str, compiler: str, tmp_path: Path) -> None:
    """As C++17, which is what the projects use. tests/cpp/test_ep_watch.cpp says what it does."""
    program, *flags = compiler.split()
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    source, place = tmp_path / "alone.cpp", tmp_path / "deep_ep" / "common"
    shutil.copytree(PATCHES, place)  # Headers name each other by where they are put.
    source.write_text(f"#include <deep_ep/common/{header}>\n" * 2)
    command = [program, "-std=c++17", f"-I{tmp_path}", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ELASTIC = r"""
#include <deep_ep/common/ep_watch_elastic.cuh>
#include <cstring>
#include <string>
using namespace ep_watch::elastic;

struct Context { int num_ranks, rank_idx, num_scaleup_ranks; };

constexpr int64_t kAlignment = 2097152;
alignas(64) static char workspace[7 * kAlignment];

static std::string said(int64_t used, std::uintptr_t cells, Context context) {
    try {
        set(workspace, used, kAlignment, cells, context,
            [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

int main() {
    const Area& area = *::area(workspace);
    if (said(12820528, 0x1000, {32, 19, 8}) != "") return 1;
    if (area.target.cells != reinterpret_cast<unsigned long long*>(0x1000)) return 2;
    if (area.target.ranks != 32 || area.target.node_begin != 16 || area.ranks_per_node != 8) return 3;
    if (said(12820528, 0, {32, 19, 8}) != "" || area.target.cells != nullptr) return 4;
    for (int i = 0; i < 12820528; ++i)
        if (workspace[i] != 0) return 5;  // What is used is left alone.
    if (said(12820536, 0x1000, {32, 19, 8}) == "" || area.target.cells != nullptr) return 6;
    if (said(12820528, 0x1000, {2048, 19, 8}) == "") return 7;
    if (said(12820528, 0x1004, {32, 19, 8}) == "") return 8;
    const int in_node[] = {-1, -1, 0, 2, 3, 4, 0, 2, 3, 4, -1};
    const int of_nodes[] = {-1, -1, 5, 6, 7, 8, 5, 6, 7, 8, -1};
    for (int tag = 0; tag <= 10; ++tag)
        if (hop_in_node(tag) != in_node[tag] || hop_of_nodes(tag) != of_nodes[tag]) return 9;
    return 0;
}
"""


def test_cells_of_v2_stand_behind_what_its_workspace_uses(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    shutil.copytree(PATCHES, tmp_path / "deep_ep" / "common")
    source, program = tmp_path / "elastic.cpp", tmp_path / "elastic"
    source.write_text(ELASTIC)
    command = ["g++", "-std=c++17", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    assert subprocess.run([str(program)], check=False).returncode == 0


# ---------------------------------------------------------------------------------------- upstream


def run(checkout: Path, *, reverse: bool = False, check: bool = False) -> int:
    return patch.patch(argparse.Namespace(checkout=checkout, reverse=reverse, check=check))


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def copy_of(checkout: Path, target: Path) -> Path:
    shutil.copytree(checkout, target, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return target


@pytest.fixture(params=UPSTREAM, ids=str)
def upstream(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.mark.skipif(not UPSTREAM, reason="DEEP_EP_UPSTREAM names no checkout")
def test_patches_go_in_as_git_puts_them_and_out_again(upstream: Path, tmp_path: Path) -> None:
    ours, git = copy_of(upstream, tmp_path / "ours"), copy_of(upstream, tmp_path / "git")
    before = files_of(ours)
    assert run(ours, check=True) == 0
    assert files_of(ours) == before
    (name,) = [
        one.name
        for one in patch.patch_sets()
        if all(before.get(file.path) == file.sha256 for file in one.files)
    ]
    assert run(ours) == 0
    for path in patches_of(name):
        subprocess.run(["git", "apply", "--unidiff-zero", str(path)], cwd=git, check=True)
    changed = files_of(ours)
    added = changed.keys() - before.keys()
    assert {Path(path).name for path in added} <= {path.name for path in PATCHES.glob("*.cuh")}
    assert {path: text for path, text in changed.items() if path not in added} == files_of(git)
    assert run(ours, reverse=True) == 0
    assert files_of(ours) == before


NVCC = (
    "nvcc -std=c++17 -O3 -DDISABLE_NVSHMEM --expt-relaxed-constexpr --extended-lambda "
    "-arch=sm_90a -Xptxas=-v"
)


def resources(tree: Path) -> dict[str, tuple[int, int, int, int]]:
    """Of each kernel of intranode.cu: registers, bytes of frame, of spill stores and of spill loads."""
    (source,) = tree.rglob("intranode.cu")
    command = [*NVCC.split(), f"-I{tree}/deep_ep/include", "-cubin", "-o", "/dev/null", source.name]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for block in done.stderr.split("Compiling entry function")[1:]:
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )
        registers = re.search(r"Used (\d+) registers", block)
        assert frame is not None
        assert registers is not None
        found[block.split("'")[1]] = (int(registers[1]), *map(int, frame.groups()))
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not UPSTREAM, reason="DEEP_EP_UPSTREAM names no checkout")
def test_kernels_within_a_node_spill_nothing_and_fit_as_before(
    upstream: Path, tmp_path: Path
) -> None:
    """Registers are printed; what is asserted is that they cost no block of a multiprocessor and no memory."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    tree = copy_of(upstream, tmp_path / "tree")
    before = resources(tree)
    assert run(tree) == 0
    after = resources(tree)
    assert before.keys() == after.keys()
    for kernel, (registers, *memory) in after.items():
        print(f"{before[kernel]} -> {(registers, *memory)}  {kernel}")
        assert memory == [*before[kernel][1:]], kernel
        # Those that move rows may have 80, for 768 threads; notify is one block of at most 256.
        assert registers <= 80, kernel
