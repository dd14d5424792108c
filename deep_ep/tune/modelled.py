"""Times of settings in a model of a GPU, for those who have no cluster at hand: computed before, kept as data.

`python benchmarks/time_model.py --tune` computes them. None was measured on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from deep_ep.errors import EPArgumentError
from deep_ep.tune.trials import Times, Trial
from deep_ep.types.config import Config

# Of docs/cost_model.md, "What the model of time says".
ERROR = (
    "Of EP8 and EP16 on H100, the model's times of our kernels are 4 % below to 20 % above published times of DeepEP's; "
    "docs/cost_model.md has them"
)
FILE = Path(__file__).with_name("modelled.json")
_HEAD = ("gpus", "num_nodes", "ranks_per_node", "tokens")


@dataclass(frozen=True)
class ModelledGroup:
    """What one group takes, FP8 out and bf16 back, 7168 channels, top-8 of 256 experts.

    Attributes:
        gpus: of which it is true.
        num_nodes, ranks_per_node: of the group.
        tokens: of each rank.
        times: by setting; layout and host are not included.
    """

    gpus: list[str]
    num_nodes: int
    ranks_per_node: int
    tokens: int
    times: Mapping[Trial, Times]

    def measure(self, tried: Sequence[Trial]) -> list[Times]:
        """What the settings take; an EPArgumentError if one was not computed."""
        for trial in tried:
            if trial not in self.times:
                known = sorted({each.dispatch.num_sms for each in self.times})
                raise EPArgumentError(
                    f"tune --model: {trial.dispatch.num_sms} SMs with these chunks were not computed. Known SMs are "
                    f"{known}; others: benchmarks/time_model.py --num-sms."
                )
        return [self.times[trial] for trial in tried]


def find(gpu: str, num_nodes: int, ranks_per_node: int) -> ModelledGroup:
    """The group of this GPU and size; an EPArgumentError if it was not computed."""
    groups = read()
    gpus = sorted({name for group in groups for name in group.gpus})
    if gpu not in gpus:
        raise EPArgumentError(f"tune --model: {gpu!r} is not known; there are {', '.join(gpus)}.")
    sizes = {(each.num_nodes, each.ranks_per_node): each for each in groups if gpu in each.gpus}
    group = sizes.get((num_nodes, ranks_per_node))
    if group is None:
        known = ", ".join(f"{nodes}x{ranks}" for nodes, ranks in sizes)
        raise EPArgumentError(
            f"tune --model: {num_nodes}x{ranks_per_node} ranks were not computed; there are {known}. Take the "
            "recommended Config (Buffer.get_dispatch_config, get_combine_config), or measure on the job."
        )
    return group


def read() -> list[ModelledGroup]:
    """All that were computed."""
    return [
        ModelledGroup(
            **{name: one[name] for name in _HEAD},
            times={
                Trial(Config(*dispatch), Config(*combine)): Times(*us)
                for dispatch, combine, us in one["times"]
            },
        )
        for one in json.loads(FILE.read_text())
    ]


def write(groups: Sequence[ModelledGroup]) -> None:
    """Puts these in the place of what was computed before, a line each group."""
    lines = []
    for group in groups:
        times = [
            [*map(astuple, trial), [round(us, 1) for us in (times.dispatch, times.combine)]]
            for trial, times in group.times.items()
        ]
        lines.append(json.dumps({**{name: getattr(group, name) for name in _HEAD}, "times": times}))
    FILE.write_text("[\n " + ",\n ".join(lines) + "\n]\n")
