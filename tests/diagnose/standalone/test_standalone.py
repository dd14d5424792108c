"""The distribution deep-ep-diagnose: built and installed once, then used beside a stock deep_ep, without any, and beside ours."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path
from textwrap import dedent

import pytest

import deep_ep
from deep_ep.diagnose.__main__ import main

# A wheel is built and installed.
pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[3]
PROJECT = ROOT / "deep_ep" / "diagnose" / "standalone"
STOCK = '''
class Buffer:
    """As much of it as is looked at."""

    def low_latency_dispatch(self, x, dispatch_wait_recv_cost_stats=None): ...
'''
LOG = "DeepEP timeout check failed: rank = {rank}, thread = 5, value = 1024)\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(PROJECT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The folder into which the wheel is installed."""
    folder = wheel.parent / "site"
    pip("install", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with somebody else's deep_ep."""
    folder = tmp_path_factory.mktemp("stock")
    (folder / "deep_ep").mkdir()
    (folder / "deep_ep" / "__init__.py").write_text(STOCK)
    return folder


def built(project: Path, folder: Path) -> Path:
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, project)
    (made,) = folder.glob("*.whl")
    return made


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*map(str, command), *map(str, words[1:])], check=True, cwd="/")


def python(*words: object, path: list[Path], **variables: str) -> str:
    """What an interpreter prints that finds packages there, and behind these what torch and others need, but no deep_ep."""
    places = [*map(str, path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {k: v for k, v in os.environ.items() if k != "DEEP_EP_DIAGNOSE"}
    environment |= {"PYTHONPATH": os.pathsep.join(places), **variables}
    # Without site no .pth file is read, so nothing that is installed in place is found.
    command = [sys.executable, "-S", *map(str, words)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Error" not in ran.stderr
    return ran.stdout


def metadata(site: Path) -> Distribution:
    (found,) = (one for one in distributions(path=[str(site)]))
    return found


def test_the_distribution_has_the_version_of_deep_ep_and_takes_any_torch(site: Path) -> None:
    found = metadata(site)
    assert found.metadata["Name"] == "deep-ep-diagnose"
    assert found.version == deep_ep.__version__
    assert "torch" in (found.requires or [])


def test_engines_find_the_entry_point(wheel: Path, site: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    points = metadata(site).entry_points
    assert {(point.group, point.value) for point in points} == {
        ("vllm.general_plugins", "deep_ep_diagnose:install"),
        ("sglang.srt.plugins", "deep_ep_diagnose:install"),
    }


def test_no_module_imports_deep_ep(site: Path) -> None:
    found = []
    for file in site.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            found += [f"{file}: {name}" for name in names if name.split(".")[0] == "deep_ep"]
    assert not found


def test_it_has_the_licence_the_patches_and_no_native_module(site: Path) -> None:
    package = site / "deep_ep_diagnose"
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    patches = [file for file in (ROOT / "patches").rglob("*") if file.is_file()]
    for file in patches:
        assert (package / file.relative_to(ROOT)).read_bytes() == file.read_bytes()
    assert not [file for file in package.rglob("*") if file.suffix in (".so", ".pyi")]


def test_nothing_is_left_in_the_checkout(wheel: Path) -> None:
    assert not [*PROJECT.glob("build"), *PROJECT.glob("*.egg-info")]


def test_beside_a_stock_deep_ep_every_module_and_command_works(site: Path, stock: Path) -> None:
    modules = """
        import importlib, pkgutil, sys
        import deep_ep_diagnose
        for module in pkgutil.walk_packages(deep_ep_diagnose.__path__, "deep_ep_diagnose."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        for name in deep_ep_diagnose.__all__:
            assert getattr(deep_ep_diagnose, name) is not None
        assert "deep_ep" not in sys.modules
        from deep_ep import Buffer
        assert not hasattr(Buffer, "enable_counters")
    """
    helps = f"""
        import contextlib, io, runpy, sys
        for command in {commands()}:
            sys.argv, printed = ["deep_ep_diagnose", command, "--help"], io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                runpy.run_module("deep_ep_diagnose", run_name="__main__", alter_sys=True)
            assert printed.getvalue().startswith(f"usage: python -m deep_ep_diagnose {{command}}"), command
            assert "deep_ep" not in sys.modules
    """
    watched = """
        import os, sys
        os.environ["DEEP_EP_DIAGNOSE"] = "1"
        import deep_ep_diagnose
        deep_ep_diagnose.install()
        import deep_ep
        assert "deep_ep_diagnose.other_kernels.attach" in sys.modules
        assert "deep_ep.diagnose" not in sys.modules
    """
    in_children(modules, helps, watched, path=[site, stock])


def in_children(*programs: str, path: list[Path]) -> str:
    """What programs print, each in a process that is forked from one that has imported torch alone, which takes seconds."""
    parent = """
        import os, sys, torch
        for program in sys.argv[1:]:
            child = os.fork()
            if child == 0:
                exec(program, {"__name__": "__main__"})
                sys.exit()
            if os.waitpid(child, 0)[1]:
                sys.exit(1)
    """
    return python("-c", dedent(parent), *map(dedent, programs), path=path)


def commands() -> list[str]:
    """Those of `python -m deep_ep.diagnose`, as its help lists them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["--help"])
    lines = printed.getvalue().split("COMMAND\n")[1].split("\n\n")[0].splitlines()
    return [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]


def test_beside_ours_both_names_are_one(site: Path) -> None:
    one = """
        import sys
        {first}
        import deep_ep_diagnose
        from deep_ep import diagnose
        for name in diagnose.__all__:
            assert getattr(deep_ep_diagnose, name) is getattr(diagnose, name), name
        assert deep_ep_diagnose.__all__ == diagnose.__all__
        import deep_ep_diagnose.live.monitor
        from deep_ep_diagnose.core import package
        from deep_ep.diagnose.core import package as ours
        assert package is ours
        assert package.__name__ == package.__spec__.name == "deep_ep.diagnose.core.package"
        assert deep_ep_diagnose.live.monitor is diagnose.live.monitor
        assert not any(name.startswith("deep_ep_diagnose._deep_ep") for name in sys.modules)
        try:
            from deep_ep_diagnose import nothing
        except ImportError as error:
            assert "cannot import name 'nothing'" in str(error)
    """
    called = """
        import runpy, sys
        sys.argv = ["deep_ep_diagnose", "show", "--help"]
        runpy.run_module("deep_ep_diagnose", run_name="__main__", alter_sys=True)
    """
    firsts = (
        "import deep_ep.diagnose",
        "import deep_ep_diagnose.core.diagnosis",
        "from deep_ep_diagnose import judge",
        "from deep_ep_diagnose import install; install()",
    )
    programs = [one.replace("{first}", first) for first in firsts]
    printed = in_children(*programs, called, path=[site, ROOT])
    assert printed.startswith("usage: python -m deep_ep_diagnose show")


@pytest.mark.parametrize("beside", ["stock", "nothing", "ours"])
@pytest.mark.parametrize("wanted", ["", "0", "1"])
def test_the_entry_point_imports_no_torch(
    beside: str, wanted: str, site: Path, stock: Path
) -> None:
    cheap = """
        import sys
        import deep_ep_diagnose
        assert "torch" not in sys.modules and "deep_ep" not in sys.modules
        deep_ep_diagnose.install()
        deep_ep_diagnose.install()
        assert "torch" not in sys.modules and "deep_ep" not in sys.modules
        print(sum(hasattr(finder, "deep_ep_diagnose_watches") for finder in sys.meta_path))
    """
    path = {"stock": [site, stock], "nothing": [site], "ours": [site, ROOT]}[beside]
    watching = python("-c", dedent(cheap), path=path, DEEP_EP_DIAGNOSE=wanted)
    assert int(watching) == (wanted == "1")


def test_stacks_of_ours_are_read_as_by_ours(site: Path) -> None:
    stack = """
        from deep_ep_diagnose._deep_ep.hang.activity import call_of
        from deep_ep_diagnose._deep_ep.hang.states import Frame, Thread
        ours = Frame("launch", "/x/deep_ep/ops/communicator.py", 7), Frame("dispatch", "/x/deep_ep/buffer.py", 7)
        print(call_of([Thread("MainThread", (*ours, Frame("step", "/x/train.py", 7)))]))
    """
    assert python("-c", dedent(stack), path=[site]) == "dispatch\n"


def kernels(late_us: float) -> list[dict[str, object]]:
    """Six dispatches of a rank that is that late."""
    names = ("internode::notify_dispatch<false>(int)", "internode::dispatch<false>(int4*)")
    events, now = [], 0.0
    for _ in range(6):
        now += 1000
        for name, begin, end in ((names[0], late_us, 300.0), (names[1], 300.0, 500.0)):
            events.append(
                {"ph": "X", "cat": "kernel", "name": f"void deep_ep::{name}", "pid": 0, "tid": 7}
                | {"ts": now + begin, "dur": end - begin, "args": {"stream": 7}}
            )
    return events


@pytest.mark.parametrize(("command", "beside"), [("trace", "stock"), ("hang", "nothing")])
def test_it_prints_what_deep_ep_diagnose_prints(
    command: str,
    beside: str,
    site: Path,
    stock: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in range(6):
        text = json.dumps({"traceEvents": kernels(10.0 + 200 * (rank == 2))})
        (tmp_path / f"rank{rank}.json").write_text(text)
    (tmp_path / "node.log").write_text(LOG.format(rank=2) + LOG.format(rank=6))
    given = [command, str(tmp_path / "node.log") if command == "hang" else str(tmp_path)]
    path = [site, stock] if beside == "stock" else [site]
    printed = python("-m", "deep_ep_diagnose", *given, path=path)
    assert main(given) == 0
    assert printed == capsys.readouterr().out
    assert "rank 5" in printed if command == "hang" else "Who comes last" in printed
