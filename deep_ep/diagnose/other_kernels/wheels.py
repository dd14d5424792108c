"""Which wheels count waiting, by which keyword, and in which unit; and which do not.

Signatures tell, not names of distributions: several of them install the package `deep_ep`. What is known of each
wheel is public: docs/other_kernels.md has the table for readers.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, NamedTuple


class Counter(NamedTuple):
    """A tensor that one method of a buffer adds waiting to.

    Attributes:
        method: of the class.
        keyword: of the method, by which it takes the tensor; positions differ between wheels.
        operation: what it does, as verdicts call it.
        unit: of an entry, and with it what entries are. "cycles": int64 of the SM that waits, an entry for each source
            rank, to which each expert of the own rank adds; they all begin to wait together. "us": int32, an entry for
            each expert of all ranks, in the order of their ranks.
    """

    method: str
    keyword: str
    operation: str
    unit: Literal["cycles", "us"]


_DISPATCH, _COMBINE = "dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"
COUNTERS = (
    # DeepEP V1, the `Buffer` of V2, and what was made from them: sgl-deep-ep, hybrid-ep, UCCL, NIXL, MORI.
    Counter("low_latency_dispatch", _DISPATCH, "dispatch", "cycles"),
    Counter("low_latency_combine", _COMBINE, "combine", "cycles"),
    # sgl-kernel-npu. Its combine counts what it takes to send, which tells nothing of who is waited for.
    Counter("dispatch", _DISPATCH, "normal dispatch", "us"),
)


class Wheel(NamedTuple):
    """A class that programs make buffers of.

    Attributes:
        package: that defines it.
        name: of the class.
        library: whose it is.
        without: what to do where it counts nothing.
        ready: the method after which a buffer knows its ranks.
        grows: whether ranks join and leave. `ready` says how many there can be, and a call how many there are.
    """

    package: str
    name: str
    library: str
    without: str = (
        "It counts nothing in this version; profile it (python -m deep_ep.diagnose trace)."
    )
    ready: str = "__init__"
    grows: bool = False


_PATCH = "It counts if it is patched (python -m deep_ep.diagnose patch CHECKOUT); or profile it (python -m deep_ep.diagnose trace)."
WHEELS = (
    Wheel("deep_ep", "Buffer", "DeepEP"),
    Wheel("deep_ep", "ElasticBuffer", "DeepEP V2", _PATCH),
    Wheel("deep_ep", "HybridEPBuffer", "Hybrid-EP"),
    Wheel("nixl_ep", "Buffer", "NIXL EP", ready="update_memory_buffers", grows=True),
    Wheel("mooncake", "Buffer", "Mooncake EP"),
)


def wheel_of(cls: type) -> Wheel | None:
    """Whose class it is, or is made from, by the package that defines it; `None` of ours, and of others."""
    if hasattr(cls, "enable_counters"):
        return None
    defined = [(base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__]
    return next((wheel for wheel in WHEELS if (wheel.package, wheel.name) in defined), None)


def counters_of(cls: type) -> list[Counter]:
    """Those that a class takes a tensor for."""
    return [counter for counter in COUNTERS if counter.keyword in parameters(cls, counter.method)]


def parameters(cls: type, method: str) -> list[str]:
    """Names of a method's parameters behind `self`, in order; none where there is no such method."""
    function: Any = getattr(cls, method, None)
    try:
        return [] if function is None else list(inspect.signature(function).parameters)[1:]
    except ValueError:  # of a compiled module
        return []
