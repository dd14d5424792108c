// Bit casts and exact arithmetic for numbers.cuh, per target.
#pragma once

#if defined(__CUDACC__)
#include "device/cuda/bits.cuh"
#else
#include "device/host/bits.h"
#endif
