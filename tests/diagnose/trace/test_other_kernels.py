"""Traces of programs that use other kernels: names, phases, who comes last, and who is named; with known faults, and without."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep import diagnose
from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.core.diagnosis import Diagnosis
from deep_ep.diagnose.storage import counter_archive
from deep_ep.diagnose.trace import kernels, late_ranks, rank_trace, summary
from deep_ep.diagnose.trace.arrivals import arrivals
from deep_ep.diagnose.trace.kernels import (
    ALL_TO_ALL,
    COMBINE,
    DISPATCH,
    LAYOUT,
    PACK,
    TRANSFER,
    WAITING,
    kernel_of,
    looks_like_exchange,
)
from deep_ep.diagnose.trace.rank_trace import RankTrace
from generator import simulate_windows
from generator.faults import GeneratorFault, HotRank, SlowRank
from generator.machines import GPU
from support.launch import DEVICE, measured_again, raise_failures, run_processes
from support.library_traces import EXPERTS, LIBRARIES, events_of

RANKS, ROUNDS, TOKENS, HIDDEN, TOPK, EXPERTS_OF_ALL = 6, 40, 16, 256, 2, 12
WITH_NOTIFY = "DeepEP V1"


def traces_of(snapshots: Any, library: str, clocks_us: Any = None) -> list[RankTrace]:
    """As they are read, without a file."""
    found = []
    for snapshot in snapshots:
        off = 0.0 if clocks_us is None else clocks_us[snapshot.rank]
        events = events_of(snapshot, LIBRARIES[library], off)
        header = {"distributedInfo": {"rank": snapshot.rank, "world_size": snapshot.num_ranks}}
        found.append(rank_trace.condense(Path(f"rank{snapshot.rank}.json"), events, header))
    return found


def judged(traces: list[RankTrace]) -> Diagnosis:
    return late_ranks.judge(arrivals(traces), traces)


def test_every_library_has_its_name_and_phases() -> None:
    for library, names in LIBRARIES.items():
        rows = [kernel_of(name) for name, _ in (*names.dispatch, *names.combine)]
        assert {row and row.library for row in rows} == {library.removesuffix(", low latency")}
        phases = {row.phase for row in rows if row}
        assert TRANSFER in phases
        assert (WAITING in phases) == (library == WITH_NOTIFY)
    assert {row.phase for row in kernels.KERNELS} == {*kernels.PHASES}


@pytest.mark.parametrize(
    ("name", "library", "operation", "phase"),
    [
        # Those of the public profile of a training step, and of the threads that the table names.
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)", "DeepEP V1", DISPATCH, LAYOUT),
        ("void dpsk::ep::internode::notify_dispatch<false, 8>(int const*)", "DeepEP V1", DISPATCH, WAITING),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", "DeepEP V1", ALL_TO_ALL, WAITING),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "DeepEP V1", DISPATCH, TRANSFER),
        ("void dpsk::ep::internode::combine<false, 8>(int4*)", "DeepEP V1", COMBINE, TRANSFER),
        ("void dpsk::ep::internode::dispatch_ll<true>(void*)", "DeepEP V1", DISPATCH, TRANSFER),
        ("deep_ep::intranode::cached_notify_combine<8>", "DeepEP V1", COMBINE, WAITING),
        ("void deep_ep::internode_ll::combine<true>(void*)", "DeepEP V1", COMBINE, TRANSFER),
        ("hybrid_dispatch_impl", "DeepEP V2", DISPATCH, TRANSFER),
        ("void x::elastic::combine_reduce_epilogue_impl<3>()", "DeepEP V2", COMBINE, PACK),
        ("void (anonymous namespace)::fused_permute_dispatch_kernel<4>(P)", "Hybrid-EP", DISPATCH, TRANSFER),
        ("fused_combine_unpermute_kernel", "Hybrid-EP", COMBINE, TRANSFER),
        ("ep_combine_s", "MORI", COMBINE, TRANSFER),
        ("ep::copy_rows(ep::CopyRowsArgs)", "this package", DISPATCH, PACK),
        ("ep::sum_rows(ep::SumRowsArgs)", "this package", COMBINE, PACK),
        ("void ep::normal_notify<8>(ep::NotifyArgs)", "this package", DISPATCH, WAITING),
        ("void ep::low_latency_dispatch<true>(ep::DispatchArgs)", "this package", DISPATCH, TRANSFER),
    ],
)  # fmt: skip
def test_kernels_by_name(name: str, library: str, operation: str, phase: str) -> None:
    row = kernel_of(name)
    assert row is not None
    assert (row.library, row.operation, row.phase) == (library, operation, phase)


@pytest.mark.parametrize(
    ("name", "looks_like"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False),
        ("void sleep::dispatch()", True),
        ("_moe_a2a_dispatch_kernel", True),
        ("void pplx::dispatchKernel<8>(int)", True),
        ("void flash::flash_fwd_splitkv_combine_kernel<8>(flash::Flash_fwd_params)", False),
        ("void at::native::elementwise_kernel<4>(int)", False),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<128>>(Params)", False),
        (EXPERTS, False),
    ],
)
def test_what_no_row_has_may_look_like_an_exchange(name: str, looks_like: bool) -> None:
    assert kernel_of(name) is None
    assert looks_like_exchange(name) == looks_like


def kernel(name: str, begin: float, lasts: float, stream: int = 20) -> dict[str, Any]:
    span = {"ts": begin, "dur": lasts}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, **span, "args": {}}


def condensed(events: list[dict[str, Any]], rank: int = 0) -> RankTrace:
    return rank_trace.condense(
        Path(f"{rank}.json"), events, {"distributedInfo": {"rank": rank, "world_size": 2}}
    )


def test_kernels_of_one_exchange_are_one() -> None:
    """Servers call the buffer without an operator.

    Layout ran on another stream; a notify that tells no direction belongs to what follows it.
    """
    trace = condensed(
        [
            kernel("void deep_ep::layout::get_dispatch_layout<1>()", 0, 2, stream=7),
            kernel("void deep_ep::internode::notify_dispatch<1>()", 10, 5),
            kernel("void deep_ep::internode::dispatch<1>()", 20, 10),
            kernel("gemm", 22, 20, stream=7),
            kernel("void deep_ep::internode::cached_notify<1>()", 50, 6),
            kernel("void deep_ep::internode::combine<1>()", 56, 4),
            kernel("void deep_ep::internode::cached_notify<1>()", 70, 1),
            kernel("void deep_ep::internode::dispatch<1>()", 71, 4),
            kernel("void pplx::dispatchKernel<1>()", 90, 10),
        ]
    )
    assert [(each.name, each.operation, each.span_us) for each in trace.exchanges] == [
        ("deep_ep::internode::dispatch", DISPATCH, (10, 30)),
        ("deep_ep::internode::combine", COMBINE, (50, 60)),
        ("deep_ep::internode::dispatch", DISPATCH, (70, 75)),
    ]
    assert [each.meeting_us for each in trace.exchanges] == [(10, 15), (50, 56), (70, 71)]
    operators = [(row.count, row.mean_us, row.mean_bytes) for row in summary.operators(trace)]
    assert operators == [(2, 11, None), (1, 10, None)]
    rows = {(row.operation, row.phase): row for row in summary.kernel_rows([trace])}
    assert list(rows) == [
        (COMBINE, WAITING),
        (COMBINE, TRANSFER),
        (DISPATCH, LAYOUT),
        (DISPATCH, WAITING),
        (DISPATCH, TRANSFER),
    ]
    assert rows[DISPATCH, WAITING].count == 2
    assert rows[DISPATCH, WAITING].mean_us == 3
    assert rows[DISPATCH, WAITING].share == pytest.approx(0.06)
    assert rows[DISPATCH, TRANSFER].exposed == pytest.approx(1 - 8 / 14)
    (unknown,) = summary.unknown_rows([trace])
    assert (unknown.name, unknown.count, unknown.mean_us) == ("pplx::dispatchKernel", 1, 10)
    assert unknown.share == pytest.approx(0.1)


def test_layouts_of_no_transfer_are_told_together() -> None:
    layout = "void deep_ep::layout::get_dispatch_layout<1>()"
    trace = condensed([kernel("ep_combine", 5, 1), *(kernel(layout, 10 * i, 2) for i in range(3))])
    assert [(each.name, len(each.kernels)) for each in trace.exchanges] == [
        ("deep_ep::layout::get_dispatch_layout", 3),
        ("ep_combine", 1),
    ]
    assert sum(row.count for row in summary.kernel_rows([trace])) == 4


def test_one_kernel_for_both_directions_is_told_by_the_layout_before_it() -> None:
    trace = condensed(
        [
            event
            for at in (0, 100)
            for event in (
                kernel("void k::moe_prepare::computeCumsumDevice(int*)", at, 2),
                kernel("void k::moeAllToAllKernel<1>()", at + 5, 10),
                kernel("void k::moeAllToAllKernel<1>()", at + 50, 10),
            )
        ]
    )
    assert [(each.name, each.operation) for each in trace.exchanges] == [
        ("k::moeAllToAllKernel (dispatch)", DISPATCH),
        ("k::moeAllToAllKernel (combine)", COMBINE),
    ] * 2


def test_who_comes_last_and_what_it_did_before() -> None:
    """Rank 1 computes 30 us longer in its experts, so its notify is 30 us shorter; its clock is 5 s ahead."""

    def of_rank(rank: int) -> RankTrace:
        events = []
        for step in range(6):
            at = 200.0 * step + 5e6 * rank
            late = 30.0 * rank
            events += [
                kernel("gemm_of_experts", at, 50 + late, stream=7),
                {**kernel("experts", at - 1, 52 + late, 7), "cat": "gpu_user_annotation"},
                {**kernel("ProfilerStep#5", at, 51 + late, 7), "cat": "gpu_user_annotation"},
                kernel("void deep_ep::intranode::cached_notify_combine<8>()", at + 51 + late, 35 - late),
                kernel("void deep_ep::intranode::combine<8>()", at + 86, 20),
            ]  # fmt: skip
        return condensed(events, rank)

    traces = [of_rank(rank) for rank in range(2)]
    (found,) = arrivals(traces)
    assert (found.has_notify, found.count, found.is_last.mean(axis=1).tolist()) == (True, 6, [0, 1])
    assert found.late_us.tolist() == [[0] * 6, [30] * 6]
    assert found.before(1) == (
        "just before it ran gemm_of_experts in experts; gemm_of_experts took 30 us longer than on the others"
    )
    assert "undecided: traces of 2 ranks" in judged(traces).remarks[0]


@functools.cache
def generated(fault: GeneratorFault | None, seed: int, rounds: int = 64) -> Any:
    faults = [] if fault is None else [fault]
    windows = simulate_windows(GPU, 8, rounds, [faults], seed=seed, capacity=2 * rounds)
    return next(windows).snapshots


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_late_rank_is_named_from_the_kernels_of_every_library(library: str) -> None:
    """With clocks of hosts that differ by up to seven seconds, and 50 us of lateness."""
    traces = traces_of(
        generated(SlowRank(3, 50e-6), 5), library, clocks_us=[1e6 * rank for rank in range(8)]
    )
    diagnosis = judged(traces)
    assert diagnosis.keys == {(diagnose.COMP_SLOW, 3)}, diagnosis.remarks
    assert "cutlass::device_kernel took" in diagnosis.verdicts[0].next_step
    assert diagnosis.verdicts[0].cause == diagnose.Cause.LATE


def test_a_late_rank_behind_a_later_one_is_told_what_it_did() -> None:
    """It never comes last."""
    (window,) = simulate_windows(GPU, 8, 64, [[SlowRank(1, 30e-6), SlowRank(5, 60e-6)]], 7, 128)
    verdicts = judged(traces_of(window.snapshots, WITH_NOTIFY)).verdicts
    assert {verdict.rank for verdict in verdicts} == {1, 5}
    assert all("cutlass::device_kernel took" in verdict.next_step for verdict in verdicts)


@pytest.mark.parametrize("library", LIBRARIES)
def test_nobody_is_named_where_nobody_is_slow(library: str) -> None:
    assert judged(traces_of(generated(None, 6), library)).verdicts == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_more_tokens_alone_are_undecided_without_rows(library: str) -> None:
    diagnosis = judged(traces_of(generated(HotRank(2), 7), library))
    assert {verdict.rank for verdict in diagnosis.verdicts} <= {2}
    assert diagnose.COMP_SLOW not in {verdict.kind for verdict in diagnosis.verdicts}


def written(folder: Path, num_ranks: int = 8, *, keep: Any = lambda event: True) -> list[str]:
    """Traces of a group whose rank 3 is slow: their files."""
    for snapshot in generated(SlowRank(3, 50e-6), 5)[:num_ranks]:
        events = [event for event in events_of(snapshot, LIBRARIES[WITH_NOTIFY]) if keep(event)]
        text = json.dumps({"traceEvents": events})
        (folder / f"rank{snapshot.rank}.json").write_text(text)
    return [str(path) for path in folder.glob("*.json")]


def test_programs_without_exchanges_name_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traces of a slow rank, without the kernels of exchanges."""
    files = written(tmp_path, keep=lambda event: event["name"] == EXPERTS)
    assert main(["trace", *files, "--width", "200"]) == 0
    said = capsys.readouterr().out
    assert "no kernel of a dispatch or combine that is known is in these traces." in said
    assert "-Slow" not in said


