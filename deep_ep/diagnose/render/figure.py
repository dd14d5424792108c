"""One picture from a Diagnosis, for tickets: the heatmap of each operation, the verdicts below.

matplotlib is asked for only here and only when a picture is; without it everything else works.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import quantities, rank_blocks, safe_files
from ..core.diagnosis import Diagnosis, FloatArray, Measured
from ..core.package import EPArgumentError, EPNotBuiltError, counted
from ..core.robust_stats import median_of
from ..render import wording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")
# Inches.
_SIDE = 5.0
_LEFT, _RIGHT, _TOP, _BELOW = 0.75, 1.05, 0.75, 0.65
_LINE = 0.19
_DOTS_PER_INCH = 150
_COLUMNS_PER_INCH = 13
_MOST_SENTENCES = 6
_MOST_TICKS = 16
# Up to so many ranks a number fits into a cell.
_MOST_NUMBERS = 12
# Inches between lines that part nodes; closer, they would hide the cells.
_CLOSEST_BORDERS = 0.25


def write_picture(diagnosis: Diagnosis, path: str | Path) -> None:
    """Writes the waiting of every operation as heatmaps, with the verdicts as caption.

    Args:
        diagnosis: one window.
        path: the file to write; its suffix, .png or .svg, says how.

    Raises:
        EPArgumentError: another suffix.
        EPNotBuiltError: matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise EPArgumentError(
            f"write_picture: path is {str(path)!r}, whose suffix is {suffix or 'missing'!r}; allowed "
            f"are {' and '.join(_SUFFIXES)}. Name the file accordingly; pages: python -m deep_ep.diagnose show --html."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EPNotBuiltError(
            f"write_picture: {suffix} pictures are drawn by matplotlib, which cannot be imported "
            f"({error}). Install it: pip install 'deep_ep[report]'."
        ) from error

    figure = Figure(facecolor="white")
    _draw(figure, diagnosis)
    # A date would be that of the file, not of the window.
    metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {}
    # A rank is at least one dot wide.
    dots = max(_DOTS_PER_INCH, diagnosis.num_ranks / _SIDE)
    with safe_files.create(path) as file:
        figure.savefig(file, format=suffix[1:], dpi=dots, metadata=metadata)


def _draw(figure: Figure, diagnosis: Diagnosis) -> None:
    known = [m for m in diagnosis.measured.values() if np.isfinite(m.wait_us).any()]
    cell_width, cell_height = _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BELOW
    num_columns = max(1, min(2, len(known)))
    num_rows = -(-len(known) // num_columns)
    width = num_columns * cell_width
    lines = _caption(diagnosis, int(width * _COLUMNS_PER_INCH))
    below = (len(lines) + 2) * _LINE
    height = num_rows * cell_height + below
    figure.set_size_inches(width, height)
    for index, measured in enumerate(known):
        row, column = divmod(index, num_columns)
        left = column * cell_width + _LEFT
        bottom = below + (num_rows - 1 - row) * cell_height + _BELOW
        box = (left / width, bottom / height, _SIDE / width, _SIDE / height)
        _heatmap(figure, figure.add_axes(box), diagnosis, measured)
    # Host names may hold dollar signs, which would otherwise begin a formula.
    figure.text(
        0.25 / width, (below - _LINE) / height, "\n".join(lines), va="top", fontsize=10,
        linespacing=1.3, parse_math=False,
    )  # fmt: skip


def _caption(diagnosis: Diagnosis, columns: int) -> list[str]:
    causes = wording.causes(diagnosis)
    sentences = [wording.sentence(diagnosis, verdicts) for verdicts in causes[:_MOST_SENTENCES]]
    if len(causes) > _MOST_SENTENCES:
        sentences.append(f"and {counted(len(causes) - _MOST_SENTENCES, 'smaller cause')}")
    sentences += [f"{text[0].upper()}{text[1:]}." for text in wording.savings(diagnosis)]
    sentences += [] if causes else wording.headlines(diagnosis)
    sentences += [f"Note: {remark}" for remark in wording.notes(diagnosis)]
    return [line for text in sentences for line in textwrap.wrap(text, columns)]


def _heatmap(figure: Figure, axes: Axes, diagnosis: Diagnosis, m: Measured) -> None:
    from matplotlib.colors import FuncNorm

    count = diagnosis.num_ranks
    calm, top = colour_scale([m.wait_us])
    # Logarithmic above the everyday value, linear below: noise stays calm beside what stands out.
    norm = FuncNorm(
        (lambda us: np.log1p(us / calm), lambda level: calm * np.expm1(level)), vmin=0.0, vmax=top
    )
    # What is not known shows the stripes behind.
    axes.patch.set(facecolor="#eeeeee", edgecolor="#888888", hatch="////")
    image = axes.imshow(m.wait_us, cmap="magma_r", norm=norm, interpolation="none")
    title = f"{m.operation}: waiting, us {wording.per(diagnosis, m.operation)}"
    if m.num_operations:
        title += f"\n{m.num_operations} operations, {quantities.microseconds(m.duration_us)} each"
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("waited for: rank")
    axes.set_ylabel("waiting: rank")
    ticks = range(0, count, max(1, -(-count // _MOST_TICKS)))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    _draw_borders(axes, diagnosis)
    if count <= _MOST_NUMBERS:
        _write_numbers(axes, m.wait_us, norm)
    beside = axes.get_position()
    bar = figure.add_axes((beside.x1 + 0.01, beside.y0, 0.012, beside.height))
    levels = norm.inverse(np.linspace(0.0, 1.0, 6))
    figure.colorbar(image, cax=bar, ticks=list(levels), format=lambda us, _: quantities.number(us))


def colour_scale(matrices: Sequence[FloatArray]) -> tuple[float, float]:
    """Median of the first matrix and largest value of all, each at least 1.

    What a rank does with itself must not set the colours, unless it is alone.
    """
    between = ~np.eye(len(matrices[0]), dtype=bool) if len(matrices[0]) > 1 else np.True_
    tops = [float(np.max(m, initial=1.0, where=np.isfinite(m) & between)) for m in matrices]
    median = median_of(np.where(between, matrices[0], np.nan))
    return median if median > 1.0 else 1.0, max(tops)


def _draw_borders(axes: Axes, diagnosis: Diagnosis) -> None:
    borders = rank_blocks.borders(diagnosis)
    if _SIDE / (len(borders) + 1) < _CLOSEST_BORDERS:
        return
    for rank in borders:
        axes.axhline(rank - 0.5, color="dimgrey", linewidth=0.8)
        axes.axvline(rank - 0.5, color="dimgrey", linewidth=0.8)


def _write_numbers(axes: Axes, values: FloatArray, norm: Any) -> None:
    for row, column in zip(*np.nonzero(np.isfinite(values))):
        value = float(values[row, column])
        text = f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
        colour = "white" if norm(value) > 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
