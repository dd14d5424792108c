"""What diagnosis needs of the package around it: nothing else in this folder imports from there."""

# Imported for those modules: ruff must not miss a use here, nor mypy an `__all__`.
# ruff: noqa: F401
# mypy: implicit-reexport

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep.base import codec, env
from deep_ep.base.files import naming, open_closed_streams
from deep_ep.base.files import replace as replace_file
from deep_ep.base.group import Group, ThreadGroup, TorchGroup, as_group
from deep_ep.base.text import counted, listed, printable, rows_of
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPNotBuiltError,
    EPTransportError,
    EPTypeError,
    EPUsageError,
    ranks_text,
)
from deep_ep.hang import folder, request
from deep_ep.hang import picture as hang_picture
from deep_ep.hang import report as hang_report
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.wording import line as hang_line
from deep_ep.membership import rendezvous
from deep_ep.observe import stamps
from deep_ep.observe.copier import to_host
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.observe.phases import counters_of

if TYPE_CHECKING:
    from deep_ep.observe.counters import RecvCounters
