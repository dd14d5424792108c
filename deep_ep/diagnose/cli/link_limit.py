"""The least time that an operation could take: its bytes over the speed of the links that they cross (a roofline).

A rank sends and receives over NVLink within its node and over its NIC between nodes, both at once and both ways at
once, so the busiest of these four decides. Rows that stay on their rank cross nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.hops import NORMAL_DISPATCH
from ..core.diagnosis import BoolArray, FloatArray, Measured

_BYTES_PER_US = 1e3  # of 1 GB/s


@dataclass(frozen=True)
class Links:
    """GB/s (1e9 bytes) one way, of each rank.

    Attributes:
        nvlink: to the other ranks of its node.
        nic: to other nodes.
    """

    nvlink: float
    nic: float

    def least_us(self, nvlink_bytes: float, nic_bytes: float) -> float:
        """Microseconds in which a rank can send or receive both."""
        return max(nvlink_bytes / self.nvlink, nic_bytes / self.nic) / _BYTES_PER_US


# NVLink one way as data sheets of NVIDIA have it, and the NIC that such machines have for each GPU (400 Gb/s).
KNOWN = {
    "H100": Links(450, 50),
    "H200": Links(450, 50),
    "H800": Links(200, 50),
    "H20": Links(450, 50),
    "B200": Links(900, 50),
}


def parse(text: str) -> Links:
    """Of a name of `KNOWN`, or of "NVLINK:NIC" in GB/s, such as "450:50"; raises ArgumentTypeError."""
    if text.upper() in KNOWN:
        return KNOWN[text.upper()]
    try:
        nvlink, nic = map(float, text.split(":"))
    except ValueError:
        nvlink = nic = 0.0
    if not (0 < nvlink < np.inf and 0 < nic < np.inf):
        raise argparse.ArgumentTypeError(
            f"links: got {text!r}; they must be {', '.join(KNOWN)}, or NVLINK:NIC in GB/s one way of each rank, such "
            "as 450:50."
        )
    return Links(nvlink, nic)


def least_us(m: Measured, nodes: Sequence[int], links: Links) -> float:
    """Microseconds per operation in which the links can carry the mean bytes; NaN where these are not known.

    `m` is of one kind of operation, of a normal one of one hop; `nodes` is empty where all ranks are on one.
    """
    if not np.isfinite(m.bytes).any():
        return float("nan")
    num_bytes = np.nan_to_num(m.bytes)  # [receiver, source]
    same_node = _same_node(len(num_bytes), nodes)
    np.fill_diagonal(num_bytes, 0.0)
    between = np.where(same_node, 0.0, num_bytes)
    within = num_bytes - between
    if m.operation == NORMAL_DISPATCH:
        # The network was the gateway's hop; here rows come from the gateway.
        within, between = within + _from_gateways(between, same_node), np.zeros_like(between)
    return links.least_us(_busiest(within), _busiest(between))


def _same_node(num_ranks: int, nodes: Sequence[int]) -> BoolArray:
    of_rank = np.array(nodes) if len(nodes) else np.zeros(num_ranks, np.int64)
    same: BoolArray = (of_rank[:, None] == of_rank[None, :]) & (of_rank[:, None] >= 0)
    return same


def _from_gateways(between: FloatArray, same_node: BoolArray) -> FloatArray:
    """Bytes of sources on other nodes, as coming from the rank of the receiver's node with the source's place."""
    moved = np.zeros_like(between)
    place = np.array([int(row[:rank].sum()) for rank, row in enumerate(same_node)])
    for receiver, members in enumerate(map(np.flatnonzero, same_node)):
        known = place < members.size
        np.add.at(moved[receiver], members[place[known]], between[receiver, known])
    np.fill_diagonal(moved, 0.0)  # of the sources whose gateway the receiver is
    return moved


def _busiest(num_bytes: FloatArray) -> float:
    """The most bytes that one rank sends or receives."""
    return float(max(num_bytes.sum(axis=0).max(), num_bytes.sum(axis=1).max()))
