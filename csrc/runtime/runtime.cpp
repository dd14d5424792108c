#include "runtime/runtime.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "kernels/barrier.cuh"
#include "kernels/clock_offset.cuh"

namespace ep {

Runtime::Runtime(const RuntimeOptions& options) : options_(options), control_{options.num_ranks} {
    if (options.num_ranks < 1 || options.num_ranks > kMaxExperts || options.rank < 0 ||
        options.rank >= options.num_ranks) {
        throw std::runtime_error("rank " + std::to_string(options.rank) + " of " +
                                 std::to_string(options.num_ranks) + ": groups have 1 to " +
                                 std::to_string(kMaxExperts) + " ranks");
    }
    device_ = std::make_unique<Device>(options.device_index, options.clock);
    SymmetricMemoryOptions memory;
    memory.rank = options.rank;
    memory.num_ranks = options.num_ranks;
    memory.control_bytes = control_.bytes();
    memory.data_bytes = round_up(options.num_nvl_bytes, 128) + options.num_rdma_bytes;
    memory.allow_nvlink = options.allow_nvlink;
    memory.num_queue_pairs = options.num_qps_per_rank;
    memory_ = std::make_unique<SymmetricMemory>(*device_, memory);
    workspace_ = static_cast<Workspace*>(device_->allocate(sizeof(Workspace)));
    failure_ = static_cast<FailureRecord*>(device_->allocate_host_visible(sizeof(FailureRecord)));
    device_->prepare(&ep::low_latency_dispatch<Payload::kBf16>,
                     &ep::low_latency_dispatch<Payload::kFp8>,
                     &ep::low_latency_dispatch<Payload::kFp8PowerOfTwo>,
                     &ep::low_latency_dispatch<Payload::kFp8Ue8m0>,
                     &ep::low_latency_combine<false>,
                     &ep::low_latency_combine<true>,
                     &ep::barrier,
                     &ep::clock_offset,
                     &ep::dispatch_layout);
}

Runtime::~Runtime() { close(); }

void Runtime::close() {
    const std::scoped_lock lock(mutex_);
    memory_.reset();
    if (!device_) return;
    device_->release(workspace_);
    device_->release_host_visible(failure_);
    workspace_ = nullptr;
    failure_ = nullptr;
    device_.reset();
}

std::string Runtime::local_handle() const { return memory_->local_handle(); }
void Runtime::connect(const std::vector<std::string>& handles) { memory_->connect(handles); }
void Runtime::release_handle() { memory_->release_handle(); }

void Runtime::check_connected(const char* call) const {
    if (!memory_ || !memory_->connected()) {
        throw std::runtime_error(std::string(call) +
                                 ": the buffer is closed or was never connected");
    }
}

std::pair<void*, size_t> Runtime::local_buffer(bool use_rdma) const {
    check_connected("local_buffer");
    std::byte* begin = memory_->local_base() + control_.bytes();
    if (!use_rdma) return {begin, options_.num_nvl_bytes};
    return {begin + round_up(options_.num_nvl_bytes, 128), options_.num_rdma_bytes};
}

uint64_t Runtime::operation() {
    check_connected("operation");
    return device_->peek(&workspace_->op);
}

LowLatencyMap Runtime::map(const LowLatencySize& size) const {
    return {options_.num_ranks,
            size.num_experts,
            size.num_max_dispatch_tokens_per_rank,
            size.hidden,
            control_.bytes() + round_up(options_.num_nvl_bytes, 128)};
}

size_t Runtime::low_latency_bytes(const LowLatencySize& size, int num_ranks) {
    return LowLatencyMap{
        num_ranks, size.num_experts, size.num_max_dispatch_tokens_per_rank, size.hidden, 0}
        .bytes();
}

// Python checks arguments in the reader's words; these are the last line before memory is written.
void Runtime::check_size(const LowLatencySize& size, const char* call) const {
    check_connected(call);
    const auto refuse = [&](const std::string& reason) {
        throw std::runtime_error(std::string(call) + ": " + reason);
    };
    if (size.hidden <= 0 || size.hidden % kChannelsPerScale != 0)
        refuse("hidden must be a multiple of 128");
    if (size.num_experts <= 0 || size.num_experts > kMaxExperts ||
        size.num_experts % options_.num_ranks != 0) {
        refuse("num_experts must be a multiple of the number of ranks, at most " +
               std::to_string(kMaxExperts));
    }
    if (size.num_max_dispatch_tokens_per_rank <= 0 ||
        size.num_max_dispatch_tokens_per_rank >= kMaxTokens) {
        refuse("num_max_dispatch_tokens_per_rank must be between 1 and " +
               std::to_string(kMaxTokens - 1));
    }
    const size_t needed = map(size).bytes();
    if (needed > options_.num_rdma_bytes) {
        refuse("needs " + std::to_string(needed) + " bytes of buffer, has " +
               std::to_string(options_.num_rdma_bytes));
    }
}

OperationArgs Runtime::operation_args(const LowLatencySize& size,
                                      Operation operation,
                                      uint16_t format,
                                      int phases) const {
    return {
        .transport = memory_->transport(),
        .workspace = workspace_,
        .failure = failure_,
        .control = control_,
        .map = map(size),
        .shape = {static_cast<uint32_t>(size.num_max_dispatch_tokens_per_rank),
                  static_cast<uint32_t>(size.hidden),
                  static_cast<uint32_t>(size.num_experts),
                  format,
                  static_cast<uint16_t>(operation)},
        .timeout_ns = options_.timeout_ns,
        .phases = phases,
        .counters = {},
        .wait_stats = nullptr,
        .row_bytes = 0,
    };
}

void Runtime::set_launch_shape(int blocks, int warps) {
    shape_blocks_ = blocks;
    shape_warps_ = warps;
}

LaunchShape Runtime::operation_shape(int num_rows, int num_local_experts) const {
    if (shape_blocks_ > 0) return {shape_blocks_, std::max(shape_warps_, 1) * kWarpSize, 0, true};
    if constexpr (Device::kIsHost) {
        // Fibers of one thread gain nothing from company; fewer stacks stay in the cache.
        return {1, kWarpSize, 0, true};
    } else {
        // A block per token or per part of an expert, as many as are resident; 8 warps put a token's
        // usual top-8 at once. Chosen, not tuned.
        const int wanted = std::max(num_rows, num_local_experts * 2);
        return {std::clamp(wanted, 1, device_->num_multiprocessors()), 8 * kWarpSize, 0, true};
    }
}

void Runtime::low_latency_dispatch(const DispatchCall& call) {
    const std::scoped_lock lock(mutex_);
    check_size(call.size, "low_latency_dispatch");
    const DispatchMessage message{call.size.hidden, call.payload};
    DispatchArgs args;
    args.common = operation_args(
        call.size, Operation::kDispatch, static_cast<uint16_t>(call.payload), call.phases);
    args.common.counters = call.counters;
    args.common.wait_stats = call.wait_stats;
    args.common.row_bytes = message.data_bytes() + message.num_scale_items() * sizeof(uint32_t);
    args.x = static_cast<const bf16*>(call.x);
    args.topk_idx = call.topk_idx;
    args.num_tokens = call.num_tokens;
    args.num_topk = call.num_topk;
    args.recv_x = static_cast<std::byte*>(call.recv_x);
    args.recv_scales = static_cast<uint32_t*>(call.recv_scales);
    args.recv_count = call.recv_count;
    args.src_info = call.src_info;
    args.layout_range = call.layout_range;
    args.expert_stats = call.expert_stats;
    LaunchShape shape = operation_shape(call.num_tokens, args.common.map.num_local_experts());
    shape.shared_bytes = DispatchShared::bytes(call.num_topk, args.common.map, shape.threads);
    const auto launch = [&](auto kernel) {
        device_->launch("low_latency_dispatch", kernel, shape, args, call.stream);
    };
    switch (call.payload) {
        case Payload::kBf16:
            return launch(&ep::low_latency_dispatch<Payload::kBf16>);
        case Payload::kFp8:
            return launch(&ep::low_latency_dispatch<Payload::kFp8>);
        case Payload::kFp8PowerOfTwo:
            return launch(&ep::low_latency_dispatch<Payload::kFp8PowerOfTwo>);
        case Payload::kFp8Ue8m0:
            return launch(&ep::low_latency_dispatch<Payload::kFp8Ue8m0>);
    }
}

std::pair<void*, size_t> Runtime::next_combine_buffer(const LowLatencySize& size) const {
    check_size(size, "get_next_low_latency_combine_buffer");
    const LowLatencyMap layout = map(size);
    const size_t first =
        layout.combine_staging(combine_half_, 0, 0) + CombineMessage{size.hidden}.data_offset();
    return {memory_->local_base() + first, layout.combine_bytes()};
}

void Runtime::low_latency_combine(const CombineCall& call) {
    const std::scoped_lock lock(mutex_);
    check_size(call.size, "low_latency_combine");
    CombineArgs args;
    args.common = operation_args(call.size, Operation::kCombine, call.use_logfmt, call.phases);
    args.common.counters = call.counters;
    args.common.wait_stats = call.wait_stats;
    args.common.row_bytes = CombineMessage{call.size.hidden}.data_bytes();
    args.x_is_staged = call.zero_copy;
    args.staging_half = combine_half_;
    if (call.zero_copy) {
        const auto [first, stride] = next_combine_buffer(call.size);
        args.x = static_cast<const bf16*>(first);
        args.x_stride = stride / sizeof(bf16);
    } else {
        args.x = static_cast<const bf16*>(call.x);
        args.x_stride = call.size.hidden;
    }
    args.topk_idx = call.topk_idx;
    args.topk_weights = call.topk_weights;
    args.src_info = call.src_info;
    args.layout_range = call.layout_range;
    args.out = static_cast<bf16*>(call.out);
    args.num_tokens = call.num_tokens;
    args.num_topk = call.num_topk;
    LaunchShape shape = operation_shape(call.num_tokens, args.common.map.num_local_experts());
    shape.shared_bytes = CombineShared::bytes(args.common.map, shape.threads);
    device_->launch(
        "low_latency_combine",
        call.use_logfmt ? &ep::low_latency_combine<true> : &ep::low_latency_combine<false>,
        shape,
        args,
        call.stream);
    if (call.phases & kPhaseReceive) combine_half_ ^= 1;
}

void Runtime::barrier(Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_connected("barrier");
    const OperationArgs args =
        operation_args({}, Operation::kBarrier, 0, kPhaseSend | kPhaseReceive);
    device_->launch("barrier", &ep::barrier, small_shape(), args, stream);
}

std::vector<std::pair<int64_t, int64_t>> Runtime::measure_clock_offsets(int num_samples,
                                                                        Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_connected("measure_clock_offsets");
    const ClockOffsetArgs args{
        operation_args({}, Operation::kClockOffset, 0, kPhaseSend | kPhaseReceive),
        num_samples,
        options_.clock_interval_ns};
    device_->launch("clock_offset", &ep::clock_offset, small_shape(), args, stream);
    std::vector<std::pair<int64_t, int64_t>> result;
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        const ClockLine clock = device_->read(&workspace_->clocks[rank], stream);
        result.emplace_back(clock.offset_ns, clock.round_trip_ns);
    }
    return result;
}

