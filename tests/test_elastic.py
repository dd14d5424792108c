"""`ElasticBuffer`, end to end: a program with DeepEP's options, and a few tests of it.

It repeats the checks of the original's test, all of them exact, and measures. With --diagnose it then
shows who waited for whom, with --inject it makes a rank, a path or an expert slow first and succeeds only
if the verdicts name exactly that:

    python tests/test_elastic.py --num-processes 4
    python tests/test_elastic.py --num-processes 8 --ranks-per-node 4 --combinations all
    torchrun --nproc-per-node 8 tests/test_elastic.py --do-cpu-sync 0
    python tests/test_elastic.py --skip-check --skip-perf-test --inject slow-rank=3:2ms
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.elastic_cases import combinations, parse_arguments, run_rank
from support.program import assert_named, run_program, start

# Shapes of tests: some combinations, in seconds.
REDUCED = (
    "--num-processes=4", "--num-tokens=32", "--hidden=256", "--num-topk=3", "--num-experts=16",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns the exit status."""
    return start(run_rank, parse_arguments(argv, __doc__ or ""))


def test_some_combinations_have_every_value_of_all() -> None:
    every = combinations(parse_arguments(["--combinations=all"], ""))
    some = combinations(parse_arguments(["--combinations=few"], ""))
    assert len(every) == 144
    for name in every[0].__dataclass_fields__:
        assert {getattr(mode, name) for mode in some} == {getattr(mode, name) for mode in every}


def test_program_checks_and_measures_on_two_nodes_and_names_what_was_injected() -> None:
    options = ("--ranks-per-node=2", "--masked-ratio=0.2", "--inject", "slow-rank=2:5ms")
    done = run_program(Path(__file__), *REDUCED, *options)
    assert_named(done, "Comp-Slow  rank 2")
    assert "Config:\n > Ranks: 2 x 2\n > Experts: 3/16\n" in done.stdout, done.stdout
    assert done.stdout.count("> Testing with handle copy: ") == 5, done.stdout
    line = r"^ [*\-#@+] EP: \d/4 \| (?:dispatch|combine): [\d.]+ GB/s \(SO\), [\d.]+ GB/s \(SU\), \d+ us, \d+ bytes$"
    assert len(re.findall(line, done.stdout, re.MULTILINE)) == 5 * 5 * 4, done.stdout


def test_program_repeats_itself_without_waiting_for_counts() -> None:
    options = ("--do-pressure-test", "--do-cpu-sync=0", "--allow-multiple-reduction=0")
    done = run_program(
        Path(__file__), *REDUCED, *options, "--unbalanced-ratio=3", "--deterministic"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Testing with seed") == 20, done.stdout


if __name__ == "__main__":
    sys.exit(main())
