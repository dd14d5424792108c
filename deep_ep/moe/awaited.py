"""A tensor that another stream is still writing: who uses its values waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from deep_ep.types.event import EventOverlap

Tensor = torch.Tensor
# Of what is written these read nothing.
_OF_SHAPES = (
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
)


class AwaitedTensor(torch.Tensor):
    """Stands for a tensor until its values are used; what is done with it is done with the tensor itself.

    Attributes:
        written: that tensor.
        event: after which its values are there.
    """

    written: Tensor
    event: EventOverlap

    @staticmethod
    def __new__(cls: type[AwaitedTensor], data: Tensor, event: EventOverlap) -> AwaitedTensor:
        """Does not wait.

        Args:
            data: what is being written.
            event: after which it is there.
        """
        awaited: AwaitedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            dtype=data.dtype,
            device=data.device,
        )
        awaited.written, awaited.event = data, event
        return awaited

    def wait(self) -> Tensor:
        """The tensor, once the current stream waits for it. To be repeated by each stream that uses it."""
        self.event.current_stream_wait()
        return self.written

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_SHAPES:
            awaited, *rest = args
            return AwaitedTensor(func(awaited.written, *rest), awaited.event)
        args, kwargs = pytree.tree_map_only(AwaitedTensor, AwaitedTensor.wait, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AwaitedTensor({self.wait()!r})"