void Runtime::dispatch_layout(const DispatchLayoutArgs& args, Stream stream) {
    const std::scoped_lock lock(mutex_);
    device_->launch("dispatch_layout", &ep::dispatch_layout, small_shape(), args, stream);
}

std::optional<Failure> Runtime::take_failure() {
    const std::scoped_lock lock(mutex_);
    if (failure_ == nullptr) return std::nullopt;
    // A kernel may still be running. Pairs with the release at the end of record_failure().
    const uint32_t kind = std::atomic_ref(failure_->kind).load(std::memory_order_acquire);
    if (kind == 0) return std::nullopt;
    Failure failure{
        .kind = static_cast<FailureKind>(kind),
        .operation = failure_->operation,
        .op = failure_->op,
        .waited_ns = failure_->waited_ns,
        .ranks = {},
        .last_op = {},
        .expected = OpShape::from_words(failure_->expected_shape[0], failure_->expected_shape[1]),
        .seen = OpShape::from_words(failure_->seen_shape[0], failure_->seen_shape[1]),
    };
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        if (failure_->ranks[rank] == 0) continue;
        failure_->ranks[rank] = 0;
        failure.ranks.push_back(rank);
        uint64_t newest = 0;
        for (int half = 0; half < kNumHalves; ++half) {
            const size_t word = control_.header(half, rank) + offsetof(OpHeader, op);
            newest = std::max(
                newest,
                device_->peek(reinterpret_cast<const uint64_t*>(memory_->local_base() + word)));
        }
        failure.last_op.push_back(newest);
    }
    failure_->kind = 0;
    return failure;
}

}  // namespace ep