def test_exchanges_that_do_not_belong_together_name_nobody() -> None:
    """Ranks 4 to 7 began their profile one round later, and ended it one later."""
    traces = [
        rank_trace.condense(
            Path("t"),
            events_of(snapshot, LIBRARIES[WITH_NOTIFY])[(12 if snapshot.rank > 3 else 0) :],
            {"distributedInfo": {"rank": snapshot.rank}},
        )
        for snapshot in generated(SlowRank(3, 50e-6), 5)
    ]
    diagnosis = judged(traces)
    assert diagnosis.verdicts == []
    assert "Profile the same steps everywhere" in diagnosis.remarks[0]


def test_files_of_all_ranks_end_in_a_sentence_for_a_ticket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = written(tmp_path)
    page, records = tmp_path / "page.html", tmp_path / "records"
    arguments = ["--width", "250", "--html", str(page), "--record", str(records)]
    assert main(["trace", *files, *arguments]) == 0
    said = capsys.readouterr().out
    (told,) = [line for line in said.splitlines() if line.startswith("for a ticket: ")]
    assert "DeepEP V1, 8 ranks traced: dispatch and combine take " in told
    assert "Comp-Slow: rank 3" in told
    assert "Who comes last, by the lengths of kernels" in said
    assert "Comp-Slow: rank 3" in page.read_text()
    assert main(["show", str(records), "--check", "--html", str(tmp_path / "of_record.html")]) == 3
    assert "rank 3" in capsys.readouterr().out


