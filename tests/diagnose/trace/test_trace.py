"""Traces of the torch profiler: hand-made ones with answers worked out by hand, real ones, and damaged ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.trace import rank_trace, stream, summary
from deep_ep.diagnose.trace.arrivals import arrivals
from deep_ep.diagnose.trace.kernels import COMBINE, DISPATCH
from deep_ep.diagnose.trace.operations import operation_of, sent_of
from deep_ep.diagnose.trace.rank_trace import RankTrace
from deep_ep.errors import EPArgumentError
from deep_ep.group import thread_groups

T, H, N, K = 64, 256, 100, 4
BF16, LONG = "c10::BFloat16", "long int"


def event(name: str, cat: str, begin: float, lasts: float, number: int, **args: Any) -> Any:
    arguments = {"External id": number, **args}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": lasts, "args": arguments}


def operator(
    name: str, begin: float, number: int, dims: Any, types: Any, concrete: Any = ()
) -> Any:
    args = {"Input Dims": dims, "Input type": types, "Concrete Inputs": list(concrete)}
    return event(name, "cpu_op", begin, 5, number, **args)


def dispatch(begin: float, number: int, name: str = "FusedDispatch") -> Any:
    dims, types = [[T, H], [T, K], [T, K], [], [], []], [BF16, LONG, "float", *["Scalar"] * 3]
    return operator(name, begin, number, dims, types, ["", "", "", "8", "True", "True"])


def combine(begin: float, number: int) -> Any:
    return operator("FusedCombine", begin, number, [[N, H], [], []], [BF16, "Scalar", "Scalar"])


def kernel(name: str, begin: float, lasts: float, number: int) -> Any:
    return event(name, "kernel", begin, lasts, number)


def one_step(shift: float = 0, late: float = 0) -> list[Any]:
    """A dispatch of 40 us, of which a matrix product hides 10, and a combine of 20 us; 90 us busy in all."""
    return [
        dispatch(shift, 1),
        kernel("void deep_ep::intranode::notify_dispatch<8>(int)", shift + late + 10, 10 - late, 1),
        kernel(
            "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
            shift + 20,
            30,
            1,
        ),
        kernel("sm90_gemm", shift + 40, 40, 2),
        combine(shift + 80, 3),
        kernel("void deep_ep::intranode::combine<8>(int4*)", shift + 100, 20, 3),
    ]


def write(path: Path, events: list[Any], **header: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **header, "traceEvents": events, "end": 1.5}))
    return path


def traced(folder: Path, events: list[Any], rank: int | None = None, **header: Any) -> RankTrace:
    """A trace of these events, as it is read."""
    if rank is not None:
        header["distributedInfo"] = {"rank": rank}
    return rank_trace.read(write(folder / f"{rank}.json", events, **header))


def test_one_rank_by_hand(tmp_path: Path) -> None:
    trace = traced(tmp_path, one_step(), 3)
    first, second = summary.operators(trace)
    assert (trace.rank, trace.has_gpu) == (3, True)
    assert (first.name, first.operation, first.count) == ("FusedDispatch", DISPATCH, 1)
    assert first.mean_us == 40
    assert first.share == pytest.approx(40 / 90)
    assert first.exposed == pytest.approx(30 / 40)
    assert first.mean_bytes == T * H * 2
    assert first.effective_tbps == pytest.approx(T * H * 2 / 40e-6 / 1e12)
    assert (second.name, second.operation, second.mean_us) == ("FusedCombine", COMBINE, 20)
    assert second.exposed == 1
    assert second.mean_bytes == N * H * 2


def test_all_ranks_by_hand(tmp_path: Path) -> None:
    """Rank 1 begins its dispatches 5 us late; both end at the same time, and its clock is a second ahead."""
    traces = [traced(tmp_path, one_step(1e6 * rank, 5 * rank), rank) for rank in range(2)]
    first, second = arrivals(traces)
    assert first.name == "FusedDispatch"
    assert first.is_last.tolist() == [[False], [True]]
    assert first.waiting_us.tolist() == [[5], [0]]
    assert first.moving_us.tolist() == [[35], [35]]
    assert first.true_tbps == pytest.approx(2 * T * H * 2 / 70e-6 / 1e12)
    assert (second.waiting_us.tolist(), second.moving_us.tolist()) == ([[0], [0]], [[20], [20]])


def test_calls_are_matched_by_their_numbers(tmp_path: Path) -> None:
    """Rank 1 was profiled from call 2 on; its calls begin 3 us later, and rank 0 has had a call before."""
    traces = []
    for rank in range(2):
        events = []
        for call in range(1 + rank, 4):
            concrete = ["", "", str(rank), "2", str(call)]
            begin, lasts = 100 * call + 3 * rank, 20 - 3 * rank
            events.append(operator("deep_ep::combine", begin, call, [[T, H]], [BF16], concrete))
            events.append(kernel("ep::normal_combine<8>(ep::Args)", begin, lasts, call))
        traces.append(traced(tmp_path, events, rank))
    (found,) = arrivals(traces)
    assert (found.count, found.waiting_us.mean()) == (2, 1.5)
    assert found.is_last.tolist() == [[False] * 2, [True] * 2]


def test_the_program_prints_tables_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        write(tmp_path / f"trace_rank{rank}.json", one_step(0, 5 * rank))
    assert main(["trace", str(tmp_path), "--width", "120"]) == 0
    said = capsys.readouterr().out
    assert "Who comes last" in said
    assert "All ranks together" in said
    assert main(["trace", str(tmp_path), "--csv"]) == 0
    table = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(row["rank"], row["name"], row["count"]) for row in rows][:2] == [
        ("0", "FusedDispatch", "1"),
        ("0", "FusedCombine", "1"),
    ]
    page = tmp_path / "page.html"
    assert main(["trace", str(tmp_path), "--csv", "--html", str(page)]) == 0
    assert capsys.readouterr().out == table
    assert "FusedDispatch" in page.read_text()
    twice = [str(tmp_path / "trace_rank0.json")] * 2
    assert main(["trace", *twice]) == 2
    assert "both of rank 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("FusedDispatch", DISPATCH),
        ("FusedDispatchBackward", COMBINE),
        ("MoECombine", COMBINE),
        ("MoECombineBackward", DISPATCH),
        ("deepep::dispatch", DISPATCH),
        ("GeneratedBackwardFor_deepep_combine_defaultBackward", DISPATCH),
        ("deep_ep::moe_combine_backward", DISPATCH),
        ("autograd::engine::evaluate_function: FusedDispatchBackward", None),
        ("aten::index_select", None),
    ],
)
def test_operators_by_name(name: str, operation: str | None) -> None:
    assert operation_of(name) == operation


@pytest.mark.parametrize(
    ("dims", "types", "why"),
    [
        ([], [], "record_shapes"),
        ([[], [T, K]], ["", LONG], "tuple of data and scales"),
        ([[T, H]], ["c10::Float4"], "'c10::Float4' is not known"),
        ([[T, "x"]], [BF16], "no shape"),
        (["ab"], [BF16], "no shape"),
    ],
)
def test_what_does_not_say_its_bytes_has_none(dims: Any, types: Any, why: str) -> None:
    sent = sent_of("FusedDispatch", {"Input Dims": dims, "Input type": types})
    assert sent.num_bytes is None
    assert why in sent.why


def test_rows_for_the_worst_case_are_told(tmp_path: Path) -> None:
    concrete = ["", "", "", "8", "True", "True", str(T * 8)]
    events = [operator("MoEDispatch", 0, 1, [[T, H]], [BF16], concrete)]
    trace = traced(tmp_path, events)
    host, worst = summary.remarks([trace, trace, trace])
    assert "and 2 more: it has no work on a GPU" in host
    assert f"and 2 more: MoEDispatch allocates {T * 8} rows for the worst case" in worst


def test_a_page_has_the_tables_and_nothing_of_a_name_is_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, late in enumerate((0, 5)):
        write(tmp_path / f"rank{rank}.json", one_step(late=late), distributedInfo={"rank": rank})
    kernels = [kernel("deep_ep::dispatch_<script>x</script>", 0, 9, 1)]
    write(tmp_path / "rank2.json", kernels, distributedInfo={"rank": 2})
    page = tmp_path / "page.html"
    assert main(["trace", str(tmp_path), "--html", str(page)]) == 0
    assert f"wrote {page}" in "".join(capsys.readouterr().out.splitlines())
    text = page.read_text()
    assert "<td>FusedDispatch</td>" in text
    assert "FusedDispatch has no bytes" not in text
    assert "<script" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize("arguments", [[], ["--csv"]])
def test_nothing_of_a_name_moves_a_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for rank in range(2):
        events = [kernel(f"void \x1b[{i}m::deep_ep::dispatch<1>()", 9 * i, 9, 1) for i in range(2)]
        write(tmp_path / f"rank{rank}.json", events)
    assert main(["trace", str(tmp_path), *arguments]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[0m::deep_ep::dispatch" in said
    assert "\x1b" not in said


@pytest.mark.exhaustive
def test_plain_calls_are_operators_with_the_bytes_of_rows_and_scales(tmp_path: Path) -> None:
    needed = deep_ep.sizes(hidden=H, tokens=T, topk=K, experts=8, ranks=1)
    size = max(needed.num_rdma_bytes, needed.low_latency_rdma_bytes)
    buffer = deep_ep.Buffer(
        thread_groups(1)[0], needed.num_nvl_bytes, size, low_latency_mode=True, num_qps_per_rank=8
    )
    x = torch.randn(T, H).bfloat16()
    topk_idx, weights = torch.rand(T, 8).topk(K).indices, torch.rand(T, K)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    with torch.profiler.profile(record_shapes=True) as profile:
        (rows, _), _, _, _, handle, _ = buffer.dispatch(
            (x.to(torch.float8_e4m3fn), torch.ones(T, 2)),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        buffer.combine(rows.bfloat16(), handle)
        buffer.clean_low_latency_buffer(T, H, 8)
        received, _, sent, _, _ = buffer.low_latency_dispatch(x, topk_idx, T, 8, use_fp8=False)
        buffer.low_latency_combine(received, topk_idx, weights, sent)
    path = tmp_path / "calls.json"
    profile.export_chrome_trace(str(path))
    trace = rank_trace.read(path)
    found = {row.name: row for row in summary.operators(trace)}
    assert {name: row.operation for name, row in found.items()} == {
        "deep_ep::dispatch": DISPATCH,
        "deep_ep::combine": COMBINE,
        "deep_ep::low_latency_dispatch": DISPATCH,
        "deep_ep::low_latency_combine": COMBINE,
    }
    assert found["deep_ep::dispatch"].mean_bytes == T * (H + 2 * 4)
    assert found["deep_ep::combine"].mean_bytes == T * H * 2
    assert found["deep_ep::low_latency_dispatch"].mean_bytes is None
    assert any("each of its experts" in line for line in summary.remarks([trace]))
    (event,) = [
        e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "deep_ep::combine"
    ]
    rank, ranks, number = map(int, event["args"]["Concrete Inputs"][2:5])
    assert (rank, ranks) == (0, 1)
    assert number > 0


def test_an_operator_within_another_of_its_kind_gives_it_its_rows_and_kernels(
    tmp_path: Path,
) -> None:
    outer = {**dispatch(0, 1), "dur": 50, "pid": 1, "tid": 1}
    inner = operator("deep_ep::dispatch", 10, 2, [[T, H], [T, 2]], ["c10::Float8_e4m3fn", "float"])
    elsewhere = {**dispatch(20, 3), "pid": 1, "tid": 2}
    events = [
        *(outer, {**inner, "pid": 1, "tid": 1}, elsewhere),
        kernel("void deep_ep::intranode::dispatch<8>(int4*)", 20, 30, 2),
        kernel("void deep_ep::intranode::dispatch<8>(int4*)", 60, 10, 3),
    ]
    trace = traced(tmp_path, events)
    assert [(each.name, each.span_us, each.sent.num_bytes) for each in trace.exchanges] == [
        ("FusedDispatch", (20, 50), T * (H + 8)),
        ("FusedDispatch", (60, 70), T * H * 2),
    ]


def test_what_a_call_says_behind_it_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20 bytes a row, 2 rows are local, 3 come by NVLink and 5 by RDMA; all of it in 40 us."""
    dims, types = [[T, H], [], [], [], []], [BF16, "", "Scalar", "Scalar", "Scalar"]
    said = [("3", "2", "3", "5"), ("4", "90", "90", "90"), ("3", "-1", "0", "0"), ("3",)]
    events = [
        operator("deep_ep::dispatch", 0, 1, dims, types, ["", "", "0", "2", "3"]),
        *(
            operator("deep_ep::traffic", 10 + i, 2 + i, [], [], [call, "20", *rows])
            for i, (call, *rows) in enumerate(said)
        ),
        kernel("void deep_ep::intranode::dispatch<8>(int4*)", 20, 40, 1),
    ]
    path = write(tmp_path / "t.json", events)
    (row,) = summary.operators(rank_trace.read(path))
    assert (row.mean_local_bytes, row.mean_nvlink_bytes, row.mean_rdma_bytes) == (40, 60, 100)
    assert row.mean_bytes == T * H * 2
    assert row.effective_tbps == pytest.approx(160 / 40e-6 / 1e12)
    # 60 bytes at 0.012 GB/s take 5 us, 100 at 0.01 take 10.
    assert main(["trace", str(path), "--links", "0.012:0.01", "--width", "200"]) == 0
    cells = capsys.readouterr().out.splitlines()[2].split()
    assert cells[-3:] == ["10", "25", "%"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither a JSON object nor"),
        ("hello", "neither a JSON object nor"),
        ('{"a": 1}', "has no traceEvents"),
        ('{"traceEvents": 5}', "is no array"),
        ('{"traceEvents": [{"ph": "X"}', "the file ends here"),
        ('{"traceEvents": [{"ph": "X"} 5]}', "',' or ']' is missing"),
        ('{"traceEvents": [{"ph": nope}]}', "character 24: Expecting value"),
        ('{"traceEvents": [], "a" 5}', "':' is missing"),
        ('{"traceEvents": [] "a"}', "',' or '}' is missing"),
        ('{[1]: 2, "traceEvents": []}', "a name is no text"),
        ('{"a": ' + "9" * 5000 + "}", "a number of thousands of digits"),
    ],
)
def test_damaged_files_are_named_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(EPArgumentError, match="t.json: character") as raised:
        rank_trace.read(path)
    assert said in str(raised.value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
_WELL = {
    "name": st.sampled_from(
        [
            *("FusedDispatch", "MoEDispatch", "deep_ep::dispatch", "deep_ep::combine"),
            *("deep_ep::traffic", "deep_ep::low_latency_combine", "void deep_ep::dispatch<1>()"),
        ]
    ),
    "cat": st.sampled_from(["cpu_op", "kernel", "gpu_memcpy"]),
    "ts": st.floats(0, 9),
    "dur": st.floats(0, 9),
    "pid": st.integers(0, 1),
    "tid": st.integers(0, 1),
}
_ARGUMENTS = {
    "External id": st.integers(0, 4),
    "Input Dims": st.just([[T, H], [T, 2]]),
    "Input type": st.just([BF16, "float"]),
    "Concrete Inputs": st.lists(st.integers(0, 9).map(str) | _VALUES, max_size=7),
    "deep_ep": _VALUES,
}


@pytest.mark.exhaustive
@given(
    st.lists(
        st.fixed_dictionaries(
            {"ph": st.just("X")},
            optional={
                **{name: good | _VALUES for name, good in _WELL.items()},
                "args": _VALUES
                | st.fixed_dictionaries(
                    {}, optional={name: good | _VALUES for name, good in _ARGUMENTS.items()}
                ),
            },
        ),
        max_size=8,
    )
)
def test_events_of_any_content_are_read(events: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "rank0.json"), events)
        trace = rank_trace.read(path)
        summary.operators(trace)
        summary.remarks([trace])


