// The host side of the device interface: a Device launches kernels and owns memory they can reach.
// Both targets offer the same members; see device/host/device_runtime.h for what each does.
#pragma once

#include "device/target.h"

#if defined(EP_TARGET_CUDA)
#include "device/cuda/device_runtime.h"
#else
#include "device/host/device_runtime.h"
#endif
