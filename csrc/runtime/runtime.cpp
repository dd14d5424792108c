#include "runtime/runtime.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "kernels/normal/combine.cuh"
#include "kernels/normal/dispatch.cuh"
#include "kernels/normal/local_rows.cuh"
#include "kernels/normal/notify.cuh"
#include "kernels/protocol/barrier.cuh"
#include "kernels/protocol/clock_offset.cuh"
#include "kernels/protocol/mask_calls.cuh"

namespace ep {

namespace {

using DispatchKernel = void (*)(DispatchArgs);
using CombineKernel = void (*)(CombineArgs);

Agreed agreed_of(const uint64_t (&words)[OpHeader::kNumAgreed]) {
    return {OpShape::from_words(words[0], words[1]), words[2], words[3]};
}

template <bool kVerify>
DispatchKernel dispatch_kernel_for(Payload payload) {
    switch (payload) {
        case Payload::kBf16:
            break;
        case Payload::kFp8:
            return &ep::low_latency_dispatch<Payload::kFp8, kVerify>;
        case Payload::kFp8PowerOfTwo:
            return &ep::low_latency_dispatch<Payload::kFp8PowerOfTwo, kVerify>;
        case Payload::kFp8Ue8m0:
            return &ep::low_latency_dispatch<Payload::kFp8Ue8m0, kVerify>;
    }
    return &ep::low_latency_dispatch<Payload::kBf16, kVerify>;
}

DispatchKernel dispatch_kernel(Payload payload, bool verify) {
    return verify ? dispatch_kernel_for<true>(payload) : dispatch_kernel_for<false>(payload);
}

CombineKernel combine_kernel(bool use_logfmt, bool verify) {
    if (verify)
        return use_logfmt ? &ep::low_latency_combine<true, true>
                          : &ep::low_latency_combine<false, true>;
    return use_logfmt ? &ep::low_latency_combine<true, false>
                      : &ep::low_latency_combine<false, false>;
}

}  // namespace

Runtime::Runtime(const RuntimeOptions& options)
    : options_(options),
      control_{options.num_ranks},
      topology_{options.num_ranks, std::max(options.ranks_per_node, 1)},
      normal_control_{topology_, control_.bytes()} {
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
    memory.control_bytes = normal_control_.end();
    memory.data_bytes = round_up(options.num_nvl_bytes, kBufferAlignment) + options.num_rdma_bytes;
    memory.allow_nvlink = options.allow_nvlink;
    memory.allow_mnnvl = options.allow_mnnvl;
    memory.num_queue_pairs = options.num_qps_per_rank;
    memory_ = std::make_unique<SymmetricMemory>(*device_, memory);
    workspace_ = static_cast<Workspace*>(device_->allocate(sizeof(Workspace)));
    failure_ = static_cast<FailureRecord*>(device_->allocate_host_visible(sizeof(FailureRecord)));
    if (options.enable_shrink) {
        options_.verify = true;
        masks_ = static_cast<Masks*>(device_->allocate(sizeof(Masks)));
        mask_record_ = static_cast<MaskRecord*>(device_->allocate_host_visible(sizeof(MaskRecord)));
        device_->poke(&masks_->record, mask_record_);
        device_->prepare(&ep::update_mask, &ep::query_masks, &ep::clean_masks);
    }
    const size_t num_queue_ends = 2 * (topology_.num_ranks + topology_.num_nodes) * kMaxChannels;
    queue_states_ =
        static_cast<QueueState*>(device_->allocate(num_queue_ends * sizeof(QueueState)));
    receive_counts_ =
        static_cast<ReceiveCounts*>(device_->allocate_host_visible(sizeof(ReceiveCounts)));
    log_.open(*device_, options.num_recorded_calls);
    for (const auto payload :
         {Payload::kBf16, Payload::kFp8, Payload::kFp8PowerOfTwo, Payload::kFp8Ue8m0}) {
        device_->prepare(dispatch_kernel(payload, options_.verify));
    }
    device_->prepare(combine_kernel(false, options_.verify),
                     combine_kernel(true, options_.verify),
                     &ep::barrier,
                     &ep::part,
                     &ep::clock_offset,
                     &ep::dispatch_layout,
                     &ep::copy_rows,
                     &ep::sum_rows,
                     &ep::normal_notify,
                     &ep::normal_pack,
                     &ep::normal_prove,
                     &ep::normal_dispatch,
                     &ep::normal_combine);
}

Runtime::~Runtime() { close(); }

void Runtime::close(bool keeps_memory) {
    const std::scoped_lock lock(mutex_);
    if (keeps_memory && memory_) memory_->keep();
    memory_.reset();
    if (!device_) return;
    device_->release(workspace_);
    device_->release(queue_states_);
    if (masks_ != nullptr) device_->release(masks_);
    if (masks_ != nullptr) device_->release_host_visible(mask_record_);
    device_->release_host_visible(failure_);
    device_->release_host_visible(receive_counts_);
    log_.close(*device_);
    workspace_ = nullptr;
    queue_states_ = nullptr;
    failure_ = nullptr;
    masks_ = nullptr;
    mask_record_ = nullptr;
    receive_counts_ = nullptr;
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
    std::byte* begin = memory_->local_base() + normal_control_.end();
    if (!use_rdma) return {begin, options_.num_nvl_bytes};
    return {begin + round_up(options_.num_nvl_bytes, kBufferAlignment), options_.num_rdma_bytes};
}

uint64_t Runtime::operation() const {
    check_connected("operation");
    return std::max(device_->peek(&workspace_->op), lost_op_.load(std::memory_order_relaxed));
}

uint64_t Runtime::entered_operation() const {
    check_connected("entered_operation");
    return device_->peek(&workspace_->open_op);
}

LowLatencyMap Runtime::map(const LowLatencySize& size) const {
    return {options_.num_ranks,
            size.num_experts,
            size.num_max_dispatch_tokens_per_rank,
            size.hidden,
            normal_control_.end() + round_up(options_.num_nvl_bytes, kBufferAlignment)};
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
        refuse("hidden must be a multiple of " + std::to_string(kChannelsPerScale));
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

OperationArgs Runtime::common_args(Operation operation) const {
    OperationArgs args{};
    args.transport = memory_->transport();
    args.workspace = workspace_;
    args.masks = masks_;
    args.failure = failure_;
    args.control = control_;
    args.shape.operation = static_cast<uint16_t>(operation);
    args.timeout_ns = options_.timeout_ns;
    return args;
}

OperationArgs Runtime::operation_args(const OperationCall& call,
                                      int num_tokens,
                                      Operation operation,
                                      uint16_t format) {
    OperationArgs args = common_args(operation);
    static_cast<OperationOptions&>(args) = call;
    args.map = map(call);
    args.shape = {static_cast<uint32_t>(call.num_max_dispatch_tokens_per_rank),
                  static_cast<uint32_t>(call.hidden),
                  static_cast<uint32_t>(call.num_experts),
                  static_cast<uint16_t>(format | (options_.verify ? kVerifiedFormat : 0)),
                  static_cast<uint16_t>(operation)};
    args.layout = {{args.shape.word(0), args.shape.num_experts}};
    args.num_queue_pairs = static_cast<uint32_t>(args.map.num_local_experts());
    const bool sends = (call.phases & kPhaseSend) != 0;
    const bool has_hook = call.phases == kPhaseSend;
    if (sends) given_up_ = lost_op_.load(std::memory_order_relaxed);
    args.given_up = given_up_;
    args.record = log_.add(Agreed{args.shape, 0, 0}, num_tokens, call.stream, !sends, has_hook);
    return args;
}

void Runtime::set_launch_shape(int blocks, int warps) {
    shape_blocks_ = blocks;
    shape_warps_ = warps;
}

LaunchShape Runtime::operation_shape(const LowLatencyMap& map, int num_tokens) const {
    if (shape_blocks_ > 0) return {shape_blocks_, std::max(shape_warps_, 1) * kWarpSize, 0, true};
    if constexpr (!Device::kHasGpuShapes) {
        // Fibers of one thread gain nothing from company; fewer stacks stay in the cache.
        return {1, kWarpSize, 0, true};
    } else {
        // 8 warps put a token's usual top-8 at once. Chosen, not tuned.
        constexpr int kWarps = 8;
        const int blocks = operation_blocks(map, num_tokens, kWarps);
        return {std::min(blocks, device_->num_multiprocessors()), kWarps * kWarpSize, 0, true};
    }
}

void Runtime::low_latency_dispatch(const DispatchCall& call) {
    const std::scoped_lock lock(mutex_);
    check_size(call, "low_latency_dispatch");
    const Payload payload = call.payload();
    const DispatchMessage message{call.hidden, payload};
    DispatchArgs args{
        {operation_args(
            call, call.num_tokens, Operation::kDispatch, static_cast<uint16_t>(payload))},
        call,
        HandleView::of(call.src_info, map(call)),
    };
    args.common.row_bytes = message.data_bytes() + message.num_scale_items() * sizeof(uint32_t);
    LaunchShape shape = operation_shape(args.common.map, call.num_tokens);
    shape.shared_bytes = DispatchShared::bytes(call.num_topk, args.common.map, shape.threads);
    device_->launch_operation("low_latency_dispatch",
                              dispatch_kernel(payload, options_.verify),
                              shape,
                              args,
                              call.stream);
}

std::pair<void*, size_t> Runtime::next_combine_buffer(const LowLatencySize& size) const {
    check_size(size, "get_next_low_latency_combine_buffer");
    const LowLatencyMap layout = map(size);
    const size_t first =
        layout.combine_staging(zero_copy_half_, 0, 0) + CombineMessage{size.hidden}.data_offset();
    return {memory_->local_base() + first, layout.combine_bytes()};
}

size_t Runtime::handle_words(const LowLatencySize& size, int num_tokens, int num_topk) const {
    return HandleView::num_words(map(size), num_tokens, num_topk);
}

HandleFault Runtime::find_handle_fault(const HandleCall& call) const {
    // On the GPU a look would stall the stream; there the kernel finds it.
    if constexpr (!Device::kIsHost) return {};
    const LowLatencyMap layout = map(call);
    const HandleView handle = HandleView::of(call.src_info, layout);
    const HandleHead& head = *handle.head();
    if (head.op == 0) return {.reason = HandleFault::kNotReceived};
    if (!handle.is_of(call.num_tokens, call.num_topk))
        return {.reason = HandleFault::kTopkShape, .place = {head.num_tokens, head.num_topk}};
    for (int64_t entry = 0; entry < int64_t{call.num_tokens} * call.num_topk; ++entry) {
        const HandleEntry& sent = handle.entries()[entry];
        const HandleFault::Reason reason = sent.fault(entry, call.topk_idx[entry], layout);
        if (reason == HandleFault::kNone) continue;
        return {.reason = reason,
                .place = {entry / call.num_topk, entry % call.num_topk},
                .expected = sent.named()};
    }
    for (int expert = 0; expert < layout.num_local_experts(); ++expert) {
        int end = 0;
        for (int source = 0; source < layout.num_ranks; ++source) {
            const int pair = expert * layout.num_ranks + source;
            const RowRange range = RowRange::unpack(call.layout_range[pair]);
            if (!handle.is_intact(range, pair, end, layout))
                return {.reason = HandleFault::kRange, .place = {expert, source}};
            end = range.end();
        }
    }
    return {};
}

void Runtime::low_latency_combine(const CombineCall& call) {
    const std::scoped_lock lock(mutex_);
    check_size(call, "low_latency_combine");
    CombineArgs args{
        {operation_args(call, call.num_tokens, Operation::kCombine, call.use_logfmt)},
        call,
        HandleView::of(call.src_info, map(call)),
        static_cast<size_t>(call.hidden),
        call.zero_copy ? zero_copy_half_ : CombineArgs::kNotStaged,
    };
    args.common.row_bytes = CombineMessage{call.hidden}.data_bytes();
    args.common.dispatch_op = &args.handle.head()->op;
    if (call.zero_copy) {
        const auto [first, stride] = next_combine_buffer(call);
        args.x = static_cast<const bf16*>(first);
        args.x_stride = stride / sizeof(bf16);
    }
    LaunchShape shape = operation_shape(args.common.map, call.num_tokens);
    shape.shared_bytes = CombineShared::bytes(args.common.map, shape.threads);
    device_->launch_operation("low_latency_combine",
                              combine_kernel(call.use_logfmt, options_.verify),
                              shape,
                              args,
                              call.stream);
    if (call.phases & kPhaseSend) zero_copy_half_ ^= 1;
}

void Runtime::barrier(Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_connected("barrier");
    OperationArgs args = common_args(Operation::kBarrier);
    args.record = log_.add(Agreed{args.shape, 0, 0}, 0, stream, false, false);
    device_->launch_operation("barrier", &ep::barrier, small_shape(), args, stream);
}

std::vector<std::pair<int64_t, int64_t>> Runtime::measure_clock_offsets(int num_samples,
                                                                        Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_connected("measure_clock_offsets");
    ClockOffsetArgs args{
        common_args(Operation::kClockOffset), num_samples, options_.clock_interval_ns};
    args.common.record = log_.add(Agreed{args.common.shape, 0, 0}, 0, stream, false, false);
    device_->launch_operation("clock_offset", &ep::clock_offset, small_shape(), args, stream);
    std::vector<std::pair<int64_t, int64_t>> result;
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        const ClockLine clock = device_->read(&workspace_->clocks[rank], stream);
        result.emplace_back(clock.offset_ns, clock.round_trip_ns);
    }
    return result;
}

void Runtime::dispatch_layout(const DispatchLayoutCall& call) {
    const std::scoped_lock lock(mutex_);
    const DispatchLayoutArgs& args = call;
    const LaunchShape shape = shape_for_blocks(args.num_ranks);
    device_->launch("dispatch_layout", &ep::dispatch_layout, shape, args, call.stream);
}

void Runtime::check_rank(const char* call, int rank) const {
    check_connected(call);
    if (rank < 0 || rank >= options_.num_ranks)
        throw std::runtime_error(std::string(call) + ": no rank " + std::to_string(rank));
}

void Runtime::check_masks(const char* call) const {
    check_connected(call);
    if (masks_ == nullptr) throw std::runtime_error(std::string(call) + ": enable_shrink is False");
}

void Runtime::update_mask(int rank, bool masked, Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_masks("update_mask");
    check_rank("update_mask", rank);
    const UpdateMaskArgs args{masks_, rank, masked ? 1 : 0};
    device_->launch_operation("update_mask", &ep::update_mask, small_shape(), args, stream);
}

void Runtime::query_masks(int32_t* status, Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_masks("query_masks");
    const QueryMasksArgs args{masks_, options_.num_ranks, status};
    device_->launch_operation("query_masks", &ep::query_masks, small_shape(), args, stream);
}

void Runtime::clean_masks(Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_masks("clean_masks");
    const OperationArgs args = common_args(Operation::kBarrier);
    device_->launch_operation("clean_masks", &ep::clean_masks, small_shape(), args, stream);
}

void Runtime::part(Stream stream) {
    const std::scoped_lock lock(mutex_);
    check_connected("part");
    const OperationArgs args = common_args(Operation::kBarrier);
    device_->launch_operation("part", &ep::part, small_shape(), args, stream);
}

std::vector<Masked> Runtime::take_masked() {
    const std::scoped_lock lock(mutex_);
    std::vector<Masked> masked;
    // Pairs with the release at the end of mask_missing(). What comes in between is found at the next call.
    if (mask_record_ == nullptr || std::atomic_ref(mask_record_->any).exchange(0) == 0)
        return masked;
    constexpr auto kSeries = static_cast<uint64_t>(Series::kEnd);
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        const uint64_t when = std::atomic_ref(mask_record_->when[rank]).exchange(0);
        if (when != 0)
            masked.push_back({rank, static_cast<Series>(when % kSeries), when / kSeries});
    }
    return masked;
}

