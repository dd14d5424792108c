"""The public face without any exchange: names, signatures, settings, events, groups, docstrings."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deep_ep
from deep_ep import Buffer, Config, EventHandle, EventOverlap
from deep_ep.base import env, rules
from deep_ep.base.topology import Topology, ranks_per_node
from deep_ep.checks import calls
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.errors import (
    EPArgumentError,
    EPError,
    EPTimeoutError,
    EPTypeError,
    EPUsageError,
    ranks_text,
)
from deep_ep.group import Group, ThreadGroup, TorchGroup, as_group, thread_groups
from deep_ep.native import backend
from deep_ep.observe import watchers
from deep_ep.observe.counters import RecvCounters
from deep_ep.ops.failures import error_from_failure
from deep_ep.types.handles import LowLatencyHandle, hidden_word, new_handle
from support.launch import on_threads, outcomes
from support.native_recorder import NativeRecorder

STREAMS = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
# All that may be positional, in the order of v1.2.1; the masks, which that version lacks, as in later ones.
SIGNATURES = {
    "__init__": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "get_local_buffer_tensor": "dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_dispatch_layout": f"topk_idx, num_experts, {STREAMS}",
    "dispatch": "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
    "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
    f"expert_alignment=1, num_worst_tokens=0, config=None, {STREAMS}",
    "combine": f"x, handle, topk_weights=None, bias=None, config=None, {STREAMS}",
    "internode_dispatch": "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
    "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
    f"expert_alignment=1, config=None, {STREAMS}",
    "internode_combine": f"x, handle, topk_weights=None, bias=None, config=None, {STREAMS}",
    "low_latency_dispatch": "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
    "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None",
    "get_next_low_latency_combine_buffer": "handle",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "low_latency_update_mask_buffer": "rank_to_mask, mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_comm_stream": "",
    "destroy": "",
}


def buffer_of_one_rank(**arguments: Any) -> Buffer:
    """For four tokens and two experts."""
    size = Buffer.get_low_latency_rdma_size_hint(4, 256, 1, 2)
    group = thread_groups(1)[0]
    return Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=2, **arguments
    )


@pytest.fixture
def buffer() -> Any:
    made = buffer_of_one_rank(num_nvl_bytes=1024, explicitly_destroy=True)
    yield made
    made.destroy()


def four_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """x and topk_idx, all for the first expert."""
    device = backend.get().device()
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
    return x, torch.zeros(4, 1, dtype=torch.int64, device=device)


# ---- names and signatures


def test_all_import_forms_of_every_revision() -> None:
    import deep_ep.buffers.legacy
    import deep_ep.utils.event
    import deep_ep_cpp

    assert deep_ep.buffers.legacy.Buffer is deep_ep.buffer.Buffer is Buffer
    assert deep_ep.utils.event.EventOverlap is deep_ep.utils.EventOverlap is EventOverlap
    assert deep_ep_cpp.EventHandle is deep_ep.utils.EventHandle is EventHandle
    assert deep_ep_cpp.Config is deep_ep.utils.Config is Config
    assert deep_ep.topk_idx_t is deep_ep_cpp.topk_idx_t is torch.int64
    assert callable(deep_ep.utils.check_nvlink_connections)
    for name in deep_ep.__all__:
        assert hasattr(deep_ep, name)
    assert not hasattr(deep_ep, "HybridEPBuffer"), "clients probe for it"


def test_importing_loads_no_backend_and_touches_no_gpu() -> None:
    code = (
        "import sys, deep_ep, torch; assert not torch.cuda.is_initialized(); "
        "sys.exit(any(name in sys.modules for name in ('deep_ep._cpu', 'deep_ep._cuda')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters_are_those_of_deep_ep(name: str) -> None:
    parameters = list(inspect.signature(getattr(Buffer, name)).parameters.values())
    given = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    assert ", ".join(given) == SIGNATURES[name]
    others = {p.kind for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD}
    assert others <= {inspect.Parameter.KEYWORD_ONLY}


def test_what_revisions_have_in_one_place_is_told_apart() -> None:
    with pytest.raises(EPTypeError, match="comm is True; .* Pass comm and enable_shrink by name"):
        Buffer(thread_groups(1)[0], 0, 0, False, 24, True, False, False, True)  # type: ignore[arg-type]


def test_a_positional_config_is_the_config(buffer: Buffer) -> None:
    x, topk_idx = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    counts = buffer.get_dispatch_layout(topk_idx, 2)
    per_rank, per_node, per_expert, in_rank, _ = counts
    given = (x, None, per_rank, per_node, in_rank, per_expert, topk_idx, torch.ones(3, 1), 1)
    received = buffer.internode_dispatch(*given, Config(2, 2, 8), None, True)
    assert received[5].event is not None
    assert torch.equal(received[0], x)
    # Where some revisions have num_worst_tokens.
    with pytest.raises(EPTypeError, match="config"):
        buffer.internode_dispatch(*given, 0, Config(2, 2, 8))  # type: ignore[arg-type]


def test_the_constructor_takes_the_keywords_of_every_revision() -> None:
    parameters = inspect.signature(Buffer).parameters
    assert {"use_fabric", "enable_shrink", "comm", "explicitly_destroy"} <= set(parameters)
    assert "is_intranode" not in parameters
    with pytest.raises(TypeError, match="num_nvl_peers"):
        Buffer(None, num_nvl_peers=8)  # type: ignore[call-arg]


CALLS: list[type[calls.BufferCall]] = [
    *(calls.LowLatencyDispatch, calls.LowLatencyCombine, calls.DispatchLayout),
    *(calls.NormalDispatch, calls.NormalCombine, calls.MaskQuery),
    *(calls.ElasticDispatch, calls.ElasticCombine),
]


def method_of(kind: type[calls.BufferCall]) -> Callable[..., Any]:
    """Whose arguments these are."""
    owner = deep_ep.ElasticBuffer if issubclass(kind, calls.ElasticCall) else Buffer
    method: Callable[..., Any] = getattr(owner, kind.name)
    return method


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_a_call_knows_which_arguments_of_its_method_are_flags(kind: type[calls.BufferCall]) -> None:
    parameters = inspect.signature(method_of(kind)).parameters.values()
    assert {one.name for one in parameters if one.annotation == "bool"} == {*kind.flags}


@pytest.mark.parametrize("kind", CALLS[:2], ids=lambda kind: kind.__name__)
def test_of_a_known_call_all_arguments_are_looked_at(kind: type[calls.BufferCall]) -> None:
    """Those beside tensors, flags and numbers whoever asks checks each time."""
    looked_at = {*kind.flags, *kind.numbers, *(rule.argument for rule in kind.rules)}
    others = inspect.signature(method_of(kind)).parameters.keys() - looked_at
    assert others <= {"self", "handle", "recv_counters"}


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, rule) for kind in CALLS for rule in kind.rules],
    ids=lambda value: getattr(value, "argument", getattr(value, "__name__", value)),
)
def test_docstrings_give_the_shapes_that_are_checked(
    kind: type[calls.BufferCall], rule: rules.TensorRule
) -> None:
    text = " ".join((method_of(kind).__doc__ or "").split())
    assert f"{rule.argument}: {rule.text}" in text


# ---- Config


def test_config_takes_positions_and_keywords_and_rounds_up() -> None:
    config = Config(24, 8, 512, 16, 120)
    assert config == Config(
        num_sms=24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=512,
        num_max_rdma_chunked_send_tokens=16,
        num_max_rdma_chunked_recv_tokens=128,
    )
    assert Config() == Config(20, 6, 256, 6, 256)


@pytest.mark.parametrize(
    "values",
    [(-2,), (20, 0), (20, 6, 6), (20, 6, 0), (20, 6, 256, 0), (20, 6, 256, 6, 11), (20, 7, 6)],
)
def test_config_refuses_what_deep_ep_refuses(values: tuple[int, ...]) -> None:
    with pytest.raises(EPArgumentError, match="Config: num_"):
        Config(*values)


def test_config_refuses_other_types_and_keywords() -> None:
    with pytest.raises(TypeError):
        Config(20.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Config(num_channels=10)  # type: ignore[call-arg]


def test_size_hints_are_those_of_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DEEP_EP_RANKS_PER_NODE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert Buffer.get_dispatch_config(8).get_nvl_buffer_size_hint(14336, 8) == 335709824
    assert Buffer.get_dispatch_config(8).get_rdma_buffer_size_hint(14336, 8) == 0
    assert Buffer.get_dispatch_config(16).get_nvl_buffer_size_hint(14336, 16) == 377673984
    assert Buffer.get_dispatch_config(16).get_rdma_buffer_size_hint(14336, 16) == 91887744


def test_size_hints_are_for_the_nodes_that_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Buffer.get_dispatch_config(8)

    def hints(**variables: str) -> tuple[int, int]:
        for name in ("DEEP_EP_RANKS_PER_NODE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return (
            config.get_nvl_buffer_size_hint(14336, 8),
            config.get_rdma_buffer_size_hint(14336, 8),
        )

    alone = hints()
    of_four = hints(DEEP_EP_RANKS_PER_NODE="4")
    assert of_four[0] < alone[0]
    assert of_four[1] > alone[1] == 0
    assert hints(LOCAL_WORLD_SIZE="4") == (alone[0], of_four[1])
    assert hints(LOCAL_WORLD_SIZE="8") == hints(LOCAL_WORLD_SIZE="64") == alone
    assert hints(LOCAL_WORLD_SIZE="4", DEEP_EP_RANKS_PER_NODE="8") == alone


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 12, 16, 20, 160])
def test_size_hints_are_aligned_and_grow_with_the_row(num_ranks: int) -> None:
    config = Buffer.get_combine_config(num_ranks)
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        sizes = [hint(hidden_bytes, num_ranks) for hidden_bytes in (256, 1000, 14336)]
        assert all(size % 128 == 0 for size in sizes)
        assert sizes == sorted(sizes)


def test_size_hints_need_even_sms_between_nodes() -> None:
    assert Config(21).get_nvl_buffer_size_hint(1024, 8) > 0
    with pytest.raises(EPArgumentError, match="num_sms is 21"):
        Config(21).get_nvl_buffer_size_hint(1024, 16)


def test_recommended_configs_exist_for_every_group_size() -> None:
    assert Buffer.get_dispatch_config(2) == Config(20, 24, 256, 6, 128)
    assert Buffer.get_combine_config(160) == Config(20, 2, 720, 8, 128)
    assert Buffer.get_dispatch_config(1) == Buffer.get_dispatch_config(2)
    assert Buffer.get_dispatch_config(12) == Buffer.get_dispatch_config(16)
    assert Buffer.get_dispatch_config(1000) == Buffer.get_dispatch_config(160)


def test_set_num_sms_on_class_and_object_changes_later_configs(buffer: Buffer) -> None:
    try:
        Buffer.set_num_sms(24)
        assert Buffer.num_sms == buffer.num_sms == Buffer.get_dispatch_config(8).num_sms == 24
        buffer.set_num_sms(16)
        assert Buffer.num_sms == 16
        with pytest.raises(AssertionError, match="num_sms is 15"):
            Buffer.set_num_sms(15)
        assert Buffer.num_sms == 16
    finally:
        Buffer.set_num_sms(20)


# ---- events


def test_events_wait_in_every_form() -> None:
    event = EventOverlap(EventHandle(), (torch.zeros(1),))
    event.current_stream_wait()
    with event as entered:
        assert entered is event
    with event():
        pass
    assert event.event is not None
    with event(release_handle=True):
        pass
    assert event.event is None
    with event:  # nothing to wait for
        pass
    with pytest.raises(AssertionError, match="event is None"):
        event.current_stream_wait()
    event.event = Buffer.capture().event
    event.current_stream_wait(release_handle=True)
    assert event.event is None


def test_a_hook_runs_once_after_the_next_wait() -> None:
    calls: list[int] = []
    event = Buffer.capture()
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(AssertionError, match="already registered"):
        event.register_hook_after_wait(lambda: calls.append(2))
    assert calls == []
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1]
    event.register_hook_after_wait(lambda: calls.append(3))
    with event():
        pass
    assert calls == [1, 3]


# ---- Buffer of one rank


def test_attributes_that_callers_read(buffer: Buffer) -> None:
    assert (buffer.rank, buffer.group_size) == (0, 1)
    assert buffer.num_nvl_bytes == 1024
    assert buffer.num_rdma_bytes == Buffer.get_low_latency_rdma_size_hint(4, 256, 1, 2)
    assert buffer.low_latency_mode is True
    assert buffer.explicitly_destroy is True
    assert buffer.enable_shrink is False
    assert buffer.nvshmem_qp_depth == env.nvshmem_qp_depth()
    assert buffer.get_comm_stream() is buffer.get_comm_stream()
    assert isinstance(buffer.group, deep_ep.group.ThreadGroup)
    assert Buffer.is_sm90_compiled() is True


def test_local_buffer_views_count_elements(buffer: Buffer) -> None:
    device = backend.get().device()
    whole = buffer.get_local_buffer_tensor(torch.float32)
    assert whole.shape == (256,)
    assert whole.device == device
    whole.copy_(torch.arange(256))
    assert buffer.get_local_buffer_tensor(torch.float32, offset=250).tolist() == [*range(250, 256)]
    view = buffer.get_local_buffer_tensor(torch.float32, torch.Size((2, 3)), offset=4)
    assert view.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == (
        buffer.num_rdma_bytes
    )
    with pytest.raises(EPArgumentError, match="256 elements"):
        buffer.get_local_buffer_tensor(torch.float32, torch.Size((7,)), offset=250)


def test_a_buffer_is_weakly_referenceable_and_goes_with_its_last_reference() -> None:
    made = Buffer(thread_groups(1)[0], num_nvl_bytes=128)
    view = made.get_local_buffer_tensor(torch.int8)
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None
    view.fill_(1)  # keeps the memory


def test_destroy_needs_to_be_announced_and_may_be_repeated() -> None:
    implicit = Buffer(thread_groups(1)[0])
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        implicit.destroy()
    explicit = Buffer(thread_groups(1)[0], explicitly_destroy=True)
    explicit.destroy()
    explicit.destroy()
    assert explicit.runtime is None
    with pytest.raises(EPUsageError, match="destroy"):
        explicit.get_comm_stream()


def test_dropping_a_buffer_that_should_be_destroyed_warns() -> None:
    made = [Buffer(thread_groups(1)[0], explicitly_destroy=True)]
    with pytest.warns(ResourceWarning, match=r"without destroy\(\)"):
        made.clear()


def test_a_hook_keeps_the_buffer_that_it_receives_for() -> None:
    made = buffer_of_one_rank()
    _, count, _, _, hook = made.low_latency_dispatch(*four_tokens(), 4, 2, return_recv_hook=True)
    dropped = weakref.ref(made)
    del made
    assert hook is not None
    assert dropped() is not None
    hook()
    assert count.tolist() == [4, 0]
    del hook
    assert dropped() is None


@pytest.mark.parametrize("diagnose", ["0", "async:600"])
def test_who_registers_is_started_with_a_buffer_that_is_watched_and_ended_with_it(
    monkeypatch: pytest.MonkeyPatch, diagnose: str
) -> None:
    told: list[str] = []

    class Watcher:
        def end(self) -> None:
            told.append("end")

        def close(self) -> None:
            told.append("close")

    def start(buffer: Buffer, group: Group, when: env.DiagnoseMode) -> Watcher:
        assert buffer.dispatch_counters is not None
        told.append(f"start on {group.rank} of {group.size}, {when.mode}")
        return Watcher()

    monkeypatch.setenv("DEEP_EP_DIAGNOSE", diagnose)
    monkeypatch.setattr(watchers, "starts", [])
    watchers.register(start)
    watchers.register(lambda *_: None)
    made = buffer_of_one_rank(explicitly_destroy=True)
    assert told == ([] if diagnose == "0" else ["start on 0 of 1, async"])
    made.destroy()
    assert told[1:] == ([] if diagnose == "0" else ["end", "close"])


class Allocations(TorchDispatchMode):
    """Counts the tensors that torch allocates in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__.startswith("empty")
        return func(*args, **(kwargs or {}))


