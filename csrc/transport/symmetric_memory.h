// The host side of the transport: allocates this rank's symmetric memory, tells the others how to
// reach it, maps theirs and hands out the Transport that kernels use.
#pragma once

#include "device/target.h"

#if defined(EP_TARGET_CUDA)
#include "transport/cuda/symmetric_memory.h"
#else
#include "transport/host/symmetric_memory.h"
#endif
