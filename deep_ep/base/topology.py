"""Which ranks share a node (an NVLink domain), and a rank's place in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """Place of one rank. Ranks of a node are consecutive; the last node may have fewer.

    Attributes:
        rank: the rank.
        num_ranks: size of the group.
        ranks_per_node: ranks of one NVLink domain.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Place of this rank in its node."""
        return self.rank % self.ranks_per_node


def ranks_per_node(hosts: Sequence[str], asked: int | None) -> int:
    """Size of a node for ranks on these hosts.

    Args:
        hosts: host name of every rank, in rank order.
        asked: the user's choice, if any.

    Returns:
        The choice; else the largest node size for which no node spans two hosts.
    """
    if asked is not None:
        return min(asked, len(hosts))
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    return math.gcd(*runs)
