"""Who comes late to normal operations of DeepEP, which kernels count that `deep_ep.diagnose patch` has changed.

Ranks of a node meet at the start of each operation, and each counts for how long it waits there for each other one. Kernels
read an address of ours when they run, so graphs are counted, too, and so are operations: the own cell counts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.diagnosis import IntArray
from ..core.package import to_host

# Of DeepEP V1 and of 2.1.0; and the hops of patches/README.md that are read, by operation.
EXTENSIONS = ("deep_ep_cpp", "deep_ep._C")
_HOPS = {"normal dispatch": "dispatch_entry", "normal combine": "combine_entry"}

# [hops, ranks, 2], ns waited and waits, for the life of the process, as kernels have the address: of extensions that
# have one for all buffers, each with the rank, and of buffers with one of their own.
_of_extensions: dict[str, tuple[torch.Tensor, int]] = {}
_of_buffers: list[torch.Tensor] = []


@dataclass
class EntryWaits:
    """What one rank waits at the start of one operation.

    Attributes:
        operation: what verdicts call it.
        cells: [num_ranks, 2].
        rank: this rank.
    """

    operation: str
    cells: torch.Tensor
    rank: int
    _before: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._now()

    def take(self, _: float) -> tuple[IntArray, int]:
        """What was added since the last call: [num_ranks] ns, and in how many operations."""
        now = self._now()
        added, self._before = now - self._before, now
        waits = added[:, 0].copy()
        waits[self.rank] = 0
        return waits, int(added[self.rank, 1])

    def _now(self) -> IntArray:
        return np.asarray(to_host(self.cells)[0].numpy(), np.int64)


def counts_entries(buffer: Any) -> bool:
    """Whether kernels of this buffer are changed."""
    return _setter(buffer) is not None


def entries(buffer: Any, num_ranks: int, rank: int, device: torch.device) -> list[EntryWaits]:
    """Those of a buffer, from now on; none if its kernels are not changed, or count for another group."""
    setter = _setter(buffer)
    if setter is None:
        return []
    names, set_cells, extension = setter
    cells = torch.zeros(len(names), num_ranks, 2, dtype=torch.int64, device=device)
    if extension is None:
        _of_buffers.append(cells)
        set_cells(cells.data_ptr())
    elif extension not in _of_extensions:
        _of_extensions[extension] = cells, rank
        set_cells(cells.data_ptr(), num_ranks, rank)
    else:
        cells, of_rank = _of_extensions[extension]
        if (cells.shape[1], of_rank) != (num_ranks, rank):
            return []
    return [
        EntryWaits(operation, cells[names.index(hop)], rank) for operation, hop in _HOPS.items()
    ]


def _setter(buffer: Any) -> tuple[list[str], Callable[..., Any], str | None] | None:
    """Names of the hops, what sets the address of their cells, and the extension, where it has one address for all buffers."""
    loaded = {name: sys.modules[name] for name in EXTENSIONS if name in sys.modules}
    of_buffer = getattr(getattr(buffer, "runtime", None), "ep_watch_set", None)
    for name, extension in loaded.items():
        if of_buffer is not None and hasattr(extension, "ep_watch_elastic_hops"):
            return extension.ep_watch_elastic_hops().split(), of_buffer, None
        if of_buffer is None and hasattr(extension, "ep_watch_set"):
            return extension.ep_watch_hops().split(), extension.ep_watch_set, name
    return None
