"""A first exchange, before training: does every rank reach every rank?"""

from __future__ import annotations

import torch

from deep_ep.buffer import Buffer
from deep_ep.errors import EPTransportError
from deep_ep.moe.exchange import combine, dispatch
from deep_ep.testing import identity

# Narrower than the rows of any model, so that they fit its buffer.
_HIDDEN = 64


@torch.no_grad()
def preflight(buffer: Buffer) -> None:
    """Sends a few rows from every rank to every rank and back, and compares them. Collective.

    Call it once, before training: what is wrong with a path then has a name, and is no NaN an hour later.

    Args:
        buffer: with room for normal operations.

    Raises:
        EPTransportError: rows came wrong, on all ranks; names source and destination.
        EPTimeoutError: some ranks did not come, or nothing came from them; names them.
    """
    rank, size = buffer.rank, buffer.group_size
    device = buffer.communicator.backend.device()
    x = identity.rows_of(rank, size, _HIDDEN).to(device)
    topk_idx = identity.routing_of(rank, size).to(device)
    weights = torch.ones_like(topk_idx, dtype=torch.float32)
    arrived = dispatch(x, topk_idx, weights, buffer, num_experts=size)
    combined = combine(arrived.x, arrived)
    pairs = identity.wrong_pairs(rank, size, arrived.x.cpu(), combined.cpu())
    gathered = buffer.communicator.group.all_gather_object(pairs)
    wrong = sorted({pair for pairs in gathered for pair in pairs})
    if wrong:
        named = ", ".join(f"{source} to {destination}" for source, destination in wrong)
        raise EPTransportError(
            f"deep_ep.moe.preflight: rows did not arrive as they were sent, from rank {named}; all must. Run "
            "`python -m deep_ep.doctor --test` on these ranks, and look at the link between them."
        )
