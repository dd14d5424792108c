"""`python -m deep_ep.diagnose run`: programs are watched that know nothing of it, and come to no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli.run import environment
from deep_ep.diagnose.storage import diagnosis_log

ROOT = Path(__file__).resolve().parents[3]
# The package of another library, whose kernels are simulated.
PACKAGE = """
from support import wheels

Buffer = wheels.as_of("nixl_ep.buffer", wheels.NixlBuffer, "Buffer")
"""
TORCH = "import sys; print('torch' in sys.modules)"
LATE, NUM_RANKS = 4, 6
PROGRAM = f"""
import sys, threading
from pathlib import Path
import torch.distributed as dist
from support.waiting import eventually
%s

LATE, NUM_RANKS, FOLDER = {LATE}, {NUM_RANKS}, Path(sys.argv[1])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ended = threading.Barrier(NUM_RANKS)

def named():
    return any('"verdicts": [{{' in path.read_text() for path in FOLDER.glob("*.jsonl"))

def rank_of(rank):
    buffer = %s(rank, store.clone())
    buffer.update_memory_buffers(NUM_RANKS, 2, 0)
    waits = [20.0 + (rank + other) %% 3 for other in range(NUM_RANKS)]
    waits[LATE] = 5e4
    buffer.waits_us = [0.0] * NUM_RANKS if rank == LATE else waits

    def step():
        for _ in range(4):
            _, handle = buffer.low_latency_dispatch(None, None, 128, 2 * NUM_RANKS)
            buffer.low_latency_combine(None, None, None, handle)

    eventually(named, 180.0, step)
    ended.wait()

threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(NUM_RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
IMPORTS = {
    "the class": ("from nixl_ep import Buffer", "Buffer"),
    "the module": ("import nixl_ep", "nixl_ep.Buffer"),
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with the other library's package in it."""
    package = tmp_path / "library" / "nixl_ep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    return package.parent


def started(*arguments: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """`python`, with these arguments, and with folders to import from."""
    folders = [path, ROOT, ROOT / "tests"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(*program: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    return started("-m", "deep_ep.diagnose", "run", *program, path=path)


@pytest.mark.parametrize("way", IMPORTS)
def test_a_program_is_watched_however_it_imports_the_class(
    way: str, library: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM % IMPORTS[way])
    folder = tmp_path / "records"
    ended = run(
        *("--interval", "0.05", "--dir", folder, "--", sys.executable, program, folder),
        path=library,
    )
    assert ended.returncode == 0, ended.stderr
    assert "watches a buffer of NIXL EP, 6 ranks" in ended.stderr
    records = list(diagnosis_log.read(folder))
    named = {v.rank for record in records for v in record.diagnosis.verdicts}
    assert named == {LATE}, ended.stderr


def test_a_program_without_buffers_does_not_even_import_torch(library: Path) -> None:
    ended = run("--", sys.executable, "-c", TORCH, path=library)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("False\n", "", 0)


@pytest.mark.exhaustive
def test_a_module_that_was_imported_before_is_watched_too(library: Path) -> None:
    program = (
        "import os, nixl_ep; from deep_ep.diagnose import install\n"
        "for text in '', '0', '1':\n"
        "    os.environ['DEEP_EP_DIAGNOSE'] = text; install()\n"
        "    print(hasattr(nixl_ep.Buffer.update_memory_buffers, '__wrapped__'))"
    )
    assert started("-c", program, path=library).stdout.split() == ["False", "False", "True"]


@pytest.mark.exhaustive
def test_finders_that_ask_all_others_do_not_go_round(library: Path) -> None:
    program = (
        "import sys\n"
        "class Asks:\n"
        "    def find_spec(self, *asked):\n"
        "        others = (f.find_spec(*asked) for f in sys.meta_path if f is not self)\n"
        "        return next(filter(None, others), None)\n"
        "sys.meta_path.insert(1, Asks())\n"
        "import nixl_ep; print(hasattr(nixl_ep.Buffer.update_memory_buffers, '__wrapped__'))"
    )
    ended = run("--", sys.executable, "-c", program, path=library)
    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.exhaustive
def test_the_site_of_the_program_still_runs(library: Path) -> None:
    (library / "sitecustomize.py").write_text("print('its own')\n")
    ended = run("--", sys.executable, "-c", "print('program')", path=library)
    # The first one is that of the interpreter that becomes the program.
    assert ended.stdout == "its own\n" * 2 + "program\n"


@pytest.mark.exhaustive
def test_a_package_that_cannot_be_imported_fails_as_it_would(library: Path) -> None:
    (library / "nixl_ep" / "__init__.py").write_text("raise ImportError('no driver')\n")
    ended = run("--", sys.executable, "-c", "import nixl_ep", path=library)
    assert "ImportError: no driver" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.exhaustive
def test_a_file_of_python_is_started_by_this_python(library: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.executable, sys.argv[1:])\n")
    ended = run(program, "--dir", "mine", path=library)
    assert ended.stdout == f"{sys.executable} ['--dir', 'mine']\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no program was given"),
        (["--", ""], "no program was given"),
        (["--", "no-such-program"], "'no-such-program' cannot be"),
        (["--dir", __file__, "--", sys.executable, "-c", ""], "a file; it must be a folder"),
    ],
)
def test_what_cannot_be_started_is_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_what_the_environment_says_is_kept() -> None:
    assert environment({}, None, None)["DEEP_EP_DIAGNOSE"] == "1"
    assert environment({"DEEP_EP_DIAGNOSE": "0"}, None, None)["DEEP_EP_DIAGNOSE"] == "1"
    said = {"DEEP_EP_DIAGNOSE": "async:5", "PYTHONPATH": "/mine"}
    made = environment(said, None, Path("records"))
    assert made["DEEP_EP_DIAGNOSE"] == "async:5"
    assert environment(said, 2.5, None)["DEEP_EP_DIAGNOSE"] == "async:2.5"
    assert made["PYTHONPATH"].split(os.pathsep)[1] == "/mine"
    assert Path(made["DEEP_EP_DIAGNOSE_DIR"]).is_absolute()
