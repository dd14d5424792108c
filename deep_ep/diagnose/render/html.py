"""One self-contained HTML page from diagnoses: verdicts and tables as text, two pictures drawn by html.js.

The page asks the network for nothing, and its own policy forbids it. It is built as a tree, so that
whatever a host name holds stays text. Without a script, words and tables are still there.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from ..core import quantities, rank_blocks, safe_files
from ..core.causes import TITLES
from ..core.diagnosis import Diagnosis, FloatArray, Measured, Verdict
from ..core.package import EPArgumentError
from ..render import wording
from .page_parts import Element, add, add_table, resource, source_of
from .phase_bars import add_bars, of_measured

_PARTS = ("wait", "late", "issue", "path", "tokens")
# Up to here matrices keep 16 bits of mantissa; beyond, 8: a page of 1024 ranks stays below 20 MB.
_LARGEST_EXACT = 256
_EXACT_BITS = 16
_ROUNDED_BITS = 8
# Longer tables hide what matters; the matrices hold the rest.
_SLOWEST = 3
_MOST_RANKS = 64
_MOST_OUTLIERS = 50


def write_page(
    diagnoses: Sequence[Diagnosis],
    path: str | Path,
    *,
    title: str,
    times: Sequence[float] | None = None,
    block_of: Sequence[Sequence[int]] | None = None,
) -> None:
    """Writes one HTML file that shows the windows given; it needs no other file and no network.

    Args:
        diagnoses: windows in order of time; the last one is shown first.
        path: the file to write, about 50 kB at 8 ranks, 200 kB at 64, below 20 MB at 1024 per window.
        title: group or job, for the head of the page.
        times: when each window ended, seconds since 1970; NaN where unknown.
        block_of: per window, the block of each rank where matrices are means over blocks of ranks
            (`records.Record.block_of`); empty where they are not.

    Raises:
        EPArgumentError: no window; another number of times or blocks than of windows; a matrix that
            is not [num_ranks, num_ranks].
    """
    if not diagnoses:
        raise EPArgumentError(
            "write_page: diagnoses is empty; at least one window is needed. Count operations first: "
            "buffer.enable_counters(), or DEEP_EP_DIAGNOSE=1."
        )
    for name, given in (("times", times), ("block_of", block_of)):
        if given is not None and len(given) != len(diagnoses):
            raise EPArgumentError(
                f"write_page: {len(given)} {name} for {len(diagnoses)} diagnoses; give one per "
                "diagnosis, or None."
            )
    for diagnosis in diagnoses:
        _check(diagnosis)
    names = [_window_name(i, len(diagnoses), times) for i in range(len(diagnoses))]
    page = _page(diagnoses, title, names, block_of or [()] * len(diagnoses))
    text = "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html")
    # A host name may hold what UTF-8 cannot.
    with safe_files.create(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


def _check(diagnosis: Diagnosis) -> None:
    expected = (diagnosis.num_ranks, diagnosis.num_ranks)
    for m in diagnosis.measured.values():
        for part in _PARTS:
            shape = _matrix(m, part).shape
            if shape != expected:
                raise EPArgumentError(
                    f"write_page: {part} of {m.operation} is {shape}, but hosts names "
                    f"{diagnosis.num_ranks} ranks; matrices must be {expected}."
                )


def _matrix(m: Measured, part: str) -> FloatArray:
    values: FloatArray = m.tokens if part == "tokens" else getattr(m, f"{part}_us")
    return values


def _window_name(index: int, count: int, times: Sequence[float] | None) -> str:
    name = f"window {index + 1} of {count}" if count > 1 else "window"
    if times is None or not math.isfinite(times[index]):
        return name
    ended = datetime.fromtimestamp(times[index], tz=timezone.utc)
    return f"{name} until {ended:%Y-%m-%d %H:%M:%S} UTC"


# ------------------------------------------------------------------------------------ page


def _page(
    diagnoses: Sequence[Diagnosis],
    title: str,
    names: Sequence[str],
    block_of: Sequence[Sequence[int]],
) -> Element:
    style, script = resource("html.css"), resource("html.js")
    page = Element("html", lang="en")
    head = add(page, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    # Only this script and this style, and nothing from anywhere else.
    policy = f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}"
    add(head, "meta", content=policy, **{"http-equiv": "Content-Security-Policy"})
    add(head, "title", f"{title}, {names[-1]}")
    add(head, "style", style)

    body = add(page, "body")
    add(body, "h1", title)
    _add_window_choice(body, diagnoses, names)
    for index, diagnosis in enumerate(diagnoses):
        section = _add_window_part(body, index, len(diagnoses))
        add(section, "p", f"{names[index]}: {_about(diagnosis)}", **{"class": "about"})
        _add_headlines(section, diagnosis)
        _add_verdicts(section, diagnosis)
        _add_outliers(section, diagnosis)
        _add_remarks(section, diagnosis)
    _add_pictures(body)
    for index, diagnosis in enumerate(diagnoses):
        section = _add_window_part(body, index, len(diagnoses))
        _add_bandwidth(section, diagnosis, with_paths=not block_of[index])
        _add_own_times(section, diagnosis)

    windows = [_window_data(*window) for window in zip(diagnoses, block_of)]
    data = json.dumps({"windows": windows})
    # Text of a script element ends at the first "</script", wherever it stands.
    add(body, "script", data.replace("<", "\\u003c"), id="data", type="application/json")
    add(body, "script", script)
    return page


def _add_window_choice(body: Element, diagnoses: Sequence[Diagnosis], names: Sequence[str]) -> None:
    # The script reads the choice; a single window needs none.
    if len(diagnoses) == 1:
        return
    label = add(add(body, "p"), "label", "Window ")
    choice = add(label, "select", id="window", autocomplete="off")
    for index, (diagnosis, name) in enumerate(zip(diagnoses, names)):
        option = add(choice, "option", f"{name}: {_short_answer(diagnosis)}", value=str(index))
        if index == len(diagnoses) - 1:
            option.set("selected", "selected")


def _short_answer(diagnosis: Diagnosis) -> str:
    count = len(wording.by_cause(diagnosis.verdicts))
    if count:
        return f"{count} cause{'' if count == 1 else 's'}"
    if wording.undecided(diagnosis):
        return "undecided"
    return "no anomaly" if diagnosis.measured and not diagnosis.remarks else "see notes"


def _add_window_part(body: Element, index: int, count: int) -> Element:
    section = add(body, "section", **{"data-window": str(index)})
    if index != count - 1:
        section.set("hidden", "hidden")
    return section


def _about(diagnosis: Diagnosis) -> str:
    text = wording.size(diagnosis)
    if diagnosis.device:
        text += f", {diagnosis.device}"
    for name, m in diagnosis.measured.items():
        text += f"; {name}: {_operations(m)}"
        if math.isfinite(m.duration_us):
            text += f", {quantities.microseconds(m.duration_us)} each"
    if diagnosis.source == "waits":
        text += "; from cumulative waiting alone: which side is slow, not why"
    return text


def _operations(m: Measured) -> str:
    if not m.num_operations:
        return "operations not counted"
    text = f"{m.num_operations} operations"
    return text + (f" ({m.first_operation} to {m.last_operation})" if m.last_operation else "")


# ---------------------------------------------------------------------------------- tables


def _add_headlines(section: Element, diagnosis: Diagnosis) -> None:
    if diagnosis.verdicts:
        mood = "bad"
    else:
        mood = "good" if diagnosis.measured and not diagnosis.remarks else "open"
    answers = add(section, "ul", **{"class": f"headlines {mood}"})
    for text in wording.headlines(diagnosis):
        add(answers, "li", text)


def _saving(diagnosis: Diagnosis, verdict: Verdict) -> str:
    number = quantities.number(verdict.saving_us)
    return f"{number}, hidden" if wording.is_hidden(diagnosis, verdict) else number


def _add_verdicts(section: Element, diagnosis: Diagnosis) -> None:
    if not diagnosis.verdicts:
        return
    add(section, "h2", "Verdicts, the largest effect first")
    # The same for all: windows of logs from elsewhere have no count of operations at all.
    per = wording.per(diagnosis, diagnosis.verdicts[0].operation)
    rows = []
    verdicts = [v for cause in wording.by_cause(wording.by_effect(diagnosis)) for v in cause]
    for before, verdict in zip([None, *verdicts], verdicts):
        same_cause = before is not None and before.key == verdict.key
        rows.append(
            [
                f"{TITLES[verdict.kind]}: {verdict.cause}",
                ", ".join(filter(None, (wording.subject(verdict), verdict.where))),
                verdict.operation,
                quantities.number(verdict.effect_us) + wording.interval(verdict),
                quantities.percent(verdict.share),
                # One number for all operations that a cause shows in.
                "" if same_cause else _saving(diagnosis, verdict),
                quantities.percent(verdict.seen_in),
                wording.certainty(verdict),
            ]
        )
    body = add_table(
        section,
        ["Class: cause", "Where", "Operation", f"Effect, us {per} (95 %)"]
        + ["Share of all waiting", f"Less without it, us {per}", "Seen in", "Certainty"],
        rows,
        numbers={3, 4, 5, 6, 7},
        css_class="verdicts",
    )
    # Sentences would push the numbers out of sight: they get a line of their own below.
    for index, verdict in enumerate(verdicts):
        line = Element("tr", {"class": "words"})
        body.insert(2 * index + 1, line)
        cell = add(line, "td", verdict.next_step, colspan=str(len(rows[0])))
        add(cell, "div", wording.evidence(verdict), **{"class": "evidence"})
        _add_show_button(cell, diagnosis, verdict)


def _add_show_button(cell: Element, diagnosis: Diagnosis, verdict: Verdict) -> None:
    if verdict.operation not in diagnosis.measured:
        return
    row = wording.row_of(verdict)
    part, shape = (row.matrix, row.axis) if row else ("path", "cell")
    marks = _marks(diagnosis, verdict, shape)
    add(
        cell,
        "button",
        "show in the heatmap",
        type="button",
        **{
            "data-operation": verdict.operation,
            "data-part": part,
            "data-marks": json.dumps(marks),
        },
    )


def _marks(diagnosis: Diagnosis, verdict: Verdict, shape: str) -> list[list[int]]:
    """[row, column, row end, column end] of every rectangle of the heatmap that shows the subject."""
    side = diagnosis.num_ranks
    if verdict.edge is not None:
        source, destination = verdict.edge
        return [[destination, source, destination + 1, source + 1]]
    if verdict.nodes is not None:
        columns, rows = (_of_node(diagnosis, node) for node in verdict.nodes)
        return [[r.start, c.start, r.stop, c.stop] for r in rows for c in columns]
    if verdict.node is not None:
        members = _of_node(diagnosis, verdict.node)
        if shape == "column":
            return [[0, m.start, side, m.stop] for m in members]
        return [[m.start, 0, m.stop, side] for m in members]
    if verdict.rail is not None:
        ranks = [rank for rank, device in enumerate(diagnosis.devices) if device == verdict.rail]
        return [[0, rank, side, rank + 1] for rank in ranks]
    if verdict.rank is None:
        return [[0, 0, side, side]]
    if shape == "column":
        return [[0, verdict.rank, side, verdict.rank + 1]]
    return [[verdict.rank, 0, verdict.rank + 1, side]]


def _of_node(diagnosis: Diagnosis, node: int) -> list[range]:
    nodes = rank_blocks.nodes_of(diagnosis)
    return _runs([rank for rank, of in enumerate(nodes) if of == node])


def _runs(ranks: Sequence[int]) -> list[range]:
    """[0, 1, 2, 5] -> [range(0, 3), range(5, 6)]."""
    runs: list[range] = []
    for rank in ranks:
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


def _add_outliers(section: Element, diagnosis: Diagnosis) -> None:
    if not diagnosis.events:
        return
    add(section, "h2", "Single operations that stood out")
    items = add(section, "ul")
    for outlier in diagnosis.events[:_MOST_OUTLIERS]:
        add(items, "li", wording.outlier(diagnosis, outlier))
    if len(diagnosis.events) > _MOST_OUTLIERS:
        add(items, "li", f"and {len(diagnosis.events) - _MOST_OUTLIERS} more")


def _add_remarks(section: Element, diagnosis: Diagnosis) -> None:
    remarks = wording.notes(diagnosis)
    if not remarks:
        return
    add(section, "h2", "Notes")
    items = add(section, "ul", **{"class": "remarks"})
    for remark in remarks:
        add(items, "li", remark)


def _add_bandwidth(section: Element, diagnosis: Diagnosis, *, with_paths: bool) -> None:
    known = {name: m.bandwidth for name, m in diagnosis.measured.items() if m.bandwidth}
    if not known:
        return
    add(section, "h2", "Bandwidth, GB/s")
    add(
        section,
        "p",
        "Effective: bytes into a rank over all its waiting, what the program gets. True: bytes over "
        "the time in which they were on their way, what the wire did. Effective far below true: "
        "somebody is late, not the network slow. Tokens that stay on their rank do not count.",
        **{"class": "hint"},
    )
    rows = [
        [
            name,
            *(
                quantities.number(_median(values))
                for values in (b.effective, b.ingress, b.egress, b.edge)
            ),
        ]
        for name, b in known.items()
    ]
    add_table(
        section,
        [
            "Median",
            "effective, per rank",
            "true, into a rank",
            "true, out of a rank",
            "true, per path",
        ],
        rows,
        numbers={1, 2, 3, 4},
        css_class="bandwidth",
    )
    slowest: list[list[str]] = []
    for name, b in known.items():
        slowest += _slowest_ranks(diagnosis, f"{name}, into", b.ingress)
        slowest += _slowest_ranks(diagnosis, f"{name}, out of", b.egress)
        if with_paths:
            slowest += _slowest_edges(diagnosis, f"{name}, path", b.edge)
    if slowest:
        add(section, "h2", "Slowest")
        add_table(
            section,
            ["Operation", "Where", "GB/s", "of the median"],
            slowest,
            numbers={2, 3},
            css_class="slowest",
        )


def _median(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def _slowest_ranks(diagnosis: Diagnosis, what: str, rates: FloatArray) -> list[list[str]]:
    ranks = [int(r) for r in np.argsort(rates, kind="stable") if np.isfinite(rates[r])]
    median = _median(rates)
    return [
        [
            what,
            wording.rank_name(diagnosis, rank),
            quantities.number(float(rates[rank])),
            quantities.percent(float(rates[rank]) / median) if median > 0 else "",
        ]
        for rank in ranks[:_SLOWEST]
    ]


def _slowest_edges(diagnosis: Diagnosis, what: str, rates: FloatArray) -> list[list[str]]:
    others = np.array(rates)
    np.fill_diagonal(others, np.nan)
    flat = np.where(np.isfinite(others), others, np.inf).ravel()
    count = min(_SLOWEST, flat.size)
    cells = np.argpartition(flat, count - 1)[:count] if count else np.zeros(0, np.int64)
    median = _median(others)
    found = []
    for cell in sorted((int(c) for c in cells), key=lambda c: float(flat[c])):
        receiver, source = divmod(cell, rates.shape[1])
        if not np.isfinite(flat[cell]):
            continue
        ends = (wording.rank_name(diagnosis, source), wording.rank_name(diagnosis, receiver))
        part = quantities.percent(float(flat[cell]) / median) if median > 0 else ""
        found.append([what, " > ".join(ends), quantities.number(float(flat[cell])), part])
    return found


def _add_own_times(section: Element, diagnosis: Diagnosis) -> None:
    known = {
        name: m
        for name, m in diagnosis.measured.items()
        if np.isfinite([m.gap_us, m.send_us, m.drain_us, m.own_wait_us]).any()
    }
    if not known:
        return
    add(section, "h2", "Where the time of each rank goes")
    shown = {name: _ranks_by_gap(m) for name, m in known.items()}
    for name, m in known.items():
        add_bars(section, diagnosis, m, shown[name])
    details = add(section, "details")
    add(details, "summary", "What each rank did by itself, microseconds")
    for name, m in known.items():
        if len(shown[name]) < m.gap_us.size:
            add(details, "p", f"{name}: the {_MOST_RANKS} ranks with the largest gap")
        phases = of_measured(m)
        add_table(
            details,
            [name, *phases],
            [
                [wording.rank_name(diagnosis, rank)]
                + [quantities.number(float(values[rank])) for values in phases.values()]
                for rank in shown[name]
            ],
            numbers={1, 2, 3, 4},
            css_class="own",
        )


def _ranks_by_gap(m: Measured) -> Sequence[int]:
    """All ranks; of many those with the largest gap."""
    if m.gap_us.size <= _MOST_RANKS:
        return range(m.gap_us.size)
    order = np.argsort(np.where(np.isfinite(m.gap_us), -m.gap_us, np.inf), kind="stable")
    return [int(rank) for rank in order[:_MOST_RANKS]]


# -------------------------------------------------------------------------------- pictures


def _add_pictures(body: Element) -> None:
    controls = add(body, "div", id="controls", hidden="hidden", **{"class": "controls"})
    add(controls, "fieldset", id="operations")
    _add_choice(controls, "Heatmap of", "part", _PARTS)
    _add_choice(controls, "Colour", "scale", ("log", "linear"))
    sizes = add(controls, "fieldset")
    add(sizes, "legend", "Size")
    for name, sign in (("smaller", "\N{MINUS SIGN}"), ("larger", "+")):
        add(sizes, "button", sign, id=name, type="button", **{"aria-label": f"{name} cells"})
        sizes[-1].tail = " "

    add(body, "p", "Heatmap and timeline need a script, or nothing was measured.", id="no-pictures")
    pictures = add(body, "div", id="pictures", hidden="hidden")
    for name, title in (("heat", "Who waits for whom"), ("line", "Recent operations")):
        add(pictures, "h2", title)
        figure = add(pictures, "figure")
        add(figure, "figcaption", id=f"{name}-caption")
        if name == "heat":
            add(figure, "canvas", id="legend", **{"aria-hidden": "true"})
        box = add(figure, "div", id=f"{name}-box", **{"class": "scroll"})
        add(box, "canvas", id=name, tabindex="0", role="img")
    add(body, "div", id="tip", role="status", hidden="hidden", **{"aria-live": "polite"})


def _add_choice(controls: Element, title: str, name: str, values: Sequence[str]) -> None:
    choice = add(controls, "fieldset")
    add(choice, "legend", title)
    for index, value in enumerate(values):
        label = add(choice, "label")
        button = add(label, "input", type="radio", name=name, value=value, autocomplete="off")
        button.tail = f" {value}"
        if index == 0:
            button.set("checked", "checked")


# ------------------------------------------------------------------------------------ data


def _window_data(diagnosis: Diagnosis, block_of: Sequence[int]) -> dict[str, Any]:
    """What html.js reads of one window: names of the ranks, and packed matrices per operation."""
    ranks = range(diagnosis.num_ranks)
    return {
        "labels": [wording.rank_name(diagnosis, rank) for rank in ranks],
        "missing": list(wording.missing_ranks(diagnosis)),
        "borders": rank_blocks.borders(diagnosis),
        "notes": ["Stored as means over blocks of ranks."] if block_of else [],
        "operations": {
            name: {"per": wording.per(diagnosis, name), **_operation_data(m)}
            for name, m in diagnosis.measured.items()
        },
    }


def _operation_data(m: Measured) -> dict[str, Any]:
    rounded = m.wait_us.shape[0] > _LARGEST_EXACT
    bits = _ROUNDED_BITS if rounded else _EXACT_BITS
    stored = bool(np.isfinite(m.wait_us).any())
    return {
        "about": _operations(m),
        "notes": ["Values are rounded to 0.2 %."] if rounded else [],
        # One scale for all parts of the waiting, so that switching between them compares them.
        "scale": {
            "us": _scale([_matrix(m, part) for part in _PARTS if part != "tokens"]),
            "tokens": _scale([m.tokens]),
        },
        "matrices": {part: _packed(_matrix(m, part), bits) for part in _PARTS} if stored else None,
        "timeline": _timeline_data(m),
    }


def _timeline_data(m: Measured) -> Mapping[str, Any] | None:
    recent = m.timeline
    if recent is None or not len(recent.ops):
        return None
    return {
        "observer": recent.observer,
        "ops": [int(op) for op in recent.ops],
        "begin": [round(float(us), 1) for us in recent.begin_us],
        "entered": _packed(recent.entered_us, _EXACT_BITS),
        "arrival": _packed(recent.arrival_us, _EXACT_BITS),
        "last": [int(rank) for rank in recent.last],
    }


def _scale(matrices: Sequence[FloatArray]) -> list[float]:
    """[median of the first matrix, largest value of all]; at least 1, and without the diagonal.

    What a rank does with itself must not set the colours.
    """
    between = ~np.eye(len(matrices[0]), dtype=bool) if len(matrices[0]) > 1 else np.True_
    tops = [float(np.max(m, initial=1.0, where=np.isfinite(m) & between)) for m in matrices]
    median = _median(np.where(between, matrices[0], np.nan))
    return [median if median > 1.0 else 1.0, max(tops)]


def _packed(values: FloatArray, bits: int) -> str:
    """float32 with `bits` of mantissa, as four planes of bytes, deflated, base64; NaN stays NaN."""
    known = np.isfinite(values)
    words = np.ascontiguousarray(np.where(known, values, 0.0), dtype="<f4").view("<u4")
    dropped = 23 - bits
    words = (words + np.uint32(1 << (dropped - 1))) >> np.uint32(dropped) << np.uint32(dropped)
    words[~known] = np.float32(np.nan).view(np.uint32)
    planes = words.reshape(-1, 1).view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")
