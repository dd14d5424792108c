"""Operations in traces of the torch profiler: each call is one operator there, with shapes and types.

The profiler records arguments of operators only, and an autograd function is one. `python -m deep_ep.diagnose trace`
reads what is recorded here.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, TypeVar

import torch

# torch has no public names for them: whether this thread is profiled, and whether the process is.
_is_thread_profiled: Callable[[], bool] = getattr(
    torch.autograd, "_profiler_enabled", lambda: False
)
_PROCESS_FLAG = "_is_profiler_enabled"
Method = TypeVar("Method", bound=Callable[..., Any])


def operator(*, is_combine: bool | None = None) -> Callable[[Method], Method]:
    """Makes a method of `Buffer` whose first argument is rows an operator of its name.

    Its recorded inputs are rows, scales or none, rank, ranks, and the number of the call in this buffer.
    While nothing is profiled it adds 0.4 us to a call.

    Args:
        is_combine: of a method with a handle, which it takes, or returns as its fifth value: which way rows go; what
            moves is recorded, too. `None`: nobody knows without asking the device.
    """

    def decorate(method: Method) -> Method:
        recorded = type(f"deep_ep::{method.__name__}", (_Recorded,), {})
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_profiling():
                return method(self, *args, **kwargs)
            x = args[0] if args else kwargs.get("x")
            rows, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
            if not isinstance(rows, torch.Tensor):
                return method(self, *args, **kwargs)  # which refuses it
            runtime = self.communicator.runtime
            # As the recorder counts calls; 0 where none may begin.
            number = 0 if runtime is None else runtime.native.num_calls() + 1
            results: list[Any] = []
            recorded.apply(  # type: ignore[attr-defined]
                rows.detach(),
                scales.detach() if isinstance(scales, torch.Tensor) else None,
                self.rank,
                self.group_size,
                number,
                lambda: results.append(method(self, *args, **kwargs)),
            )
            if is_combine is not None and runtime is not None:
                # It defines operators, which takes milliseconds; whoever is not profiled should not wait for them.
                from deep_ep.observe import traffic

                handle = signature.bind(self, *args, **kwargs).arguments.get("handle")
                is_fresh = handle is None
                # Behind the operator, since its time is that of what is launched in it.
                traffic.record(
                    runtime.topology,
                    results[0][4] if is_fresh else handle,
                    number,
                    sum(x.shape[1] * x.element_size() for x in (rows, scales) if x is not None),
                    is_combine=is_combine,
                    is_counted=is_fresh and bool(results[0][3]),
                )
            return results[0]

        return call  # type: ignore[return-value]

    return decorate


def _is_profiling() -> bool:
    # A profile of all threads is not one of this thread.
    return getattr(torch.autograd.profiler, _PROCESS_FLAG, False) or _is_thread_profiled()


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
