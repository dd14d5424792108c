"""Normal dispatch and combine within a node, end to end: a program with DeepEP's options, and a few tests of it.

It repeats the checks of the original's test and measures. With --diagnose it then shows who waited
for whom, with --inject it makes a rank, a path or an expert slow first and succeeds only if the
verdicts name exactly that:

    python tests/test_intranode.py --num-processes 8
    torchrun --nproc-per-node 8 tests/test_intranode.py --tune
    python tests/test_intranode.py --num-tokens 256 --quick --diagnose --inject slow-rank=3:2ms
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.normal_cases import parse_arguments, run_rank
from support.program import assert_named, run_program, start

# Shapes of tests: all loops, in seconds.
REDUCED = (
    "--num-processes=4", "--num-tokens=48", "--hidden=512", "--num-topk=3", "--num-experts=16",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    return start(run_rank, parse_arguments(argv, __doc__ or "", between_nodes=False))


def test_program_checks_measures_and_names_what_was_injected() -> None:
    options = ("--test-ll-compatibility", "--inject", "slow-rank=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    assert_named(done, "Comp-Slow  rank 2")
    assert done.stdout.count("passed") == 24 + 1, done.stdout
    for words in ("[layout] Kernel performance:", "Best dispatch (FP8):", "Best combine:"):
        assert words in done.stdout, done.stdout


def test_program_names_a_receiver_for_whose_slots_the_others_wait() -> None:
    options = ("--quick", "--num-tokens=128", "--nvl-slots=2", "--inject", "slow-receiver=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    assert_named(done, "Mixed-Slow  rank 2")


def test_program_times_all_chunk_sizes() -> None:
    sizes = ("--num-tokens=8", "--hidden=128", "--num-topk=2", "--num-experts=4")
    done = run_program(Path(__file__), *sizes, "--tune", "--num-processes=2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if ", NVL chunk " in line]
    of_each = {"NVL chunk 4:": 3, "NVL chunk 32:": 2, "NVL chunk 15:": 1, "NVL chunk default:": 3}
    for words, times in of_each.items():  # of two dispatches and a combine, and who is best
        tried = [line for line in lines if words in line and "Best" not in line]
        assert len(tried) == times, done.stdout
    assert sum("Best" in line for line in lines) == 3, done.stdout


if __name__ == "__main__":
    sys.exit(main())
