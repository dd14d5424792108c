"""Calls that were allowed. A program makes few different ones, again and again: one that looks the same is allowed too.

Looking takes two fifths of the time of the checks.
"""

from __future__ import annotations

import operator
from typing import Callable, Generic, TypeVar

from torch import Tensor, strided

from deep_ep.base.rules import VECTOR_BYTES
from deep_ep.checks.calls import BufferCall

# What a call looks like, and what follows from that.
_Look = tuple[object, ...]
Found = TypeVar("Found")
Call = TypeVar("Call", bound=BufferCall)

_MOST = 1024


class KnownCalls(Generic[Found]):
    """Those of one kind on one buffer, and what was found of each.

    A call looks like another if all is equal that its rules speak of, and all numbers and flags are. Whoever asks checks what
    else there is: values in tensors, storage and counters.
    """

    def __init__(self, kind: type[BufferCall]) -> None:
        """Knows none yet."""
        self._rules = kind.rules
        self._plain = operator.attrgetter(*kind.flags, *kind.numbers)
        self._types = (*(bool for _ in kind.flags), *(int for _ in kind.numbers))
        self._found: dict[_Look, Found] = {}

    def find(self, call: Call, check: Callable[[Call], Found]) -> Found:
        """What was found of a call that looks like this one, or what `check` finds; that raises if it is not allowed."""
        look = self._look(call)
        if look is None:
            return check(call)
        found = self._found.get(look)
        if found is None:
            found = check(call)
            if len(self._found) == _MOST:
                self._found.clear()
            self._found[look] = found
        return found

    def _look(self, call: BufferCall) -> _Look | None:
        """`None` if an argument has another type than most programs give it: equality says nothing then."""
        plain = self._plain(call)
        if tuple(map(type, plain)) != self._types:
            return None
        look: list[object] = [plain]
        for rule in self._rules:
            tensor = rule.of(call)
            if tensor is None:
                look.append(None)
                continue
            # A subclass may hold no elements of its own, a negated view none that are right.
            if type(tensor) is not Tensor or tensor.layout != strided or tensor.is_neg():
                return None
            pointer = tensor.data_ptr()
            begin = rule.in_vectors and pointer % VECTOR_BYTES
            traits = tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous(), begin
            # Its memory may have been freed since.
            look.append((*traits, pointer == 0))
        return tuple(look)
