"""The native module of the cuda backend: the same interface as `deep_ep._cpu`."""

from deep_ep._cpu import COUNTER_FIELDS as COUNTER_FIELDS
from deep_ep._cpu import MAX_EXPERTS as MAX_EXPERTS
from deep_ep._cpu import MAX_TOKENS as MAX_TOKENS
from deep_ep._cpu import MAX_TOPK as MAX_TOPK
from deep_ep._cpu import OWN_FIELDS as OWN_FIELDS
from deep_ep._cpu import PHASE_RECEIVE as PHASE_RECEIVE
from deep_ep._cpu import PHASE_SEND as PHASE_SEND
from deep_ep._cpu import RING_OWN_FIELDS as RING_OWN_FIELDS
from deep_ep._cpu import RING_SOURCE_FIELDS as RING_SOURCE_FIELDS
from deep_ep._cpu import Runtime as Runtime
from deep_ep._cpu import device_count as device_count
from deep_ep._cpu import low_latency_rdma_size_hint as low_latency_rdma_size_hint
