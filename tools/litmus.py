"""Litmus tests of the kernels' protocol under the PTX memory model: docs/memory_model.md.

Usage: python tools/litmus.py [--lines] [--variants]
    --lines     the source lines that each test stands for
    --variants  every variant of the source, and which test tells it apart
"""

from __future__ import annotations

import argparse
import sys
import time

from memory_order.expectations import LEFT_OUT, NO_DIFFERENCE
from memory_order.litmus import Litmus, Variant, site_line, variants
from memory_order.mask_programs import ALL
from memory_order.sources import Source, working_tree


def by_variant(source: Source) -> dict[Variant, list[Litmus]]:
    """All variants, and the tests that have a line of theirs."""
    made: dict[Variant, list[Litmus]] = {}
    for test in ALL:
        for variant in variants(source, test):
            made.setdefault(variant, []).append(test)
    return made


def finder(source: Source, variant: Variant, tests: list[Litmus]) -> Litmus | None:
    """The first test that tells a variant apart."""
    return next((test for test in tests if test.check(source, variant) is not None), None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    source = working_tree()
    broken = 0
    for test in ALL:
        execution = test.check(source)
        broken += execution is not None
        print(f"{'holds' if execution is None else 'BROKEN':7} {test.name}: {test.claim}")
        if execution is not None:
            print(f"        {execution.reason}: {execution.registers}")
        for name in sorted(test.program(source).sites) if args.lines else ():
            print(f"        {name:45} {site_line(source, name)}")
    made = by_variant(source)
    missed = set()
    for variant, tests in made.items():
        found = finder(source, variant, tests)
        if found is None:
            missed.add(str(variant))
        if args.variants:
            print(
                f"{variant}: {found.name if found else NO_DIFFERENCE.get(str(variant), 'MISSED')}"
            )
    unknown = sorted(missed - set(NO_DIFFERENCE))
    print(
        f"{len(ALL)} claims, {broken} broken; {len(made)} variants, {len(made) - len(missed)} found, "
        f"{len(missed)} that change nothing, {len(unknown)} of them without a reason; "
        f"{len(LEFT_OUT)} of {len(source.sites)} source lines left out; {time.monotonic() - begin:.0f} s"
    )
    for variant in unknown:
        print(f"missed: {variant}")
    return 1 if broken or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
