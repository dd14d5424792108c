"""The codec of records, messages and dumps: what was written is read, what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import TypeAliasType

from deep_ep.base import codec


class Pair(NamedTuple):
    left: Annotated[int, codec.Range()]
    right: int


@dataclass(frozen=True)
class Part:
    rank: Annotated[int, codec.Range(below="num_ranks")]
    word: Literal["on", "off"] = "on"


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    num_ranks: Annotated[int, codec.Range(1, 9), codec.Length(("num_ranks",))]
    us: Annotated[float, codec.Digits(1)] = float("nan")
    flag: bool = False
    pair: Optional[Pair] = None  # noqa: UP045 - read at run time, by Python 3.9 as well
    by_rank: Mapping[Annotated[int, codec.Range()], str] = field(default_factory=dict)
    by_word: Annotated[Mapping[Literal["a", "b"], float], codec.Most(2)] = field(
        default_factory=dict
    )
    listed: Annotated[npt.NDArray[np.float64], ("num_ranks",), codec.Digits(1)] = field(
        default_factory=lambda: np.zeros(2), compare=False
    )
    anything: Any = None


LISTED = np.array([2.5, np.nan])
WHOLE = Whole(
    (Part(1, "off"), Part(0)),
    *(2, 1.5, True, Pair(3, -4), {0: "x", 12: "y"}, {"a": 0.25}, LISTED),
    anything=[1, {"x": None}],
)
PLAIN = codec.to_plain(WHOLE)


def nested(levels: int) -> list[Any]:
    """An empty list, in so many others."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def require_whole(decoded: Whole) -> None:
    assert decoded == WHOLE
    np.testing.assert_array_equal(decoded.listed, LISTED)
    assert decoded.listed.dtype == np.float64


def test_what_was_encoded_is_decoded() -> None:
    require_whole(codec.decode(Whole, codec.encode(WHOLE)))
    for not_known in ({}, {"us": None}):
        assert np.isnan(codec.from_plain(Whole, {"parts": (), "num_ranks": 2, **not_known}).us)
    assert b"\n" not in codec.encode(WHOLE)


def test_numbers_are_rounded_and_what_is_not_known_is_null() -> None:
    plain = codec.to_plain(Whole((), 2, float("inf"), listed=np.array([0.26, np.nan])))
    assert (plain["us"], plain["listed"]) == (None, [0.3, None])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"new": 1}, "new is no field of Whole"),
        ({"parts": [{"word": "on"}]}, r"parts\[0\].rank is missing; expected an integer of at least 0"),
        ({"parts": [{"rank": 0}, {"rank": 2}]}, r"parts\[1\].rank is 2; expected .* below 2"),
        ({"parts": [{"rank": 0, "word": "x"}]}, r'word is "x"; expected "on" or "off"'),
        ({"parts": 3}, "parts is 3; expected a list of objects"),
        ({"num_ranks": True}, "num_ranks is true; expected an integer"),
        ({"num_ranks": 10**400}, "num_ranks is 1000.*; expected an integer of at least 1 and below 9"),
        ({"us": "1"}, 'us is "1"; expected a number or null'),
        ({"us": 1e300}, "us is 1e.300; expected a number that fits"),
        ({"flag": 1}, "flag is 1; expected false or true"),
        ({"pair": [1]}, "pair has 1 entries; expected 2"),
        ({"pair": [-1, 2]}, r"pair\[0\] is -1; expected an integer of at least 0"),
        ({"by_rank": {"x": "y"}}, 'by_rank.x is "x"; expected an integer'),
        ({"by_rank": {"-1": "x"}}, "by_rank.-1 is -1; expected an integer of at least 0"),
        ({"by_rank": {"01": "x"}}, 'by_rank.01 is "01"; expected an integer'),
        ({"by_rank": {"١": "x"}}, "expected an integer"),
        ({"by_rank": {"9" * 5000: "x"}}, "expected an integer"),
        ({"by_word": {"c": 1.0}}, r"by_word.c is not known; expected .*a"),
        ({"by_word": dict.fromkeys("abc", 1.0)}, "by_word has 3 entries; expected at most 2"),
        ({"listed": [1.0]}, "listed has 1 entries; expected 2"),
        ({"listed": [1.0, [2.0]]}, r"listed\[1\] is \[2.0\]; expected a number or null"),
        ({"listed": b"x"}, "listed is of type bytes; expected a list of numbers"),
        ({"anything": [1, {"x": 1e400}]}, r"anything\[1\].x is a number that is not finite"),
        ({"anything": {"y": 1 << 70}}, "anything.y is a number of more than 64 bits"),
        ({"anything": nested(10**4)}, "anything is nested too deeply"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(codec.CodecError, match=said) as caught:
        codec.from_plain(Whole, {**PLAIN, **changed})
    assert len(str(caught.value)) < 250


def test_fields_and_words_of_a_later_version_are_left_out_where_that_is_asked_for() -> None:
    later = {**PLAIN, "new": 1, "by_word": {"a": 0.25, "c": 1}}
    require_whole(codec.from_plain(Whole, later, is_strict=False))


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{", b"[" * 10**5, b"NaN", b"[]", bytes(codec.LARGEST_MESSAGE + 1)]
)
def test_bytes_of_anybody_raise_one_error(data: bytes) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode(Whole, data)


@dataclass(frozen=True)
class OfTwoSides:
    cells: Annotated[npt.NDArray[np.int64], ("rows", "columns")]


@pytest.mark.parametrize("shape", [[0, 10**24], [4 * 10**18, 0]])
def test_a_shape_that_no_array_has_is_refused(shape: list[int]) -> None:
    with pytest.raises(codec.CodecError, match="expected the shape of an array"):
        codec.decode(OfTwoSides, json.dumps({"cells": shape}).encode() + b"\n")


def test_numbers_of_numpy_are_numbers() -> None:
    value: Any = replace(WHOLE, num_ranks=np.int64(2), flag=np.bool_(True))
    require_whole(codec.decode(Whole, codec.encode(value)))
    with pytest.raises(TypeError, match="a set cannot be written"):
        codec.encode(replace(WHOLE, anything={1}))


@dataclass(frozen=True)
class OfRanks:
    hosts: Annotated[tuple[str, ...], ("num_ranks",)]
    num_ranks: Annotated[int, codec.Length(("num_ranks",))]


def test_what_is_missing_is_named_with_what_it_is() -> None:
    with pytest.raises(codec.CodecError, match="hosts is missing; expected a list of texts"):
        codec.from_plain(OfRanks, {"num_ranks": 4})


Scalar = TypeVar("Scalar", bound=np.generic)
# What npt.NDArray is from NumPy 2.5 and Python 3.12 on.
NamedArray = TypeAliasType(
    "NamedArray", np.ndarray[tuple[int, ...], np.dtype[Scalar]], type_params=(Scalar,)
)


def test_an_array_may_be_an_alias_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npt, "NDArray", NamedArray)

    @dataclass(frozen=True)
    class OfNamedArray:
        cells: Any

    hint = Annotated[NamedArray[np.int64], ("rows", "columns")]
    monkeypatch.setitem(OfNamedArray.__annotations__, "cells", hint)
    cells = np.arange(6).reshape(2, 3)
    read = codec.decode(OfNamedArray, codec.encode(OfNamedArray(cells)))
    assert read.cells.tolist() == cells.tolist()
