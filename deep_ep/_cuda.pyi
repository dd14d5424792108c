"""The native module of the cuda backend: the same interface as `deep_ep._cpu`, and this."""

from deep_ep._cpu import *  # noqa: F403

MAX_WARPS: int  # of a block
CUDA_MAJOR: int
# Where the build has NVSHMEM:
NVSHMEM_VERSION: str
NVSHMEM_LIBRARY: str