def test_a_call_of_known_sizes_asks_only_for_the_operation_and_allocates_only_its_outputs(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, topk_idx = four_tokens()
    weights = torch.ones(4, 1, device=x.device)

    def exchange() -> tuple[int, int]:
        with Allocations() as of_dispatch:
            (data, _), _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 2)
        rows = torch.zeros(data.shape, dtype=torch.bfloat16, device=x.device)
        with Allocations() as of_combine:
            buffer.low_latency_combine(rows, topk_idx, weights, handle)
        return of_dispatch.count, of_combine.count

    exchange()
    runtime = buffer.runtime
    assert runtime is not None
    recorder = NativeRecorder(runtime.native)
    monkeypatch.setattr(runtime, "native", recorder)
    binding = backend.get().binding
    monkeypatch.setattr(binding, "low_latency_rdma_size_hint", lambda **_: pytest.fail("asked"))
    # Rows, scales, counts, handle[0] and handle[1]; and what combine returns.
    assert exchange() == (5, 1)
    looks = [] if backend.get().runs_in_streams else ["find_handle_fault"]
    assert recorder.asked == [
        *("low_latency_dispatch", "take_failure"),
        *(*looks, "low_latency_combine", "take_failure"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nvl_bytes": 100}, "num_nvl_bytes is 100"),
        ({"num_rdma_bytes": -128}, "num_rdma_bytes is -128"),
        ({"num_nvl_bytes": 2**64 - 128}, "num_nvl_bytes is 18446744073709551488"),
        ({"num_nvl_bytes": 1e9}, "it must be an integer"),
        ({"low_latency_mode": True, "num_qps_per_rank": 0}, "num_qps_per_rank is 0"),
        (
            {"low_latency_mode": True, "num_qps_per_rank": "4"},
            "num_qps_per_rank is '4'; .* integer",
        ),
        ({"timeout_s": "2"}, "timeout_s is '2'; it must be a number above 0"),
        ({"explicitly_destroy": torch.zeros(2)}, "explicitly_destroy is a Tensor"),
    ],
)
def test_construction_refuses_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EPArgumentError, match=message):
        Buffer(thread_groups(1)[0], **arguments)


