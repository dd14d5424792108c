"""What one rank of a trial does: steps of two operations whose results it knows, and a fault in the middle."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPArgumentError, EPError, EPTimeoutError
from deep_ep.hang.cause import HangVerdict
from support.normal_exchange import layout_of
from trials.faults import BY_NAME, FOR_EVER_S, NONE, Fault

TOKENS, HIDDEN, TOPK = 8, 256, 2
WARM_STEPS, STEPS = 2, 5
CONFIG = deep_ep.Config(4, 3, 8, 2, 5)


@dataclass(frozen=True)
class Trial:
    """What happens, all of it drawn from a seed.

    Attributes:
        seed: of everything.
        mode: "low latency" or "normal".
        num_ranks, ranks_per_node: the group.
        victims: rank to the name of its fault.
        at_combine: whether faults strike before the second operation of a step.
    """

    seed: int
    mode: str
    num_ranks: int
    ranks_per_node: int
    victims: dict[int, str]
    at_combine: bool

    def faults(self) -> dict[int, Fault]:
        """By rank."""
        return {rank: BY_NAME[name] for rank, name in self.victims.items()}


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        verdicts: that were logged here, plain, and how long after its operation had begun.
        error: type and text of what it raised; empty: nothing.
        verdict: that its exception carried, plain.
        is_right: whether every result was.
        meets_again: whether the group could be used afterwards; `None` if that was not tried.
    """

    verdicts: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    error: tuple[str, str] = ("", "")
    verdict: dict[str, Any] | None = None
    is_right: bool = True
    meets_again: bool | None = None


class _Listener(logging.Handler):
    """Keeps the verdicts that this rank logs."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen, self.begin_s = seen, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        verdict: HangVerdict | None = getattr(record, "verdict", None)
        if verdict is not None:
            self.seen.verdicts.append((verdict.plain(), time.monotonic() - self.begin_s))


class _Rank:
    """A buffer and steps on it, each a dispatch and a combine of rows that no expert changes."""

    def __init__(self, group: dist.ProcessGroup, trial: Trial) -> None:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(trial.ranks_per_node)
        self.trial, self.rank, self.num_ranks = trial, group.rank(), group.size()
        self.num_experts = 2 * self.num_ranks
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
        sizes = {
            "low latency": (0, hint(2 * TOKENS, HIDDEN, self.num_ranks, self.num_experts)),
            "normal": (
                CONFIG.get_nvl_buffer_size_hint(2 * HIDDEN, self.num_ranks),
                CONFIG.get_rdma_buffer_size_hint(2 * HIDDEN, self.num_ranks),
            ),
        }
        self.buffer = deep_ep.Buffer(
            group,
            *sizes[trial.mode],
            low_latency_mode=trial.mode == "low latency",
            num_qps_per_rank=4,
            explicitly_destroy=True,
        )
        generator = torch.Generator().manual_seed(trial.seed + self.rank)
        x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator)
        self.x = x.bfloat16()
        scores = torch.rand(TOKENS, self.num_experts, generator=generator)
        self.topk_idx = scores.topk(TOPK).indices
        self.weights = torch.full((TOKENS, TOPK), 0.5)
        self.handle: Any = None

    def step(self, fault: Fault = NONE) -> bool:
        """Whether the result is right."""
        if fault.loses_path:
            self._lose_path()
        if not self.trial.at_combine and not fault.hooked:
            self._strike(fault)
        if self.trial.mode == "low latency":
            return self._low_latency(fault)
        return self._normal(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.blocks_s:
            self.buffer.runtime.native.block_stream(round(fault.blocks_s * 1e9))
        fault.act()

    def _lose_path(self) -> None:
        """To the next rank of the node; what is sent there comes when the trial is over."""
        per_node = self.trial.ranks_per_node
        destination = self.rank // per_node * per_node + (self.rank + 1) % per_node
        self.buffer.runtime.native.set_path_fault(
            dst=destination, delay_ns=round(FOR_EVER_S * 1e9), bytes_per_s=0.0
        )

    def _low_latency(self, fault: Fault) -> bool:
        if fault.name == "calls another operation":
            self._combine_low_latency(self.x_again, self.handle)
        tokens = 2 * TOKENS if fault.name == "calls with another size" else TOKENS
        call = self.x, self.topk_idx, tokens, self.num_experts
        recv_x, _, self.handle, _, hook = self.buffer.low_latency_dispatch(
            *call, use_fp8=False, return_recv_hook=fault.hooked
        )
        self.x_again = recv_x
        if hook is not None:
            fault.act()
            hook()
        if self.trial.at_combine:
            self._strike(fault)
        return torch.equal(self._combine_low_latency(recv_x, self.handle), self.x)

    def _combine_low_latency(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        combined, _, _ = self.buffer.low_latency_combine(x, self.topk_idx, self.weights, handle)
        return combined

    def _normal(self, fault: Fault) -> bool:
        if fault.name == "calls another operation":
            self.buffer.combine(self.x_again, self.handle, config=CONFIG)
        is_smaller = fault.name == "calls with another size"
        x = self.x[:, : HIDDEN // 2].contiguous() if is_smaller else self.x
        layout, _ = layout_of(self.buffer, self.topk_idx, self.num_experts)
        recv_x, _, _, _, self.handle, _ = self.buffer.dispatch(
            x,
            **layout,
            topk_idx=self.topk_idx,
            topk_weights=self.weights,
            config=CONFIG,
        )
        self.x_again = recv_x
        if self.trial.at_combine or fault.hooked:
            self._strike(fault)
        combined, _, _ = self.buffer.combine(recv_x, self.handle, config=CONFIG)
        copies = layout["is_token_in_rank"].sum(1, keepdim=True)
        return torch.equal(combined, (self.x.float() * copies).bfloat16())

    def meets_again(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks can go on, once all have come."""
        group.barrier().wait()
        for _ in range(4):
            with contextlib.suppress(EPError):
                return self.step()
        return False


def run(rank: int, group: dist.ProcessGroup, trial: Trial) -> Seen:
    """One rank of a trial, from its buffer on."""
    seen = Seen()
    listener = _Listener(seen)
    logging.getLogger("deep_ep").addHandler(listener)
    this = _Rank(group, trial)
    pids: list[int] = [0] * group.size()
    dist.all_gather_object(pids, os.getpid(), group)
    own = trial.faults().get(rank, NONE)
    healthy = [r for r in range(trial.num_ranks) if r not in trial.victims]
    for _ in range(WARM_STEPS):
        seen.is_right = this.step() and seen.is_right
    group.barrier().wait()
    skipped = own.name == "leaves out an operation"
    try:
        for number in range(STEPS - skipped):
            listener.begin_s = time.monotonic()
            fault = own if number == 1 and not skipped else NONE
            seen.is_right = this.step(fault) and seen.is_right
    except EPError as error:
        seen.error = type(error).__name__, str(error)
        if isinstance(error, EPTimeoutError) and error.verdict is not None:
            seen.verdict = error.verdict.plain()
        if isinstance(error, EPArgumentError) and own is NONE:
            time.sleep(0.1)
    if any(fault.ends for fault in trial.faults().values()):
        time.sleep(1.0)  # until others have had their answers, and rank 0 its say on the dead
        if rank == healthy[-1]:
            for victim in trial.victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[victim], signal.SIGKILL)
        return seen
    seen.meets_again = this.meets_again(group)
    group.barrier().wait()
    this.buffer.destroy()
    return seen
