"""One dispatch + combine over small made-up shapes, and its comparison with the reference.

`Shape` says what is exchanged, `Mode` says how; both print as the Python that makes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import deep_ep
from support import reference
from support.launch import DEVICE, Ranks

# LogFMT is lossy: a step is at most 32/510 octaves, and a value is off by half of one at most.
LOGFMT_RELATIVE_ERROR = 2 ** (32 / 510 / 2) - 1
# Of a group's largest magnitude: what lies below may become this, or zero.
LOGFMT_SMALLEST = 2.0**-32
BF16_RELATIVE_ERROR = 2.0**-8


@dataclass(frozen=True)
class Shape:
    """Sizes and routing of one exchange. `num_tokens` is per rank; equal shapes give equal inputs.

    routing: "random" (distinct experts), "repeats" (an expert may appear twice in a row),
    "one-expert" (everyone selects expert 0, once), "nowhere" (all entries -1).
    """

    num_tokens: tuple[int, ...]
    num_max_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    routing: str = "random"
    dropped: float = 0.1
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks


@dataclass(frozen=True)
class Mode:
    """Keyword arguments of one exchange."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    hook: bool = False
    async_finish: bool = False
    zero_copy: bool = False
    use_logfmt: bool = False
    use_out: bool = False


class Inputs(NamedTuple):
    """One rank's x [T, hidden] bfloat16, topk_idx [T, K] int64, topk_weights [T, K] float32."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class Received(NamedTuple):
    """Result of one rank's dispatch, without event and hook."""

    recv_x: Any
    recv_count: torch.Tensor
    handle: tuple[Any, ...]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory that begins one element behind a multiple of 64 bytes."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def make_inputs(shape: Shape) -> list[Inputs]:
    """Inputs of all ranks. Magnitudes vary from group to group; some rows are zero."""
    generator = torch.Generator().manual_seed(shape.seed)
    inputs = []
    num_groups = shape.hidden // reference.FP8_GROUP
    for num_tokens in shape.num_tokens:
        groups = torch.randn(num_tokens, num_groups, reference.FP8_GROUP, generator=generator)
        octaves = torch.randint(-12, 6, (num_tokens, num_groups, 1), generator=generator)
        zero = torch.rand(num_tokens, 1, 1, generator=generator) < 0.05
        x = torch.ldexp(groups, octaves).masked_fill(zero, 0).flatten(1).bfloat16()
        inputs.append(Inputs(x, *make_routing(shape, num_tokens, generator)))
    return inputs


def make_routing(
    shape: Shape, num_tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] int64 and topk_weights [T, K] float32."""
    size = (num_tokens, shape.num_topk)
    if shape.routing == "random":
        scores = torch.rand(num_tokens, max(shape.num_experts, shape.num_topk), generator=generator)
        topk_idx = scores.argsort(1)[:, : shape.num_topk]
        topk_idx[topk_idx >= shape.num_experts] = -1
    elif shape.routing == "repeats":
        topk_idx = torch.randint(0, min(3, shape.num_experts), size, generator=generator)
    elif shape.routing == "one-expert":
        topk_idx = torch.full(size, -1)
        topk_idx[:, -1] = 0
    elif shape.routing == "nowhere":
        topk_idx = torch.full(size, -1)
    else:
        raise ValueError(shape.routing)
    dropped = torch.rand(size, generator=generator) < shape.dropped
    topk_idx = at_most(shape.num_max_tokens, topk_idx.masked_fill(dropped, -1))
    return topk_idx, torch.randn(size, generator=generator)


def at_most(num_rows: int, topk_idx: torch.Tensor) -> torch.Tensor:
    """topk_idx with an expert's entries beyond `num_rows` dropped: that is all it takes of a rank."""
    flat = topk_idx.flatten()
    for expert in flat[flat >= 0].unique().tolist():
        flat[(flat == expert).nonzero()[num_rows:]] = -1
    return flat.view_as(topk_idx)


