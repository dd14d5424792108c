"""Seeds, hypothesis profiles and the replay command at the end of a failure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Before any of them is imported: their assertions are tests', though their names do not say so.
pytest.register_assert_rewrite("support")

# Before anything imports the library: a hang must end long before a test's patience does.
os.environ.setdefault("DEEP_EP_TIMEOUT_S", "30")

# Rows prove themselves in every test that does not say otherwise.
os.environ.setdefault("DEEP_EP_VERIFY", "1")

import hypothesis  # noqa: E402
import torch  # noqa: E402

from support.launch import package_under_test  # noqa: E402

# CI looks at the same examples every time; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, max_examples=50,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.register_profile(
    "explore", deadline=None, print_blob=True, max_examples=1000,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
hypothesis.settings.load_profile("ci")

REPLAYS = pytest.StashKey[str]()
# Exhaustive tests in files that must also run without pytest.
EXHAUSTIVE = {
    "test_program_repeats_itself_under_pressure_and_measures_under_torchrun",
    "test_program_names_a_slow_nic_and_not_its_paths",
    "test_program_names_a_receiver_for_whose_slots_the_others_wait",
    "test_program_names_a_receiver_for_whose_slots_gateways_wait_and_no_gateway",
    "test_program_times_all_chunk_sizes",
    "test_program_repeats_itself_without_waiting_for_counts",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in EXHAUSTIVE:
            item.add_marker(pytest.mark.exhaustive)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="run only this seed of the interleaving tests (printed when one fails)",
    )


def pytest_report_header() -> str:
    return package_under_test()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Ranks are threads already; torch's own pool would only fight them for the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Callable[..., None]:
    """replay("--schedule-seed", 118) notes arguments for the command that repeats this test."""

    def note(*arguments: object) -> None:
        request.node.stash[REPLAYS] = " ".join(shlex.quote(str(a)) for a in arguments)

    return note


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        extra = item.stash.get(REPLAYS, "")
        report.sections.append(("replay", f'replay: pytest "{item.nodeid}" {extra}'.rstrip()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The replay commands once more, last on the screen."""
    for key in ("failed", "error"):
        for report in terminalreporter.stats.get(key, []):
            for title, text in report.sections:
                if title == "replay":
                    terminalreporter.write_line(text)
