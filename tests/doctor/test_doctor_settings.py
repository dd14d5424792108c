"""Environments that are made up, and what a model needs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from deep_ep import Buffer
from deep_ep.base import env
from deep_ep.doctor import settings, sizes
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding, examine
from deep_ep.doctor.host import Host
from made_up_host import DRIVER, all_named, made_up, named

# Reads the variables of the build.
SETUP = Path(__file__).resolve().parents[2] / "setup.py"


def check(tmp_path: Path, files: dict[str, str] | None = None, **environment: str) -> list[Finding]:
    return examine(settings.CHECKS, made_up(tmp_path, files, environment=environment))


def needs(host: Host, **other: int) -> list[Finding]:
    """What DeepSeek-V3 needs on 64 ranks, where sizes are not `other`."""
    model = {"tokens": 128, "hidden": 7168, "experts": 256, "topk": 8, "ranks": 64, **other}
    return examine([sizes.check(model, 8)], host)


def test_nothing_set_is_ok(tmp_path: Path) -> None:
    findings = check(tmp_path)
    assert {finding.status for finding in findings} == {OK}
    assert named(findings, "variables").found == "none is set"


def test_a_misspelt_variable_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    of_the_build = dict.fromkeys(re.findall(r"\bDEEP_EP_\w+", SETUP.read_text()), "1")
    findings = check(tmp_path, DEEP_EP_TIMEOUT="300", **of_the_build)
    found = named(findings, "unknown variable")
    assert (found.status, found.found) == (WARN, "DEEP_EP_TIMEOUT; DEEP_EP_TIMEOUT_S may be meant")
    assert found.repair == "unset DEEP_EP_TIMEOUT; export DEEP_EP_TIMEOUT_S=300"


@pytest.mark.parametrize(
    "variable",
    [
        one
        for one in env.VARIABLES
        if one.kind.words not in ("file", "folder", "FAULT[,FAULT...]")
        and one not in settings.OF_LAUNCHERS
    ],
    ids=lambda one: str(one.name),
)
def test_a_value_out_of_range_fails_by_name(tmp_path: Path, variable: env.Variable[Any]) -> None:
    found = named(check(tmp_path, **{variable.name: "nonsense"}), "variable out of range")
    assert found.status == FAIL
    assert found.found.startswith(f"{variable.name} is 'nonsense'; it must be")
    assert found.repair.startswith("Correct it or unset it")


def test_the_process_s_own_environment_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "soon")
    assert named(check(tmp_path), "timeout").status == OK
    assert os.environ["DEEP_EP_TIMEOUT_S"] == "soon"
    with pytest.raises(ValueError, match="soon"):
        env.timeout_s()


@pytest.mark.parametrize(
    ("environment", "files", "status", "said"),
    [
        ({"DEEP_EP_BACKEND": "cuda"}, {}, FAIL, "no driver of a GPU"),
        ({"DEEP_EP_BACKEND": "cpu"}, DRIVER, WARN, "there is a GPU"),
        ({"DEEP_EP_DIAGNOSE_DIR": "/tmp/x"}, {}, WARN, "DEEP_EP_DIAGNOSE is off"),
        ({"DEEP_EP_INJECT": "hot-rank=1"}, {}, WARN, "DEEP_EP_INJECT=hot-rank=1"),
        ({"NVSHMEM_IBGDA_NIC_HANDLER": "cpu"}, {}, WARN, "NIC_HANDLER=cpu"),
        (
            *({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "4"}, {}),
            *(FAIL, "LOCAL_WORLD_SIZE=4 ranks"),
        ),
    ],
)
def test_contradictions_are_named(
    tmp_path: Path, environment: dict[str, str], files: dict[str, str], status: str, said: str
) -> None:
    found = named(check(tmp_path, files, **environment), "contradiction")
    assert (found.status, said in found.found) == (status, True)


def test_streams_in_one_queue_are_warned_of(tmp_path: Path) -> None:
    found = named(check(tmp_path, CUDA_DEVICE_MAX_CONNECTIONS="1"), "kernels of others")
    assert (found.status, "same order on all ranks" in found.repair) == (WARN, True)


def test_a_timeout_shorter_than_a_cold_compile_is_warned_of(tmp_path: Path) -> None:
    cold = named(check(tmp_path / "cold", DRIVER, HOME="/home/me"), "timeout")
    assert (cold.status, "no compiled kernels" in cold.found) == (WARN, True)
    cache = {"/home/me/.triton/cache/kernel": "", **DRIVER}
    assert named(check(tmp_path / "warm", cache, HOME="/home/me"), "timeout").status == OK
    patient = check(tmp_path / "patient", DRIVER, DEEP_EP_TIMEOUT_S="1800")
    assert named(patient, "timeout").status == OK


def test_sizes_are_those_of_the_hints(tmp_path: Path) -> None:
    findings = needs(made_up(tmp_path))
    (found,) = all_named(findings, "sizes")
    bytes_needed = Buffer.get_low_latency_rdma_size_hint(128, 7168, 64, 256)
    assert f"low_latency_rdma_bytes={bytes_needed}, num_qps_per_rank=4" in found.found
    assert f"dispatch_config={Buffer.get_dispatch_config(64)!r}" in found.found
    assert "more tokens is refused" in found.why
    assert {finding.status for finding in findings} == {OK}


def test_a_shallow_queue_fails_with_the_depth_that_is_enough(tmp_path: Path) -> None:
    found = named(needs(made_up(tmp_path), tokens=1024), "queue depth")
    assert (found.status, found.repair) == (FAIL, "export NVSHMEM_QP_DEPTH=4096")
    one_node = needs(made_up(tmp_path), tokens=1024, ranks=8)
    assert named(one_node, "queue depth").status == OK


def test_memory_is_compared_with_what_a_gpu_has(tmp_path: Path) -> None:
    host = made_up(tmp_path, commands={"nvidia-smi": "80000\n1024\n"})
    found = named(needs(host), "memory per GPU")
    assert (found.status, found.found.endswith("a GPU has 1,024 MiB free")) == (WARN, True)


def test_sizes_that_are_not_allowed_fail_with_the_library_s_words(tmp_path: Path) -> None:
    (found,) = needs(made_up(tmp_path), experts=255)
    assert (found.name, found.status) == ("sizes", FAIL)
    assert "multiple of the group size" in found.found
    assert named(needs(made_up(tmp_path), topk=64), "top-k").status == FAIL
    assert not all_named(needs(made_up(tmp_path)), "top-k")