def begin_dispatch(
    buffer: deep_ep.Buffer, inputs: Inputs, shape: Shape, mode: Mode, **arguments: Any
) -> tuple[Received, Any, Any]:
    """One rank's dispatch, its event, and its hook (None unless the mode asks for one)."""
    *received, event, hook = buffer.low_latency_dispatch(
        inputs.x.to(DEVICE),
        inputs.topk_idx.to(DEVICE),
        shape.num_max_tokens,
        shape.num_experts,
        use_fp8=mode.use_fp8,
        round_scale=mode.round_scale,
        use_ue8m0=mode.use_ue8m0,
        async_finish=mode.async_finish,
        return_recv_hook=mode.hook,
        **arguments,
    )
    return Received(*received), event, hook


def dispatch(
    buffer: deep_ep.Buffer, inputs: Inputs, shape: Shape, mode: Mode, **arguments: Any
) -> Received:
    """One rank's dispatch, finished when this returns."""
    received, event, hook = begin_dispatch(buffer, inputs, shape, mode, **arguments)
    finish(mode, event, hook)
    return received


def combine(
    buffer: deep_ep.Buffer,
    inputs: Inputs,
    handle: tuple[Any, ...],
    ys: list[torch.Tensor],
    mode: Mode,
    **arguments: Any,
) -> torch.Tensor:
    """One rank's combine of `ys` (see `experts`), finished when this returns.

    NaN fills every row past the counts, and with zero_copy all of `x`: neither may be read.
    """
    num_local_experts, num_rows = handle[0].shape
    hidden = inputs.x.shape[1]
    x = torch.empty((num_local_experts, num_rows, hidden), dtype=torch.bfloat16, device=DEVICE)
    if x.numel() < 1 << 24:  # a production-sized one would cost half a gigabyte per rank
        x.fill_(torch.nan)
    target = buffer.get_next_low_latency_combine_buffer(handle) if mode.zero_copy else x
    for i, rows in enumerate(ys):
        target[i, : len(rows)] = rows.to(DEVICE)
    out = None
    if mode.use_out:
        out = torch.full_like(inputs.x, torch.nan, device=DEVICE)
    combined, event, hook = buffer.low_latency_combine(
        x,
        inputs.topk_idx.to(DEVICE),
        inputs.topk_weights.to(DEVICE),
        handle,
        use_logfmt=mode.use_logfmt,
        zero_copy=mode.zero_copy,
        async_finish=mode.async_finish,
        return_recv_hook=mode.hook,
        out=out,
        **arguments,
    )
    finish(mode, event, hook)
    if out is not None:
        assert combined.data_ptr() == out.data_ptr()
    return combined


def send_back(buffer: deep_ep.Buffer, inputs: Inputs, received: Received, **arguments: Any) -> Any:
    """One rank's combine of the rows as they came, in bfloat16; what the call returns."""
    topk_idx, topk_weights = inputs.topk_idx.to(DEVICE), inputs.topk_weights.to(DEVICE)
    return buffer.low_latency_combine(
        received.recv_x, topk_idx, topk_weights, received.handle, **arguments
    )


def round_trip(buffer: deep_ep.Buffer, inputs: Inputs, shape: Shape, mode: Mode) -> torch.Tensor:
    """One rank's dispatch, experts and combine, finished when this returns."""
    received = dispatch(buffer, inputs, shape, mode)
    return combine(buffer, inputs, received.handle, experts(received, buffer.rank), mode)


def finish(mode: Mode, event: Any, hook: Any) -> None:
    """Waits for a call's result in the way its mode asks for."""
    if mode.hook:
        hook()
    else:
        assert hook is None
    if mode.async_finish:
        event.current_stream_wait()
    else:
        assert event.event is None


def experts(received: Received, rank: int) -> list[torch.Tensor]:
    """What this rank's experts make of the rows it received."""
    data, scales = unpacked(received.recv_x)
    num_local_experts = len(received.recv_count)
    return [
        apply_expert(
            rank * num_local_experts + i,
            data[i, :count].cpu(),
            None if scales is None else scales[i, :count].cpu(),
        )
        for i, count in enumerate(received.recv_count.tolist())
    ]


def expected_experts(dispatched: list[reference.Dispatched]) -> list[list[torch.Tensor]]:
    """What the experts of all ranks make of the rows the reference gives them."""
    return [
        [
            apply_expert(rank * len(one.data) + i, one.data[i], one.scales and one.scales[i])
            for i in range(len(one.data))
        ]
        for rank, one in enumerate(dispatched)
    ]


