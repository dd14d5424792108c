"""What a rank sends, counted by the host target's transport, and the page that has the tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cost_model.md"
CHANNELS_PER_SCALE = 128
_COUNTED = ("puts", "put_bytes", "words", "signals", "fences", "quiets")


@dataclass(frozen=True)
class PathCounts:
    """What a rank sends in one operation over one kind of path, mean of the group.

    Attributes:
        rows: that had to go this way.
        payload_bytes: of those rows.
        counts: calls of the transport, by name.
    """

    rows: float
    payload_bytes: float
    counts: dict[str, float]

    @property
    def messages(self) -> float:
        """Puts, words and signals: what a NIC takes as a work request each."""
        return self.counts["puts"] + self.counts["words"] + self.counts["signals"]

    @property
    def bytes(self) -> float:
        return sent_bytes(self.counts)

    @property
    def overhead(self) -> str:
        """What is sent beside the payload, as the tables have it."""
        return f"{(self.bytes / self.payload_bytes - 1) * 100:.2f} %"


def sent_bytes(counts: Mapping[str, float]) -> float:
    """All that is sent, of calls of the transport by name."""
    return counts["put_bytes"] + 8 * (counts["words"] + counts["signals"])


def row_bytes(hidden: int, is_dispatch: bool) -> int:
    """Payload of a row: FP8 and its scales out, bf16 back."""
    return hidden + 4 * (hidden // CHANNELS_PER_SCALE) if is_dispatch else 2 * hidden


def mean_sent(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    pairs: Iterable[tuple[int, int]],
) -> dict[str, float]:
    """Calls of the transport by name, from rank to peer, over all `pairs`: mean of the ranks.

    Args:
        before, after: `traffic()` of each rank.
    """
    pairs = list(pairs)
    return {
        name: sum(
            after[rank]["to"][peer][name] - before[rank]["to"][peer][name] for rank, peer in pairs
        )
        / len(after)
        for name in _COUNTED
    }


def pairs_of(num_ranks: int, ranks_per_node: int, same_node: bool) -> list[tuple[int, int]]:
    """(rank, peer) of two ranks on one node, or on two."""
    return [
        (rank, peer)
        for rank in range(num_ranks)
        for peer in range(num_ranks)
        if rank != peer and (rank // ranks_per_node == peer // ranks_per_node) == same_node
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of Markdown."""
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            "|---" * 2 + "|---:" * (len(header) - 2) + "|",
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def options(about: str | None) -> argparse.ArgumentParser:
    """The options of a command that counts: the shape, and whether the page is written."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    return parser


def write_into_page(begin: str, end: str, text: str) -> None:
    """Puts the tables between the two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
