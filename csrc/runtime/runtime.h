// A rank of a group, seen from the host: its memory, its place among the others and the launches of
// its operations. One source for both targets; the binding is its only caller. Pointers are device
// pointers of the caller's tensors. Everything but the constructor needs connect() first.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/device_runtime.h"
#include "kernels/low_latency/combine.cuh"
#include "kernels/low_latency/dispatch.cuh"
#include "kernels/normal/dispatch_layout.cuh"
#include "kernels/normal/pack.cuh"
#include "runtime/call_log.h"
#include "runtime/calls.h"
#include "transport/symmetric_memory.h"

namespace ep {

struct RuntimeOptions {
#define EP_OPTION(type, name, ...) type name{__VA_ARGS__};
#include "runtime/options.def"
};

// Where a rank is.
struct Progress {
    uint64_t closed;  // newest operation that has ended
    uint64_t open;    // newest one that was entered
    bool waiting;     // for others: before it sends, or after it has sent everything
};

// What a rank receives in a normal dispatch.
struct NormalCounts {
    int num_rows;
    int num_relayed;  // for other ranks of its node
    std::vector<int> per_expert;
};

// Bytes that a normal operation needs of the user's buffer.
struct NormalBytes {
    size_t nvl;
    size_t rdma;
};

// What a kernel that gave up left behind.
struct Failure {
    FailureReason reason;
    Operation operation;
    uint64_t op;
    uint64_t waited_ns;
    std::vector<int> ranks;
    std::vector<uint64_t> last_op;   // of each of those ranks: the newest operation it announced
    std::vector<uint64_t> given_up;  // and the newest one it gave up
    Agreed expected;
    Agreed seen;
    RowPlace row;  // of kCorrupt
};

// A rank that operations go on without since it did not arrive.
struct Masked {
    int rank;
    Series series;
    uint64_t number;  // in that series
};

class Runtime {
  public:
    explicit Runtime(const RuntimeOptions& options);
    ~Runtime();

    std::string local_handle() const;
    void connect(const std::vector<std::string>& handles);
    void release_handle();
    // keeps_memory: others may write to this rank's memory afterwards.
    void close(bool keeps_memory = false);

    // Address and size of the NVLink or RDMA buffer the user asked for.
    std::pair<void*, size_t> local_buffer(bool use_rdma) const;
    // The newest operation that has ended here, or that the group has given up: the next one comes behind it.
    uint64_t operation() const;
    uint64_t entered_operation() const;  // the newest one

    void low_latency_dispatch(const DispatchCall& call);
    void low_latency_combine(const CombineCall& call);
    // 32-bit words of the tensor behind handle[0].
    size_t handle_words(const LowLatencySize& size, int num_tokens, int num_topk) const;
    // What keeps a combine from being made, found before anything is sent; on the host target only.
    HandleFault find_handle_fault(const HandleCall& call) const;
    // First row the next zero-copy combine sends from, and the distance between rows in bytes.
    std::pair<void*, size_t> next_combine_buffer(const LowLatencySize& size) const;
    void barrier(Stream stream);
    // The end: waits for all ranks that are not masked to call it.
    void part(Stream stream);
    // Per rank: (its clock minus this rank's, round trip), nanoseconds.
    std::vector<std::pair<int64_t, int64_t>> measure_clock_offsets(int num_samples, Stream stream);
    void dispatch_layout(const DispatchLayoutCall& call);
    // Of tensors of this rank alone; see kernels/normal/local_rows.cuh.
    void copy_rows(const CopyRowsCall& call);
    void sum_rows(const SumRowsCall& call);

    // The first half of a fresh normal_dispatch(); see kernels/normal/notify.cuh.
    void normal_notify(const NotifyCall& call);
    // What it found, once it has; nothing if it failed.
    std::optional<NormalCounts> normal_counts();
    void normal_dispatch(const NormalDispatchCall& call);
    void normal_combine(const NormalCombineCall& call);

    std::optional<Failure> take_failure();

