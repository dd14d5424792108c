// Measures on one GPU the costs of the model of time that one GPU can tell, and prints samples of them as JSON.
// benchmarks/gpu_costs.py builds and runs it.
//
// A sample is the difference of two runs of a probe, one of them with twice as many turns, so what begins and ends a
// run is not in it. Cycles become nanoseconds by the clock rate of the same launch.
//
// Not told: step_ns, because a basic block of the host's code is nothing that a GPU has; NVLink and NIC.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "device/cuda/launch.h"
#include "gpu_probes.cuh"

namespace ep::probes {
namespace {

using cuda_target::check;

constexpr int kSamples = 101;
// Of a launch: much longer than a step of the GPU's timer, and at first than the clocks need to rise.
constexpr uint64_t kLeastNs = 2'000'000;
constexpr uint64_t kWarmUpNs = 500'000'000;
// Of the source and of the target: much more than any L2.
constexpr size_t kMemoryBytes = size_t{512} << 20;

struct Args {
    Memory memory;
    int turns;  // no constant, lest the compiler make different code of the two runs
    uint64_t least_ns;
    int64_t* cycles;  // [kSamples]
    double* ns_per_cycle;
    uint32_t* kept;  // [threads of the launch]
};

template <class Probe>
EP_KERNEL void sample(EP_GRID_CONSTANT const Args args) {
    Probe probe(args.memory);
    const bool is_first = block_index() == 0 && thread_index() == 0;
    uint32_t kept = 0;
    const uint64_t begin_ns = now_ns();
    const int64_t begin = clock64();
    for (int i = 0; i < kSamples; ++i) {
        int64_t cycles = 0;
        EP_UNROLL(1)
        for (int runs = 1; runs <= 2; ++runs) {
            cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
            block_sync();
            const int64_t run_begin = clock64();
            kept += probe.run(runs * args.turns);
            block_sync();
            cycles = clock64() - run_begin - cycles;
        }
        if (is_first) args.cycles[i] = cycles;
    }
    while (now_ns() - begin_ns < args.least_ns) {
    }
    if (is_first) {
        const auto ns = static_cast<double>(now_ns() - begin_ns);
        *args.ns_per_cycle = ns / static_cast<double>(clock64() - begin);
    }
    args.kept[block_index() * num_threads() + thread_index()] = kept;
}

// A fence when nothing is under way.
template <cuda::thread_scope kScope>
class Fence {
  public:
    static constexpr int kTurns = 32;
    static LaunchShape shape() { return shape_of(1, kWarpSize); }

    EP_DEVICE explicit Fence(const Memory&) {}
    EP_DEVICE uint32_t run(int turns) {
        if (thread_index() != 0) return 0;
        for (int i = 0; i < turns; ++i)
            cuda::atomic_thread_fence(cuda::memory_order_acq_rel, kScope);
        return 0;
    }
};

template <class T>
T* allocate(size_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc", "what probes work on");
    check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset", "what probes work on");
    return static_cast<T*>(memory);
}

template <class T>
std::vector<T> read(const T* memory, size_t count, const char* what) {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy",
          what);
    return values;
}

class Gpu {
  public:
    Gpu() {
        check(cudaGetDeviceProperties(&properties_, 0), "cudaGetDeviceProperties", "the GPU");
        std::vector<uint32_t> words(kNumWords * kWordStride);
        for (int i = 0; i < kNumWords; ++i)
            words[i * kWordStride] = (i + 1) % kNumWords * kWordStride;
        args_.memory = {allocate<uint32_t>(words.size()),
                        allocate<std::byte>(kMemoryBytes),
                        allocate<std::byte>(kMemoryBytes),
                        kMemoryBytes};
        check(cudaMemcpy(args_.memory.words,
                         words.data(),
                         words.size() * sizeof(uint32_t),
                         cudaMemcpyHostToDevice),
              "cudaMemcpy",
              "words that name the next one");
        args_.cycles = allocate<int64_t>(kSamples);
        args_.ns_per_cycle = allocate<double>(1);
        args_.kept = allocate<uint32_t>(properties_.multiProcessorCount * kMaxThreads);
    }

    const char* name() const { return properties_.name; }

    // Samples of what a turn takes, in nanoseconds.
    template <class Probe>
    std::vector<double> ns_of_turn(const char* name, uint64_t least_ns = kLeastNs) {
        args_.turns = Probe::kTurns;
        args_.least_ns = least_ns;
        LaunchShape shape = Probe::shape();
        if (shape.blocks > 1) shape.blocks = properties_.multiProcessorCount;
        cuda_target::launch(sample<Probe>, name, shape, cuda_target::Place{}, args_);
        const double ns_per_cycle = read(args_.ns_per_cycle, 1, name)[0];
        std::vector<double> samples;
        for (const int64_t cycles : read(args_.cycles, kSamples, name))
            samples.push_back(static_cast<double>(cycles) * ns_per_cycle / Probe::kTurns);
        return samples;
    }

    template <class Probe>
    std::vector<double> bytes_per_ns(const char* name) {
        std::vector<double> samples = ns_of_turn<Probe>(name);
        for (double& one : samples) one = Probe::kTurnBytes / one;
        return samples;
    }

  private:
    cudaDeviceProp properties_;
    Args args_;
};

// Separated by commas.
void print(const char* name, const std::vector<double>& samples) {
    static const char* separator = "";
    std::printf("%s\n\"%s\": [", separator, name);
    separator = ",";
    for (size_t i = 0; i < samples.size(); ++i) std::printf(i == 0 ? "%.3f" : ", %.3f", samples[i]);
    std::printf("]");
}

void measure() {
    Gpu gpu;
    gpu.ns_of_turn<Exchange>("warm-up", kWarmUpNs);
    std::printf("{\"device\": \"%s\", \"samples\": {", gpu.name());
#define EP_NS(name, ...) print(#name, gpu.ns_of_turn<__VA_ARGS__>(#name))
#define EP_RATE(name, ...) print(#name, gpu.bytes_per_ns<__VA_ARGS__>(#name))
    EP_NS(shared_ns, SharedAccess);
    EP_NS(load_ns, Load);
    EP_NS(store_ns, Store);
    EP_NS(device_fence_ns, Fence<cuda::thread_scope_device>);
    EP_NS(system_fence_ns, Fence<cuda::thread_scope_system>);
    EP_NS(warp_ns, Exchange);
    EP_NS(barrier_ns, Barrier);
    EP_NS(grid_barrier_ns, GridBarrier);
    EP_NS(copy_ns, CopyStep);
    EP_NS(bulk_ns, BulkRow);
    EP_RATE(sm_bytes_per_ns, ManyBulkRows);
#undef EP_NS
#undef EP_RATE
    std::printf("}}\n");
}

}  // namespace
}  // namespace ep::probes

int main() {
    try {
        ep::probes::measure();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