def test_ranks_that_disagree_at_construction_are_named() -> None:
    groups = thread_groups(3)
    errors = outcomes(lambda group: Buffer(group, 128 * (1 + group.rank // 2)), groups)
    for error in errors:
        assert isinstance(error, EPArgumentError)
        assert "num_nvl_bytes is 128 on ranks 0-1, 256 on rank 2" in str(error)
    for made in on_threads(lambda group: Buffer(group, 128), groups):
        assert isinstance(made, Buffer)


def test_an_error_on_one_rank_reaches_all() -> None:
    mine, others = outcomes(
        lambda group: Buffer(group, 100 if group.rank == 0 else 128), thread_groups(2)
    )
    assert str(mine).startswith("Buffer: num_nvl_bytes is 100")
    assert "rank 0 failed" in str(others)


def test_layout_of_one_rank_counts_repeated_and_ignores_invalid(buffer: Buffer) -> None:
    topk_idx = torch.tensor([[0, 0], [1, -1], [-1, -1], [7, 1]], device=backend.get().device())
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, 2)
    assert per_rank.tolist() == [3]
    assert per_node is None
    assert per_expert.tolist() == [2, 2]
    assert in_rank.tolist() == [[True], [True], [False], [True]]
    assert event.event is None
    again = buffer.get_dispatch_layout(topk_idx, 2, event, True)
    assert again[4].event is not None
    third = buffer.get_dispatch_layout(topk_idx, 2, again[4], True, True)
    assert third[2].tolist() == [2, 2]
    with pytest.raises(EPArgumentError, match="allocate_on_comm_stream"):
        buffer.get_dispatch_layout(topk_idx, 2, event, True, True)


def test_a_buffer_knows_the_place_of_its_rank_among_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", "2")
    *_, last = on_threads(Buffer, thread_groups(4))
    assert last.runtime.get_num_rdma_ranks() == 2
    assert (last.runtime.get_rdma_rank(), last.runtime.get_root_rdma_rank(True)) == (1, 1)


# ---- counters


def test_counters_follow_the_native_fields(buffer: Buffer) -> None:
    binding = backend.get().binding
    counters = RecvCounters(3, ring=5)
    assert counters.totals.shape == (len(binding.COUNTER_FIELDS), 3)
    assert counters.own.shape == (len(binding.OWN_FIELDS),)
    assert counters.ring.shape == (5, 4, binding.NUM_RING_FIELDS)
    assert counters.pointers() == (
        counters.totals.data_ptr(),
        counters.own.data_ptr(),
        counters.ring.data_ptr(),
        5,
    )
    assert RecvCounters(3, ring=0).pointers()[2:] == (0, 0)
    buffer.enable_counters(ring=8)
    kept = buffer.dispatch_counters
    buffer.enable_counters(ring=8)
    assert buffer.dispatch_counters is kept
    buffer.disable_counters()
    assert buffer.dispatch_counters is buffer.combine_counters is None


def test_normal_operations_have_counters_of_their_own(buffer: Buffer) -> None:
    buffer.enable_counters(ring=8)
    names = ("dispatch", "combine", "notify", "relay_dispatch", "relay_combine")
    counters = [getattr(buffer, f"normal_{name}_counters") for name in names]
    assert len({id(one) for one in counters[:3]} | {id(buffer.dispatch_counters)}) == 4
    assert counters[3:] == [None, None], "nothing is relayed on one node"
    buffer.enable_counters(ring=8)
    assert buffer.normal_dispatch_counters is counters[0]
    buffer.disable_counters()
    assert buffer.normal_dispatch_counters is None
    without = Buffer(thread_groups(1)[0])
    without.enable_counters()
    assert without.normal_dispatch_counters is None


def test_windows_are_differences_of_snapshots() -> None:
    counters = RecvCounters(2, ring=4)
    counters["wait_ns"].copy_(torch.tensor([5, 7]))
    counters["max_wait_ns"].copy_(torch.tensor([5, 7]))
    counters.ring[1, 2, 0] = 1
    earlier = counters.snapshot()
    counters["wait_ns"].add_(10)
    counters["max_wait_ns"].copy_(torch.tensor([10, 10]))
    counters.own[0] += 2
    for op in (2, 3):
        counters.ring[op, 2, 0] = op
    window = counters.snapshot() - earlier
    assert window["wait_ns"].tolist() == [10, 10]
    assert window["max_wait_ns"].tolist() == [10, 10]
    assert window.ops == window.own_value("ops") == 2
    assert window.operation == 3
    assert window.operations()[:, 2, 0].tolist() == [2, 3]
    assert earlier["wait_ns"].tolist() == [5, 7]
    assert np.array_equal(pickle.loads(pickle.dumps(window)).totals, window.totals)
    with pytest.raises(EPArgumentError, match="no field 'waiting'"):
        window["waiting"]
    with pytest.raises(EPArgumentError, match="same counters"):
        window.since(RecvCounters(3, ring=4).snapshot())


# ---- groups and topology


def test_thread_groups_exchange_copies_and_survive_a_missing_thread() -> None:
    groups = thread_groups(3, timeout_s=2.0)
    objects = [[rank] for rank in range(3)]
    gathered = on_threads(lambda group: group.all_gather_object(objects[group.rank]), groups)
    assert gathered == [objects] * 3
    assert gathered[0][0] is not objects[0]
    for error in outcomes(ThreadGroup.barrier, [groups[0], groups[2]]):
        assert isinstance(error, EPTimeoutError)
        assert error.missing_ranks == (1,)
    assert on_threads(ThreadGroup.barrier, groups) == [None] * 3


def test_groups_are_adapted() -> None:
    class Communicator:
        def Get_rank(self) -> int:  # noqa: N802
            return 1

        def Get_size(self) -> int:  # noqa: N802
            return 2

        def allgather(self, obj: object) -> list[object]:
            return [None, obj]

    class ProcessGroup:
        def rank(self) -> int:
            return 3

        def size(self) -> int:
            return 4

    adapted = as_group(None, Communicator())
    assert (adapted.rank, adapted.size, adapted.all_gather_object("x")) == (1, 2, [None, "x"])
    torch_group = as_group(ProcessGroup())
    assert isinstance(torch_group, TorchGroup)
    assert (torch_group.rank, torch_group.size) == (3, 4)
    with pytest.raises(ValueError, match="both None"):
        as_group(None)
    with pytest.raises(TypeError, match="group is a int"):
        as_group(3)


@pytest.mark.parametrize(
    ("hosts", "asked", "expected"),
    [
        (["a"] * 8, None, 8),
        (["a"] * 4 + ["b"] * 4, None, 4),
        (["a"] * 6 + ["b"] * 4, None, 2),
        (["a", "b", "a", "b"], None, 1),
        (["a"] * 12, None, 12),
        (["a"] * 8, 2, 2),
        (["a"] * 2, 8, 2),
    ],
)
def test_nodes_never_span_hosts(hosts: list[str], asked: int | None, expected: int) -> None:
    assert ranks_per_node(hosts, asked) == expected


# ---- environment and errors


# What is read otherwise than by a call without arguments.
READERS: dict[str, Callable[[], object]] = {
    "DEEP_EP_LAUNCH_SHAPE": lambda: env.launch_shape(max_warps=32, max_threads=512 * 32),
    "MASTER_PORT": env.nodes,
    "WORLD_SIZE": env.nodes,
    "RANK": env.nodes,
}


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.timeout_s, "2.5", 2.5),
        (env.recorder_frames, "8", 8),
        (env.ranks_per_node, "", None),
        (env.ranks_per_node, "4", 4),
        (env.schedule, "random:7", ("random", 7)),
        (env.delivery, "in-order", ("in-order", 0)),
        (env.any_launch_shape, "4x8", (4, 8)),
        (env.any_launch_shape, "512x1", (512, 1)),
        (env.any_launch_shape, "", (0, 0)),
        (env.bulk_copies, "", None),
        (env.clock_interval_s, "", None),
        (env.clock_interval_s, "0", 0.0),
        (env.bulk_copies, "0", False),
        (env.bulk_copies, "1", True),
        (env.cpu_clock, "wall", "wall"),
        (env.diagnose, "0", env.DiagnoseMode("off")),
        (env.diagnose, "1", env.DiagnoseMode("async", seconds=20.0)),
        (env.diagnose, "sync:580", env.DiagnoseMode("sync", steps=580)),
        (env.diagnose, "async:0.5", env.DiagnoseMode("async", seconds=0.5)),
        (env.diagnose_dir, "", None),
        (env.diagnose_dir, "logs/ep", Path("logs/ep")),
        (env.nvshmem_qp_depth, "2048", 2048),
        (env.local_world_size, "", None),
        (env.local_world_size, "4", 4),
        (env.master_port, "99", ("tcp://127.0.0.1:99", 1, 0)),
        (env.world_size, "3", ("tcp://127.0.0.1:8361", 3, 0)),
    ],
)
def test_environment_variables_are_read(
    monkeypatch: pytest.MonkeyPatch, variable: env.Variable[Any], text: str, value: object
) -> None:
    monkeypatch.setenv(variable.name, text)
    assert READERS.get(variable.name, variable)() == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.backend, "rocm"),
        (env.local_world_size, "none"),
        (env.timeout_s, "0"),
        (env.node_rank, "1"),
        (env.world_size, "0"),
        (env.timeout_s, "soon"),
        (env.recorder_frames, "65"),
        (env.recorder_frames, "all"),
        (env.ranks_per_node, "-1"),
        (env.ranks_per_node, "1" + "0" * 5000),
        (env.schedule, "random"),
        (env.schedule, "random:18446744073709551616"),
        (env.delivery, "round-robin"),
        (env.any_launch_shape, "4x0"),
        (env.any_launch_shape, "4"),
        (env.any_launch_shape, "1x33"),
        (env.any_launch_shape, "513x1"),
        (env.any_launch_shape, "1000000x1"),
        (env.any_launch_shape, f"1{'0' * 5000}x1"),
        (env.bulk_copies, "on"),
        (env.cpu_clock, "sun"),
        (env.diagnose, "yes"),
        (env.diagnose, "sync"),
        (env.diagnose, "sync:0"),
        (env.diagnose, "sync:" + "1" * 5000),
        (env.diagnose, "async:0"),
        (env.diagnose, "async:nan"),
        (env.diagnose, "async:"),
    ],
)
def test_bad_environment_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: env.Variable[Any], text: str
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(EPArgumentError, match=f"{variable.name} is '{text}'; it must be"):
        READERS.get(variable.name, variable)()


