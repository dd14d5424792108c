// A rank of a group, seen from the host: its memory, its place among the others and the launches of
// its operations. One source for both targets; the binding is its only caller. Pointers are device
// pointers of the caller's tensors. Everything but the constructor needs connect() first.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/device_runtime.h"
#include "kernels/dispatch_layout.cuh"
#include "kernels/low_latency_combine.cuh"
#include "kernels/low_latency_dispatch.cuh"
#include "transport/symmetric_memory.h"

namespace ep {

struct RuntimeOptions {
    int rank = 0;
    int num_ranks = 1;
    size_t num_nvl_bytes = 0;
    size_t num_rdma_bytes = 0;
    bool low_latency_mode = false;
    int num_qps_per_rank = 24;
    uint64_t timeout_ns = 0;
    int ranks_per_node = 1;
    int device_index = 0;
    bool allow_nvlink = true;
    std::string clock = "rank";      // host target: "rank" or "wall"
    uint64_t clock_interval_ns = 0;  // longest between clock exchanges in operations; 0: none
};

struct LowLatencySize {
    int num_max_dispatch_tokens_per_rank = 0;
    int hidden = 0;
    int num_experts = 0;
};

struct DispatchCall {
    LowLatencySize size;
    const void* x = nullptr;
    int num_tokens = 0;
    const int64_t* topk_idx = nullptr;
    int num_topk = 0;
    Payload payload = Payload::kBf16;
    void* recv_x = nullptr;
    void* recv_scales = nullptr;
    int32_t* recv_count = nullptr;
    int32_t* src_info = nullptr;
    int64_t* layout_range = nullptr;
    int32_t* expert_stats = nullptr;
    int64_t* wait_stats = nullptr;
    CounterView counters{};
    int phases = kPhaseSend | kPhaseReceive;
    Stream stream = 0;
};

struct CombineCall {
    LowLatencySize size;
    const void* x = nullptr;
    int num_tokens = 0;
    const int64_t* topk_idx = nullptr;
    const float* topk_weights = nullptr;
    int num_topk = 0;
    const int32_t* src_info = nullptr;
    const int64_t* layout_range = nullptr;
    void* out = nullptr;
    bool use_logfmt = false;
    bool zero_copy = false;
    int64_t* wait_stats = nullptr;
    CounterView counters{};
    int phases = kPhaseSend | kPhaseReceive;
    Stream stream = 0;
};

// What a kernel that gave up left behind.
struct Failure {
    FailureKind kind;
    Operation operation;
    uint64_t op;
    uint64_t waited_ns;
    std::vector<int> ranks;
    std::vector<uint64_t> last_op;  // of each of those ranks: the newest operation it announced
    OpShape expected;
    OpShape seen;
};

class Runtime {
  public:
    explicit Runtime(const RuntimeOptions& options);
    ~Runtime();

    std::string local_handle() const;
    void connect(const std::vector<std::string>& handles);
    void release_handle();
    void close();

    // Address and size of the NVLink or RDMA buffer the user asked for.
    std::pair<void*, size_t> local_buffer(bool use_rdma) const;
    uint64_t operation();

    void low_latency_dispatch(const DispatchCall& call);
    void low_latency_combine(const CombineCall& call);
    // First row the next zero-copy combine sends from, and the distance between rows in bytes.
    std::pair<void*, size_t> next_combine_buffer(const LowLatencySize& size) const;
    void barrier(Stream stream);
    // Per rank: (its clock minus this rank's, round trip), nanoseconds.
    std::vector<std::pair<int64_t, int64_t>> measure_clock_offsets(int num_samples, Stream stream);
    void dispatch_layout(const DispatchLayoutArgs& args, Stream stream);

    std::optional<Failure> take_failure();

    Device& device() { return *device_; }
    SymmetricMemory& memory() { return *memory_; }
    // For tests: blocks and warps of low-latency launches; 0 chooses.
    void set_launch_shape(int blocks, int warps);

    static size_t low_latency_bytes(const LowLatencySize& size, int num_ranks);

  private:
    // One block of this many threads serves the small kernels.
    LaunchShape small_shape() const { return {1, Device::kIsHost ? kWarpSize : 512, 0, false}; }
    // Without its shared memory, which depends on it.
    LaunchShape operation_shape(int num_rows, int num_local_experts) const;
    LowLatencyMap map(const LowLatencySize& size) const;
    OperationArgs operation_args(const LowLatencySize& size,
                                 Operation operation,
                                 uint16_t format,
                                 int phases) const;
    void check_connected(const char* call) const;
    void check_size(const LowLatencySize& size, const char* call) const;

    RuntimeOptions options_;
    std::mutex mutex_;  // launches of one rank do not overlap
    std::unique_ptr<Device> device_;
    std::unique_ptr<SymmetricMemory> memory_;
    ControlMap control_;
    Workspace* workspace_ = nullptr;
    FailureRecord* failure_ = nullptr;
    int combine_half_ = 0;  // of the staging memory of the next combine
    int shape_blocks_ = 0;
    int shape_warps_ = 0;
};

}  // namespace ep
