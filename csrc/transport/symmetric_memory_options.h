// What a rank's symmetric memory is to be, on either target.
#pragma once

#include <cstddef>

namespace ep {

struct SymmetricMemoryOptions {
    int rank = 0;
    int num_ranks = 1;
    size_t control_bytes = 0;  // signals and their payload, at offset 0
    size_t data_bytes = 0;     // right behind
    bool allow_nvlink = true;  // whether peers' memory may be addressed; on the host it always is
    bool allow_mnnvl = false;  // whether that may reach beyond the host
    int num_queue_pairs = 1;   // per peer out of reach
};

}  // namespace ep
