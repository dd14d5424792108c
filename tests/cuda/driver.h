// A CUDA driver and an NVSHMEM without a GPU: they record what is called, keep streams, events and captures
// as the documentation describes them, and refuse what that forbids. No kernel runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace ep::driver {

struct Launch {
    const void* kernel;
    cudaStream_t stream;
    unsigned blocks;
    bool cooperative;
    // Launches that are known to have ended before it begins, by their number.
    std::vector<size_t> after;
    unsigned long long capture;  // 0: not captured
    // The first Machine::argument_bytes of its only argument, which a captured graph keeps.
    std::vector<std::byte> arguments;
};

// Everything that was called, in order: names, with an argument where that matters.
std::vector<std::string>& calls();
// How often a call is there.
int count(const std::string& call);
std::vector<Launch>& launches();
// Whether launch `later` waits for launch `earlier`.
bool ordered(size_t earlier, size_t later);
// Calls that break a stream capture.
std::vector<std::string>& illegal();

cudaStream_t new_stream();
// Graph capture in global mode, torch's default.
void begin_capture(cudaStream_t stream);
void end_capture(cudaStream_t stream);
// As a wait of `stream` for an event of a captured stream does.
void join_capture(cudaStream_t stream, cudaStream_t captured);

// What the machine is like; a test sets it before the calls that should see it.
struct Machine {
    int devices = 1;
    int driver_version = 13000;  // as CUDA counts: 1000 * major + 10 * minor; 0: there is none
    int runtime_version = 13000;
    int multiprocessors = 132;
    int blocks_per_multiprocessor = 1;
    int most_shared_bytes = 227 * 1024;  // of a block
    // Calls that fail: name to error.
    std::map<std::string, cudaError_t> failing;
    // NVSHMEM: which ranks' memory can be addressed, whether queue pairs can be made, and their handles.
    std::vector<bool> reachable;
    bool has_queue_pairs = true;
    int32_t first_handle = 16;
    bool is_first_handle_alone = false;  // the others are ordinary
    size_t argument_bytes = 0;           // of each launch, recorded
    int nvshmem_status = 0;              // before anybody starts it
};
Machine& machine();

// The variables that NVSHMEM read, all in its first call; later changes it does not see.
const std::map<std::string, std::string>& nvshmem_environment();

}  // namespace ep::driver