def test_operators_that_are_numbered_in_small_letters_have_their_kernels(tmp_path: Path) -> None:
    """As older profilers do."""
    launched = {"ph": "X", "cat": "kernel", "name": "ep::normal_combine<8>()", "ts": 5, "dur": 3}
    call = {"ph": "X", "cat": "cpu_op", "name": "MoECombine", "ts": 0, "dur": 1}
    events = [{**event, "args": {"external id": 7}} for event in (call, launched)]
    (exchange,) = traced(tmp_path, events).exchanges
    assert (exchange.name, exchange.span_us) == ("MoECombine", (5, 8))


def test_damaged_gzip_and_text_are_named(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": one_step() * 50}).encode())
    (tmp_path / "short.json.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "latin.json").write_bytes(b'{"traceEvents": ["\xe9 "]}')
    for name, said in (("short.json.gz", "gzip data is damaged"), ("latin.json", "not UTF-8")):
        with pytest.raises(EPArgumentError, match=said):
            rank_trace.read(tmp_path / name)


def test_numbers_count_for_each_buffer(tmp_path: Path) -> None:
    """Two buffers, whose calls have the same numbers; rank 1 comes late to those of the first one."""
    traces = []
    for rank in range(2):
        events = []
        for number in range(6):
            concrete = ["", "", str(rank), "2", str(number // 2 + 1)]
            begin, late = 100 * number, 3 * rank * (number % 2 == 0)
            events.append(operator("deep_ep::combine", begin, number, [[T, H]], [BF16], concrete))
            name = "ep::normal_combine<8>(ep::Args)"
            events.append(kernel(name, begin + late, 20 - late, number))
        traces.append(traced(tmp_path, events, rank))
    (found,) = arrivals(traces)
    assert found.late_us.tolist() == [[0] * 6, [3, 0] * 3]
    assert found.is_last.tolist() == [[False] * 6, [True, False] * 3]


@given(st.integers(1, 40), st.booleans())
def test_where_chunks_end_does_not_matter(size: int, packed: bool) -> None:
    events = [*one_step(), 5, "text", {"name": "é" * 3, "n": 12345}]
    header = {"n": 123456, "x": 1.5e-07, "last": [1, {}]}
    data = json.dumps({"traceEvents": events, **header}, indent=1).encode()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(stream, "_CHUNK", size)
        path = Path(folder, "t.json")
        path.write_bytes(gzip.compress(data) if packed else data)
        read = stream.TraceStream(path)
        assert list(read) == [each for each in events if isinstance(each, dict)]
        assert read.header == header


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    filler = json.dumps(event("aten::add", "cpu_op", 1, 1, 5, text="x" * 1000))
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for _ in range(20_000):
            file.write(filler + ",")
        file.write(filler + "]}")
    assert path.stat().st_size > 20 << 20
    tracemalloc.start()
    rank_trace.read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=8),
    st.lists(st.integers(-5, 70), min_size=1, max_size=5),
)
def test_time_that_is_covered_is_counted_second_by_second(
    lasting: list[tuple[int, int]], times: list[int]
) -> None:
    spans = [(float(begin), float(begin + lasts)) for begin, lasts in lasting]
    intervals = rank_trace.union(spans)
    got = rank_trace.covered_us(np.array(times, float), intervals)
    busy = {t for begin, lasts in lasting for t in range(begin, begin + lasts)}
    assert got.tolist() == [sum(t < time for t in busy) for time in times]


def test_a_pipe_is_as_wide_as_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "GeneratedBackwardFor_deepep_dispatch_defaultBackward"
    path = write(tmp_path / "t.json", [dispatch(0, 1, name)])
    monkeypatch.delenv("COLUMNS", raising=False)

    def printed(*arguments: str) -> str:
        assert main(["trace", str(path), "--links", "0.012:0.01", *arguments]) == 0
        return capsys.readouterr().out

    assert printed() == printed("--width", "400") != printed("--width", "80")
