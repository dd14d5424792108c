"""Normal dispatch and combine within a node, end to end: a program with DeepEP's options, and a few tests of it.

It repeats the checks of the original's test and measures. With --diagnose it then shows who waited
for whom, with --inject it makes a rank, a path or an expert slow first and succeeds only if the
verdicts name exactly that:

    python tests/test_intranode.py --num-processes 8
    python tests/test_intranode.py --num-tokens 256 --quick --diagnose --inject slow-rank=3:2ms
"""

from __future__ import annotations

import sys
from pathlib import Path

from normal_cases import parse_arguments, run_rank
from program import run_program, start

# Shapes of tests: all loops, in seconds.
REDUCED = (
    "--num-processes=4", "--num-tokens=48", "--hidden=512", "--num-topk=3", "--num-experts=16",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    return start(run_rank, parse_arguments(argv, __doc__ or "", between_nodes=False))


def test_program_checks_measures_and_names_what_was_injected() -> None:
    """It may name others besides: a second step of a dispatch is short, and cores are shared here."""
    options = ("--test-ll-compatibility", "--inject", "slow-rank=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "named but not injected" in output, output
    assert "injected but not named" not in output, output
    assert "Comp-Slow  rank 2" in output, output
    assert done.stdout.count("passed") == 24 + 1, output
    for words in ("[layout] Kernel performance:", "Best dispatch (FP8):", "Best combine:"):
        assert words in done.stdout, output


if __name__ == "__main__":
    sys.exit(main())
