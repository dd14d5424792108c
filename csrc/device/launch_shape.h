// A launch as a value: how many threads run a kernel and what they share.
#pragma once

#include <cstddef>

namespace ep {

struct LaunchShape {
    int blocks = 1;
    int threads = 32;  // per block, a multiple of 32
    size_t shared_bytes = 0;
    bool cooperative = false;  // blocks wait for each other, so all must be resident
};

}  // namespace ep
