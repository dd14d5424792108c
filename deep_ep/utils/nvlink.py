"""Whether the GPUs of a group are joined by NVLink."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep.base.group import as_group
from deep_ep.errors import EPUsageError


def check_nvlink_connections(group: Any) -> None:
    """Checks that PCIe cards are joined by NVLink; other GPUs and machines without a GPU pass. Collective.

    Args:
        group: as `Buffer` takes it.

    Raises:
        EPUsageError: a group of more than two PCIe cards, or two without NVLink (also an
            `AssertionError`).
        ModuleNotFoundError: PCIe cards, and `pynvml` is not installed.
    """
    if not torch.cuda.is_available():
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if "PCIE" not in properties.name.upper():
        return
    ranks = as_group(group)
    if ranks.size > 2:
        raise EPUsageError(
            f"check_nvlink_connections: a group of {ranks.size} PCIe cards; at most 2 can be joined by "
            "NVLink. Use a smaller group."
        )
    import pynvml  # type: ignore[import-not-found]

    uuids = ranks.all_gather_object(f"GPU-{properties.uuid}")
    pynvml.nvmlInit()
    try:
        others = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        mine = others.pop(ranks.rank)
        for other in others:
            status = pynvml.nvmlDeviceGetP2PStatus(mine, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status != pynvml.NVML_P2P_STATUS_OK:
                raise EPUsageError(
                    f"check_nvlink_connections: NVLink status between {' and '.join(uuids)} is {status}; "
                    "it must be connected. Install the bridge, or use other cards."
                )
    finally:
        pynvml.nvmlShutdown()
