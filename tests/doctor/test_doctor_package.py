"""Which deep_ep, native modules, torch and NVSHMEM the doctor finds, on installations that are made up."""

from __future__ import annotations

import dataclasses
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.doctor import libraries, package
from deep_ep.doctor.finding import FAIL, OK, WARN
from deep_ep.doctor.host import Host, Ran
from deep_ep.native import nvshmem
from made_up_host import all_named, made_up, named

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CONSTANTS = {
    "CUDA_MAJOR": 13,
    "NVSHMEM_VERSION": "3.8.0",
    "NVSHMEM_LIBRARY": "/ours/libnvshmem_host.so.3",
}
DRIVER = {"/proc/driver/nvidia/version": "NVRM version: 570.86"}


def copy_of(folder: Path, version: str) -> Path:
    """A folder deep_ep with nothing but a version."""
    (folder / "deep_ep").mkdir(parents=True)
    (folder / "deep_ep" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder / "deep_ep"


def installation(
    tmp_path: Path, modules: tuple[str, ...] = ("_cpu",), said: str | Ran = "{}", **settings: Any
) -> Host:
    """A machine with a deep_ep whose modules, once loaded, say this."""
    folder = copy_of(tmp_path / "source", "1.2.1+diagnose.1")
    for name in modules:
        (folder / f"{name}{SUFFIX}").touch()
    torch = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=None),
        compiled_with_cxx11_abi=lambda: True,
    )
    settings.setdefault("load", lambda name: torch)
    return made_up(
        tmp_path / "root",
        settings.pop("files", None),
        {sys.executable: said},
        package=folder,
        **settings,
    )


