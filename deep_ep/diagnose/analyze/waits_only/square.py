"""Checks a matrix that a caller gave: square, finite, 0 or more, else an error that says where."""

from __future__ import annotations

from typing import Any

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.errors import EPArgumentError


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
