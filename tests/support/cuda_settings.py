"""What CUDA must be told before it starts, where ranks are threads that share a GPU: import this first.

Kernels of all ranks must run at once, because they wait for each other. Streams take turns where they share a queue, of
which there are 8 unless CUDA is asked for more; and a kernel that is loaded at its first launch may have to wait for
those that run.
"""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
