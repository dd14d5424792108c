"""Expert-parallel dispatch and combine, a drop-in for DeepEP whose kernels measure themselves.

Importing needs no GPU and touches none; the backend is chosen when the first `Buffer` is built.
`HybridEPBuffer`, for which some programs probe, does not exist here; `ElasticBuffer` does unless DEEP_EP_EXPORT_V2=0.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deep_ep import errors
from deep_ep.base import env
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPNotBuiltError,
    EPRankGoneError,
    EPTimeoutError,
    EPTransportError,
    EPTypeError,
    EPUnsupportedError,
    EPUsageError,
)
from deep_ep.observe import watchers

# `python -m deep_ep.doctor` begins without torch, and says so if that does not load.
# Python 3.9 does not say how it was started.
_words = getattr(sys, "orig_argv", None) or Path("/proc/self/cmdline").read_text().split("\0")
if ("-m", "deep_ep.doctor") not in zip(_words, _words[1:]):
    from deep_ep import utils
    from deep_ep.base import group
    from deep_ep.base.rules import topk_idx_t
    from deep_ep.buffer import Buffer
    from deep_ep.buffers.model_sizes import Sizes, sizes
    from deep_ep.observe.counter_snapshot import CounterSnapshot
    from deep_ep.observe.counters import RecvCounters
    from deep_ep.types.config import Config
    from deep_ep.types.event import EventHandle, EventOverlap

    # Rooms build on groups, so these are in base; programs import them from `deep_ep.group` (group.pyi for checkers).
    sys.modules[f"{__name__}.group"] = group

    if env.export_v2():
        from deep_ep.elastic.buffer import ElasticBuffer
        from deep_ep.elastic.domains import get_logical_domain_size, get_physical_domain_size
        from deep_ep.elastic.handle import EPHandle


def _compare_ranks(
    buffer: Buffer, ranks: group.Group, when: env.DiagnoseMode
) -> watchers.Watcher | None:
    """The one place where the package knows `deep_ep.diagnose`; imported where it is asked for."""
    from deep_ep.diagnose.live import monitor

    return monitor.start(buffer, ranks, when)


watchers.register(_compare_ranks)

__version__ = "1.2.1+diagnose.1"

__all__ = [
    "Buffer",
    "Config",
    "CounterSnapshot",
    "EPArgumentError",
    "EPError",
    "EPNotBuiltError",
    "EPRankGoneError",
    "EPTimeoutError",
    "EPTransportError",
    "EPTypeError",
    "EPUnsupportedError",
    "EPUsageError",
    "EventHandle",
    "EventOverlap",
    "RecvCounters",
    "Sizes",
    "__version__",
    "errors",
    "group",
    "sizes",
    "topk_idx_t",
    "utils",
]
if env.export_v2():
    __all__ += [
        "EPHandle",
        "ElasticBuffer",
        "get_logical_domain_size",
        "get_physical_domain_size",
    ]
