"""Names that programs written for DeepEP import from `deep_ep.utils`, of any V1 revision."""

from __future__ import annotations

from deep_ep.types.config import Config
from deep_ep.types.event import EventHandle, EventOverlap
from deep_ep.utils import envs, event, math, testing
from deep_ep.utils.nvlink import check_nvlink_connections

__all__ = [
    "Config",
    "EventHandle",
    "EventOverlap",
    "check_nvlink_connections",
    "envs",
    "event",
    "math",
    "testing",
]
