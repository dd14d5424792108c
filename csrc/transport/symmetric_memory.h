// The host side of the transport: allocates this rank's symmetric memory, tells the others how to
// reach it, maps theirs and hands out the Transport that kernels use.
#pragma once

#if defined(__CUDACC__)
#include "transport/cuda/symmetric_memory.h"
#else
#include "transport/host/symmetric_memory.h"
#endif