def apply_expert(expert: int, data: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Each expert multiplies its rows by a number of its own, so a wrong expert shows."""
    rows = reference.dequantise(data, scales)
    return (rows.float() * (1 + expert % 7 / 8)).bfloat16()


def unpacked(recv_x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(data, scales or None) of a dispatch in either mode."""
    return (recv_x, None) if isinstance(recv_x, torch.Tensor) else (recv_x[0], recv_x[1])


def expected_dispatch(inputs: list[Inputs], shape: Shape, mode: Mode) -> list[reference.Dispatched]:
    """The reference's answer for all ranks."""
    return reference.dispatch(
        [one.x for one in inputs],
        [one.topk_idx for one in inputs],
        shape.num_experts,
        mode.use_fp8,
        mode.round_scale,
        mode.use_ue8m0,
    )


def expected_combine(
    inputs: list[Inputs], ys: list[list[torch.Tensor]], dispatched: list[reference.Dispatched]
) -> list[torch.Tensor]:
    """The reference's answer for all ranks."""
    return reference.combine(
        ys, [one.topk_idx for one in inputs], [one.topk_weights for one in inputs], dispatched
    )


def assert_received(
    received: list[Received], expected: list[reference.Dispatched], shape: Shape, mode: Mode
) -> None:
    """Every rank holds exactly the reference's rows."""
    for rank, (got, want) in enumerate(zip(received, expected)):
        assert_received_one(got, want, shape, mode, f"rank {rank}")


def assert_received_one(
    got: Received, want: reference.Dispatched, shape: Shape, mode: Mode, where: str
) -> None:
    """One rank's bytes, row order and counts are the reference's; shapes and strides as promised."""
    num_rows = shape.num_ranks * shape.num_max_tokens
    data, scales = unpacked(got.recv_x)
    src_info, layout_range, *sizes = got.handle
    assert sizes == [shape.num_max_tokens, shape.hidden, shape.num_experts], where
    assert data.shape == (shape.num_local_experts, num_rows, shape.hidden), where
    assert data.is_contiguous(), where
    assert data.dtype == (torch.float8_e4m3fn if mode.use_fp8 else torch.bfloat16), where
    assert (got.recv_count.dtype, src_info.dtype) == (torch.int32, torch.int32), where
    assert src_info.shape == (shape.num_local_experts, num_rows), where
    assert got.recv_count.tolist() == want.recv_count.tolist(), where
    assert layout_range.dtype == torch.int64, where
    assert layout_range.tolist() == want.layout_range.tolist(), where
    assert (scales is not None) == mode.use_fp8, where
    for i, count in enumerate(want.recv_count.tolist()):
        what = f"{where}, local expert {i}"
        assert src_info[i, :count].tolist() == want.src_info[i].tolist(), what
        assert_same_bytes(data[i, :count].cpu(), want.data[i], what)
    if scales is not None and want.scales is not None:
        assert scales.dtype == (torch.int32 if mode.use_ue8m0 else torch.float32), where
        assert scales.stride() == (num_rows * scales.shape[2], 1, num_rows), where
        for i, count in enumerate(want.recv_count.tolist()):
            what = f"{where}, scales of local expert {i}"
            assert_same_bytes(scales[i, :count].cpu(), want.scales[i], what)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal shape and bit pattern, NaN payloads included, wherever the two are."""
    assert got.shape == want.shape, what
    different = bytes_of(got.cpu()) != bytes_of(want.cpu())
    if different.any():
        row = int(different.view(len(got), -1).any(1).nonzero()[0])
        raise AssertionError(f"{what}: row {row} differs\ngot  {got[row]}\nwant {want[row]}")


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """[n] uint8, a copy: a dimension of size 1 may have any stride, which view() does not like."""
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_combined(
    combined: list[torch.Tensor], expected: list[torch.Tensor], what: str = "combine"
) -> None:
    """Bit for bit, because the order of the additions and their one rounding are promised."""
    for rank, (got, want) in enumerate(zip(combined, expected)):
        assert got.dtype == torch.bfloat16
        assert_same_bytes(got.cpu(), want, f"{what}, rank {rank}")


def assert_combined_from_logfmt(
    combined: list[torch.Tensor],
    ys: list[list[torch.Tensor]],
    inputs: list[Inputs],
    dispatched: list[reference.Dispatched],
) -> None:
    """Within the sum of what the wire format may lose of each term."""
    magnitudes = reference.combine(
        [[rows.abs() for rows in one] for one in ys],
        [one.topk_idx for one in inputs],
        [one.topk_weights.abs() for one in inputs],
        dispatched,
    )
    largest = reference.combine(
        [[group_maxima(rows) for rows in one] for one in ys],
        [one.topk_idx for one in inputs],
        [one.topk_weights.abs() for one in inputs],
        dispatched,
    )
    for rank, want in enumerate(expected_combine(inputs, ys, dispatched)):
        error = (combined[rank].cpu().float() - want.float()).abs()
        bound = (LOGFMT_RELATIVE_ERROR + 2 * BF16_RELATIVE_ERROR) * magnitudes[rank].float()
        bound += LOGFMT_SMALLEST * largest[rank].float()
        assert (error <= bound).all(), (
            f"rank {rank}: off by {(error - bound).max()} more than LogFMT may"
        )


def group_maxima(rows: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the largest magnitude of the channels that LogFMT encodes together."""
    size = deep_ep.native.backend.get().binding.LOGFMT_GROUP
    groups = rows.abs().unflatten(-1, (-1, size))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)


