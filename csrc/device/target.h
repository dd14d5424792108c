// Which target this translation unit is compiled for. The only place that asks the compiler.
#pragma once

#if defined(__CUDACC__)
#define EP_TARGET_CUDA 1
#else
#define EP_TARGET_HOST 1
#endif
