// Rows of a combine in the logarithmic format: 10 bits a value, see CombineMessage.
#pragma once

#include "kernels/protocol/messages.cuh"

namespace ep {

// Warp. Encodes a row in the logarithmic format; false when a value is not finite. 16 lanes share a
// group of 128 values, 8 each: 8 low bytes and 8 high bit pairs.
EP_DEVICE bool encode_row(const bf16* x, int hidden, std::byte* payload) {
    constexpr int kLanesPerGroup = kLogGroup / kVectorElements;
    const int num_vectors = hidden / kVectorElements;
    for (int base = 0; base < num_vectors; base += kWarpSize) {
        const int v = base + lane_id();
        float values[kVectorElements] = {};
        if (v < num_vectors) unpack(load_vector(reinterpret_cast<const Vector*>(x) + v), values);
        float bounds[2] = {0.0f,
                           -3.0e38f};  // largest magnitude, and minus the smallest that is not zero
        bool finite = true;
        for (float value : values) {
            const float magnitude = value < 0.0f ? -value : value;
            finite = finite && magnitude <= 3.4e38f;
            bounds[0] = Max{}(bounds[0], magnitude);
            if (magnitude > 0.0f) bounds[1] = Max{}(bounds[1], -magnitude);
        }
        if (ballot(!finite) != 0) return false;
        group_reduce<kLanesPerGroup, Max>(bounds);
        if (v >= num_vectors) continue;
        const LogScale scale =
            bounds[0] > 0.0f ? log_scale(-bounds[1], bounds[0]) : LogScale{0.0f, 0.0f};
        std::byte* group =
            payload + static_cast<size_t>(v / kLanesPerGroup) * CombineMessage::kLogGroupBytes;
        const int part = v % kLanesPerGroup;
        if (part == 0) *reinterpret_cast<LogScale*>(group) = scale;
        uint64_t low = 0;
        uint32_t high = 0;
        for (int i = 0; i < kVectorElements; ++i) {
            const uint32_t code = log_encode(values[i], scale);
            low |= static_cast<uint64_t>(code & 0xFFu) << (8 * i);
            high |= code >> 8 << (2 * i);
        }
        reinterpret_cast<uint64_t*>(group + CombineMessage::kLogLowOffset)[part] = low;
        reinterpret_cast<uint16_t*>(group + CombineMessage::kLogHighOffset)[part] =
            static_cast<uint16_t>(high);
    }
    return true;
}

// Warp.
EP_DEVICE void decode_vector(const std::byte* payload, int v, float (&values)[kVectorElements]) {
    constexpr int kLanesPerGroup = kLogGroup / kVectorElements;
    const std::byte* group =
        payload + static_cast<size_t>(v / kLanesPerGroup) * CombineMessage::kLogGroupBytes;
    const LogScale scale = *reinterpret_cast<const LogScale*>(group);
    const uint64_t low = reinterpret_cast<const uint64_t*>(
        group + CombineMessage::kLogLowOffset)[v % kLanesPerGroup];
    const uint32_t high = reinterpret_cast<const uint16_t*>(
        group + CombineMessage::kLogHighOffset)[v % kLanesPerGroup];
    EP_UNROLL(8)
    for (int i = 0; i < kVectorElements; ++i) {
        values[i] = log_decode((low >> (8 * i) & 0xFFu) | (high >> (2 * i) & 3u) << 8, scale);
    }
}

}  // namespace ep
