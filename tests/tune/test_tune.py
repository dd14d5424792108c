"""`python -m deep_ep.tune`: which settings it takes, what it remembers, and the program itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from deep_ep import Config
from deep_ep.doctor.job import Job
from deep_ep.tune import (
    Experts,
    Model,
    Tuned,
    choice,
    meeting,
    memory,
    modelled,
    remembered,
    trials,
)
from deep_ep.tune import __main__ as program
from deep_ep.tune.__main__ import main
from deep_ep.tune.trials import Times, Trial
from support.program import run_program, torchrun

BASE = Trial(Config(20, 6, 256, 6, 128), Config(20, 4, 256, 6, 128))
MODEL = Model(hidden=256, tokens=16, topk=2, experts=8)
PROGRAM = Path(trials.__file__).with_name("__main__.py")


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TUNED", str(tmp_path / "folder" / "tuned.json"))


def test_requests_over_rdma_are_tried_between_nodes_only() -> None:
    within, between = trials.chunk_trials(BASE, 1), trials.chunk_trials(BASE, 2)
    assert within[0] == between[0] == BASE
    assert {trial.dispatch.num_max_rdma_chunked_send_tokens for trial in within} == {6}
    assert {trial.combine.num_max_rdma_chunked_send_tokens for trial in between} > set(
        trials.RDMA_SENDS
    )
    assert len(set(between)) == len(between)


@pytest.mark.parametrize(
    ("times", "taken", "reason"),
    [
        pytest.param(
            [Times(100, 50), Times(80, 60), Times(90, 40)],
            (1, 2),
            "dispatch: 20% faster than as recommended; combine: 20% faster than as recommended",
            id="each direction takes its own fastest step",
        ),
        pytest.param(
            [Times(100, 50), Times(98, 49), Times(100, 50)],
            (0, 0),
            "none is surely faster than the recommended ones",
            id="what is hardly faster replaces nothing",
        ),
        pytest.param(
            [Times(100, 50, 4, 0.1), Times(90, 40, 4, 0.1), Times(100, 50, 4, 0.1)],
            (0, 1),
            "dispatch: as recommended; combine: 20% faster than as recommended",
            id="what is faster by chance replaces nothing",
        ),
    ],
)
def test_what_is_surely_faster_replaces_what_is_recommended(
    times: list[Times], taken: tuple[int, int], reason: str
) -> None:
    tried = trials.sm_trials(BASE, [20, 2, 4])
    dispatch, combine = taken
    chosen = Trial(tried[dispatch].dispatch, tried[combine].combine)
    assert choice.best_chunks(tried, times) == (chosen, reason)


def test_of_equally_fast_numbers_the_fewest_sms_are_taken() -> None:
    tried = trials.sm_trials(BASE, [8, 16, 24])
    tuned = choice.best_sms(tried, [Times(100, 50), Times(70, 31), Times(70, 30)], None)
    assert (tuned.dispatch_config, tuned.combine_config) == tried[1]
    assert (tuned.dispatch_us, tuned.combine_us) == (70, 31)
    assert (
        tuned.reason == "16 SMs: 24 SMs are 1.0% faster, too little to take them from the experts"
    )


def test_beside_experts_that_take_longer_the_exchange_gets_few_sms() -> None:
    tried, times = trials.sm_trials(BASE, [8, 32]), [Times(500, 400), Times(300, 200)]
    assert choice.best_sms(tried, times, None).dispatch_config.num_sms == 32
    tuned = choice.best_sms(tried, times, Experts(us=1000, total_sms=128))
    assert tuned.dispatch_config.num_sms == 8
    # 1000 x 128 / 120.
    assert "the experts take 1067 us and the exchange 900 us, so the computation decides" in (
        tuned.reason
    )


def test_what_was_chosen_is_found_again_for_the_same_model_only() -> None:
    tuned = Tuned(*BASE, 12.0, 34.0, "because")
    assert remembered(MODEL, 8) is None
    memory.remember(MODEL, 8, None, tuned)
    assert remembered(MODEL, 8) == tuned
    assert remembered(MODEL, 4) is None
    assert remembered(MODEL, 8, Experts(5.0, 132)) is None
    assert remembered(Model(256, 16, 2, 8, fp8=True), 8) is None
    memory.remember(MODEL, 4, None, tuned)
    assert remembered(MODEL, 8) == tuned


def test_a_file_in_the_home_of_the_user_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DEEP_EP_TUNED", "~/of_mine/tuned.json")
    monkeypatch.chdir(tmp_path)
    tuned = Tuned(*BASE, 12.0, 34.0, "because")
    assert memory.remember(MODEL, 8, None, tuned) == tmp_path / "of_mine" / "tuned.json"
    assert remembered(MODEL, 8) == tuned


@pytest.mark.parametrize("text", ["{ damaged", "[1]", '{"a": 1}', "null"])
def test_a_file_of_something_else_is_no_memory(text: str) -> None:
    path = memory.remember(MODEL, 8, None, Tuned(*BASE, 1.0, 2.0, ""))
    key = next(iter(json.loads(path.read_text())))
    path.write_text(json.dumps({key: {"dispatch_config": {"num_sms": "x"}}}))
    assert remembered(MODEL, 8) is None
    path.write_text(text)
    assert remembered(MODEL, 8) is None
    tuned = Tuned(*BASE, 3.0, 4.0, "")
    memory.remember(MODEL, 8, None, tuned)
    assert remembered(MODEL, 8) == tuned


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-sms", "7"], "must be even"),
        (["--tokens", "0"], "at least 1"),
        (["--tokens", "many"], "'many'; it must be an integer of at least 1"),
        ([], "torchrun --nproc-per-node 8 -m deep_ep.tune"),
        (["--model", "H200"], "--model and --ranks go together, such as --model H200 --ranks 8x8"),
        (["--model", "H200", "--ranks", "64"], "'64'; it must be nodes x ranks of each"),
        (["--ranks", "1x8"], "--model and --ranks go together"),
    ],
)
def test_bad_arguments_end_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_chunks_are_chosen_before_sms() -> None:
    measured = []

    def measure(title: str, tried: Sequence[Trial]) -> list[Times]:
        measured.append(len(tried))
        return [
            Times(1000 / config.num_sms - config.num_max_nvl_chunked_send_tokens, 10)
            for config, _ in tried
        ]

    tuned = choice.search(BASE, 1, [8, 4], None, measure)
    assert tuned.dispatch_config == Config(8, max(trials.NVL_SENDS), 256, 6, 128)
    assert tuned.combine_config == Config(8, 4, 256, 6, 128)
    assert measured == [1 + len(trials.NVL_SENDS), 2]
    assert "dispatch: " in tuned.reason


def test_a_model_answers_for_each_gpu_without_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "config.json"
    for gpu, num_nodes in itertools.product(("H100", "H200", "H800"), (1, 2, 4, 8)):
        arguments = ["--model", gpu, "--ranks", f"{num_nodes}x8", "--output", str(output)]
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert f"{gpu}, by a model, not measured" in printed
        assert f"{num_nodes} x 8 ranks" in printed
        sections = json.loads(output.read_text())
        assert {Config(**section).num_sms for section in sections.values()} <= set(trials.NUM_SMS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "B300", "--ranks", "1x8"], "'B300' is not known; there are H100, H200, H800"),
        (["--model", "H800", "--ranks", "1x8", "--num-sms", "2"], "2 SMs with these chunks"),
        (
            ["--model", "H800", "--ranks", "16x8"],
            "16x8 ranks were not computed; there are 1x8, 2x8, 4x8, 8x8",
        ),
        (["--model", "H200", "--ranks", "2x8", "--hidden", "4096"], "--hidden is 4096; 7168 was"),
        (["--model", "H200", "--ranks", "8x8", "--tokens", "512"], "--tokens is 512; 256 was"),
    ],
)
def test_what_was_not_computed_is_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_computed_groups_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelled, "FILE", tmp_path / "modelled.json")
    groups = [
        modelled.ModelledGroup(["A", "B"], nodes, 8, 64, {BASE: Times(1.5, 2.5)})
        for nodes in (1, 4)
    ]
    modelled.write(groups)
    assert modelled.read() == groups
    assert modelled.find("B", 4, 8) == groups[1]


def test_arguments_that_differ_between_ranks_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def gather(of_ranks: list[dict[str, object]], mine: dict[str, object]) -> None:
        of_ranks[:] = [mine, {**mine, "num_sms": [4]}]

    monkeypatch.setattr(program, "job_of", lambda _: Job(0, 2, "nowhere", 0))
    monkeypatch.setattr(meeting, "joined", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert main(["--num-sms", "2", "--output", str(tmp_path / "of rank 0")]) == 2
    assert "--num-sms is [2] on rank 0, [4] on rank 1; it must be" in capsys.readouterr().err


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program, of a small model on two ranks."""
    sizes = ("--tokens", "16", "--hidden", "256", "--topk", "2", "--rounds", "1")
    return run_program(PROGRAM, *sizes, *arguments, launcher=torchrun(2))


