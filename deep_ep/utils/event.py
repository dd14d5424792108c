"""`deep_ep.utils.event`, where later revisions of DeepEP keep `EventOverlap`."""

from __future__ import annotations

from deep_ep.types.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
