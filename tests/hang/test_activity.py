"""What a stack shows."""

from __future__ import annotations

import pytest

from deep_ep.hang.activity import PHRASES, ThreadActivity, call_of, doing, user_frame
from deep_ep.hang.states import Frame, Thread

USER = Frame("step", "/home/user/train.py", 41)
SITE = "/usr/lib/python3.11/site-packages"


C10D = "torch/distributed/distributed_c10d.py"


def library(file: str, function: str) -> Frame:
    return Frame(function, f"{SITE}/{file}", 9)


@pytest.mark.parametrize(
    ("what", "inner"),
    [
        ("compiling", [library("torch/_inductor/compile_fx.py", "compile_fx")]),
        # Whoever compiles may wait for a thread, or a program, meanwhile.
        ("compiling", [library("threading.py", "wait"), library("torch/_inductor/x.py", "result")]),
        ("compiling", [library("triton/runtime/jit.py", "_do_compile")]),
        ("collective", [library(C10D, "all_reduce")]),
        # A collective of the optimiser is a collective.
        ("collective", [library(C10D, "all_reduce"), library("torch/optim/adam.py", "step")]),
        ("optimiser", [library("torch/optim/adam.py", "step")]),
        ("initialising", [library(C10D, "init_process_group")]),
        ("checkpoint", [library("torch/serialization.py", "load")]),
        ("data", [library("queue.py", "get"), library("torch/utils/data/x.py", "_get_data")]),
        ("debugger", [library("pdb.py", "interaction")]),
        ("gpu", [library("torch/cuda/__init__.py", "synchronize")]),
        ("process", [library("subprocess.py", "communicate")]),
        ("thread", [library("threading.py", "join")]),
        ("network", [library("socket.py", "readinto")]),
        ("sleeping", [Frame("step", "/home/user/train.py", 40, "time.sleep(100)")]),
        ("importing", [Frame("_find_and_load", "<frozen importlib._bootstrap>", 9)]),
        ("runs", []),
    ],
)
def test_the_frame_that_shows_it(what: str, inner: list[Frame]) -> None:
    found = doing([Thread("MainThread", (*inner, USER))])
    assert found is not None
    assert found.what == what
    assert found.what in PHRASES
    assert found.user in (USER, *inner)


def test_a_program_that_runs_while_it_is_imported_is_not_importing() -> None:
    frames = [Frame(f"f{i}", "/home/user/train.py", i) for i in range(5)]
    found = doing([Thread("", (*frames, Frame("_load", "<frozen importlib._bootstrap>", 1)))])
    assert found == ThreadActivity("runs", "", frames[0], frames[0])


def test_nothing_is_known() -> None:
    assert doing([]) is None
    assert doing([Thread("MainThread", ())]) is None


OURS = [
    library("deep_ep/ops/normal.py", "_wait"),
    Frame("dispatch", "/x/deep_ep/buffer.py", 9),
]


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        ([*OURS, USER], "dispatch"),
        # A collective that our call makes is within that call.
        ([library(C10D, "barrier"), *OURS, USER], "dispatch"),
        # What profiles a method stands around it.
        ([*OURS, library("deep_ep/observe/profiled.py", "call"), USER], "dispatch"),
        ([USER, *OURS], ""),
        ([library("deep_ep/buffer.py", "__init__"), USER], ""),
        ([], ""),
    ],
)
def test_the_call_of_ours_in_which_the_host_is(frames: list[Frame], call: str) -> None:
    assert call_of([Thread("MainThread", tuple(frames))]) == call


def test_a_program_in_a_folder_of_our_name_is_no_library() -> None:
    program = Frame("step", "/home/user/deep_ep/train.py", 4)
    assert user_frame([*OURS, program]) == program