    // Masks; see kernels/protocol/masks.cuh. Only with `enable_shrink`.
    void update_mask(int rank, bool masked, Stream stream);
    void query_masks(int32_t* status, Stream stream);
    void clean_masks(Stream stream);
    // Ranks that kernels have masked since the last call.
    std::vector<Masked> take_masked();

    // Below: from any thread, at once, also while an operation runs in another one.
    // Operations that wait for this rank end at once, now and from now on; or no more.
    void mark_gone(int rank, bool is_gone);
    // The group has given up operations up to this one: no later call takes part in them.
    void give_up(uint64_t op);
    // The group goes on without this rank since this operation; until masks are cleaned after that.
    void mark_out(int rank, uint64_t op);
    Progress progress() const;
    // What the last calls were and where their kernels are, without asking the device; oldest first.
    std::vector<RecordedCall> recorded_calls(size_t most) const { return log_.calls(most); }
    uint64_t num_calls() const { return log_.num_calls(); }
    // For whom the newest of them that waits has been waiting lately; by what they owe, by rank.
    WaitsNow waits_now() const { return log_.waits(options_.num_ranks); }

    Device& device() { return *device_; }
    SymmetricMemory& memory() { return *memory_; }
    // A fault of the host target: normal operations see the rows of other ranks so much after they came.
    void set_receive_fault(uint64_t delay_ns);
    // For tests: blocks and warps of low-latency launches; 0 chooses.
    void set_launch_shape(int blocks, int warps);

    static size_t low_latency_bytes(const LowLatencySize& size, int num_ranks);
    static NormalBytes normal_bytes(const NormalSize& size, const Topology& topology);

  private:
    // One block of this many threads serves the small kernels.
    LaunchShape small_shape() const {
        return {1, Device::kHasGpuShapes ? kMaxThreads : kWarpSize, 0, false};
    }
    // Without its shared memory, which depends on it.
    LaunchShape operation_shape(const LowLatencyMap& map, int num_tokens) const;
    LowLatencyMap map(const LowLatencySize& size) const;
    OperationArgs operation_args(const OperationCall& call,
                                 int num_tokens,
                                 Operation operation,
                                 uint16_t format);
    void check_connected(const char* call) const;
    void check_rank(const char* call, int rank) const;
    void check_masks(const char* call) const;
    void check_size(const LowLatencySize& size, const char* call) const;
    void check_normal(const NormalSize& size, const char* call) const;
    void check_local_rows(const char* call, int row_bytes, std::initializer_list<int> counts) const;
    OperationArgs common_args(Operation operation) const;
    template <class Args, class Call>
    Args normal_args(const Call& call, Operation operation, bool continues = false);
    LaunchShape normal_shape(const NormalSize& size) const;
    size_t add_row_pieces(LaunchShape& shape, size_t row_bytes) const;
    // Of a kernel that has something to do for so many blocks, or for so many threads.
    LaunchShape shape_for_blocks(int64_t num_blocks) const;
    LaunchShape shape_for_threads(int64_t num_threads) const;
    void pack(const PackArgs& args, Stream stream);
    void prove(const ProveArgs& args, Stream stream);

    RuntimeOptions options_;
    std::mutex mutex_;  // launches of one rank do not overlap
    std::unique_ptr<Device> device_;
    std::unique_ptr<SymmetricMemory> memory_;
    ControlMap control_;
    Topology topology_;
    NormalControlMap normal_control_;
    Workspace* workspace_ = nullptr;
    QueueState* queue_states_ = nullptr;
    ReceiveCounts* receive_counts_ = nullptr;
    uint64_t ticket_ = 0;          // of the last normal_notify()
    int num_counted_experts_ = 0;  // of this rank, in that call
    FailureRecord* failure_ = nullptr;
    uint64_t given_up_ = 0;              // OperationArgs::given_up of the operation that is open
    std::atomic<uint64_t> lost_op_ = 0;  // of the last give_up()
    CallLog log_;
    Masks* masks_ = nullptr;  // nullptr: ranks cannot be masked
    MaskRecord* mask_record_ = nullptr;
    int zero_copy_half_ = 0;  // of the staging memory, for the next combine if it is without copy
    int shape_blocks_ = 0;
    int shape_warps_ = 0;
};

}  // namespace ep
