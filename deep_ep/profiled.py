"""Operations in traces of the torch profiler: each call is one operator there, with shapes and types.

The profiler records arguments of operators only, and an autograd function is one. `python -m deep_ep.diagnose trace`
reads what is recorded here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import torch

if TYPE_CHECKING:
    from deep_ep.buffer import Buffer

# torch has no public name for it.
_is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
Method = TypeVar("Method", bound=Callable[..., Any])


def operator(method: Method) -> Method:
    """Makes a method of `Buffer` whose first argument is rows an operator of its name.

    Its recorded inputs are rows, scales or none, rank, ranks, and the number of the call in this buffer.
    While nothing is profiled it adds 0.4 us to a call.
    """
    recorded = type(f"deep_ep::{method.__name__}", (_Recorded,), {})

    @functools.wraps(method)
    def call(self: Buffer, *args: Any, **kwargs: Any) -> Any:
        if not _is_profiling():
            return method(self, *args, **kwargs)
        x = args[0] if args else kwargs.get("x")
        rows, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        if not isinstance(rows, torch.Tensor):
            return method(self, *args, **kwargs)  # which refuses it
        results: list[Any] = []
        recorded.apply(  # type: ignore[attr-defined]
            rows.detach(),
            scales.detach() if isinstance(scales, torch.Tensor) else None,
            self.rank,
            self.group_size,
            _number(self),
            lambda: results.append(method(self, *args, **kwargs)),
        )
        return results[0]

    return call  # type: ignore[return-value]


def part(name: str) -> Callable[[Method], Method]:
    """Makes a function a range `deep_ep::NAME` of a profile, without its arguments."""

    def decorate(function: Method) -> Method:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_profiling():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"deep_ep::{name}"):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _number(buffer: Buffer) -> int:
    """Of the call that begins, as the recorder counts calls; 0 where none may begin."""
    runtime = buffer.communicator.runtime
    return 0 if runtime is None else runtime.native.num_calls() + 1


class _Recorded(torch.autograd.Function):
    """Runs a call. Its arguments are there to be recorded."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        rank: int,
        num_ranks: int,
        number: int,
        run: Callable[[], None],
    ) -> None:
        run()
