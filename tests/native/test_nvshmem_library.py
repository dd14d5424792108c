"""Which NVSHMEM host library is in a process: stand-in libraries of the same name, in a process of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_ep.native import nvshmem

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]
SOURCE = """
void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {{
    *major = {0}; *minor = {1}; *patch = {2};
}}
"""


def library(folder: Path, version: str) -> Path:
    """A host library that can say its version, if it has one, and nothing else."""
    folder.mkdir(parents=True)
    source, path = folder / "host.c", folder / nvshmem.SONAME
    source.write_text(SOURCE.format(*version.split(".")) if version else "int nothing;\n")
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{nvshmem.SONAME}", "-o", path, source]
    subprocess.run(command, check=True)
    return path


def run(code: str, **env: str) -> str:
    """What a fresh process prints."""
    header = (
        "import ctypes\n"
        "from deep_ep.native import nvshmem\n"
        "ours = nvshmem.HostLibrary('3.8.0', '/ours/libnvshmem_host.so.3')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", header + code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path), **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def conflict_with(folder: Path, version: str) -> tuple[Path, str]:
    """A library of that version, and what a process says that has loaded it."""
    there = library(folder / "of torch", version)
    code = f"ctypes.CDLL({str(there)!r})\nprint(nvshmem.conflict(nvshmem.in_process(), ours, 13))"
    return there, run(code)


def test_an_older_library_in_the_process_is_named_with_both_versions_and_files_and_the_repair(
    tmp_path: Path,
) -> None:
    old, said = conflict_with(tmp_path, "3.4.5")
    assert f"NVSHMEM 3.4.5 ({old})" in said
    assert "NVSHMEM 3.8.0 (/ours/libnvshmem_host.so.3)" in said
    assert "pip install --no-deps nvidia-nvshmem-cu13==3.8.0" in said
    assert "./install_nvshmem.sh --repair" in said
    assert "LD_PRELOAD=/ours/libnvshmem_host.so.3" in said


@pytest.mark.parametrize(
    ("version", "serves"),
    [("3.8.0", True), ("3.8.4", True), ("3.10.1", True), ("3.7.9", False), ("4.0.0", False)],
)
def test_libraries_of_the_same_major_version_that_are_not_older_serve(
    tmp_path: Path, version: str, serves: bool
) -> None:
    _, said = conflict_with(tmp_path, version)
    assert (said == "None\n") == serves


def test_what_the_loader_finds_is_named_once_the_module_did_not_load(tmp_path: Path) -> None:
    there = library(tmp_path / "there", "3.4.5")
    # To look is not to load.
    assert run("print(nvshmem.in_process())", LD_LIBRARY_PATH=str(there.parent)) == "None\n"
    code = "print(nvshmem.conflict(nvshmem.on_path(), ours, 13))"
    assert f"NVSHMEM 3.4.5 ({there})" in run(code, LD_LIBRARY_PATH=str(there.parent))


def test_a_library_without_a_version_does_not_serve(tmp_path: Path) -> None:
    there, said = conflict_with(tmp_path, "")
    assert f"NVSHMEM of an unknown version ({there})" in said
