"""The places in the kernels' source that order memory, found and not listed.

A site is one call of a primitive (an atomic, a fence, a barrier, a call of the transport). Its name is
`function.primitive`, with `#n` if a function has several, so that a changed line number changes nothing.
Order and scope of a site are read from the source as well: a litmus test sees what the kernel says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "csrc/device/cuda/device.cuh"
ROW_COPY = "csrc/device/cuda/row_copy.cuh"
TRANSPORT = "csrc/transport/cuda/transport.cuh"
FOLDERS = ("csrc/kernels", "csrc/transport/cuda")

ATOMICS = (
    "load_acquire", "load_relaxed", "store_release", "store_relaxed", "add_relaxed", "add_release",
    "add_acq_rel", "or_relaxed", "exchange_relaxed", "max_relaxed", "compare_exchange_relaxed",
)  # fmt: skip
BARRIERS = (
    "block_sync", "warp_sync", "block_any", "bar_sync", "grid_sync", "team_sync", "team_any", "leader_sync",
)  # fmt: skip
CALLS = ("put_warp", "put_word", "fence", "quiet", "signal", "poll", "newest")
FENCE = "atomic_thread_fence"
# Of a RowCopy: they order the accesses of the async proxy behind and before those of the generic one.
ROW_COPIES = ("take", "finish")

SITE = re.compile(
    rf"\b(?P<atomic>{'|'.join(ATOMICS)})<(?:Scope::k(?P<scope>\w+))?"
    rf"|\b(?P<barrier>{'|'.join(BARRIERS)})\("
    rf"|(?P<object>\w+)\.(?P<call>{'|'.join(CALLS)})\("
    rf"|\w+\.(?P<row_copy>{'|'.join(ROW_COPIES)})\("
    rf"|\b(?P<newest>poll)\(offset\);"
    rf"|\b(?P<fence>{FENCE})\(\s*cuda::memory_order_(?P<order>\w+),\s*cuda::thread_scope_(?P<width>\w+)"
)
FUNCTION = re.compile(r"^\s*(?:\[\[nodiscard\]\] )?EP_(?:DEVICE|KERNEL|ALWAYS_INLINE)\b([^;{]*)")
SCOPES = {"Block": "cta", "Device": "gpu", "System": "sys"}
WIDTHS = {"block": "cta", "device": "gpu", "system": "sys"}


@dataclass(frozen=True)
class Site:
    """One place; `scope` is cta, gpu or sys, and empty where the place names none."""

    name: str
    path: str
    line: int
    primitive: str
    order: str = ""
    scope: str = ""

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text().splitlines()[self.line - 1].strip()


def without_comments(text: str) -> str:
    """Comments become blanks, so that lines keep their numbers."""
    return re.sub(r"//[^\n]*", "", text)


def functions(text: str) -> list[tuple[int, str]]:
    """(first line, name) of each device function; of methods, with the name of their struct."""
    found = []
    struct = ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if match := re.match(r"(?:struct|class) (\w+)[^;]*$", line):
            struct = match.group(1) + "."
        elif line.startswith("};"):
            struct = ""
        if not FUNCTION.match(line) or line.lstrip().startswith("#"):
            continue
        head = " ".join(lines[number - 1 : number + 2])
        name = re.search(r"([\w]+)\s*\(", head[head.index("EP_") :])
        if name is not None:
            found.append((number, struct + name.group(1)))
    return found


def sites_of(path: str, text: str) -> list[Site]:
    text = without_comments(text)
    heads = functions(text)
    found: list[tuple[str, str, int, str, str]] = []
    for match in SITE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        function = [name for first, name in heads if first <= line][-1]
        primitive = next(
            match.group(key)
            for key in ("atomic", "barrier", "call", "row_copy", "newest", "fence")
            if match.group(key)
        )
        if primitive == function:
            continue  # where it is defined
        if match.group("object") == "queue_pairs":
            primitive = f"queue_pairs.{primitive}"
        scope = SCOPES.get(match.group("scope") or "", WIDTHS.get(match.group("width") or "", ""))
        found.append(
            (f"{function}.{primitive}", primitive, line, match.group("order") or "", scope)
        )
    names = [name for name, *_ in found]
    seen: dict[str, int] = {}
    sites = []
    for name, primitive, line, order, scope in found:
        seen[name] = seen.get(name, 0) + 1
        full = f"{name}#{seen[name]}" if names.count(name) > 1 else name
        sites.append(Site(full, path, line, primitive, order, scope))
    return sites


@dataclass(frozen=True)
class Device:
    """What the atomics of the device interface are on the CUDA target."""

    orders: dict[str, str]  # by primitive
    widths: dict[str, str]  # what a scope that the kernels name means


def device_of(text: str) -> Device:
    """Reads the wrappers of device.cuh."""
    heads = functions(text)
    orders = {}
    for match in re.finditer(r"cuda::memory_order_(\w+)\)", text):
        line = text.count("\n", 0, match.start()) + 1
        name = [name for first, name in heads if first <= line][-1]
        orders[name] = match.group(1)
    mapping = re.search(
        r"S == Scope::kBlock\s*\? cuda::thread_scope_(\w+)\s*: S == Scope::kDevice\s*"
        r"\? cuda::thread_scope_(\w+)\s*: cuda::thread_scope_(\w+);",
        text,
    )
    if mapping is None:
        raise ValueError(
            f"{DEVICE}: the table of scopes was not found; teach device_of() its new form."
        )
    widths = dict(zip(("cta", "gpu", "sys"), (WIDTHS[width] for width in mapping.groups())))
    return Device(orders, widths)


class Source:
    """All sites by name, of the working tree or of a changed copy of some files."""

    def __init__(self, changed: dict[str, str] | None = None) -> None:
        self.changed = changed = changed or {}
        self.sites: dict[str, Site] = {}
        for folder in FOLDERS:
            for file in sorted((ROOT / folder).rglob("*.cuh")):
                path = str(file.relative_to(ROOT))
                for site in sites_of(path, changed.get(path) or file.read_text()):
                    if site.name in self.sites:
                        raise ValueError(
                            f"{site.name} is in {self.sites[site.name].path} and {path}."
                        )
                    self.sites[site.name] = site
        self.device = device_of(changed.get(DEVICE) or (ROOT / DEVICE).read_text())

    def site(self, name: str) -> Site:
        """The site, or an error that lists its function's."""
        if name not in self.sites:
            function = name.rsplit(".", 1)[0]
            there = [other for other in self.sites if other.rsplit(".", 1)[0] == function]
            raise KeyError(f"{name} is not in the source; {function} has {there or 'no site'}.")
        return self.sites[name]


@cache
def working_tree() -> Source:
    """The source as it is."""
    return Source()
