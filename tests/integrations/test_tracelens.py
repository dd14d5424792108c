"""The extension file of TraceLens: against what TraceLens asks of such a file, and in TraceLens where there is one.

CLIENT_TRACELENS names a checkout of https://github.com/AMD-AGI/TraceLens whose requirements are installed.
"""

from __future__ import annotations

import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.integrations import tracelens

FILE = tracelens.__file__
CHECKOUT = os.environ.get("CLIENT_TRACELENS", "")
BF16, LONG = "c10::BFloat16", "long int"
T, H, N, K = 16384, 2048, 131072, 6


def event(name: str, dims: list[Any], types: list[str], concrete: list[str] | None = None) -> Any:
    args = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete or []}
    return {"name": name, "cat": "cpu_op", "args": args}


def model(of: dict[str, Any]) -> Any:
    """As TraceLens makes it."""
    return loaded()["perf_model_extension"][of["name"]](of, arch=None, python_path=None)


def loaded() -> dict[str, Any]:
    """TraceLens runs the file, and runs it again for the sheets."""
    runpy.run_path(FILE)
    return runpy.run_path(FILE)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (
            event("MoEDispatch", [[T, H], [T, K], [T, K], *[[]] * 4], [BF16, LONG, "float"]),
            T * H * 2,
        ),
        (event("MoECombine", [[N, H], [], []], [BF16, "Scalar", "Scalar"]), N * H * 2),
        (event("DeepEPDispatchBackward", [[N, H], [], [N, K]], [BF16, "", "float"]), N * H * 2),
        (event("FusedCombineBackward", [[T, H], []], [BF16, ""]), T * H * 2),
        (event("deepep::dispatch", [[T, H], [T, K]], ["c10::Float8_e4m3fn", LONG]), T * H),
        (event("FusedDispatch", [[], [T, K]], ["", LONG]), None),
        (event("FusedDispatch", [[T, H]], ["some::type"]), None),
        ({"name": "FusedDispatch", "args": {}}, None),
    ],
)
def test_bytes_are_those_of_the_rows_or_not_known(given: Any, num_bytes: int | None) -> None:
    asked = model(given)
    assert asked.bytes() == asked.bytes_bwd() == num_bytes
    assert asked.flops() == asked.flops_bwd() == 0
    assert asked.get_maf_type() is None
    assert asked.get_compute_precision() is None
    assert asked.category == asked.bwd_category == "EP_Communication"
    assert bool(asked.param_details["no_bytes_because"]) == (num_bytes is None)


def test_rows_for_the_worst_case_have_a_column() -> None:
    dims = [[T, H], [T, K], [T, K], [], [], [], []]
    concrete = ["", "", "", "64", "True", "True", str(8 * T)]
    asked = model(event("MoEDispatch", dims, [BF16, LONG, "float"], concrete))
    assert asked.param_details == {
        "num_tokens": T,
        "bytes_per_token": 2 * H,
        "num_worst_tokens": 8 * T,
        "no_bytes_because": "",
    }


def test_releases_without_a_registry_get_the_same_names() -> None:
    names = loaded()
    assert names["dict_cat2names_extension"] == {
        "EP_Communication": list(names["perf_model_extension"])
    }
    for name in ("FusedDispatch", "MoECombineBackward", "deepep::combine"):
        assert name in names["perf_model_extension"]


def step() -> list[dict[str, Any]]:
    """A combine of 20 us, of which a matrix product hides 5."""
    operator = event("FusedCombine", [[N, H], [], []], [BF16, "Scalar", "Scalar"])
    operator["args"]["External id"] = 1
    kernels = [("void deep_ep::intranode::combine<8>(int4*)", 10, 20, 1), ("sm90_gemm", 25, 30, 2)]
    return [
        {"ph": "X", "ts": 0, "dur": 5, "pid": 1, "tid": 1, **operator},
        *(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "ts": begin,
                "dur": lasts,
                "pid": 0,
                "tid": 7,
                "args": {"External id": number, "stream": 7},
            }
            for name, begin, lasts, number in kernels
        ),
    ]


def test_an_extra_sheet_says_what_is_exposed() -> None:
    tree = SimpleNamespace(events=step(), trace_metadata={"distributedInfo": {"rank": 3}})
    sheets = loaded()["get_additional_dataframes_extension"](tree)
    assert list(sheets) == ["EP_exposed"]
    (row,) = sheets["EP_exposed"].to_dict("records")
    assert (row["rank"], row["name"]) == (3, "FusedCombine")
    assert row["mean_us"] == 20
    assert row["exposed"] == 0.75
    assert row["effective_tbps"] == pytest.approx(N * H * 2 / 20e-6 / 1e12)


def test_a_trace_without_exchanges_has_no_extra_sheet() -> None:
    assert loaded()["get_additional_dataframes_extension"](SimpleNamespace(events=[])) == {}


@pytest.mark.skipif(not CHECKOUT, reason="CLIENT_TRACELENS names no checkout of TraceLens")
def test_tracelens_has_a_sheet_of_them_and_loses_none(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": linked(step())}))
    program = (
        "import inspect, sys; from TraceLens.Reporting.generate_perf_report_pytorch import "
        "generate_perf_report_pytorch as run; no_nccl = {'collective_analysis': False}; "
        "run(sys.argv[1], output_csvs_dir=sys.argv[2], extension_file=sys.argv[3], "
        "**{k: v for k, v in no_nccl.items() if k in inspect.signature(run).parameters})"
    )
    package = str(Path(FILE).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, str(trace), str(tmp_path / "csv"), FILE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([CHECKOUT, package])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for sheet in ("EP_Communication_fwd", "ops_summary", "EP_exposed"):
        with (tmp_path / "csv" / f"{sheet}.csv").open() as file:
            assert any(row["name"] == "FusedCombine" for row in csv.DictReader(file)), sheet


def linked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the launch of each kernel, and the arrows from there by which TraceLens finds its operator."""
    operator, *kernels = events
    launches, arrows = [], []
    for kernel in kernels:
        number = kernel["args"]["External id"]
        kernel["args"]["correlation"] = number
        # The matrix product is launched behind the operator.
        at = {"ts": 1.0 if number == 1 else 6.0, "pid": 1, "tid": 1}
        arguments = {"External id": number, "correlation": number}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1}
        launches.append({**launch, **at, "args": arguments})
        arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
        end = {"ts": kernel["ts"], "pid": kernel["pid"], "tid": kernel["tid"], "bp": "e"}
        arrows += [{**arrow, **at, "ph": "s"}, {**arrow, **end, "ph": "f"}]
    return [operator, *launches, *kernels, *arrows]
