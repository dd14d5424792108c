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
    array = _array(matrix)
    is_square = array.ndim == 2 and array.shape[0] == array.shape[1] > 0
    if array.dtype.kind not in "biuf" or not is_square:
        raise EPArgumentError(
            f"{what}; this one is {array.dtype.name} of shape {list(array.shape)}. Pass one row of numbers per "
            "rank, all of one length; a rank that did not report gets a row of NaN."
        )
    values = array.astype(np.float64)
    unknown = np.isnan(values)
    allowed = np.zeros(values.shape, bool)
    if missing_rows:
        gone = np.asarray(unknown.all(axis=1))
        allowed = gone[:, None] | gone | np.eye(gone.size, dtype=bool)
    bad = np.where(unknown, ~allowed, ~(np.isfinite(values) & (values >= 0)))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise EPArgumentError(
            f"{what}, finite and 0 or more; [{row}][{column}] is {values[row, column]:g}. Only whole rows may be "
            "NaN, of ranks that did not report, and only in judge_waits."
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
    for matrix in map(_array, given.values()):
        windows = matrix if matrix.ndim == 3 else [matrix]
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


def _array(given: Any) -> np.ndarray[Any, Any]:
    """Of a list, array or tensor; of objects where rows differ in length."""
    on_host = given
    if hasattr(given, "detach"):
        # NumPy has no bfloat16.
        on_host = (given.double() if given.is_floating_point() else given).detach().cpu().numpy()
    try:
        return np.asarray(on_host)
    except ValueError:
        return np.array(["rows of several lengths"], object)
