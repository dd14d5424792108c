"""`DEEP_EP_VERIFY=1`: a row that is not what was sent in this operation is never returned silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.errors import EPArgumentError, EPError, EPTransportError
from explore.damage import (
    EARLIER_TOKEN,
    HOPS,
    NUM_RANKS,
    OWNER,
    TOKEN,
    Damage,
    Exchange,
    Hop,
    flip_mark,
    flip_operation,
    flip_row,
    flip_weight,
    restore_earlier,
    swap_words,
)
from support.exchange import (
    Mode,
    Shape,
    begin_dispatch,
    dispatch,
    exchange_and_check,
    make_inputs,
    ranks_for,
    send_back,
)
from support.launch import Ranks, run_processes

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=256, num_experts=6, num_topk=3)
INPUTS = make_inputs(SHAPE)
VICTIM = 1
MODES = [Mode(), Mode(use_fp8=True), Mode(use_fp8=True, round_scale=True, use_ue8m0=True)]


def send_all(ranks: Ranks, mode: Mode) -> list[Any]:
    """The hooks of a dispatch."""
    hooked = replace(mode, hook=True)
    return ranks.run(lambda rank, buffer: begin_dispatch(buffer, INPUTS[rank], SHAPE, hooked)[2])


def assert_victim_reports(ranks: Ranks, hooks: list[Any]) -> None:
    error = ranks.outcomes(lambda rank, _: hooks[rank]())[VICTIM]
    assert isinstance(error, EPTransportError)
    assert "not what was sent" in str(error)


def memory_of_victim(ranks: Ranks) -> torch.Tensor:
    return ranks.buffers[VICTIM].get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)


def overwrite(ranks: Ranks) -> None:
    """Changes the lowest bit of every 64th byte of what the victim has received so far."""
    memory_of_victim(ranks)[::64] ^= 1


@pytest.mark.parametrize("mode", MODES, ids=["bf16", "fp8", "ue8m0"])
def test_dispatched_rows_that_were_overwritten_are_reported(mode: Mode) -> None:
    with ranks_for(SHAPE) as ranks:
        hooks = send_all(ranks, mode)
        overwrite(ranks)
        assert_victim_reports(ranks, hooks)
        exchange_and_check(ranks, SHAPE, mode)


@pytest.mark.parametrize("logfmt", [False, True], ids=["bf16", "logfmt"])
def test_combined_rows_that_were_overwritten_are_reported(logfmt: bool) -> None:
    def send_rows_back(rank: int, buffer: deep_ep.Buffer) -> Any:
        received = dispatch(buffer, INPUTS[rank], SHAPE, Mode())
        arguments = {"use_logfmt": logfmt, "return_recv_hook": True}
        return send_back(buffer, INPUTS[rank], received, **arguments)[2]

    with ranks_for(SHAPE) as ranks:
        hooks = ranks.run(send_rows_back)
        overwrite(ranks)
        assert_victim_reports(ranks, hooks)
        exchange_and_check(ranks, SHAPE, Mode(use_logfmt=logfmt))


def test_rows_of_an_earlier_operation_are_reported() -> None:
    """They are whole, and in their places, but not of this operation."""
    with ranks_for(SHAPE) as ranks:
        memory = memory_of_victim(ranks)
        exchange_and_check(ranks, SHAPE, Mode())
        earlier = memory.clone()  # of the half that the next dispatch uses as well
        hooks = send_all(ranks, Mode())
        memory.copy_(earlier)
        assert_victim_reports(ranks, hooks)


def swap_two_words(row: torch.Tensor) -> None:
    row[:8] = row[:8].roll(4)


def name_another_token(row: torch.Tensor) -> None:
    row[2 * SHAPE.hidden] ^= 1


@pytest.mark.parametrize("damage", [swap_two_words, name_another_token])
def test_a_row_that_was_changed_in_its_place_is_reported(
    damage: Callable[[torch.Tensor], None],
) -> None:
    with ranks_for(SHAPE) as ranks:
        hooks = send_all(ranks, Mode())
        memory = memory_of_victim(ranks)
        found = memory.numpy().tobytes()
        for one in INPUTS:
            for row in one.x.view(torch.uint8).numpy():
                at = found.find(row.tobytes())
                while at >= 0:
                    damage(memory[at:])
                    at = found.find(row.tobytes(), at + 1)
        assert_victim_reports(ranks, hooks)


@pytest.mark.parametrize(
    "mode", [*MODES, Mode(use_logfmt=True), Mode(zero_copy=True, hook=True)], ids=str
)
def test_results_are_the_same_without(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_VERIFY", "0")
    with ranks_for(SHAPE) as ranks:
        exchange_and_check(ranks, SHAPE, mode)


DAMAGES = (flip_row, flip_weight, flip_operation, swap_words, restore_earlier)
OF_A_HOP = pytest.mark.parametrize(
    "hop", HOPS, ids=lambda hop: f"{hop.operation}-{hop.over.split()[-1]}"
)


def assert_found(damage: Damage, hop: Hop, seed: int = 1) -> None:
    """Who receives the row raises and names it; nobody returns anything wrong."""
    exchange = Exchange(hop, damage, verifies=True, seed=seed)
    outcomes = exchange.run()
    error = outcomes[hop.receiver]
    assert isinstance(error, EPTransportError), error
    # In combine the last receiver knows whose turn it is.
    is_awaited = damage is not restore_earlier or hop == HOPS[-1]
    token = TOKEN if is_awaited else EARLIER_TOKEN
    prover = OWNER if hop.operation == "dispatch" else hop.sender
    assert str(error).startswith(f"{hop.operation} (operation "), error
    assert f"rows of rank {prover} are not what was sent" in str(error), error
    place = f"for token {token} of rank {OWNER}, which rank {hop.sender} sent over {hop.over}"
    assert place in str(error), error
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, EPError):
            assert isinstance(outcome, torch.Tensor), outcome
            assert torch.equal(outcome, exchange.xs[rank]), f"rank {rank} returned another row"


@OF_A_HOP
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_row_of_a_normal_operation_is_named_with_its_hop(
    damage: Damage, hop: Hop
) -> None:
    assert_found(damage, hop)


@pytest.mark.parametrize("seed", range(2, 8))
def test_nobody_is_told_of_a_sum_that_its_gateway_has_found_wrong(seed: int) -> None:
    """Its owner could return it before it hears that the gateway has given up."""
    (gateway,) = (hop for hop in HOPS if hop.operation == "combine" and hop.receiver != OWNER)
    assert_found(flip_row, gateway, seed)


def test_a_mark_that_would_send_a_row_elsewhere_is_found() -> None:
    assert_found(flip_mark, HOPS[0])


@OF_A_HOP
def test_the_damage_is_real(hop: Hop) -> None:
    exchange = Exchange(hop, flip_row, verifies=False)
    outcomes = exchange.run()
    assert all(isinstance(outcome, torch.Tensor) for outcome in outcomes), outcomes
    damaged = [
        rank for rank in range(NUM_RANKS) if not torch.equal(outcomes[rank], exchange.xs[rank])
    ]
    assert damaged == [OWNER]


def build_with_own_choice(rank: int, group: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_VERIFY", str(rank))
        with pytest.raises(EPArgumentError, match="DEEP_EP_VERIFY is"):
            deep_ep.Buffer(group, num_rdma_bytes=1 << 20, low_latency_mode=True)
    return "refused"


def test_all_ranks_must_verify_or_none() -> None:
    outcomes = run_processes(build_with_own_choice, 2)
    assert [outcome.value for outcome in outcomes] == ["refused", "refused"]
