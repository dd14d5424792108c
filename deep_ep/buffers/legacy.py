"""`deep_ep.buffers.legacy`, where later revisions of DeepEP keep `Buffer`."""

from __future__ import annotations

from deep_ep.buffer import Buffer

__all__ = ["Buffer"]
