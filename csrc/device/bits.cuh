// Bit casts, bf16 and the conversions whose instructions differ per target. Both offer
//   bits_to_float float_to_bits divide fused_multiply_add log2_approx exp2_approx
//   load_vector(from) store_vector(to, vector)  16 bytes in one instruction
//   unpack(vector, values)  8 bf16 elements to floats
//   pack(values)            to bf16, round to nearest even, NaN stays NaN
//   largest_magnitude(vectors) bits of the largest absolute bf16 element; NaN counts as largest
//   popcount(bits) lowest_bit(bits) highest_bit(bits)  of 32 bits, of which the last two have one
//   to_e4m3(values)         8 floats to e4m3 bytes, round to nearest even, saturating at 448
#pragma once

#include <cstdint>

#include "device/target.h"

namespace ep {

struct bf16 {
    uint16_t bits;
};

// 16 bytes: the unit of every copy and of every load or store of payload.
struct alignas(16) Vector {
    uint32_t words[4];
};
constexpr int kVectorElements = 8;  // bf16 elements in a Vector

}  // namespace ep

#if defined(EP_TARGET_CUDA)
#include "device/cuda/bits.cuh"
#else
#include "device/host/bits.h"
#endif
