"""What was chosen, by machine and model, in a file of the user's."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deep_ep.base import codec, env, files
from deep_ep.native import backend
from deep_ep.tune.choice import Experts, Tuned
from deep_ep.tune.trials import Model
from deep_ep.types.config import DEFAULT_RANKS_PER_NODE


def sections(tuned: Tuned) -> dict[str, dict[str, int]]:
    """As servers take them (`--deepep-config`); each section is `Config(**section)`."""
    return {
        "normal_dispatch": asdict(tuned.dispatch_config),
        "normal_combine": asdict(tuned.combine_config),
    }


def remembered(model: Model, ranks: int, experts: Experts | None = None) -> Tuned | None:
    """What `python -m deep_ep.tune` chose for this model on a machine like this one, if it ever did.

    Read on every rank; take it on all or on none. Where hosts do not share the file (`DEEP_EP_TUNED`), pass around
    the file that `--output` writes.

    Args:
        model: as it was measured.
        ranks: size of the group.
        experts: what ran beside the exchange, as it was measured.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(files.read(env.tuned()))[_key(model, ranks, experts)]
        return codec.from_plain(Tuned, entry)
    return None


def remember(model: Model, ranks: int, experts: Experts | None, tuned: Tuned) -> Path:
    """Puts it into the file, in the place of what stood there for this model and machine; returns its path."""
    path = env.tuned()
    entries: dict[str, Any] = {}
    # A damaged file is written anew: all in it can be measured again.
    with contextlib.suppress(OSError, ValueError, TypeError):
        entries = dict(json.loads(files.read(path)))
    entries[_key(model, ranks, experts)] = codec.to_plain(tuned)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, json.dumps(entries, indent=1).encode(), mode=0o644)
    return path


def machine() -> str:
    """What times depend on, of this machine."""
    if backend.get().name == "cuda":
        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, cpu backend"


def _key(model: Model, ranks: int, experts: Experts | None) -> str:
    per_node = env.ranks_per_node() or env.local_world_size() or DEFAULT_RANKS_PER_NODE
    key = f"{machine()}; {ranks} ranks, {min(per_node, ranks)} per node; {model}"
    if experts is not None:
        key += f"; beside {experts.us:.0f} us of experts on {experts.total_sms} SMs"
    return key
