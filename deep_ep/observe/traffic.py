"""What normal operations move, for profiles: counted from their handles, recorded as operators without work.

Rows of a handle come to this rank in a dispatch, and go back the same way in a combine:

    local    are of its own tokens
    nvlink   cross from a rank of its node, those that it relays of other nodes included
    rdma     cross from other nodes to this rank, once each, as the gateway of its place

Over all ranks these are the rows that cross each kind of link.
"""

from __future__ import annotations

from typing import Any

import torch

from deep_ep.base.topology import Topology
from deep_ep.observe.copier import to_host
from deep_ep.types.handles import NormalHandle, OneNodeHandle, SeveralNodesHandle, hidden_word

# The profiler keeps lists of so many numbers, and no longer ones.
_LONGEST_LIST = 30


def _operator(name: str, arguments: str) -> Any:
    """One that does nothing: it is there for what is recorded of it."""

    def run(*given: Any) -> None:
        pass

    return torch.library.custom_op(
        f"deep_ep::{name}", run, mutates_args=(), schema=f"({arguments}) -> ()"
    )


_traffic = _operator("traffic", "int call, int row_bytes, int local, int nvlink, int rdma")
_tokens_per_rank = _operator("tokens_per_rank", "int call, int first_rank, int[] tokens")


def record(
    place: Topology, handle: Any, call: int, row_bytes: int, *, is_combine: bool, is_counted: bool
) -> None:
    """Records the operators `deep_ep::traffic` and `deep_ep::tokens_per_rank`, to be called while a profiler runs.

    Nothing is recorded where the handle is not filled yet, as may be without the host's waiting for counts.

    Args:
        place: of this rank.
        handle: of a dispatch, a tuple.
        call: number of the call.
        row_bytes: of a row that travels, scales included.
        is_combine: whether rows go back.
        is_counted: whether the host has waited for this handle's counts.
    """
    kind = SeveralNodesHandle if place.num_nodes > 1 else OneNodeHandle
    typed: NormalHandle = kind(*handle)
    word = hidden_word(typed.channel_prefix)
    # In a capture nothing runs.
    if word is None or (word.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    # Whole tensors, since to copy a part of one from a GPU takes a kernel.
    if isinstance(typed, SeveralNodesHandle):
        done, prefix, ends, relayed = to_host(
            word, typed.channel_prefix, typed.source_prefixes, typed.recv_node_prefix
        )
        rdma = int(relayed[-1])
    else:
        done, prefix, prefixes = to_host(word, typed.channel_prefix, typed.rank_prefix)
        ends, rdma = prefixes[:, place.rank], 0
    if int(done) == 0 and not is_counted:
        return
    received = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    nvlink = sum(
        rows
        for source, rows in enumerate(received)
        if source % place.ranks_per_node != place.local_rank
    )
    _traffic(call, row_bytes, received[place.rank], nvlink, rdma)
    # Tokens that this rank sends to each; in a combine, rows that it sends back.
    sent = received if is_combine else prefix[:, -1].tolist()
    for first in range(0, place.num_ranks, _LONGEST_LIST):
        _tokens_per_rank(call, first, sent[first : first + _LONGEST_LIST])