def exchange_and_check(
    ranks: Ranks, shape: Shape, mode: Mode, inputs: list[Inputs] | None = None
) -> None:
    """One dispatch and one combine on all ranks; all results equal the reference's. Inputs are random unless given."""
    inputs = inputs or make_inputs(shape)
    received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], shape, mode))
    dispatched = expected_dispatch(inputs, shape, mode)
    assert_received(received, dispatched, shape, mode)
    ys = [experts(one, rank) for rank, one in enumerate(received)]
    combined = ranks.run(
        lambda rank, buffer: combine(buffer, inputs[rank], received[rank].handle, ys[rank], mode)
    )
    if mode.use_logfmt:
        assert_combined_from_logfmt(combined, ys, inputs, dispatched)
    else:
        assert_combined(combined, expected_combine(inputs, ys, dispatched))


class Exchange:
    """One exchange for ranks that do not wait for each other in between, and the reference's answers."""

    def __init__(self, shape: Shape, mode: Mode) -> None:
        self.shape, self.mode = shape, mode
        self.inputs = make_inputs(shape)
        self.dispatched = expected_dispatch(self.inputs, shape, mode)
        ys = expected_experts(self.dispatched)
        self.combined = expected_combine(self.inputs, ys, self.dispatched)

    def dispatch(self, rank: int, buffer: deep_ep.Buffer, where: str) -> Received:
        """One rank's, compared with the reference."""
        received = dispatch(buffer, self.inputs[rank], self.shape, self.mode)
        assert_received_one(received, self.dispatched[rank], self.shape, self.mode, where)
        return received

    def run(self, rank: int, buffer: deep_ep.Buffer, where: str) -> None:
        """One rank's dispatch and combine, compared with the reference; from LogFMT only the dispatch is."""
        received = self.dispatch(rank, buffer, where)
        ys = experts(received, rank)
        combined = combine(buffer, self.inputs[rank], received.handle, ys, self.mode)
        assert combined.dtype == torch.bfloat16
        if not self.mode.use_logfmt:
            assert_same_bytes(combined, self.combined[rank], f"{where}, combine")


def buffer_for(shape: Shape, group: Any, **arguments: Any) -> deep_ep.Buffer:
    """This rank's buffer for operations of `shape`, where ranks are no threads of `Ranks`."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        shape.num_max_tokens, shape.hidden, shape.num_ranks, shape.num_experts
    )
    return deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=shape.num_local_experts,
        **arguments,
    )


def ranks_for(shape: Shape, **buffer_arguments: Any) -> Ranks:
    """A rank group whose buffers fit `shape`."""
    return Ranks(
        shape.num_ranks, shape.num_max_tokens, shape.hidden, shape.num_experts, **buffer_arguments
    )
