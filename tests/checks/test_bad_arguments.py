"""Bad arguments of every public callable: the error is ours and names the argument.

A correct call of each is made with one argument after the other replaced by everything in `bad_values`. Some of these
are allowed here and there, so a call may succeed; if it fails, then in our words.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deep_ep import Buffer, Config, RecvCounters, moe, sizes
from deep_ep.errors import EPError
from deep_ep.group import thread_groups
from deep_ep.native import backend
from support.normal_exchange import layout_of

pytestmark = pytest.mark.skipif(
    backend.get().name != "cpu", reason="the correct calls have tensors on the CPU"
)

HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 128, 4, 2, 3
CONFIG = Config(4, 2, 8, 2, 8)
NUM_BYTES = 1 << 20
# In a hundred; of the arguments of all calls together.
MOST_OF_OTHERS = 1.0

Call = Callable[..., Any]
Arguments = dict[str, Any]


class NoNumber:
    """A type that nothing knows."""

    def __repr__(self) -> str:
        return "NoNumber()"


def scalars() -> dict[str, Any]:
    """Values that are no tensors."""
    return {
        "None": None,
        "text": "x",
        "bytes": b"\xff",
        "object": NoNumber(),
        "type": int,
        "list": [],
        "list of texts": ["x", "y"],
        "dict": {},
        "tuple": (1, 2, 3),
        "nan": float("nan"),
        "inf": float("inf"),
        "half": 1.5,
        "negative": -1,
        "zero": 0,
        "odd": 3,
        "int32": 1 << 31,
        "int64": 1 << 63,
        "huge": 1 << 200,
        "complex": 1j,
        "numpy": np.zeros(3, np.int32),
        "numpy nan": np.float32("nan"),
        "array of objects": np.array([None, "x"], object),
    }


def tensors(like: Any) -> dict[str, Any]:
    """Tensors, most of the shape of a correct one, if that is one."""
    base = like if isinstance(like, torch.Tensor) else torch.ones(3, 4)
    dense = base.detach().clone()
    numbers = dense.float()
    found = {
        "int8": numbers.to(torch.int8),
        "float64": numbers.double(),
        "complex64": numbers.to(torch.complex64),
        "bool": numbers.bool(),
        "meta": torch.empty_like(dense, device="meta"),
        "sparse": torch.sparse_coo_tensor(
            torch.zeros(dense.dim(), 0, dtype=torch.int64),
            torch.zeros(0, dtype=dense.dtype),
            dense.shape,
        ),
        "scalar": dense.new_zeros(()),
        "empty": dense[:0],
        "longer": torch.cat([dense, dense]),
        "more dimensions": dense[None],
        "not contiguous": torch.stack([dense, dense], -1)[..., 0],
        "expanded": dense.new_zeros(()).expand(dense.shape),
        "nan": torch.full_like(numbers, torch.nan).to(dense.dtype),
        "lowest": torch.full_like(dense, torch.iinfo(dense.dtype).min)
        if not dense.is_floating_point() and dense.dtype != torch.bool
        else -numbers,
        "needs grad": numbers.requires_grad_(),
        "conjugated": torch.ones(dense.shape, dtype=torch.complex64).conj(),
    }
    if dense.dim() == 2:
        found["csr"] = numbers.detach().to_sparse_csr()
        found["transposed"] = dense.t()
    return found


def replacements(like: Any) -> dict[str, Any]:
    """What takes the place of an argument."""
    found = {**scalars(), **{f"tensor, {name}": tensor for name, tensor in tensors(like).items()}}
    if not isinstance(like, tuple):
        return found
    found |= {"shorter": like[:-1], "with one more": (*like, None)}
    for i, item in enumerate(like):
        for name, value in replacements(item).items():
            found[f"[{i}] {name}"] = (*like[:i], value, *like[i + 1 :])
    return found


def attacks(call: Call, correct: Callable[[], Arguments]) -> Iterator[tuple[str, str, Arguments]]:
    """Argument, what is wrong with it, and the arguments of the call."""
    for name in inspect.signature(call).parameters:
        for wrong in replacements(correct().get(name)):
            arguments = correct()
            arguments[name] = replacements(arguments.get(name))[wrong]
            yield name, wrong, arguments


def new_buffer(
    num_nvl_bytes: int,
    num_rdma_bytes: int,
    low_latency_mode: bool = False,
    num_qps_per_rank: int = 24,
) -> Buffer:
    """Of a rank that is alone."""
    sizes = num_nvl_bytes, num_rdma_bytes
    return Buffer(thread_groups(1)[0], *sizes, low_latency_mode, num_qps_per_rank)


def nvl_hint(hidden_bytes: int, num_ranks: int) -> int:
    """With names, which the method does not take."""
    return CONFIG.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)


def rdma_hint(hidden_bytes: int, num_ranks: int) -> int:
    """The same."""
    return CONFIG.get_rdma_buffer_size_hint(hidden_bytes, num_ranks)


class Calls:
    """Correct calls of one rank that is alone, each as a function and its arguments."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def all(self) -> dict[str, tuple[Call, Callable[[], Arguments]]]:
        """By name; the arguments are made anew for each call."""
        buffer = self.buffer
        model = {
            "num_max_dispatch_tokens_per_rank": NUM_TOKENS,
            "hidden": HIDDEN,
            "num_experts": NUM_EXPERTS,
        }
        return {
            "Config": (Config, dict),
            "nvl hint": (nvl_hint, lambda: {"hidden_bytes": 256, "num_ranks": 8}),
            "rdma hint of Config": (rdma_hint, lambda: {"hidden_bytes": 256, "num_ranks": 8}),
            "sizes": (
                sizes,
                lambda: {"hidden": 256, "tokens": 3, "topk": 2, "experts": 4, "ranks": 2},
            ),
            "RecvCounters": (RecvCounters, lambda: {"num_ranks": 1, "ring": 4}),
            "Buffer": (new_buffer, lambda: {"num_nvl_bytes": 128, "num_rdma_bytes": 128}),
            "rdma hint": (buffer.get_low_latency_rdma_size_hint, lambda: {**model, "num_ranks": 1}),
            "set_num_sms": (buffer.set_num_sms, lambda: {"new_num_sms": 20}),
            "get_dispatch_config": (buffer.get_dispatch_config, lambda: {"num_ranks": 8}),
            "get_combine_config": (buffer.get_combine_config, lambda: {"num_ranks": 8}),
            "get_local_buffer_tensor": (
                buffer.get_local_buffer_tensor,
                lambda: {"dtype": torch.int32, "size": (2, 3), "offset": 4},
            ),
            "enable_counters": (buffer.enable_counters, lambda: {"ring": 4}),
            "measure_clock_offsets": (buffer.measure_clock_offsets, lambda: {"samples": 2}),
            "set_hang_warning": (buffer.set_hang_warning, lambda: {"seconds": 5.0}),
            "clean_low_latency_buffer": (buffer.clean_low_latency_buffer, lambda: dict(model)),
            "get_dispatch_layout": (buffer.get_dispatch_layout, self.layout_arguments),
            "dispatch": (buffer.dispatch, self.dispatch_arguments),
            "dispatch again": (buffer.dispatch, self.cached_arguments),
            "combine": (buffer.combine, self.combine_arguments),
            "low_latency_dispatch": (
                buffer.low_latency_dispatch,
                self.low_latency_dispatch_arguments,
            ),
            "low_latency_combine": (buffer.low_latency_combine, self.low_latency_combine_arguments),
            "next combine buffer": (
                buffer.get_next_low_latency_combine_buffer,
                lambda: {"handle": self.low_latency_combine_arguments()["handle"]},
            ),
            "moe.dispatch": (moe.dispatch, self.moe_dispatch_arguments),
            "moe.combine": (moe.combine, self.moe_combine_arguments),
        }

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        topk_idx = torch.tensor([[0, 1], [2, -1], [3, 0]])
        return x, topk_idx, torch.ones(topk_idx.shape)

    def layout_arguments(self) -> Arguments:
        return {
            "topk_idx": self.tokens()[1],
            "num_experts": NUM_EXPERTS,
            "previous_event": Buffer.capture(),
        }

    def dispatch_arguments(self) -> Arguments:
        x, topk_idx, topk_weights = self.tokens()
        layout, _ = layout_of(self.buffer, topk_idx, NUM_EXPERTS)
        return {
            "x": x,
            **layout,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "config": CONFIG,
            "recv_counters": RecvCounters(1, 2),
            "dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
        }

    def cached_arguments(self) -> Arguments:
        x, _, _, _, handle, _ = self.buffer.dispatch(**self.dispatch_arguments())
        return {"x": self.tokens()[0], "handle": handle, "config": CONFIG}

    def combine_arguments(self) -> Arguments:
        x, _, weights, _, handle, _ = self.buffer.dispatch(**self.dispatch_arguments())
        rows = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        return {
            "x": x,
            "handle": handle,
            "topk_weights": weights,
            "bias": (rows, rows),
            "config": CONFIG,
            "combine_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
        }

    def low_latency_dispatch_arguments(self) -> Arguments:
        x, topk_idx, _ = self.tokens()
        return {
            "x": x,
            "topk_idx": topk_idx,
            "num_max_dispatch_tokens_per_rank": NUM_TOKENS,
            "num_experts": NUM_EXPERTS,
            "use_fp8": False,
            "cumulative_local_expert_recv_stats": torch.zeros(NUM_EXPERTS, dtype=torch.int32),
            "dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
        }

    def low_latency_combine_arguments(self) -> Arguments:
        _, topk_idx, topk_weights = self.tokens()
        rows, _, handle, *_ = self.buffer.low_latency_dispatch(
            **self.low_latency_dispatch_arguments()
        )
        return {
            "x": rows,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "handle": handle,
            "out": torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16),
            "combine_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
        }

    def moe_dispatch_arguments(self) -> Arguments:
        x, topk_idx, topk_weights = self.tokens()
        return {
            "x": x,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "buffer": self.buffer,
            "num_experts": NUM_EXPERTS,
        }

    def moe_combine_arguments(self) -> Arguments:
        dispatched = moe.dispatch(**self.moe_dispatch_arguments())
        return {"y": dispatched.x, "dispatched": dispatched}


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_TIMEOUT_S", "5")
        yield Calls(new_buffer(NUM_BYTES, NUM_BYTES, True, NUM_EXPERTS))


def in_other_words(call: Call, arguments: Arguments, name: str) -> str:
    """What a bad argument ends in, if that is not an error of ours which names it; else empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(**arguments)
    except EPError as error:
        # Where two arguments do not go together, it may name the other one.
        names = {name, *arguments}
        is_named = any(one.removeprefix("new_") in str(error) for one in names)
        return "" if is_named else f"names nothing: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not ours
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.exhaustive
def test_bad_arguments_end_in_our_words(calls: Calls) -> None:
    num_attacks, found = 0, []
    for what, (call, correct) in calls.all().items():
        call(**correct())
        for name, wrong, arguments in attacks(call, correct):
            num_attacks += 1
            said = in_other_words(call, arguments, name)
            Buffer.num_sms = 20  # which a call may have set
            if said:
                found.append(f"{what}: {name} = {wrong}: {said.splitlines()[0][:200]}")
    share = 100 * len(found) / num_attacks
    sparse = [line for line in found if "tensor, sparse" in line or "tensor, csr" in line]
    assert not sparse, "\n".join(sparse)
    assert share <= MOST_OF_OTHERS, f"{len(found)} of {num_attacks}\n" + "\n".join(found)
