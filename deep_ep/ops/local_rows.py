"""Rows of one rank copied to several places, and added up from several: what happens beside a dispatch and a combine.

Both run on the native stream they are given and allocate nothing. What is passed must stay until they have run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH
from deep_ep.ops import pointers

if TYPE_CHECKING:
    import torch

    from deep_ep.ops.communicator import Communicator

    Tensor = torch.Tensor


def copy_rows(
    communicator: Communicator, x: Tensor, slots: Tensor, out: Tensor, stream_handle: int
) -> None:
    """`out[slots[i, k]] = x[i]` for each i and k. Rows of `out` that no slot names stay as they are.

    Args:
        communicator: whose runtime launches it.
        x: [num_rows, hidden] of any dtype, contiguous; a row is a multiple of 16 bytes.
        slots: [num_rows, width] int32, contiguous; what is no row of `out` is none. Each row is named at most once.
        out: [num_out, hidden], contiguous, of the dtype of `x`.
        stream_handle: the native stream, as `StreamOrder.handle`.
    """
    runtime = communicator.connected_runtime(NORMAL_DISPATCH)
    runtime.native.copy_rows(
        **pointers.of_tensors({"x": x, "slots": slots, "out": out}),
        num_rows=x.shape[0],
        width=slots.shape[1],
        row_bytes=x.shape[1] * x.element_size(),
        num_out=out.shape[0],
        stream=stream_handle,
    )


def sum_rows(
    communicator: Communicator,
    x: Tensor,
    rows: Tensor,
    out: Tensor,
    stream_handle: int,
    bias: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """`out[i]` = the biases, then `x[rows[i, k]]` for k ascending, in float32, rounded once.

    No row and no bias: zeros. One of them alone stays as it is, bit by bit.

    Args:
        communicator: whose runtime launches it.
        x: [num_rows, hidden] bfloat16, contiguous; a row is a multiple of 16 bytes.
        rows: [num_sums, width] int32, contiguous; what is no row of `x` is none.
        out: [num_sums, hidden] bfloat16, contiguous.
        stream_handle: the native stream, as `StreamOrder.handle`.
        bias: each [num_sums, hidden] bfloat16, contiguous.
    """
    runtime = communicator.connected_runtime(NORMAL_COMBINE)
    tensors = {"x": x, "rows": rows, "bias_0": bias[0], "bias_1": bias[1], "out": out}
    runtime.native.sum_rows(
        **pointers.of_tensors(tensors),
        num_rows=x.shape[0],
        num_sums=out.shape[0],
        width=rows.shape[1],
        row_bytes=x.shape[1] * x.element_size(),
        stream=stream_handle,
    )
