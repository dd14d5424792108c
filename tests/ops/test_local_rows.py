"""Rows of one rank that are copied to several places, and added up from several: what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deep_ep.ops import local_rows
from support.exchange import assert_same_bytes
from support.launch import DEVICE, Ranks

Tensor = torch.Tensor
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls one of the two on a rank's comm stream, and waits for it."""
    with Ranks(1, 1, 128, 1) as ranks:
        (buffer,) = ranks.buffers

        def call(operation: Callable[..., None], *tensors: Tensor, **arguments: Any) -> None:
            communicator = buffer.communicator
            stream = buffer.get_comm_stream()
            communicator.backend.wait_stream(stream, communicator.backend.current_stream())
            handle = communicator.backend.stream_handle(stream)
            operation(communicator, *tensors, handle, **arguments)
            stream.synchronize()

        yield call


def copied(x: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """`out` after `copy_rows`."""
    out = out.clone()
    for row, of_row in zip(x, slots.tolist()):
        for slot in of_row:
            if 0 <= slot < len(out):
                out[slot] = row
    return out


def summed(x: Tensor, rows: Tensor, bias: tuple[Tensor, ...]) -> Tensor:
    """What `sum_rows` is to write."""
    sums = []
    for number, of_sum in enumerate(rows.tolist()):
        terms = [one[number] for one in bias]
        terms += [x[row] for row in of_sum if 0 <= row < len(x)]
        total = torch.zeros(x.shape[1], device=x.device)
        for term in terms:
            total += term.float()
        sums.append(terms[0] if len(terms) == 1 else total.bfloat16())
    return torch.stack(sums) if sums else x[:0]


def places(width: int, num_places: int, num_used: int, generator: torch.Generator) -> Tensor:
    """[any, width] int32 with each of `num_used` places of `num_places` at most once, and none elsewhere."""
    num_rows = -(-2 * num_used // width) if width else 3
    entries = torch.randint(-3, 0, (num_rows * width,), generator=generator)
    at = torch.randperm(len(entries), generator=generator)[:num_used]
    entries[at] = torch.randperm(num_places, generator=generator)[: len(at)]
    return entries.view(num_rows, width).int()


@given(
    width=st.sampled_from([0, 1, 2, 3, 7, 8, 33, 128]),
    num_out=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    vectors=st.sampled_from([1, 2, 3, 33, 64, 257]),
    dtype=st.sampled_from([torch.bfloat16, torch.uint8, torch.int64]),
    seed=st.integers(0, 2**20),
)
def test_rows_are_copied_to_their_slots(
    run: Run, width: int, num_out: int, share: float, vectors: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = places(width, num_out, int(share * num_out), generator)
    hidden = 16 * vectors // dtype.itemsize

    def rows(number: int) -> Tensor:
        raw = torch.randint(256, (number, 16 * vectors), dtype=torch.uint8, generator=generator)
        return raw.view(dtype) if number else torch.empty((0, hidden), dtype=dtype)

    x, out = rows(len(slots)).to(DEVICE), rows(num_out).to(DEVICE)
    want = copied(x, slots, out)
    run(local_rows.copy_rows, x, slots.to(DEVICE), out)
    assert_same_bytes(out, want, f"slots {slots.tolist()}")


@given(
    width=st.sampled_from([0, 1, 2, 3, 7, 8, 33, 128]),
    num_sums=st.integers(0, 20),
    num_rows=st.sampled_from([0, 1, 5, 30]),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    hidden=st.sampled_from([8, 24, 256, 264, 2056]),
    num_biases=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
@example(width=8, num_sums=20, num_rows=30, share=1.0, hidden=256, num_biases=1, seed=0)
def test_rows_are_added_up_in_their_order(
    run: Run,
    width: int,
    num_sums: int,
    num_rows: int,
    share: float,
    hidden: int,
    num_biases: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def values(number: int) -> Tensor:
        """Large ones that cancel out, and small ones that get lost between them: the order shows."""
        sizes = torch.randint(0, 3, (number, 1), generator=generator) * 30
        rows = torch.randn(number, hidden, generator=generator).ldexp(sizes).bfloat16()
        rows[1::2] = -rows[: number // 2 * 2 : 2]
        return rows

    x = values(num_rows).to(DEVICE)
    rows = torch.randint(-1, num_rows + 2, (num_sums, width), generator=generator)
    rows[torch.rand(num_sums, width, generator=generator) >= share] = -1
    bias = tuple(values(num_sums).to(DEVICE) for _ in range(num_biases))
    out = torch.full((num_sums, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    pair = (*bias, None, None)[:2]
    run(local_rows.sum_rows, x, rows.int().to(DEVICE), out, bias=pair)
    assert_same_bytes(out, summed(x, rows, bias), f"rows {rows.tolist()}")


def test_one_row_alone_stays_as_it_is(run: Run) -> None:
    """Every bit pattern, also of NaN and of negative zero."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    rows = torch.full((64, 3), -1)
    rows[:, 1] = torch.arange(64)
    out = torch.empty_like(x, device=DEVICE)
    run(local_rows.sum_rows, x.to(DEVICE), rows.int().to(DEVICE), out)
    assert_same_bytes(out, x, "rows")


def test_what_no_kernel_can_take_is_refused(run: Run) -> None:
    x = torch.zeros(2, 9, dtype=torch.bfloat16, device=DEVICE)
    places = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    for operation in (local_rows.copy_rows, local_rows.sum_rows):
        with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
            run(operation, x, places, torch.zeros_like(x))
    wide = torch.zeros(2, 50_000, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="so many rows"):
        run(local_rows.sum_rows, x[:, :8].contiguous(), wide, x[:, :8].contiguous())
