"""install_nvshmem.sh against made-up prefixes and source trees: what it accepts, and how it says no.

Each test runs a copy of the script in a folder of its own; nothing is fetched and nothing compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support import system_tools

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the script and its lock file."""
    tree = tmp_path / "checkout"
    (tree / "third-party").mkdir(parents=True)
    shutil.copy2(ROOT / "install_nvshmem.sh", tree)
    shutil.copy2(ROOT / "third-party" / "nvshmem.lock", tree / "third-party")
    return tree


def install(
    tree: Path, *arguments: str | Path, status: int = 0, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script of `tree`, which must end with this status."""
    env = {**os.environ, "PATH": path or os.environ["PATH"]}
    env.pop("CUDA_HOME", None)
    command = ["bash", str(tree / "install_nvshmem.sh"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == status, result.stderr + result.stdout
    return result


def make_prefix(prefix: Path, version: str = "3.8.0") -> Path:
    """Empty files with the names and the two declarations that the script and the doctor look for."""
    (prefix / "include" / "non_abi").mkdir(parents=True)
    (prefix / "lib").mkdir()
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    lines = [f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts]
    (prefix / "include" / "non_abi" / "nvshmem_version.h").write_text("".join(lines))
    (prefix / "include" / "nvshmemx.h").write_text("int nvshmemx_qp_create(int, void*);\n")
    for name in (
        "libnvshmem_device.a",
        "libnvshmem_host.so.3",
        "nvshmem_bootstrap_uid.so.3",
        "nvshmem_transport_ibgda.so.7",
    ):
        (prefix / "lib" / name).touch()
    return prefix


def make_source(source: Path) -> Path:
    """A CMake project without a compiler that installs a made-up prefix and writes down its options."""
    make_prefix(source / "made")
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(made NONE)\n"
        "file(WRITE ${CMAKE_BINARY_DIR}/options.txt\n"
        '  "${NVSHMEM_IBGDA_SUPPORT} ${NVSHMEM_MPI_SUPPORT} ${NVSHMEM_UCX_SUPPORT}")\n'
        "install(DIRECTORY made/ DESTINATION .)\n"
    )
    return source


def test_prefix_is_linked_and_said(tree: Path, tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path / "prefix")
    result = install(tree, "--prefix", prefix)
    assert (tree / "third-party" / "nvshmem").resolve() == prefix
    assert "NVSHMEM 3.8.0" in result.stdout
    assert f"export NVSHMEM_DIR={prefix}" in result.stdout.splitlines()
    install(tree, "--check")


def test_a_second_prefix_replaces_the_link(tree: Path, tmp_path: Path) -> None:
    install(tree, "--prefix", make_prefix(tmp_path / "one"))
    install(tree, "--prefix", make_prefix(tmp_path / "two"))
    assert (tree / "third-party" / "nvshmem").resolve() == tmp_path / "two"


def test_the_link_itself_is_a_prefix_and_stays_as_it_is(tree: Path, tmp_path: Path) -> None:
    install(tree, "--prefix", make_prefix(tmp_path / "prefix"))
    result = install(tree, "--prefix", tree / "third-party" / "nvshmem")
    assert (tree / "third-party" / "nvshmem").resolve() == tmp_path / "prefix"
    assert f"export NVSHMEM_DIR={tmp_path / 'prefix'}" in result.stdout.splitlines()


def test_a_real_folder_is_not_replaced(tree: Path, tmp_path: Path) -> None:
    (tree / "third-party" / "nvshmem").mkdir()
    result = install(tree, "--prefix", make_prefix(tmp_path / "prefix"), status=1)
    assert "Move it away" in result.stderr


@pytest.mark.parametrize("version", ["2.11.0", "3.4.5"])
def test_old_versions_are_refused(tree: Path, tmp_path: Path, version: str) -> None:
    result = install(tree, "--prefix", make_prefix(tmp_path / "prefix", version), status=1)
    assert f"NVSHMEM {version}; 3.5 or newer is needed" in result.stderr
    assert not (tree / "third-party" / "nvshmem").exists()


@pytest.mark.parametrize("version", ["3.5.0", "3.10.1", "4.0.0"])
def test_new_versions_are_accepted(tree: Path, tmp_path: Path, version: str) -> None:
    install(tree, "--prefix", make_prefix(tmp_path / "prefix", version))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("include/non_abi/nvshmem_version.h", "is no NVSHMEM prefix"),
        ("include/nvshmemx.h", "queue-pair API is missing"),
        ("lib/libnvshmem_device.a", "no libnvshmem_device.a (the device library)"),
        ("lib/libnvshmem_host.so.3", "no libnvshmem_host.so.3 (the host library)"),
        ("lib/nvshmem_transport_ibgda.so.7", "built without IBGDA"),
    ],
)
def test_a_missing_part_is_named(tree: Path, tmp_path: Path, missing: str, message: str) -> None:
    prefix = make_prefix(tmp_path / "prefix")
    (prefix / missing).unlink()
    result = install(tree, "--prefix", prefix, status=1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefix"], "--prefix needs a value"),
        (["--prefix", "/nonexistent"], "is not a directory"),
        (["--frobnicate"], "unknown argument --frobnicate"),
        (["--cuda", "11"], "pins no nvidia-nvshmem-cu11"),
        (["--check"], "Run ./install_nvshmem.sh"),
    ],
)
def test_wrong_use_is_named(tree: Path, arguments: list[str], message: str) -> None:
    result = install(tree, *arguments, status=1)
    assert message in result.stderr


def test_without_cuda_the_version_is_asked_for(tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "sed", "cat"):
        (tools / name).symlink_to(shutil.which(name) or "")
    result = install(tree, path=str(tools), status=1)
    assert "--cuda 13" in result.stderr


def test_help_names_every_mode(tree: Path) -> None:
    result = install(tree, "--help")
    for word in ("--prefix", "--source", "--check", "--repair", "--cuda"):
        assert word in result.stdout


def python_with(folder: Path, nvshmem: str) -> Path:
    """An interpreter whose environment has this NVSHMEM, and whose pip writes its arguments down."""
    python = folder / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        'if [[ "$*" == "-m pip --version" ]]; then exit 0; fi\n'
        f'if [[ $1 == - ]]; then echo "{nvshmem}"; exit 0; fi\n'
        f'echo "$*" >> {folder}/arguments\n'
        f'while (($#)); do [[ $1 != -r ]] || cat "$2" >> {folder}/requirements; shift; done\n'
    )
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(("brought", "offered"), [("3.4.5", True), ("3.8.1", False), ("", False)])
def test_the_repair_is_offered_where_torch_brought_an_older_one(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brought: str, offered: bool
) -> None:
    monkeypatch.setenv("PYTHON", str(python_with(tmp_path, brought)))
    result = install(tree, "--prefix", make_prefix(tmp_path / "prefix"))
    assert ("--repair" in result.stdout) == offered
    assert (f"has NVSHMEM {brought}, which torch loads first" in result.stdout) == offered


def test_the_repair_installs_the_pinned_wheel_and_not_what_torch_asks_for(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", str(python_with(tmp_path, "3.4.5")))
    result = install(tree, "--repair", "--cuda", "13")
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("-m pip install ")
    assert {"--no-deps", "--require-hashes"} <= set(arguments.split())
    lock = (tree / "third-party" / "nvshmem.lock").read_text().splitlines()
    assert (tmp_path / "requirements").read_text().strip() in lock
    assert "nvidia-nvshmem-cu13==" in result.stdout


@pytest.fixture(scope="module")
def cmake() -> None:
    """What configures a source tree of NVSHMEM."""
    system_tools.paths("cmake", "cmake", ("cmake",))


@pytest.mark.usefixtures("cmake")
class TestSource:
    def test_a_source_tree_is_built_with_ibgda_alone(self, tree: Path, tmp_path: Path) -> None:
        install(tree, "--source", make_source(tmp_path / "source"))
        prefix = tree / "third-party" / "nvshmem-source"
        assert (tree / "third-party" / "nvshmem").resolve() == prefix
        assert (tree / "build" / "nvshmem" / "options.txt").read_text() == "ON OFF OFF"

    def test_a_folder_without_cmake_files_is_refused(self, tree: Path, tmp_path: Path) -> None:
        result = install(tree, "--source", tmp_path, status=1)
        assert "is no NVSHMEM source tree" in result.stderr

    def test_a_failing_cmake_is_reported(self, tree: Path, tmp_path: Path) -> None:
        source = make_source(tmp_path / "source")
        (source / "CMakeLists.txt").write_text("message(FATAL_ERROR broken)\n")
        result = install(tree, "--source", source, status=1)
        assert "cmake refused" in result.stderr


def test_the_lock_pins_one_version_with_hashes_for_both_machines() -> None:
    lines = (ROOT / "third-party" / "nvshmem.lock").read_text().splitlines()
    pins = [line.split() for line in lines if line and not line.startswith("#")]
    assert len({pin[0].split("==")[1] for pin in pins}) == 1
    for pin in pins:
        assert [word.split(":")[0] for word in pin[1:]] == ["--hash=sha256"] * 2