void Runtime::mark_out(int rank, uint64_t op) {
    check_rank("mark_out", rank);
    device_->poke(&workspace_->news.out[rank], op);
    device_->poke(&workspace_->news.any, 1u);
}

void Runtime::mark_gone(int rank, bool is_gone) {
    check_rank("mark_gone", rank);
    device_->poke(&workspace_->news.gone[rank], is_gone ? 1u : 0u);
    device_->poke(&workspace_->news.any, 1u);
}

void Runtime::give_up(uint64_t op) {
    check_connected("give_up");
    lost_op_.store(std::max(op, lost_op_.load(std::memory_order_relaxed)),
                   std::memory_order_relaxed);
    const Progress at = progress();
    if (!at.waiting || at.open <= at.closed || at.open > op) return;
    device_->poke(&workspace_->news.lost_op, op);
    device_->poke(&workspace_->news.any, 1u);
}

Progress Runtime::progress() const {
    check_connected("progress");
    return {
        device_->peek(&workspace_->op),
        device_->peek(&workspace_->open_op),
        device_->peek(&workspace_->wait_begin_ns) != 0 || device_->peek(&workspace_->meets) != 0};
}

std::optional<Failure> Runtime::take_failure() {
    const std::scoped_lock lock(mutex_);
    if (failure_ == nullptr) return std::nullopt;
    // A kernel may still be running. Pairs with the release at the end of record_failure().
    const uint32_t reason = std::atomic_ref(failure_->reason).load(std::memory_order_acquire);
    if (reason == 0) return std::nullopt;
    Failure failure{
        .reason = static_cast<FailureReason>(reason),
        .operation = failure_->operation,
        .op = failure_->op,
        .waited_ns = failure_->waited_ns,
        .ranks = {},
        .last_op = {},
        .given_up = {},
        .expected = agreed_of(failure_->expected_shape),
        .seen = agreed_of(failure_->seen_shape),
        .row = failure_->row,
    };
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        if (failure_->ranks[rank] == 0) continue;
        failure_->ranks[rank] = 0;
        failure.ranks.push_back(rank);
        const auto word_at = [&](size_t offset) {
            return device_->peek(reinterpret_cast<const uint64_t*>(memory_->local_base() + offset));
        };
        uint64_t newest = 0;
        for (int half = 0; half < kNumHalves; ++half)
            newest =
                std::max(newest, word_at(control_.header(half, rank) + offsetof(OpHeader, op)));
        failure.last_op.push_back(newest);
        failure.given_up.push_back(
            GivenUp::unpack(word_at(control_.given_up(Series::kOperations, rank))).newest);
    }
    std::atomic_ref(failure_->reason).store(0, std::memory_order_relaxed);
    return failure;
}

}  // namespace ep
