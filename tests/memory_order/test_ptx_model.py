"""The memory model itself, on litmus tests whose answer the PTX documentation or its authors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import system_tools

z3 = system_tools.package("z3")

from memory_order.ptx import WEAK, Event, Order, Thread, find_execution  # noqa: E402

pytestmark = pytest.mark.exhaustive

RELAXED = Order(scope="sys")
ACQUIRE = Order(acquires=True, scope="sys")
RELEASE = Order(releases=True, scope="sys")
FENCE = Order(acquires=True, releases=True, scope="sys")


def write(place: str, value: Any = 1, order: Order = RELAXED) -> dict[str, Any]:
    return {"kind": "write", "place": place, "value": value, "order": order}


def read(place: str, register: str, order: Order = RELAXED) -> dict[str, Any]:
    return {"kind": "read", "place": place, "register": register, "order": order}


def add(place: str, register: str, order: Order = RELAXED) -> dict[str, Any]:
    return {
        "kind": "rmw",
        "place": place,
        "register": register,
        "order": order,
        "value": lambda value: value + 1,
    }


def fence(order: Order = FENCE) -> dict[str, Any]:
    return {"kind": "fence", "order": order}


def meet(name: str) -> dict[str, Any]:
    return {"kind": "meet", "meeting": name}


def happens(
    *programs: list[dict[str, Any]],
    outcome: Callable[[dict[str, Any]], Any],
    places: tuple[tuple[str, str], ...] = (("A", "0"), ("B", "0"), ("C", "0"), ("D", "0")),
) -> bool:
    """Whether threads, each of another rank unless `places` says otherwise, can end like this."""
    threads = []
    for (rank, block), program in zip(places, programs):
        thread = Thread(rank, block)
        thread.events = [Event(thread=thread, **event) for event in program]
        threads.append(thread)
    return find_execution(threads, {}, outcome, None) is not None


def all_are(**values: int) -> Callable[[dict[str, Any]], Any]:
    return lambda registers: z3.And(*[registers[name] == value for name, value in values.items()])


@pytest.mark.parametrize(
    ("release", "acquire", "possible"),
    [
        ([write("flag", order=RELEASE)], [read("flag", "flag", ACQUIRE)], False),
        ([fence(), write("flag")], [read("flag", "flag"), fence()], False),
        ([fence(), write("flag")], [read("flag", "flag", ACQUIRE)], False),
        ([write("flag")], [read("flag", "flag", ACQUIRE)], True),
        ([write("flag", order=RELEASE)], [read("flag", "flag")], True),
        ([fence(), write("flag", order=WEAK)], [read("flag", "flag", ACQUIRE)], True),
    ],
)
def test_message_passing_needs_both_sides(
    release: list[dict[str, Any]], acquire: list[dict[str, Any]], possible: bool
) -> None:
    sender = [write("data", order=WEAK), *release]
    receiver = [*acquire, read("data", "data", WEAK)]
    assert happens(sender, receiver, outcome=all_are(flag=1, data=0)) is possible


@pytest.mark.parametrize(
    ("scope", "places", "possible"),
    [
        ("gpu", (("A", "0"), ("A", "1")), False),
        ("gpu", (("A", "0"), ("B", "0")), True),
        ("cta", (("A", "0"), ("A", "0")), False),
        ("cta", (("A", "0"), ("A", "1")), True),
    ],
)
def test_a_scope_must_include_the_other_thread(
    scope: str, places: tuple[tuple[str, str], ...], possible: bool
) -> None:
    sender = [write("data", order=WEAK), write("flag", order=Order(releases=True, scope=scope))]
    receiver = [read("flag", "flag", ACQUIRE), read("data", "data", WEAK)]
    outcome = all_are(flag=1, data=0)
    assert happens(sender, receiver, outcome=outcome, places=places) is possible


def test_synchronisation_is_cumulative() -> None:
    first = [write("x", order=WEAK), write("y", order=RELEASE)]
    second = [read("y", "y", ACQUIRE), write("z", order=RELEASE)]
    third = [read("z", "z", ACQUIRE), read("x", "x", WEAK)]
    assert not happens(first, second, third, outcome=all_are(y=1, z=1, x=0))


def test_a_release_is_observed_through_read_modify_writes() -> None:
    first = [write("x", order=WEAK), add("count", "one", RELEASE)]
    second = [add("count", "two")]
    third = [read("count", "count", ACQUIRE), read("x", "x", WEAK)]
    assert not happens(first, second, third, outcome=all_are(one=0, count=2, x=0))
    plain = [read("count", "two"), write("count", 2)]
    assert happens(first, plain, third, outcome=all_are(one=0, count=2, x=0))


@pytest.mark.parametrize(("scope", "possible"), [("sys", False), ("cta", True)])
def test_atomics_lose_updates_only_if_scopes_are_too_narrow(scope: str, possible: bool) -> None:
    narrow = Order(scope=scope)
    outcome = all_are(one=0, two=0)
    assert happens([add("x", "one", narrow)], [add("x", "two")], outcome=outcome) is possible


def test_store_buffering_and_independent_reads_need_more_than_acquire_and_release() -> None:
    assert happens(
        [write("x"), fence(), read("y", "y")],
        [write("y"), fence(), read("x", "x")],
        outcome=all_are(x=0, y=0),
    )
    assert happens(
        [write("x")],
        [write("y")],
        [read("x", "x1", ACQUIRE), read("y", "y1", ACQUIRE)],
        [read("y", "y2", ACQUIRE), read("x", "x2", ACQUIRE)],
        outcome=all_are(x1=1, y1=0, y2=1, x2=0),
    )


def test_one_place_is_coherent_for_strong_accesses() -> None:
    reads = [read("x", "first"), read("x", "second")]
    assert not happens([write("x")], reads, outcome=all_are(first=1, second=0))
    weak = [read("x", "first", WEAK), read("x", "second", WEAK)]
    assert happens([write("x", order=WEAK)], weak, outcome=all_are(first=1, second=0))


def test_values_do_not_come_out_of_thin_air() -> None:
    one = [read("x", "x"), write("y", lambda registers: registers["x"])]
    two = [read("y", "y"), write("x", lambda registers: registers["y"])]
    assert not happens(one, two, outcome=all_are(x=1, y=1))
    assert happens(
        [read("x", "x"), write("y")], [read("y", "y"), write("x")], outcome=all_are(x=1, y=1)
    )


def test_a_barrier_orders_its_threads() -> None:
    one = [write("x", order=WEAK), meet("barrier")]
    two = [meet("barrier"), read("x", "x", WEAK)]
    places = (("A", "0"), ("A", "0"))
    assert not happens(one, two, outcome=all_are(x=0), places=places)
    assert happens(one[:1], two[1:], outcome=all_are(x=0), places=places)


def test_a_race_is_found_where_nothing_orders_or_scopes_are_too_narrow() -> None:
    def race(order: Order) -> bool:
        a = Thread("A", "0")
        b = Thread("B", "0")
        a.events = [Event(thread=a, **write("x", order=order))]
        b.events = [Event(thread=b, **read("x", "x"))]
        return find_execution([a, b], {}, None, set()) is not None

    assert race(WEAK)
    assert race(Order(scope="gpu"))
    assert not race(RELAXED)
