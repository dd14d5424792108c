"""`Buffer.runtime`: the native runtime, with the topology questions some programs put to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep_ep.base.topology import Topology
from deep_ep.native.backend import Backend

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime


class Runtime:
    """The native runtime of one buffer. Other attributes are those of the native object.

    Internal: programs should call `Buffer`. What is here answers those that ask DeepEP's object.
    """

    def __init__(
        self, native: NativeRuntime, backend: Backend, topology: Topology, comm_stream: Any
    ) -> None:
        self.native = native
        self.topology = topology
        self._backend = backend
        self._comm_stream = comm_stream

    def is_available(self) -> bool:
        """True: a buffer that exists is connected."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Number of nodes."""
        return self.topology.num_nodes

    def get_rdma_rank(self) -> int:
        """Node of this rank."""
        return self.topology.node

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """This rank's place in its node if `is_global`, else 0."""
        return self.topology.local_rank if is_global else 0

    def get_local_device_id(self) -> int:
        """Index of the device; 0 on the cpu backend."""
        return self._backend.device().index or 0

    def get_local_ipc_handle(self) -> bytes:
        """What peers map this rank's memory with."""
        return self.native.local_handle()

    def get_comm_stream(self) -> Any:
        """The stream operations run on."""
        return self._comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """1-D view of the local buffer from element `offset` to its end."""
        pointer, num_bytes = self.native.local_buffer(use_rdma_buffer)
        usable = num_bytes // dtype.itemsize * dtype.itemsize
        memory = self._backend.tensor_at(pointer, usable, self.native)
        return memory.view(dtype)[offset:]

    def __getattr__(self, name: str) -> Any:
        if name == "native":  # not set yet: unpickled or half built
            raise AttributeError(name)
        try:
            return getattr(self.native, name)
        except AttributeError:
            raise AttributeError(
                f"Buffer.runtime has no {name!r}; it answers questions about place, stream and memory. "
                "To communicate, call Buffer, whose methods have the names of DeepEP."
            ) from None
