// The target of this translation unit, for the layers above: they ask this, never the compiler.
#pragma once

#if defined(__CUDACC__)
#define EP_TARGET_CUDA 1
#else
#define EP_TARGET_HOST 1
#endif
