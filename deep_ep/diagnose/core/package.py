"""What diagnosis needs of the package around it: nothing else in this folder imports from there."""

from __future__ import annotations

from deep_ep.base import codec, env
from deep_ep.base.printable_text import printable
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPNotBuiltError,
    EPTypeError,
    EPUsageError,
    ranks_text,
)
from deep_ep.group import Group, ThreadGroup, TorchGroup, as_group
from deep_ep.hang import folder, request
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.files import replace as replace_file
from deep_ep.hang.report import picture as hang_picture
from deep_ep.hang.report import views as hang_views
from deep_ep.membership import rendezvous
from deep_ep.native import backend
from deep_ep.observe import stamps
from deep_ep.observe.copier import DeviceCopier
from deep_ep.observe.counters import CounterSnapshot, RecvCounters
from deep_ep.observe.parts import PARTS, Part
from deep_ep.observe.phases import PHASES, OperationPhases, Phases
from deep_ep.observe.phases import of_snapshots as phases_of

__all__ = [
    "PARTS",
    "PHASES",
    "CounterSnapshot",
    "DeviceCopier",
    "EPArgumentError",
    "EPError",
    "EPNotBuiltError",
    "EPTypeError",
    "EPUsageError",
    "Group",
    "OperationPhases",
    "Part",
    "Phases",
    "RecvCounters",
    "ThreadGroup",
    "TorchGroup",
    "HangVerdict",
    "as_group",
    "backend",
    "codec",
    "env",
    "folder",
    "hang_picture",
    "hang_views",
    "phases_of",
    "printable",
    "ranks_text",
    "rendezvous",
    "replace_file",
    "request",
    "stamps",
]
