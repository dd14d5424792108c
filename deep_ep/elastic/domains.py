"""Where the ranks of a group are, and how large the buffers are that normal operations of given rows need."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from deep_ep.base.group import as_group
from deep_ep.base.rules import fail
from deep_ep.base.topology import Topology
from deep_ep.checks import arguments as checks
from deep_ep.checks import normal as normal_checks
from deep_ep.errors import EPError, EPUsageError
from deep_ep.native import backend
from deep_ep.ops import construction
from deep_ep.types.config import recommended_combine, recommended_dispatch

PAGE = 1 << 21
# Of a scale, float32 or four UE8M0, for the least channels that any format has.
_CHANNELS_PER_SCALE = 32
# Where nobody says how many there are.
_DEFAULT_TOPK = 32
_USUAL_ROWS = (7168, 8)  # hidden, and picks of a token

# By the identity of the group, as long as that lives.
_known: dict[int, Topology] = {}


class Bytes(NamedTuple):
    """Of the two buffers of a rank."""

    nvl: int
    rdma: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.nvl + self.rdma


def place_in(group: Any) -> Topology:
    """The place of this rank in a group, as a buffer on that group has it. Collective when a group is first asked for."""
    known = _known.get(id(group))
    return meet_in(group, {}) if known is None else known


def meet_in(group: Any, agreed: Mapping[str, Any], error: EPError | None = None) -> Topology:
    """The same, once all ranks have said what must be equal. Collective.

    Args:
        group: see above.
        agreed: by name.
        error: why this rank cannot go on; all ranks raise it.

    Raises:
        EPArgumentError: something differs; names the ranks.
        EPTimeoutError: some ranks did not come.
    """
    place = construction.meet(as_group(group), agreed, error)
    # A communicator of MPI knows no weak references, and is asked each time.
    with contextlib.suppress(TypeError):
        if id(group) not in _known:
            weakref.finalize(group, _known.pop, id(group), None)
        _known[id(group)] = place
    return place


def physical(place: Topology) -> tuple[int, int]:
    """RDMA ranks and NVLink ranks; nodes of unequal size are one rank each."""
    if place.num_ranks % place.ranks_per_node:
        return place.num_ranks, 1
    return place.num_nodes, place.ranks_per_node


def logical(place: Topology, allow_hybrid_mode: bool) -> tuple[int, int]:
    """Scale-out ranks and scale-up ranks: the physical ones, or all ranks as one domain."""
    return physical(place) if allow_hybrid_mode else (1, place.num_ranks)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """How many ranks of a group RDMA and NVLink connect. Collective when a group is first asked for.

    Args:
        group: as `ElasticBuffer` takes it.

    Returns:
        Number of nodes, and ranks of a node. DEEP_EP_RANKS_PER_NODE says what a node is; else a host.

    Compatibility: same as DeepEP V2, which asks NCCL.
    """
    return physical(place_in(group))


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Scale-out and scale-up ranks of a group: the physical domain sizes, or (1, number of ranks).

    Args:
        group: as `ElasticBuffer` takes it.
        allow_hybrid_mode: whether sums are made in each domain before they go to the next one.

    Compatibility: same as DeepEP V2.
    """
    return logical(place_in(group), allow_hybrid_mode)


def needed_bytes(place: Topology, num_sms: int, hidden: int, num_topk: int) -> Bytes:
    """Buffers with which every dispatch and combine of such rows fits; each a multiple of 2 MiB.

    Args:
        place: of this rank.
        num_sms: most that a call may use.
        hidden: channels of a row, at most 2 bytes each.
        num_topk: picks of a token.
    """
    binding = backend.get().binding
    num_scales = -(-hidden // _CHANNELS_PER_SCALE) + num_topk
    row = hidden * 2, num_topk, min(num_scales, binding.MAX_NORMAL_SCALES)
    sizes = [
        normal_checks.num_bytes(binding, place.num_ranks, place.ranks_per_node, config, *row)
        for config in (
            recommended_dispatch(place.num_ranks, num_sms),
            recommended_combine(place.num_ranks, num_sms),
        )
    ]
    return Bytes(*(_in_pages(max(of_kind)) for of_kind in zip(*sizes)))


def sized(
    place: Topology, num_sms: int, num_bytes: int | None, tokens: int, hidden: int, num_topk: int
) -> Bytes:
    """The buffers that arguments of the constructor ask for.

    Raises:
        EPUsageError: the bytes are no multiple of 2 MiB, or too few; or neither they nor sizes are given.
    """
    where = "ElasticBuffer"
    if num_bytes is None:
        if not (tokens and hidden):
            got = f"num_max_tokens_per_rank is {tokens}, hidden is {hidden} and num_bytes is None"
            fail(where, got, "elastic_size", EPUsageError)
        return needed_bytes(place, num_sms, hidden, num_topk or _DEFAULT_TOPK)
    total = checks.not_negative_int(where, "num_bytes", num_bytes)
    if total == 0 or total % PAGE:
        padded = _in_pages(max(total, 1))
        fail(where, f"num_bytes is {total}", "elastic_pages", EPUsageError, padded=padded)
    if not hidden:
        # The two buffers share as they would for usual rows.
        usual = needed_bytes(place, num_sms, *_USUAL_ROWS)
        rdma = _in_pages(total * usual.rdma // usual.total) if usual.rdma else 0
        return Bytes(total - rdma, rdma)
    needed = needed_bytes(place, num_sms, hidden, num_topk or _DEFAULT_TOPK)
    if total < needed.total:
        fail(where, f"num_bytes is {total}", "elastic_bytes", EPUsageError, needed=needed.total)
    return Bytes(total - needed.rdma, needed.rdma)


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
