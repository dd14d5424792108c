"""One buffer for all layers of a group."""

from __future__ import annotations

import weakref
from typing import Any

from deep_ep.base.group import as_group
from deep_ep.buffer import Buffer
from deep_ep.types.config import ELEMENT_BYTES, largest_hints

# By identity of the group, which the buffer keeps.
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


def shared_buffer(group: Any, hidden: int) -> Buffer:
    """The buffer of a group, with room for normal operations on rows of this width.

    It is made when it is first asked for, and made larger when wider rows, or more SMs (`Buffer.set_num_sms`), ask for
    more; then that is collective. Who holds a smaller one goes on with it, and it is freed when nobody does.

    Args:
        group: of `torch.distributed`, the same object for all layers.
        hidden: channels of a token, bfloat16.

    Raises:
        EPError: see `Buffer`.
    """
    num_ranks = as_group(group).size
    configs = Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)
    nvl_bytes, rdma_bytes = largest_hints(configs, hidden * ELEMENT_BYTES, num_ranks)
    buffer = _buffers.get(id(group))
    if buffer is not None:
        if buffer.num_nvl_bytes >= nvl_bytes and buffer.num_rdma_bytes >= rdma_bytes:
            return buffer
        nvl_bytes = max(nvl_bytes, buffer.num_nvl_bytes)
        rdma_bytes = max(rdma_bytes, buffer.num_rdma_bytes)
    buffer = Buffer(group, nvl_bytes, rdma_bytes)
    _buffers[id(group)] = buffer
    return buffer
