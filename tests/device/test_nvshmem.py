"""The module with NVSHMEM, as processing elements that share one GPU: no NVLink, so all rows go through it."""

from __future__ import annotations

import importlib.util
import os

import pytest

from support.exchange import Shape
from support.launch import DEVICE, raise_failures, run_processes
from support.low_latency_cases import exchange_in_process

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and importlib.util.find_spec("deep_ep._cuda_nvshmem") is None,
    reason="deep_ep._cuda_nvshmem is not built",
)

# There is no network to look for, unless somebody says so.
ENV = {
    "DEEP_EP_TIMEOUT_S": "60",
    "NVSHMEM_REMOTE_TRANSPORT": os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "none"),
}


@pytest.mark.parametrize("num_pes", [1, 2])
def test_low_latency_without_nvlink_equals_the_reference(num_pes: int) -> None:
    shape = Shape((5, 3)[:num_pes], num_max_tokens=8, hidden=1024, num_experts=8, num_topk=4)
    modes = ["fp8", "bf16-zero-copy-hook"]
    raise_failures(run_processes(exchange_in_process, num_pes, shape, modes, False, env=ENV))