def test_what_was_measured_is_looked_for_where_nobody_has_a_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # of no user
    assert env.tuned() == Path("~/.cache/deep_ep/tuned.json")


def test_every_error_is_a_runtime_error_and_pickles() -> None:
    for name in deep_ep.__all__:
        if name.startswith("EP") and issubclass(getattr(deep_ep, name), Exception):
            error = getattr(deep_ep, name)("text")
            assert isinstance(error, RuntimeError)
            assert isinstance(error, EPError)
            assert str(pickle.loads(pickle.dumps(error))) == "text"
    assert issubclass(EPUsageError, (AssertionError, ValueError))


def test_a_timeout_carries_its_facts() -> None:
    failure: dict[str, Any] = {
        "reason": "timeout",
        "operation": "low_latency_dispatch",
        "op": 17,
        "ranks": [5, 3],
        "last_op": {3: 16, 5: 0},
        "given_up": {3: 0, 5: 0},
        "expected": {},
        "seen": {},
        "waited_ns": 2_000_000_000,
    }
    error = error_from_failure(failure, 0)
    assert isinstance(error, EPTimeoutError)
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert found.missing_ranks == (3, 5)
        assert found.last_seen == {3: 16, 5: 0}
        assert (found.operation, found.op, found.waited_s) == ("low_latency_dispatch", 17, 2.0)
    text = str(error)
    assert (
        "low_latency_dispatch (operation 17) on rank 0: ranks 3, 5 did not arrive within 2 s"
        in text
    )
    assert "rank 3 was last seen in operation 16; rank 5 has not been seen yet" in text
    assert "DEEP_EP_TIMEOUT_S" in text


