"""Which deep_ep, native modules, torch and NVSHMEM the doctor finds, on installations that are made up."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build.test_install_nvshmem import make_prefix
from deep_ep.doctor import package
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding, examine
from deep_ep.doctor.host import Host, Ran
from deep_ep.native import nvshmem
from made_up_host import DRIVER, RDMA, all_named, made_up, named

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CONSTANTS = {
    "CUDA_MAJOR": 13,
    "NVSHMEM_VERSION": "3.8.0",
    "NVSHMEM_LIBRARY": "/ours/libnvshmem_host.so.3",
}


def copy_of(folder: Path, version: str) -> Path:
    """A folder deep_ep with nothing but a version."""
    (folder / "deep_ep").mkdir(parents=True)
    (folder / "deep_ep" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder / "deep_ep"


def torch_of(cuda: str | None = None) -> Any:
    """A torch that is built for this CUDA."""
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        compiled_with_cxx11_abi=lambda: True,
    )


def installation(
    tmp_path: Path,
    modules: tuple[str, ...] = ("_cpu",),
    said: str | Ran = "{}",
    files: dict[str, str] | None = None,
    **settings: Any,
) -> Host:
    """A machine with a deep_ep whose modules, once loaded, say this."""
    folder = copy_of(tmp_path / "source", "1.2.1+diagnose.1")
    for name in modules:
        (folder / f"{name}{SUFFIX}").touch()
    settings = {"load": lambda name: torch_of(), "package": folder, **settings}
    return made_up(tmp_path / "root", files, {sys.executable: said}, **settings)


def built(tmp_path: Path, **settings: Any) -> Host:
    """One that was built for CUDA, with NVSHMEM."""
    return installation(tmp_path, ("_cpu", "_cuda"), json.dumps(CONSTANTS), **settings)


def look(host: Host) -> list[Finding]:
    """All lines on the installation."""
    return examine(package.CHECKS, host)


def test_another_package_of_the_same_name_on_the_path_is_named_in_order(tmp_path: Path) -> None:
    other = copy_of(tmp_path / "site", "1.2.1")
    host = installation(tmp_path, search_path=(str(other.parent), str(tmp_path / "source")))
    found = named(look(host), "other deep_ep")
    assert found.status == WARN
    assert f"{other} (1.2.1), {host.package} (1.2.1+diagnose.1)" in found.found


def test_one_copy_is_no_line_whatever_links_to_it(tmp_path: Path) -> None:
    link = tmp_path / "site" / "deep_ep"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "source" / "deep_ep")
    folders = [tmp_path / "source", link.parent]
    host = installation(tmp_path, search_path=tuple(map(str, folders)))
    assert not all_named(look(host), "other deep_ep")


@pytest.mark.parametrize(
    ("error", "meaning", "repair"),
    [
        ("SIGILL", "instructions that this CPU does not have", "DEEP_EP_CPU_ARCH="),
        ("_cpu.so: undefined symbol: _ZN3c10", "another version of a library", "pip install"),
        (
            *("libnvshmem_host.so.3: cannot open shared object file", "linked with a library"),
            "./install_nvshmem.sh --repair), or put its folder into LD_LIBRARY_PATH",
        ),
        ("version `GLIBCXX_3.4.32' not found", "newer libraries", "pip install"),
    ],
)
def test_a_module_that_does_not_load_says_what_its_error_means(
    tmp_path: Path, error: str, meaning: str, repair: str
) -> None:
    ran = Ran(-4, "") if error == "SIGILL" else Ran(1, f"Traceback\nImportError: {error}\n")
    found = named(look(installation(tmp_path, said=ran)), "deep_ep._cpu")
    assert found.status == FAIL
    assert found.found.endswith(error)
    assert meaning in found.why
    assert repair in found.repair


def test_a_module_that_is_there_for_another_python_is_named(tmp_path: Path) -> None:
    host = installation(tmp_path, modules=())
    (host.package / "_cpu.cpython-38-x86_64-linux-gnu.so").touch()
    found = named(look(host), "deep_ep._cpu")
    assert (found.status, "another Python (_cpu.cpython-38" in found.found) == (FAIL, True)


@pytest.mark.parametrize(
    ("module", "files", "status"),
    [
        ("_cpu", {}, FAIL),
        ("_cuda", {}, OK),
        ("_cuda", DRIVER, FAIL),
        ("_cuda_nvshmem", DRIVER, OK),
        ("_cuda_nvshmem", {**DRIVER, **RDMA}, WARN),
    ],
)
def test_a_module_is_missed_only_where_it_could_be_used(
    tmp_path: Path, module: str, files: dict[str, str], status: str
) -> None:
    host = installation(tmp_path, modules=(), files=files)
    found = named(look(host), f"deep_ep.{module}")
    assert (found.found, found.status) == ("not built", status)


def test_a_torch_that_does_not_load_is_a_finding_with_its_chain_of_errors(tmp_path: Path) -> None:
    def load(name: str) -> Any:
        raise ImportError("torch is broken") from OSError("libcudart.so.13 is missing")

    found = named(look(installation(tmp_path, load=load)), "torch")
    assert found.status == FAIL
    assert (
        "ImportError: torch is broken, because of OSError: libcudart.so.13 is missing"
        in found.found
    )


def test_the_cuda_of_torch_is_compared_with_that_of_the_build(tmp_path: Path) -> None:
    host = built(tmp_path, load=lambda name: torch_of("12.8"))
    found = named(look(host), "CUDA of the build")
    said = "deep_ep was built with CUDA 13, torch with CUDA 12.8"
    assert (found.status, found.found) == (WARN, said)


def incomplete_copy(prefix: Path, version: str) -> Path:
    """A prefix of NVSHMEM with its host library alone; returns the folder."""
    folder = make_prefix(prefix, version) / "lib"
    for part in folder.glob("nvshmem_*"):
        part.unlink()
    return folder


def test_an_incomplete_nvshmem_is_named_and_fails_where_it_is_needed_and_the_only_one(
    tmp_path: Path,
) -> None:
    folder = incomplete_copy(tmp_path / "nv", "3.8.0")
    environment = {"NVSHMEM_DIR": str(tmp_path / "nv")}
    found = named(look(installation(tmp_path / "without", environment=environment)), "NVSHMEM")
    assert found.status == WARN
    assert f"{folder} (NVSHMEM_DIR), without nvshmem_bootstrap" in found.found
    host = built(tmp_path, environment=environment)
    assert named(look(host), "NVSHMEM").status == FAIL
    make_prefix(tmp_path / "home")
    environment["NVSHMEM_HOME"] = str(tmp_path / "home")
    assert named(look(host), "NVSHMEM").status == WARN


def test_several_versions_of_nvshmem_are_named_the_loader_s_first(tmp_path: Path) -> None:
    first = make_prefix(tmp_path / "cluster") / "lib"
    make_prefix(tmp_path / "site" / "nvidia" / "nvshmem", "3.4.5")
    environment = {"LD_LIBRARY_PATH": str(first)}
    host = installation(tmp_path, environment=environment, search_path=(str(tmp_path / "site"),))
    said = f"3.8.0 in {first} (LD_LIBRARY_PATH), then 3.4.5 in "
    found = named(look(host), "NVSHMEM")
    assert (found.status, found.found.startswith(said)) == (WARN, True)


def test_an_nvshmem_that_is_not_there_or_too_old_fails_with_the_command_that_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = nvshmem.HostLibrary("3.4.5", "/torch/libnvshmem_host.so.3")
    monkeypatch.setattr(nvshmem, "in_process", lambda: loaded)
    host = built(tmp_path)
    missed = named(look(host), "NVSHMEM")
    assert (missed.status, missed.found) == (FAIL, "none found")
    found = named(look(host), "NVSHMEM in process")
    assert found.status == FAIL
    assert "loaded: 3.4.5 (/torch/" in found.found
    assert "needed: 3.8.0" in found.found
    assert "pip install --no-deps nvidia-nvshmem-cu13==3.8.0" in found.repair
    loaded = loaded._replace(version="3.8.0")
    assert named(look(host), "NVSHMEM in process").status == OK
