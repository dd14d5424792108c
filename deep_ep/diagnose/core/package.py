"""What diagnosis needs of the package around it: nothing else in this folder imports from there."""

from __future__ import annotations

from deep_ep import backend, env, rendezvous, stamps
from deep_ep.copier import DeviceCopier
from deep_ep.counters import CounterSnapshot, RecvCounters
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPNotBuiltError,
    EPTypeError,
    EPUsageError,
    ranks_text,
)
from deep_ep.group import Group, ThreadGroup, TorchGroup, as_group

__all__ = [
    "CounterSnapshot",
    "DeviceCopier",
    "EPArgumentError",
    "EPError",
    "EPNotBuiltError",
    "EPTypeError",
    "EPUsageError",
    "Group",
    "RecvCounters",
    "ThreadGroup",
    "TorchGroup",
    "as_group",
    "backend",
    "env",
    "ranks_text",
    "rendezvous",
    "stamps",
]
