"""Checks matrices that a caller gave: square, finite, 0 or more, else an error that says where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.diagnosis import FloatArray
from ...core.package import EPArgumentError


def square_matrix(where: str, matrix: Any, *, missing_rows: bool = False) -> FloatArray:
    """A new [n, n] float64 array of finite numbers >= 0.

    Args:
        where: the function to name in errors.
        matrix: what the caller passed.
        missing_rows: whether ranks may be missing: rows of NaN, and NaN in their columns.

    Raises:
        EPArgumentError: it is anything else.
    """
    what = f"{where}: the matrix must be [n, n] numbers, row i what rank i waited for each rank"
    try:
        array = np.asarray(_on_host(matrix))
    except ValueError:
        raise EPArgumentError(
            f"{what}; its rows differ in length. Pass n rows of n numbers."
        ) from None
    wrong = ""
    if array.dtype.kind not in "biuf":
        wrong = f"this one holds {array.dtype.name} values. Convert them to integers or floats."
    elif array.ndim != 2 or array.size == 0:
        wrong = f"this one has shape {list(array.shape)}. Pass two dimensions of equal length."
    elif array.shape[0] != array.shape[1]:
        wrong = (
            f"this one has {array.shape[0]} rows and {array.shape[1]} columns. Pass one row per rank; a "
            "rank that did not report gets a row of NaN."
        )
    if wrong:
        raise EPArgumentError(f"{what}; {wrong}")
    values = array.astype(np.float64)
    unknown = np.isnan(values)
    allowed = np.zeros(values.shape, bool)
    if missing_rows:
        gone = np.asarray(unknown.all(axis=1))
        allowed = gone[:, None] | gone | np.eye(gone.size, dtype=bool)
    bad = np.where(unknown, ~allowed, ~(np.isfinite(values) & (values >= 0)))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        value = f"{values[row, column]:g}".replace("nan", "NaN")
        advice = (
            "A counter that was reset between two readings is taken as it is; only whole rows may be NaN, "
            "of ranks that did not report, and only in judge_waits."
        )
        raise EPArgumentError(
            f"{what}, finite and 0 or more; [{row}][{column}] is {value}. {advice}"
        )
    return values


def wait_windows(given: Mapping[str, Any]) -> FloatArray:
    """[kinds, k, n, n]: k windows of each kind of operation; rows of NaN are ranks that are missing.

    Args:
        given: to `judge_waits`: by kind of operation [k, n, n], or [n, n] for one window.

    Raises:
        EPArgumentError: a window is no square matrix of finite numbers >= 0, or kinds differ in shape.
    """
    kinds = []
    for matrix in map(_on_host, given.values()):
        try:
            windows = matrix if np.ndim(matrix) == 3 else [matrix]
        except ValueError:  # rows differ in length, as square_matrix says
            windows = [matrix]
        kinds.append([square_matrix("judge_waits", each, missing_rows=True) for each in windows])
    shapes = {(len(windows), *(w.shape[0] for w in windows)) for windows in kinds}
    if len(shapes) != 1 or len(set(next(iter(shapes))[1:])) != 1:
        counts = [len(windows) for windows in kinds]
        raise EPArgumentError(
            f"judge_waits: {', '.join(given) or 'no kind of operation'} with {counts} windows; there must be "
            "as many windows of each kind, one at least, of equally many ranks. Pass the windows that all "
            "kinds have."
        )
    return np.array(kinds)


def _on_host(given: Any) -> Any:
    return given.detach().cpu().numpy() if hasattr(given, "detach") else given
