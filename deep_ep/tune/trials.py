"""What is tried, and how long it takes: rounds of dispatch and combine, all settings in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from deep_ep.buffer import Buffer
from deep_ep.errors import EPArgumentError
from deep_ep.moe import steps
from deep_ep.types.config import ELEMENT_BYTES, Config, largest_hints
from deep_ep.utils.math import per_token_cast_to_fp8

NVL_STEP, RDMA_STEP = "num_max_nvl_chunked_send_tokens", "num_max_rdma_chunked_send_tokens"
# Tokens of a step over NVLink and of a request over RDMA that are tried. Whatever is asked for, a step of a GPU moves
# 16 to 32 (kLeastStep, kMaxStep of csrc).
NVL_SENDS = (16, 24, 32)
RDMA_SENDS = (16, 24, 32)
# SMs that are tried.
NUM_SMS = (8, 12, 16, 20, 24, 32)
_WARM_UP_ROUNDS = 1
# Standard error of a median of normal noise, in median deviations over the root of their number.
_MEDIAN_ERROR = 1.4826 * 1.2533


@dataclass(frozen=True)
class Model:
    """The exchange of one layer.

    Attributes:
        hidden: channels of a token.
        tokens: that each rank dispatches.
        topk: experts of a token.
        experts: in total, a multiple of the number of ranks.
        fp8: rows are dispatched in float8_e4m3fn with scales; else in bfloat16, as they always come back.
    """

    hidden: int
    tokens: int
    topk: int
    experts: int
    fp8: bool = False

    def __str__(self) -> str:
        dtype = "FP8" if self.fp8 else "BF16"
        return f"{self.tokens} tokens x {self.hidden} x top-{self.topk} of {self.experts} experts, {dtype}"


class Trial(NamedTuple):
    """Settings that are measured together; both have equal `num_sms`."""

    dispatch: Config
    combine: Config


class Times(NamedTuple):
    """Microseconds, medians over rounds of the slowest rank of each; layout and host included.

    Attributes:
        dispatch, combine: what they take.
        dispatch_error, combine_error: standard errors of these, from the median deviation.
    """

    dispatch: float
    combine: float
    dispatch_error: float = 0.0
    combine_error: float = 0.0

    @property
    def total(self) -> float:
        return self.dispatch + self.combine


def chunk_trials(base: Trial, num_nodes: int) -> list[Trial]:
    """The recommended settings, and those with other steps; capacities of queues stay as they are."""
    changes = [(NVL_STEP, tokens) for tokens in NVL_SENDS]
    if num_nodes > 1:
        changes += [(RDMA_STEP, tokens) for tokens in RDMA_SENDS]
    changed = [_with(base, **{name: tokens}) for name, tokens in changes]
    return [base, *(trial for trial in changed if trial != base)]


def sm_trials(base: Trial, num_sms: Iterable[int]) -> list[Trial]:
    """The same steps with other numbers of SMs."""
    return [_with(base, num_sms=sms) for sms in num_sms]


def _with(base: Trial, **changes: int) -> Trial:
    return Trial(*(replace(config, **changes) for config in base))


class Exchange:
    """Of a model on this rank, with random routing; the same tokens for every trial."""

    def __init__(self, group: Any, model: Model, largest: Sequence[Trial]) -> None:
        """Makes a buffer for the largest trials. Collective.

        Raises:
            EPArgumentError: sizes that `deep_ep` cannot take, or that do not go together.
        """
        if model.experts % group.size() or model.topk > model.experts:
            raise EPArgumentError(
                f"deep_ep.tune: {model} on {group.size()} ranks; experts must be a multiple of the ranks, and at least "
                "topk. Pass --experts and --topk of the model, and start as many ranks as it will have."
            )
        configs = [config for trial in largest for config in trial]
        hints = largest_hints(configs, model.hidden * ELEMENT_BYTES, group.size())
        self.buffer = Buffer(group, *hints, explicitly_destroy=True)
        self._model = model
        self._device = self.buffer.communicator.backend.device()
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(model.tokens, model.hidden, generator=generator).bfloat16()
        scores = torch.rand(model.tokens, model.experts, generator=generator)
        self._topk_idx = scores.topk(model.topk, dim=1).indices.to(self._device)
        self._weights = torch.rand(self._topk_idx.shape, generator=generator).to(self._device)
        self._x = per_token_cast_to_fp8(x.to(self._device)) if model.fp8 else x.to(self._device)

    def num_nodes(self) -> int:
        """Of the group."""
        per_node = self._routing()["num_tokens_per_rdma_rank"]
        return 1 if per_node is None else len(per_node)

    def measure(self, trials: Sequence[Trial], rounds: int) -> list[Times]:
        """Times of each trial, the same on all ranks. Collective.

        Trials alternate round by round, so that whatever else the machine does hits all of them, and each round
        begins with another one, as who is first may find cold caches.
        """
        mine = []
        for first in range(_WARM_UP_ROUNDS + rounds):
            places = [(first + i) % len(trials) for i in range(len(trials))]
            times = {place: self._round(trials[place]) for place in places}
            mine.append([times[place] for place in range(len(trials))])
        ranks = self.buffer.communicator.group.all_gather_object(mine[_WARM_UP_ROUNDS:])
        # [ranks, rounds, trials, 2] to [rounds, trials, 2], then [trials, 2].
        slowest = np.array(ranks).max(axis=0)
        medians = np.median(slowest, axis=0)
        deviations = np.median(abs(slowest - medians), axis=0)
        errors = _MEDIAN_ERROR * deviations / rounds**0.5
        return [Times(*us) for us in np.hstack([medians, errors]).tolist()]

    def _round(self, trial: Trial) -> tuple[float, float]:
        self.buffer.communicator.group.barrier()
        (_, recv_idx, _, _, handle, _), dispatch_us = self._timed(
            lambda: self.buffer.dispatch(self._x, **self._routing(), config=trial.dispatch)
        )
        shape = len(recv_idx), self._model.hidden
        ys = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        self.buffer.communicator.group.barrier()
        _, combine_us = self._timed(lambda: self.buffer.combine(ys, handle, config=trial.combine))
        return dispatch_us, combine_us

    def _routing(self) -> dict[str, Any]:
        return steps.routing(self.buffer, self._topk_idx, self._weights, self._model.experts)

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns, and how long it took, microseconds, the work of a GPU included."""
        begin = time.perf_counter()
        result = call()
        self.buffer.communicator.backend.synchronize()
        return result, (time.perf_counter() - begin) * 1e6
