"""Decisions of setup.py and the verdict of tools/kernel_resources.py; nothing is compiled."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.errors import SetupError

from build.test_install_nvshmem import make_prefix
from support import system_tools

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module; its guard keeps it from building."""
    spec = importlib.util.spec_from_file_location("deep_ep_setup", ROOT / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arch_list", "codes"),
    [
        ("", ["sm_90a"]),
        ("9.0a;10.0+PTX", ["sm_90a", "sm_100", "compute_100"]),
        ("8.0 9.0", ["sm_90"]),
    ],
)
def test_architectures_follow_torch_s_notation(
    build: ModuleType, arch_list: str, codes: list[str]
) -> None:
    flags = build.gencode_flags(arch_list)
    assert [flag.split(",code=")[1] for flag in flags] == codes


@pytest.mark.parametrize("arch_list", ["hopper", "8.0", "90a"])
def test_unusable_architectures_are_refused(build: ModuleType, arch_list: str) -> None:
    with pytest.raises(SetupError, match="9.0a"):
        build.gencode_flags(arch_list)


class TestNvshmem:
    @pytest.fixture(autouse=True)
    def checkout(self, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An empty checkout and an empty interpreter."""
        (tmp_path / "third-party").mkdir()
        monkeypatch.setattr(build, "ROOT", tmp_path)
        monkeypatch.setattr(build.sys, "path", [str(tmp_path / "site")])
        monkeypatch.setattr(build.sysconfig, "get_path", lambda name: None)
        monkeypatch.delenv("NVSHMEM_DIR", raising=False)

    def test_none_says_how_to_get_it(self, build: ModuleType) -> None:
        assert "run ./install_nvshmem.sh" in build.find_nvshmem(cuda_major=13)

    def test_the_variable_comes_first_then_the_link_then_the_wheel(
        self, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_prefix(tmp_path / "site" / "nvidia" / "nvshmem")
        (tmp_path / "site" / "nvidia_nvshmem_cu13-3.8.0.dist-info").mkdir()
        assert build.find_nvshmem(cuda_major=13).origin == "wheel nvidia-nvshmem-cu13"
        make_prefix(tmp_path / "third-party" / "nvshmem")
        assert build.find_nvshmem(cuda_major=13).origin == "third-party/nvshmem"
        monkeypatch.setenv("NVSHMEM_DIR", str(make_prefix(tmp_path / "mine")))
        assert build.find_nvshmem(cuda_major=13).origin == "NVSHMEM_DIR"

    def test_an_empty_variable_is_none(
        self, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_prefix(tmp_path / "third-party" / "nvshmem")
        monkeypatch.setenv("NVSHMEM_DIR", "")
        assert build.find_nvshmem(cuda_major=13).origin == "third-party/nvshmem"

    def test_a_wheel_of_another_cuda_is_not_taken(self, build: ModuleType, tmp_path: Path) -> None:
        make_prefix(tmp_path / "site" / "nvidia" / "nvshmem")
        (tmp_path / "site" / "nvidia_nvshmem_cu12-3.8.0.dist-info").mkdir()
        assert isinstance(build.find_nvshmem(cuda_major=13), str)

    def test_an_old_one_is_refused_with_its_version(
        self, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVSHMEM_DIR", str(make_prefix(tmp_path / "old", "3.4.5")))
        assert "NVSHMEM 3.4.5; 3.5 or newer" in build.find_nvshmem(cuda_major=13)


def test_cuda_asked_for_without_nvcc_is_an_error(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    for automatic in ("auto", ""):
        monkeypatch.setenv("DEEP_EP_CUDA", automatic)
        assert build.cuda_modules() == []
    monkeypatch.setenv("DEEP_EP_CUDA", "1")
    with pytest.raises(SetupError, match="nvcc is neither in CUDA_HOME nor on PATH"):
        build.cuda_modules()


@pytest.mark.parametrize("words", [[], ["env", "g++"]])
def test_the_compiler_may_be_none_or_have_a_launcher(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("CXX", " ".join(words))
    assert build.host_module().link == [*(words or ["g++"]), "-shared", "-pthread"]
    checks = [ROOT / "tools" / "prerequisites.sh", sys.executable]
    # What it says otherwise is of the machine.
    said = subprocess.run(checks, check=False, capture_output=True, text=True).stderr
    assert "not found" not in said


LOG = """ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_90a'
ptxas info    : Function properties for _Z4copyPf
    {stack} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""


@pytest.mark.parametrize(("stack", "spill", "status"), [(0, 0, 0), (16, 0, 1), (0, 4, 1)])
def test_spills_and_local_memory_of_kernels_fail_the_check(
    tmp_path: Path, stack: int, spill: int, status: int
) -> None:
    log = tmp_path / "copy.log"
    log.write_text(LOG.format(stack=stack, spill=spill))
    command = [sys.executable, str(ROOT / "tools" / "kernel_resources.py"), "--check", str(log)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout
    assert "32" in result.stdout
    assert "1024" in result.stdout


# ---- what make installs and builds


def made(target: str, tmp_path: Path, **variables: str) -> list[str]:
    """The calls of python that `make TARGET` makes: DEEP_EP_CUDA, and the arguments."""
    binaries, calls = tmp_path / "venv" / "bin", tmp_path / "calls"
    binaries.mkdir(parents=True, exist_ok=True)
    (binaries / "python").write_text(f'#!/bin/sh\necho "${{DEEP_EP_CUDA:-auto}} $*" >> {calls}\n')
    (binaries / "python").chmod(0o755)
    ours = ("DEEP_EP_CUDA", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_VERSION")
    environment = {name: text for name, text in os.environ.items() if name not in ours}
    subprocess.run(
        ["make", target, f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"],
        cwd=ROOT, env={**environment, **variables}, check=True, capture_output=True,
    )  # fmt: skip
    return calls.read_text().splitlines()


def test_the_demo_installs_and_builds_only_what_it_runs(tmp_path: Path) -> None:
    calls = made("demo", tmp_path)
    installed = (tmp_path / "venv" / "requirements.txt").read_text()
    assert "torch==" in installed
    assert "pytest" not in installed
    assert not any("requirements-dev.txt" in call for call in calls)
    assert all(call.startswith("0 ") for call in calls)
    assert "tests/test_low_latency.py" in calls[-1]


def test_an_earlier_torch_is_installed_again(tmp_path: Path) -> None:
    for version in ("2.9.0", "2.10.0", "2.9.0"):
        made("demo", tmp_path, TORCH_VERSION=version)
        installed = (tmp_path / "venv" / "requirements.txt").read_text()
        assert f"torch=={version}\n" in installed


def test_help_names_every_target_that_says_what_it_does() -> None:
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    described = re.findall(r"^([^:\t\n]+):.*  ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split("\t")[0] for line in said.splitlines()] == described


def test_whoever_asks_for_cuda_gets_it(tmp_path: Path) -> None:
    assert all(call.startswith("1 ") for call in made("demo", tmp_path / "demo", DEEP_EP_CUDA="1"))
    assert all(call.startswith("auto ") for call in made("install", tmp_path / "install"))
    assert all(call.startswith("0 ") for call in made("demo", tmp_path / "empty", DEEP_EP_CUDA=""))


def test_ci_runs_what_make_test_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    (tmp_path / "python").chmod(0o755)
    runs: dict[str, list[str]] = {}
    for arguments in ("", "--all", "-k name"):
        subprocess.run(
            [ROOT / "tools" / "test.sh", tmp_path / "python", *arguments.split()],
            cwd=tmp_path, check=True,
        )  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
        runs[arguments] = [call.split(" -m pytest ")[1] for call in calls if " -m pytest " in call]
        (tmp_path / "calls").unlink()
    without, every, chosen = runs.values()
    assert [call.replace(" -m not exhaustive", "") for call in without] == every
    assert len(every) == 2
    assert not any("exhaustive" in call for call in every)
    assert [call.endswith("-k name") for call in chosen] == [True]
    assert "make test-all\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("required", "outcome"), [("0", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_without_a_package_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI_REQUIRE_TOOLS", required)
    with pytest.raises(outcome, match="pip install -r third-party/requirements-dev.txt"):
        system_tools.package("no_such_package")