@pytest.mark.exhaustive
def test_what_was_measured_is_told_although_it_cannot_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_TUNED", "/proc/no/tuned.json")
    output = tmp_path / "config.json"
    done = measure("--experts", "8", "--num-sms", "2", "--output", str(output))
    assert done.returncode != 0
    assert "/proc/no" in done.stderr
    assert "take 2 SMs" in done.stdout
    assert json.loads(output.read_text())["normal_dispatch"]["num_sms"] == 2


@pytest.mark.exhaustive
def test_experts_that_the_ranks_cannot_share_are_refused_by_name() -> None:
    done = measure("--experts", "7")
    assert done.returncode != 0
    assert "experts must be a multiple of the ranks" in done.stderr


@pytest.mark.exhaustive
def test_the_program_measures_once_and_writes_what_config_takes(tmp_path: Path) -> None:
    output = tmp_path / "config.json"
    arguments = ("--experts", "8", "--num-sms", "2", "4", "--output", str(output))
    beside = ("--compute-us", "100", "--total-sms", "132")
    first = measure(*arguments, *beside)
    assert first.returncode == 0, first.stderr
    assert "remembered in" in first.stdout
    written = json.loads(output.read_text())
    configs = {name: Config(**section) for name, section in written.items()}
    assert set(configs) == {"normal_dispatch", "normal_combine"}
    assert len({config.num_sms for config in configs.values()}) == 1
    again = measure(*arguments, *beside)
    assert again.returncode == 0, again.stderr
    assert "remembered; --again measures again" in again.stdout
    assert json.loads(output.read_text()) == written
