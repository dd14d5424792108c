// The target of this translation unit, for the layers above: they ask this, never the compiler.
#pragma once

// EP_CUDA_HOST_HALF: its host code alone, which tests compile without nvcc.
#if defined(__CUDACC__) || defined(EP_CUDA_HOST_HALF)
#define EP_TARGET_CUDA 1
#else
#define EP_TARGET_HOST 1
#endif
