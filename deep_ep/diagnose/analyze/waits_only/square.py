"""Checks a matrix that a caller gave: square, finite, 0 or more, else an error that says where."""

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
    given = matrix.detach().cpu().numpy() if hasattr(matrix, "detach") else matrix
    what = f"{where}: the matrix must be [n, n] numbers, row i what rank i waited for each rank"
    try:
        array = np.asarray(given)
    except ValueError:
        raise EPArgumentError(
            f"{what}; its rows differ in length. Pass n rows of n numbers."
        ) from None
    if array.dtype.kind not in "biuf":
        raise EPArgumentError(
            f"{what}; this one holds {array.dtype.name} values. Convert them to integers or floats."
        )
    if array.ndim != 2 or array.size == 0:
        raise EPArgumentError(
            f"{what}; this one has shape {list(array.shape)}. Pass two dimensions of equal length."
        )
    if array.shape[0] != array.shape[1]:
        raise EPArgumentError(
            f"{what}; this one has {array.shape[0]} rows and {array.shape[1]} columns. Pass one "
            "row per rank; a rank that did not report gets a row of NaN."
        )
    values = array.astype(np.float64)
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0]
        raise EPArgumentError(
            f"{what}, all finite; [{row}][{column}] is {values[row, column]}. Correct that "
            "rank's row."
        )
    _check_unknown(what, values, missing_rows)
    if (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise EPArgumentError(
            f"{what}, 0 or more; [{row}][{column}] is {values[row, column]:g}. A counter was reset "
            "or wrapped between two readings; take the later reading as it is."
        )
    return values


def wait_windows(where: str, given: Mapping[str, Any]) -> FloatArray:
    """[kinds, k, n, n]: k windows of each kind of operation; rows of NaN are ranks that are missing.

    Args:
        where: the function to name in errors.
        given: by kind of operation [k, n, n], or [n, n] for one window.

    Raises:
        EPArgumentError: a window is no square matrix of finite numbers >= 0, or kinds differ in shape.
    """
    kinds = []
    for matrix in given.values():
        cells = matrix.detach().cpu().numpy() if hasattr(matrix, "detach") else matrix
        try:
            is_one = np.ndim(cells) != 3
        except ValueError:  # rows differ in length, as square_matrix says
            is_one = True
        windows = [cells] if is_one else cells
        kinds.append([square_matrix(where, window, missing_rows=True) for window in windows])
    shapes = {(len(windows), *(w.shape[0] for w in windows)) for windows in kinds}
    if len(shapes) != 1 or len(set(next(iter(shapes))[1:])) != 1:
        counts = [len(windows) for windows in kinds]
        raise EPArgumentError(
            f"{where}: {', '.join(given) or 'no kind of operation'} with {counts} windows; there must be "
            "as many windows of each kind, one at least, of equally many ranks. Pass the windows that all "
            "kinds have."
        )
    return np.array(kinds)


def _check_unknown(what: str, values: FloatArray, missing_rows: bool) -> None:
    unknown = np.isnan(values)
    allowed = np.zeros(values.shape, bool)
    if missing_rows:
        gone = np.flatnonzero(unknown.all(axis=1))
        allowed[gone] = allowed[:, gone] = True
        np.fill_diagonal(allowed, True)
    if (unknown & ~allowed).any():
        row, column = np.argwhere(unknown & ~allowed)[0]
        raise EPArgumentError(
            f"{what}; [{row}][{column}] is NaN. "
            + (
                "Only whole rows may be NaN: ranks that did not report."
                if missing_rows
                else "Leave ranks that did not report to judge_waits, which takes rows of NaN."
            )
        )
