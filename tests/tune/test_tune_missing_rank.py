"""`python -m deep_ep.tune` where a rank is missing: the others end in time and name it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from deep_ep.tune import __main__ as program
from deep_ep.tune import trials
from support.missing_rank import MISSING, TIMEOUT_S, die, run_without

_SIZES = (
    *("--tokens", "16", "--hidden", "256", "--experts", "6", "--topk", "2"),
    *("--rounds", "1", "--num-sms", "2"),
)


def _stands_still(*_: object) -> None:
    time.sleep(4 * TIMEOUT_S)
    die()


def _tunes(rank: int, _: object, moment: str, port: int, folder: str) -> tuple[int, str]:
    """Runs the program as one rank, of which rank 1 is lost at a moment; its exit status and what it complained."""
    dist.destroy_process_group()
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    os.environ.update({name: str(value) for name, value in job.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["DEEP_EP_TUNED"] = f"{folder}/tuned.json"
    complaints = io.StringIO()
    with contextlib.ExitStack() as faults:
        if rank == MISSING:
            if moment == "start":
                die()
            at, name, fault = {
                "first exchange": (program, "_require_equal", lambda _: die()),
                "measuring": (trials.Exchange, "measure", lambda *_, **__: die()),
                "standing still": (program, "_tune", lambda *_, **__: _stands_still()),
            }[moment]
            faults.enter_context(mock.patch.object(at, name, fault))
        faults.enter_context(contextlib.redirect_stderr(complaints))
        status = program.main([*_SIZES, "--output", f"{folder}/config.json"])
    return status, complaints.getvalue()


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        pytest.param("start", "rank 1 did not come within 2 s", marks=pytest.mark.exhaustive),
        ("first exchange", "rank 1 ended, or does not answer"),
        pytest.param("measuring", "rank 1 ended, or does not answer", marks=pytest.mark.exhaustive),
        pytest.param(
            "standing still", "rank 1 ended, or does not answer", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_lost_rank_is_named_and_nothing_is_written(
    moment: str, words: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    survivors = run_without(_tunes, 3, -signal.SIGKILL, TIMEOUT_S, moment, port, str(tmp_path))
    for status, complaints in survivors:
        assert status == 1
        assert complaints.splitlines()[-1].startswith(f"python -m deep_ep.tune: {words}")
        assert "Traceback" not in complaints
    assert not list(tmp_path.iterdir())