def distribution(folder: Path, version: str, editable: str | None = None) -> None:
    """What pip leaves of an installation."""
    info = folder / f"deep_ep-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deep_ep\nVersion: {version}\n")
    if editable is not None:
        origin = {"url": f"file://{editable}", "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))


def test_another_package_of_the_same_name_on_the_path_is_named_in_order(tmp_path: Path) -> None:
    other = copy_of(tmp_path / "site", "1.2.1")
    host = installation(tmp_path, search_path=(str(other.parent), str(tmp_path / "source")))
    found = named(package.check(host), "other deep_ep")
    assert found.status == WARN
    assert f"{other} (another package, 1.2.1), {host.package} (this package" in found.found


def test_one_copy_alone_is_no_line(tmp_path: Path) -> None:
    host = installation(tmp_path, search_path=(str(tmp_path / "source"),))
    assert not all_named(package.check(host), "other deep_ep")


def test_two_distributions_fail(tmp_path: Path) -> None:
    distribution(tmp_path / "a", "1.2.1")
    distribution(tmp_path / "b", "1.2.1+diagnose.1")
    host = installation(tmp_path, search_path=(str(tmp_path / "a"), str(tmp_path / "b")))
    found = named(package.check(host), "distribution")
    assert (found.status, "several" in found.found) == (FAIL, True)
    assert "pip uninstall deep_ep" in found.repair


@pytest.mark.parametrize(("of_this_tree", "status"), [(True, OK), (False, WARN)])
def test_an_editable_installation_of_another_tree_is_warned_of(
    tmp_path: Path, of_this_tree: bool, status: str
) -> None:
    source = tmp_path / "source" if of_this_tree else tmp_path / "elsewhere"
    distribution(tmp_path / "site", "1.2.1+diagnose.1", editable=str(source))
    host = installation(tmp_path, search_path=(str(tmp_path / "site"),))
    assert named(package.check(host), "distribution").status == status


@pytest.mark.parametrize(
    ("error", "meaning", "repair"),
    [
        (
            "ImportError: _cpu.so: undefined symbol: _ZN3c10",
            "another version of a library",
            "pip install",
        ),
        (
            "ImportError: libnvshmem_host.so.3: cannot open shared object file",
            "linked with NVSHMEM",
            "./install_nvshmem.sh --repair",
        ),
        (
            "ImportError: libcuda.so.1: cannot open shared object file",
            "linked with a library",
            "LD_LIBRARY_PATH",
        ),
        ("ImportError: version `GLIBCXX_3.4.32' not found", "newer libraries", "pip install"),
    ],
)
def test_a_module_that_does_not_load_says_what_its_error_means(
    tmp_path: Path, error: str, meaning: str, repair: str
) -> None:
    host = installation(tmp_path, said=Ran(1, f"Traceback\n{error}\n"))
    found = named(package.check(host), "deep_ep._cpu")
    assert found.status == FAIL
    assert error in found.found
    assert meaning in found.why
    assert repair in found.repair


def test_a_module_is_tried_once_for_all_checks(tmp_path: Path) -> None:
    host = installation(tmp_path, ("_cuda",))
    tried: list[str] = []

    def run(command: Sequence[str]) -> Ran:
        tried.extend(command)
        return host.run(command)

    counting = dataclasses.replace(host, run=run)
    package.check(counting)
    libraries.check(counting)
    assert tried.count("_cuda") == 1


def test_a_module_that_crashes_is_a_finding(tmp_path: Path) -> None:
    found = named(package.check(installation(tmp_path, said=Ran(-4, ""))), "deep_ep._cpu")
    assert "SIGILL" in found.found
    assert "DEEP_EP_CPU_ARCH=" in found.repair


def test_a_module_that_is_there_for_another_python_is_named(tmp_path: Path) -> None:
    host = installation(tmp_path, modules=())
    (host.package / "_cpu.cpython-38-x86_64-linux-gnu.so").touch()
    found = named(package.check(host), "deep_ep._cpu")
    assert (found.status, "another Python (_cpu.cpython-38" in found.found) == (FAIL, True)


@pytest.mark.parametrize(("files", "status"), [({}, OK), (DRIVER, FAIL)])
def test_a_cuda_module_is_missed_only_where_there_is_a_gpu(
    tmp_path: Path, files: dict[str, str], status: str
) -> None:
    found = named(package.check(installation(tmp_path, files=files)), "deep_ep._cuda")
    assert (found.found, found.status) == ("not built", status)


def test_a_torch_that_does_not_load_is_a_finding_with_its_chain_of_errors(tmp_path: Path) -> None:
    def load(name: str) -> Any:
        raise ImportError("torch is broken") from OSError("libcudart.so.13 is missing")

    found = named(package.check(installation(tmp_path, load=load)), "torch")
    assert found.status == FAIL
    assert (
        "ImportError: torch is broken, because of OSError: libcudart.so.13 is missing"
        in found.found
    )


def test_the_cuda_of_torch_is_compared_with_that_of_the_build(tmp_path: Path) -> None:
    torch = SimpleNamespace(
        __version__="2.9.0+cu128",
        version=SimpleNamespace(cuda="12.8"),
        compiled_with_cxx11_abi=lambda: True,
    )
    modules = ("_cpu", "_cuda")
    host = installation(tmp_path, modules, json.dumps(CONSTANTS), load=lambda name: torch)
    found = named(package.check(host), "CUDA of the build")
    assert (found.status, found.found) == (
        WARN,
        "deep_ep was built with CUDA 13, torch with CUDA 12.8",
    )


def nvshmem_copy(prefix: Path, version: str, parts: tuple[str, ...]) -> Path:
    """A prefix of NVSHMEM with these libraries; returns their folder."""
    header = prefix / "include" / "non_abi" / "nvshmem_version.h"
    header.parent.mkdir(parents=True)
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [f"#define NVSHMEM_VENDOR_{n}_VERSION {v}" for n, v in zip(names, version.split("."))]
    header.write_text("\n".join(lines))
    (prefix / "lib").mkdir()
    for part in parts:
        (prefix / "lib" / part).touch()
    return prefix / "lib"


WHOLE = ("libnvshmem_host.so.3", "nvshmem_bootstrap_uid.so.3", "nvshmem_transport_ibgda.so.4")


def test_an_incomplete_nvshmem_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    folder = nvshmem_copy(tmp_path / "nv", "3.4.5", WHOLE[:1])
    host = installation(tmp_path, environment={"NVSHMEM_DIR": str(tmp_path / "nv")})
    found = named(libraries.check(host), "NVSHMEM")
    assert found.status == WARN
    assert f"{folder} (NVSHMEM_DIR) is incomplete" in found.found
    assert "nvshmem_transport_ibgda.so" in found.found


def test_an_incomplete_nvshmem_fails_where_it_is_needed_and_the_only_one(tmp_path: Path) -> None:
    nvshmem_copy(tmp_path / "nv", "3.8.0", WHOLE[:1])
    environment = {"NVSHMEM_DIR": str(tmp_path / "nv")}
    host = installation(tmp_path, ("_cpu", "_cuda"), json.dumps(CONSTANTS), environment=environment)
    assert named(libraries.check(host), "NVSHMEM").status == FAIL
    nvshmem_copy(tmp_path / "home", "3.8.0", WHOLE)
    environment["NVSHMEM_HOME"] = str(tmp_path / "home")
    statuses = [finding.status for finding in all_named(libraries.check(host), "NVSHMEM")]
    assert statuses == [WARN, OK]


def test_several_versions_of_nvshmem_are_named_the_loader_s_first(tmp_path: Path) -> None:
    first = nvshmem_copy(tmp_path / "cluster", "3.8.0", WHOLE)
    nvshmem_copy(tmp_path / "site" / "nvidia" / "nvshmem", "3.4.5", WHOLE)
    host = installation(
        tmp_path,
        environment={"LD_LIBRARY_PATH": str(first)},
        search_path=(str(tmp_path / "site"),),
    )
    found = named(libraries.check(host), "NVSHMEM")
    assert found.found.startswith(
        f"several versions: 3.8.0 in {first} (LD_LIBRARY_PATH), then 3.4.5"
    )


def test_nvshmem_is_missed_where_the_build_needs_it(tmp_path: Path) -> None:
    host = installation(tmp_path, ("_cpu", "_cuda"), json.dumps(CONSTANTS))
    found = named(libraries.check(host), "NVSHMEM")
    assert (found.status, found.found) == (FAIL, "none found")
    assert "./install_nvshmem.sh" in found.repair


def test_a_loaded_nvshmem_that_is_too_old_fails_with_the_command_that_replaces_it() -> None:
    needed = nvshmem.HostLibrary("3.8.0", "/ours/libnvshmem_host.so.3")
    old = nvshmem.HostLibrary("3.4.5", "/torch/libnvshmem_host.so.3")
    found = libraries.judge_loaded(old, (needed, 13))
    assert found.status == FAIL
    assert "loaded: 3.4.5 (/torch/" in found.found
    assert "needed: 3.8.0" in found.found
    assert "pip install --no-deps nvidia-nvshmem-cu13==3.8.0" in found.repair
    assert libraries.judge_loaded(needed, (needed, 13)).status == OK
