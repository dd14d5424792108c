"""Which operators of a trace are dispatch and combine, and how many bytes they say that they move.

Names and arguments are those that public trainers leave behind (autograd functions, custom operators). Kernels are in
`kernels`. https://pytorch.org/docs/stable/profiler.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .kernels import COMBINE, DISPATCH

# Of autograd functions and operators, by what they are called in place of {}.
_FAMILIES = ("Fused{}", "MoE{}", "DeepEP{}", "DeepEp{}", "DeepEP{}BwdOnly", "HybridEP{}")
_DISPATCHES = (
    *(family.format("Dispatch") for family in _FAMILIES),
    "_FusedDispatchAndPermute",
    "_FusedDispatchNoPermute",
    "deepep::dispatch",
    "deep_ep::moe_dispatch",
    "deep_ep::moe_combine_backward",
)
_COMBINES = (
    *(family.format("Combine") for family in _FAMILIES),
    "_FusedUnpermuteAndCombine",
    "QuackEPDeepEPCombine",
    "_SlotReturnCombine",
    "deepep::combine",
    "deep_ep::moe_combine",
    "deep_ep::moe_dispatch_backward",
)
# Of those, the backward has the name with "Backward", and is the other operation.
_OPERATIONS = {
    **dict.fromkeys(_DISPATCHES, DISPATCH),
    **dict.fromkeys(_COMBINES, COMBINE),
    **dict.fromkeys((f"{name}Backward" for name in _DISPATCHES), COMBINE),
    **dict.fromkeys((f"{name}Backward" for name in _COMBINES), DISPATCH),
    "deep_ep::dispatch": DISPATCH,
    "deep_ep::combine": COMBINE,
    "deep_ep::low_latency_dispatch": DISPATCH,
    "deep_ep::low_latency_combine": COMBINE,
    "GeneratedBackwardFor_deepep_dispatch_defaultBackward": COMBINE,
    "GeneratedBackwardFor_deepep_combine_defaultBackward": DISPATCH,
}
OPERATORS = tuple(_OPERATIONS)
# Operators of `deep_ep.observe.profiled` and `deep_ep.observe.traffic`.
_LOW_LATENCY = ("deep_ep::low_latency_dispatch", "deep_ep::low_latency_combine")
_WITH_SCALES = ("deep_ep::dispatch", "deep_ep::combine")
_TRAFFIC = "deep_ep::traffic"
# Where the number of the call stands among their concrete inputs.
_CALL = 4
# Of the profiler's names of types, in small letters.
_ITEM_BYTES = {
    "c10::bfloat16": 2,
    "c10::half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "unsigned char": 1,
    "signed char": 1,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
    "c10::float8_e4m3fnuz": 1,
    "c10::float8_e5m2fnuz": 1,
}
# Where `num_worst_tokens` stands among the concrete inputs of a dispatch that has it.
_WORST_TOKENS = 6


@dataclass(frozen=True)
class RecordedRows:
    """What an operator says of the rows it is given.

    Attributes:
        rows: tokens, or received rows; `None`: it does not say.
        row_bytes: of each; `None`: it does not say.
        why: what is missing, for people; "" if nothing is.
        worst_tokens: rows that were allocated for the worst case, 0: exactly as many as came.
    """

    rows: int | None = None
    row_bytes: int | None = None
    why: str = ""
    worst_tokens: int = 0

    @property
    def num_bytes(self) -> int | None:
        """Rows times bytes: of a dispatch each token once, to however many ranks it goes; of a combine local rows, too."""
        if self.rows is None or self.row_bytes is None:
            return None
        return self.rows * self.row_bytes


class LinkBytes(NamedTuple):
    """Bytes of rows by the link that they cross, exactly.

    Attributes:
        local: of tokens whose experts are on their own rank.
        nvlink, rdma: the others; a row that crosses both is in both.
    """

    local: int
    nvlink: int
    rdma: int

    @property
    def crossing(self) -> int:
        """Without local ones."""
        return self.nvlink + self.rdma


def added_up(links: Iterable[LinkBytes | None]) -> LinkBytes | None:
    """All together; `None` if one of them is not known."""
    known = list(links)
    return None if None in known else LinkBytes(*map(sum, zip((0, 0, 0), *filter(None, known))))


def operation_of(name: str) -> str | None:
    """`DISPATCH` or `COMBINE`, whichever an operator runs; `None`: neither."""
    return _OPERATIONS.get(name)


def sent_of(name: str, arguments: Mapping[str, Any]) -> RecordedRows:
    """What the `args` of an operator's event say."""
    if name in _LOW_LATENCY:
        return RecordedRows(
            why="a row of low latency goes to each of its experts; counters say how many"
        )
    dims = _sequence(arguments.get("Input Dims"))
    types = _sequence(arguments.get("Input type"))
    if not dims:
        return RecordedRows(why="shapes were not recorded: profile with record_shapes=True")
    shape = _sequence(dims[0])
    if len(shape) != 2 or not all(map(_is_size, shape)):
        return RecordedRows(
            why="its rows have no shape, as where they are a tuple of data and scales"
        )
    rows, channels = shape
    type_ = str(types[0]) if types else ""
    item_bytes = _ITEM_BYTES.get(type_.lower())
    worst = max([0, *_integers(arguments)[_WORST_TOKENS : _WORST_TOKENS + 1]])
    if item_bytes is None:
        return RecordedRows(rows, None, f"their type {type_!r} is not known", worst)
    scales = _scale_bytes(dims, types) if name in _WITH_SCALES else 0
    return RecordedRows(rows, channels * item_bytes + scales, "", worst)


def calls_of(name: str, arguments: Mapping[str, Any]) -> list[int]:
    """Number of the call of this package that an operator is; none: it is of none, or does not say."""
    is_call = name in _LOW_LATENCY or name in _WITH_SCALES
    numbers = _integers(arguments)[_CALL : _CALL + 1] if is_call else []
    return [number for number in numbers if number > 0]


def moved_by(name: str, arguments: Mapping[str, Any]) -> tuple[int, LinkBytes] | None:
    """Number of a call and what it moves, of the operator that says so; `None`: it is no such operator."""
    numbers = _integers(arguments) if name == _TRAFFIC else []
    if len(numbers) != 5 or min(numbers) < 0:
        return None
    call, row_bytes, *rows = numbers
    return call, LinkBytes(*(row_bytes * each for each in rows))


def _integers(arguments: Mapping[str, Any]) -> list[int]:
    """The concrete inputs, where those that are no numbers are -1."""
    concrete = _sequence(arguments.get("Concrete Inputs"))
    return [
        int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 20 else -1
        for text in concrete
    ]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _scale_bytes(dims: Sequence[Any], types: Sequence[Any]) -> int:
    """Of a row, where the second argument is its scales."""
    shape = _sequence(dims[1]) if len(dims) > 1 else ()
    if len(types) < 2 or len(shape) != 2 or not _is_size(shape[1]):
        return 0
    columns: int = shape[1]
    return columns * _ITEM_BYTES.get(str(types[1]).lower(), 0)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
