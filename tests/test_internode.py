"""Normal dispatch and combine between nodes, end to end: a program with DeepEP's options, and a few tests of it.

On one machine --ranks-per-node says which ranks count as a node. It repeats the checks of the
original's test and measures; --pressure-test-mode repeats them and compares what was received;
--diagnose and --inject are those of test_intranode.py:

    python tests/test_internode.py --num-processes 8 --ranks-per-node 4
    torchrun --nproc-per-node 8 --nnodes 2 ... tests/test_internode.py
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from support.normal_cases import parse_arguments, run_rank
from support.program import assert_named, run_program, start, torchrun

# Shapes of tests: all loops, in seconds.
REDUCED = (
    "--num-processes=4", "--ranks-per-node=2", "--num-tokens=48", "--hidden=512", "--num-topk=3",
    "--num-experts=16",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    return start(run_rank, parse_arguments(argv, __doc__ or "", between_nodes=True))


def test_program_repeats_itself_under_pressure_and_measures_under_torchrun() -> None:
    pressure = ("--pressure-test-mode=2", "--pressure-seeds=1", "--pressure-repetitions=1")
    options = (*REDUCED, *pressure, "--test-ll-compatibility")
    done = run_program(Path(__file__), *options, launcher=torchrun(4))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "num_nodes=2",
        "Testing with seed 0",
        "low latency on the same buffer ... passed",
        "GB/s (RDMA)",
        "Best dispatch (FP8):",
        "Best combine:",
    ):
        assert words in done.stdout, done.stdout


def test_program_names_a_slow_nic_and_not_its_paths() -> None:
    options = ("--quick", "--ranks-per-node=1", "--inject", "slow-nic=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    assert_named(done, "Comm-Slow  rank 2")
    assert "Comm-Slow  path" not in done.stdout, done.stdout


def test_program_names_a_receiver_for_whose_slots_gateways_wait_and_no_gateway() -> None:
    options = ("--quick", "--num-tokens=128", "--nvl-slots=2", "--inject", "slow-receiver=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    assert_named(done, "Mixed-Slow  rank 2")
    assert "(slow receive)" not in done.stdout, done.stdout
    assert "Mixed-Slow  rank 0" not in done.stdout, done.stdout


def test_program_says_that_one_node_is_not_enough(capsys: Any) -> None:
    with contextlib.suppress(SystemExit):
        main([*REDUCED, "--ranks-per-node=4"])
    assert "4 ranks are one node of 4; there must be several" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(main())
