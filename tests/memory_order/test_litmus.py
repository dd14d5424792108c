"""The protocol keeps its claims under the PTX memory model, and everything weaker is found."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

from support import system_tools

system_tools.package("z3")

from memory_order.expectations import LEFT_OUT, NO_DIFFERENCE  # noqa: E402
from memory_order.litmus import Litmus, Variant, order_of, variants  # noqa: E402
from memory_order.mask_programs import ALL  # noqa: E402
from memory_order.ptx import find_execution  # noqa: E402
from memory_order.sources import DEVICE, ROOT, TRANSPORT, Source, working_tree  # noqa: E402

pytestmark = pytest.mark.exhaustive

SOURCE = working_tree()
NAMES = [test.name for test in ALL]


def changed(path: str, original: str, replacement: str) -> Source:
    """The source with one line of one file weaker."""
    text = (ROOT / path).read_text()
    assert text.count(original) == 1, original
    return Source({path: text.replace(original, replacement)})


@pytest.mark.parametrize("test", ALL, ids=NAMES)
def test_the_claim_holds(test: Litmus) -> None:
    execution = test.check(SOURCE)
    assert execution is None, f"{test.claim} Not if {execution}"


@pytest.mark.parametrize("test", ALL, ids=NAMES)
def test_the_program_can_run_at_all(test: Litmus) -> None:
    """A wait that never ends would make every claim true."""
    program = test.program(SOURCE)
    assert find_execution(program.threads, program.initial, lambda _: True, None) is not None


# Where the next round of a loop follows.
LOOPS = {"bounce_places"}


def out_of_order(source: Source, test: Litmus) -> list[tuple[str, str]]:
    """Pairs of a thread's lines that the same function has the other way round."""
    found = []
    for thread in test.program(source).threads:
        lines = [event.order.sites[0] for event in thread.events if event.order.sites]
        for first, second in combinations(lines, 2):
            same = first.rpartition(".")[0] == second.rpartition(".")[0]
            if same and source.site(first).line > source.site(second).line:
                found.append((first, second))
    return found


def test_programs_have_their_lines_in_the_order_of_the_source() -> None:
    for test in ALL:
        assert (out_of_order(SOURCE, test) != []) is (test.name in LOOPS), test.name
    words = "        transport.fence(dst, 0);\n"
    moved = changed("csrc/kernels/protocol/operation.cuh", words, "\n")
    text = moved.changed["csrc/kernels/protocol/operation.cuh"]
    signal = "offsetof(OpHeader, op), open.op, 0);\n"
    moved = Source({"csrc/kernels/protocol/operation.cuh": text.replace(signal, signal + words, 1)})
    wrong = [test.name for test in ALL if test.name not in LOOPS and out_of_order(moved, test)]
    assert "header_words" in wrong


def test_every_variant_is_found_or_changes_nothing_for_a_stated_reason() -> None:
    made: dict[Variant, list[Litmus]] = {}
    for test in ALL:
        for variant in variants(SOURCE, test):
            made.setdefault(variant, []).append(test)
    missed = {
        str(variant)
        for variant, tests in made.items()
        if all(test.check(SOURCE, variant) is None for test in tests)
    }
    assert missed == set(NO_DIFFERENCE)
    page = " ".join((ROOT / "docs/memory_model.md").read_text().split())
    found = len(made) - len(missed)
    assert f"{len(made)} variants of {len(ALL)} claims: {found} are found" in page
    assert f"and {len(missed)} change nothing" in page


def test_every_source_line_that_orders_memory_is_in_a_test_or_left_out() -> None:
    used = set().union(*(test.program(SOURCE).sites for test in ALL))
    there = set(SOURCE.sites)
    assert there - used - set(LEFT_OUT) == set(), "no litmus test stands for these lines"
    assert set(LEFT_OUT) <= there - used, "left out, but gone or in a test"


@pytest.mark.parametrize(
    ("path", "original", "replacement", "breaks"),
    [
        (TRANSPORT, "load_acquire<Scope::kSystem>", "load_acquire<Scope::kDevice>", "header_words"),
        (
            "csrc/kernels/protocol/operation.cuh",
            "load_acquire<Scope::kDevice>(issued)",
            "load_acquire<Scope::kBlock>(issued)",
            "rows_behind_their_count",
        ),
        (
            DEVICE,
            "fetch_add(value, cuda::memory_order_acq_rel)",
            "fetch_add(value, cuda::memory_order_relaxed)",
            "header_seen_by_another_block",
        ),
    ],
    ids=["poll-of-the-device", "look-of-the-block", "add-relaxed"],
)
def test_a_weaker_source_breaks_a_claim(
    path: str, original: str, replacement: str, breaks: str
) -> None:
    test = next(test for test in ALL if test.name == breaks)
    assert test.check(changed(path, original, replacement)) is not None


@pytest.mark.parametrize(
    ("original", "replacement", "gone"),
    [
        ("    args.transport.fence(dst, qp);\n", "", "announce_rows.fence"),
        ("add_release<Scope::kDevice>", "add_relaxed<Scope::kDevice>", "count_issued.add_release"),
    ],
)
def test_a_line_that_is_gone_is_named(original: str, replacement: str, gone: str) -> None:
    source = changed("csrc/kernels/protocol/operation.cuh", original, replacement)
    test = next(test for test in ALL if test.name == "rows_behind_their_count")
    with pytest.raises(KeyError, match=f"{gone} is not in the source"):
        test.check(source)


def test_orders_and_scopes_are_read_from_the_source_through_the_transport() -> None:
    poll = order_of(SOURCE, "find_header.poll")
    assert (poll.acquires, poll.releases, poll.scope) == (True, False, "sys")
    assert "Transport.poll.load_acquire" in poll.sites
    assert order_of(SOURCE, "find_given_up.newest#1").scope == "sys"
    issued = order_of(SOURCE, "count_issued.add_release")
    assert (issued.acquires, issued.releases, issued.scope) == (False, True, "gpu")


def test_the_command_lists_the_lines_of_a_claim() -> None:
    command = [sys.executable, str(ROOT / "tools" / "litmus.py"), "--help"]
    assert (
        "--variants" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
