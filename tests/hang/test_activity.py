"""What a stack shows."""

from __future__ import annotations

import pytest

from deep_ep.hang.activity import PHRASES, ThreadActivity, call_of, doing, user_frame
from deep_ep.hang.states import Frame, Thread

USER = Frame("step", "/home/user/train.py", 41)
SITE = "/usr/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("what", "inner"),
    [
        ("compiling", [Frame("compile_fx", f"{SITE}/torch/_inductor/compile_fx.py", 7)]),
        # Whoever compiles may wait for a thread, or a program, meanwhile.
        (
            "compiling",
            [
                Frame("wait", "/usr/lib/python3.11/threading.py", 3),
                Frame("result", f"{SITE}/torch/_inductor/async_compile.py", 9),
            ],
        ),
        ("compiling", [Frame("_do_compile", f"{SITE}/triton/runtime/jit.py", 9)]),
        ("collective", [Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 9)]),
        # A collective of the optimiser is a collective.
        (
            "collective",
            [
                Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 9),
                Frame("step", f"{SITE}/torch/optim/adam.py", 9),
            ],
        ),
        ("optimiser", [Frame("step", f"{SITE}/torch/optim/adam.py", 9)]),
        (
            "initialising",
            [Frame("init_process_group", f"{SITE}/torch/distributed/distributed_c10d.py", 9)],
        ),
        ("checkpoint", [Frame("load", f"{SITE}/torch/serialization.py", 9)]),
        (
            "data",
            [
                Frame("get", "/usr/lib/python3.11/queue.py", 3),
                Frame("_get_data", f"{SITE}/torch/utils/data/dataloader.py", 9),
            ],
        ),
        ("debugger", [Frame("interaction", "/usr/lib/python3.11/pdb.py", 3)]),
        ("gpu", [Frame("synchronize", f"{SITE}/torch/cuda/__init__.py", 9)]),
        ("process", [Frame("communicate", "/usr/lib/python3.11/subprocess.py", 9)]),
        ("thread", [Frame("join", "/usr/lib/python3.11/threading.py", 9)]),
        ("network", [Frame("readinto", "/usr/lib/python3.11/socket.py", 9)]),
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
    Frame("_wait", f"{SITE}/deep_ep/ops/normal.py", 3),
    Frame("dispatch", "/x/deep_ep/buffer.py", 9),
]


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        ([*OURS, USER], "dispatch"),
        # A collective that our call makes is within that call.
        (
            [Frame("barrier", f"{SITE}/torch/distributed/distributed_c10d.py", 9), *OURS, USER],
            "dispatch",
        ),
        ([USER, *OURS], ""),
        ([Frame("__init__", f"{SITE}/deep_ep/buffer.py", 9), USER], ""),
        ([], ""),
    ],
)
def test_the_call_of_ours_in_which_the_host_is(frames: list[Frame], call: str) -> None:
    assert call_of([Thread("MainThread", tuple(frames))]) == call


def test_a_program_in_a_folder_of_our_name_is_no_library() -> None:
    program = Frame("step", "/home/user/deep_ep/train.py", 4)
    assert user_frame([*OURS, program]) == program
