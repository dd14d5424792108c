"""An exchange whose result is known: every rank sends rows to every rank, and gets its own back."""

from __future__ import annotations

import torch

Pair = tuple[int, int]

_HIDDEN = 512
# A rank sends so many rows to each rank.
_ROWS = 2


def rows_of(rank: int, size: int, hidden: int = _HIDDEN) -> torch.Tensor:
    """[tokens, hidden] bfloat16 of one rank: small integers, which bfloat16 holds exactly."""
    tokens = torch.arange(_ROWS * size, device="cpu")
    rows = ((rank * 31 + tokens * 7)[:, None] + torch.arange(hidden, device="cpu")) % 127
    rows[:, 0], rows[:, 1] = rank // 128, rank % 128
    rows[:, 2], rows[:, 3] = tokens // 128, tokens % 128
    return rows.bfloat16()


def routing_of(rank: int, size: int) -> torch.Tensor:
    """[tokens, 1] int64 of one rank: one expert a rank, and each token to the next rank."""
    return ((torch.arange(_ROWS * size, device="cpu") + rank) % size)[:, None]


def wrong_pairs(rank: int, size: int, received: torch.Tensor, combined: torch.Tensor) -> list[Pair]:
    """(source, destination) of what did not come to a rank, or came wrong.

    Args:
        rank: this one.
        size: of the group.
        received: [rows, hidden] bfloat16, what its expert got, in any order.
        combined: [tokens, hidden] bfloat16, what came back, which is what was sent.
    """
    hidden = combined.shape[1]
    there = {tuple(row) for row in received.tolist()}
    pairs = []
    for source in range(size):
        expected = rows_of(source, size, hidden)[routing_of(source, size)[:, 0] == rank]
        if any(tuple(row) not in there for row in expected.tolist()):
            pairs.append((source, rank))
    is_wrong = (combined != rows_of(rank, size, hidden)).any(1)
    back = sorted(set(routing_of(rank, size)[is_wrong, 0].tolist()))
    return pairs + [(destination, rank) for destination in back if (destination, rank) not in pairs]
