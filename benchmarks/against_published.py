"""Times of eight ranks that share one GPU beside published ones of eight GPUs of that kind.

Published times are CSV files with the columns of aiconfigurator's tables of DeepEP: `device`, `node_num`, `hidden_size`,
`num_token`, `num_topk`, `num_experts`; for low latency `dispatch_avg_t_us` and `combine_avg_t_us`, for normal mode
`dispatch_sms`, `dispatch_transmit_us` and `combine_transmit_us`. Ours are what low_latency_gpu.py and normal_gpu.py
write with --json.

Ranks on one GPU share its memory and have no NVLink between them, so a ratio shows where to look; it is no comparison
of two packages.

    python benchmarks/against_published.py --published FOLDER --ours latency.json normal.json [--markdown FILE]
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _tables import Table, write_markdown
from rich.console import Console

NUM_RANKS = 8
# What a file of ours calls a size, and what the published ones call it.
_SIZES = {"num_tokens": "num_token", "hidden": "hidden_size", "num_topk": "num_topk", "num_experts": "num_experts"}  # fmt: skip
_TIMES = {
    "dispatch": ("dispatch_avg_t_us", "dispatch_transmit_us"),
    "combine": ("combine_avg_t_us", "combine_transmit_us"),
}


def published_rows(folder: Path) -> list[dict[str, str]]:
    """Rows of one node, of all files."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row.get("node_num") == "1"]
    return rows


def compared(
    ours: Mapping[str, Any], published: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, float, float]]:
    """Of one file: what, the published time and ours, in us.

    Low-latency operations are compared by the fastest launch, normal ones by launches of as many multiprocessors.
    """
    same = [
        row
        for row in published
        if all(int(row[theirs]) == ours[name] for name, theirs in _SIZES.items())
        and row["device"] in ours["device"]
    ]
    for row in same:
        sms = row.get("dispatch_sms")
        of_ours = [
            one
            for one in ours["rows"]
            if (
                one.get("num_ranks") == NUM_RANKS and str(one["num_sms"]) == sms
                if sms
                else one.get("setting", {}).get("num_ranks") == NUM_RANKS
            )
        ]
        for operation, (low_latency, normal) in _TIMES.items() if of_ours else ():
            mode = f"normal {operation}, {sms} SMs" if sms else f"low-latency {operation}"
            what = f"{mode}, {ours['num_tokens']} tokens"
            fastest = min(one[operation]["figures"]["off"]["median"] for one in of_ours)
            yield what, float(row[normal if sms else low_latency]), fastest


def table(found: Sequence[tuple[str, float, float]], device: str) -> Table:
    """A line per operation."""
    return Table(
        f"Eight ranks that share one {device}, beside eight of them",
        ["operation", "published us", "ours us", "ratio"],
        [
            [what, f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"]
            for what, theirs, ours in found
        ],
        "Published: eight GPUs over NVLink. Ours: all ranks share one GPU's memory and multiprocessors, without NVLink; "
        "the slowest rank of each round, medians.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--published", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    published = published_rows(args.published)
    if not published:
        parser.error(f"--published: {args.published} has no CSV file with rows of one node")
    files = [json.loads(path.read_text()) for path in args.ours]
    found = [line for ours in files for line in compared(ours, published)]
    shown = table(found, files[0]["device"])
    if args.markdown is not None:
        write_markdown(args.markdown, "## Beside published times", [shown])
    console = Console(width=200)
    shown.show(console)
    console.print(f"{len(found)} operations compared with published ones", highlight=False)


if __name__ == "__main__":
    main()