def test_a_record_of_one_trace_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = ["--html", str(page), "--record", str(tmp_path / "out")]
    assert main(["trace", *written(tmp_path, 1), *arguments]) == 2
    said = capsys.readouterr()
    assert "Name a trace of each rank" in said.err
    assert said.out == ""
    assert not page.exists()


def one_rank(rank: int, group: Any, folder: str) -> None:
    """Low-latency rounds on the real kernels, and their counters."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS_OF_ALL)
    buffer = deep_ep.Buffer(
        group, 0, size, low_latency_mode=True, num_qps_per_rank=EXPERTS_OF_ALL // RANKS,
        explicitly_destroy=True,
    )  # fmt: skip
    buffer.enable_counters(ring=2 * ROUNDS)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(ROUNDS):
        scores = torch.rand((TOKENS, EXPERTS_OF_ALL), generator=generator)
        topk_idx = scores.topk(TOPK).indices.to(DEVICE)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        received, _, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, TOKENS, EXPERTS_OF_ALL, use_fp8=False
        )
        weights = torch.ones(TOKENS, TOPK, device=DEVICE)
        buffer.low_latency_combine(received, topk_idx, weights, handle)
    diagnose.save(diagnose.snapshot(buffer), folder)
    buffer.destroy()


@pytest.mark.parametrize(
    ("injected", "named"),
    [
        ("slow-rank=4:2ms", [(diagnose.COMP_SLOW, 4)]),
        # Its receiver is held up, which only a notify tells.
        ("slow-path=1>4:2ms", [(diagnose.COMM_SLOW, 4)]),
        ("", []),
    ],
)
@measured_again
def test_faults_of_real_ranks_are_named_from_the_kernels_of_every_library(
    tmp_path_factory: pytest.TempPathFactory, injected: str, named: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    env = {"DEEP_EP_INJECT": injected} if injected else {}
    raise_failures(run_processes(one_rank, RANKS, str(folder), env=env))
    snapshots = counter_archive.load(folder)
    for library in LIBRARIES:
        diagnosis = judged(traces_of(snapshots, library))
        tells = library == WITH_NOTIFY or "path" not in injected
        assert diagnosis.keys == set(named if tells else []), (library, diagnosis.remarks)