def test_ranks_are_written_as_runs() -> None:
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert ranks_text([]) == "no rank"


def test_the_low_latency_handle_is_a_tuple_of_five() -> None:
    handle = LowLatencyHandle(torch.zeros(1), torch.ones(1), 4, 512, 6)
    src_info, layout_range, maximum, hidden, num_experts = handle
    assert (maximum, hidden, num_experts) == (4, 512, 6)
    assert handle[0] is src_info
    assert handle[1] is layout_range
    assert low_latency_checks.unpack_handle("test", tuple(handle)) == handle


def test_the_native_calls_get_pointers_by_the_same_names_from_either_normal_handle() -> None:
    def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    of_nodes = ["node_channel_prefix", "recv_node_channel_prefix", "recv_node_prefix", "node_head"]
    pointers = []
    for per_node in (4, 2):
        place = Topology(rank=1, num_ranks=4, ranks_per_node=per_node)
        handle = new_handle(place, 3, torch.zeros(5, 4, dtype=torch.bool), empty)
        pointers.append(handle.pointers(1))
        for name in pointers[-1].keys() & set(handle._fields):
            assert pointers[-1][name] == getattr(handle, name).data_ptr()
        hidden = hidden_word(handle.channel_prefix)
        assert hidden is not None
        assert pointers[-1]["dispatch_op"] == hidden.data_ptr()
        assert pointers[-1]["source_prefix"] == handle.source_prefix(1).data_ptr()
    one, several = pointers
    assert one.keys() == several.keys()
    assert [one[name] for name in of_nodes] == [0] * 4
    assert all(several[name] for name in of_nodes)
    assert (one["source_stride"], several["source_stride"]) == (4, 1)


def test_every_value_rule_says_what_is_allowed_and_what_to_do() -> None:
    for name, text in rules.VALUES.items():
        allowed, _, fix = text.partition(". ")
        assert allowed, name
        assert fix.endswith("."), name
