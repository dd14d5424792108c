"""Training integration: dispatch and combine with gradients, and a module around experts.

Everything here stands on `Buffer.dispatch` and `Buffer.combine`; nothing there knows of it.
"""

from __future__ import annotations

from deep_ep.moe.exchange import combine, dispatch
from deep_ep.moe.expert_parallel import ExpertParallel
from deep_ep.moe.first_exchange import preflight
from deep_ep.moe.shared_buffer import shared_buffer
from deep_ep.moe.steps import Dispatched

__all__ = ["Dispatched", "ExpertParallel", "combine", "dispatch", "preflight", "shared_buffer"]
