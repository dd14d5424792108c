// Normal operations, seen from the host.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "kernels/normal/combine.cuh"
#include "kernels/normal/dispatch.cuh"
#include "kernels/normal/local_rows.cuh"
#include "kernels/normal/notify.cuh"
#include "runtime/runtime.h"

namespace ep {

namespace {

NormalRow row_of(const NormalSize& size) {
    return {static_cast<size_t>(size.row_bytes), size.num_topk, size.num_scales, false};
}

}  // namespace

NormalBytes Runtime::normal_bytes(const NormalSize& size, const Topology& topology) {
    const NormalRow row = row_of(size);
    const auto channels = static_cast<size_t>(size.num_channels);
    const auto nvl = static_cast<size_t>(nvl_slots(topology, size.num_max_nvl_chunked_recv_tokens));
    const auto rdma = static_cast<size_t>(size.num_max_rdma_chunked_recv_tokens);
    const bool has_nodes = topology.num_nodes > 1;
    return {topology.num_ranks * channels * nvl * row.nvl_slot_bytes(),
            has_nodes ? 2 * topology.num_nodes * channels * rdma * row.rdma_slot_bytes() : 0};
}

void Runtime::set_receive_fault(uint64_t delay_ns) {
    const auto first = [&](Hop hop) {
        return normal_control_.word(NormalControlMap::kFilled, hop, 0, 0);
    };
    memory_->set_receive_fault(first(Hop::kNvl), first(Hop::kRdma), delay_ns);
}

// Python checks arguments in the reader's words; these are the last line before memory is written.
void Runtime::check_normal(const NormalSize& size, const char* call) const {
    check_connected(call);
    const auto require = [&](bool holds, const char* rule) {
        if (!holds) throw std::runtime_error(std::string(call) + ": " + rule);
    };
    require(topology_.num_ranks % topology_.ranks_per_node == 0 &&
                topology_.ranks_per_node <= kMaxRanksPerNode,
            "all nodes must have the same number of ranks, at most 64");
    require(size.num_channels >= 1 && size.num_channels <= kMaxChannels,
            "num_channels must be between 1 and 128");
    require(size.num_tokens >= 0 && size.row_bytes > 0 && size.row_bytes % sizeof(Vector) == 0,
            "rows must be multiples of 16 bytes");
    require(size.num_topk >= 0 && size.num_topk <= kMaxNormalTopk && size.num_scales >= 0 &&
                size.num_scales <= kMaxNormalScales,
            "too many top-k entries or scales");
    require(size.num_experts >= 0 && size.num_experts <= kMaxExperts &&
                size.num_experts % topology_.num_ranks == 0,
            "num_experts must be a multiple of the number of ranks");
    require(size.num_max_nvl_chunked_send_tokens > 0 && size.num_max_rdma_chunked_send_tokens > 0 &&
                nvl_slots(topology_, size.num_max_nvl_chunked_recv_tokens) > 0 &&
                size.num_max_rdma_chunked_recv_tokens > 0,
            "queues must have slots");
    const NormalBytes needed = normal_bytes(size, topology_);
    require(needed.nvl <= options_.num_nvl_bytes && needed.rdma <= options_.num_rdma_bytes,
            "the buffer is too small");
}

void Runtime::check_local_rows(const char* call,
                               int row_bytes,
                               std::initializer_list<int> counts) const {
    check_connected(call);
    if (row_bytes <= 0 || row_bytes % sizeof(Vector) != 0)
        throw std::runtime_error(std::string(call) + ": rows must be multiples of 16 bytes");
    if (std::min(counts) < 0)
        throw std::runtime_error(std::string(call) + ": numbers of rows must not be negative");
}

template <class Args, class Call>
Args Runtime::normal_args(const Call& call, Operation operation, bool continues) {
    Args args{};
    static_cast<NormalSize&>(args) = call;
    static_cast<NormalHandle&>(args) = call;
    args.common = common_args(operation);
    args.common.masks = nullptr;  // normal operations need all ranks
    args.common.shape = {static_cast<uint32_t>(2 * call.num_channels),
                         static_cast<uint32_t>(call.row_bytes),
                         static_cast<uint32_t>(call.num_experts),
                         static_cast<uint16_t>(call.num_topk << 8 | call.num_scales),
                         static_cast<uint16_t>(operation)};
    // Low latency has a positive number of tokens where this has none.
    args.common.layout = {{static_cast<uint64_t>(call.num_channels), 0}};
    args.common.capacities = static_cast<uint64_t>(call.num_max_nvl_chunked_recv_tokens) << 32 |
                             static_cast<uint32_t>(call.num_max_rdma_chunked_recv_tokens);
    args.common.num_queue_pairs = static_cast<uint32_t>(call.num_channels);
    if (!continues) given_up_ = lost_op_.load(std::memory_order_relaxed);
    args.common.given_up = given_up_;
    args.common.row_bytes = static_cast<size_t>(call.row_bytes);
    args.queues = {
        topology_,
        call.num_channels,
        normal_control_.end(),
        NormalMap::share(options_.num_nvl_bytes, topology_.num_ranks * call.num_channels),
        normal_control_.end() + round_up(options_.num_nvl_bytes, kBufferAlignment),
        NormalMap::share(options_.num_rdma_bytes, 2 * topology_.num_nodes * call.num_channels)};
    args.words = normal_control_;
    args.row = row_of(call);
    args.row.verified = options_.verify;
    args.queue_states = queue_states_;
    args.receive_counts = receive_counts_;
    args.node = topology_.node_of(options_.rank);
    args.local_rank = topology_.local_of(options_.rank);
    args.nvl_slots = nvl_slots(topology_, call.num_max_nvl_chunked_recv_tokens);
    args.channel_tokens = TokenRange::size(call.num_channels, call.num_tokens);
    args.common.record = log_.add(Agreed{args.common.shape, 0, args.common.capacities},
                                  call.num_tokens,
                                  call.stream,
                                  continues,
                                  false);
    return args;
}

// Shared memory for the RowCopy of each warp is added to the shape, if rows of so many bytes are to have
// it and it fits.
size_t Runtime::add_row_pieces(LaunchShape& shape, size_t row_bytes) const {
    if (!options_.bulk_copies) return 0;
    const size_t piece = RowCopy::piece_bytes(row_bytes);
    const size_t bytes =
        shape.shared_bytes + RowCopy::kAlignment + shape.threads / kWarpSize * piece;
    if (bytes > kMaxSharedBytes) return 0;
    shape.shared_bytes = bytes;
    return piece;
}

LaunchShape Runtime::normal_shape(const NormalSize& size) const {
    if (shape_blocks_ > 0) return {shape_blocks_, std::max(shape_warps_, 1) * kWarpSize, 0, true};
    if constexpr (!Device::kHasGpuShapes) {
        // As for low latency: fibers of one thread gain nothing from company.
        return {1, kWarpSize, 0, true};
    } else {
        const int num_sms = std::min(2 * size.num_channels, device_->num_multiprocessors());
        return {num_sms, kMaxThreads, 0, true};
    }
}

void Runtime::normal_notify(const NotifyCall& call) {
    const std::scoped_lock lock(mutex_);
    check_normal(call, "dispatch");
    auto args = normal_args<NotifyArgs>(call, Operation::kNormalDispatch);
    static_cast<NotifyTensors&>(args) = call;
    if (call.num_max_tokens_per_rank >= 0)
        args.common.most_tokens = kMostTokens | static_cast<uint64_t>(call.num_max_tokens_per_rank);
    args.ticket = ++ticket_;
    num_counted_experts_ = call.num_experts / topology_.num_ranks;
    device_->launch_operation(
        "normal_notify", &ep::normal_notify, normal_shape(call), args, call.stream);
}

std::optional<NormalCounts> Runtime::normal_counts() {
    check_connected("dispatch");
    const std::atomic_ref ticket(receive_counts_->ticket);
    // The kernel gives up by itself; this is for one that never begins.
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::nanoseconds(options_.timeout_ns + options_.timeout_ns / 2);
    while (ticket.load(std::memory_order_acquire) != ticket_) {
        if (std::chrono::steady_clock::now() > end) {
            throw std::runtime_error(
                "dispatch: the kernel that counts tokens has not begun; work queued before it on "
                "the GPU does not end");
        }
        std::this_thread::yield();
    }
    const ReceiveCounts& counts = *receive_counts_;
    if (counts.refused != 0) return std::nullopt;
    return NormalCounts{counts.num_rows,
                        counts.num_relayed,
                        {counts.per_expert, counts.per_expert + num_counted_experts_}};
}

LaunchShape Runtime::shape_for_blocks(int64_t num_blocks) const {
    constexpr int64_t kMostBlocks = 128;
    LaunchShape shape = small_shape();
    if (shape_blocks_ > 0) {
        shape.blocks = shape_blocks_;
    } else if (Device::kHasGpuShapes) {
        shape.blocks = static_cast<int>(std::min(num_blocks, kMostBlocks));
    }
    return shape;
}

LaunchShape Runtime::shape_for_threads(int64_t num_threads) const {
    return shape_for_blocks((num_threads + kMaxThreads - 1) / kMaxThreads);
}

void Runtime::pack(const PackArgs& args, Stream stream) {
    if (args.num_rows == 0) return;
    const LaunchShape shape = shape_for_threads(args.num_rows);
    device_->launch("normal_pack", &ep::normal_pack, shape, args, stream);
}

void Runtime::prove(const ProveArgs& args, Stream stream) {
    if (!options_.verify || args.num_rows == 0) return;
    const LaunchShape shape = shape_for_threads(int64_t{args.num_rows} * kWarpSize);
    // It reads which number the operation will have.
    device_->launch_operation("normal_prove", &ep::normal_prove, shape, args, stream);
}

void Runtime::copy_rows(const CopyRowsCall& call) {
    const std::scoped_lock lock(mutex_);
    check_local_rows("copy_rows", call.row_bytes, {call.num_rows, call.width, call.num_out});
    if (call.num_rows == 0) return;
    CopyRowsArgs args{call, 0};
    LaunchShape shape = shape_for_threads(int64_t{call.num_rows} * kWarpSize);
    args.row_piece_bytes = add_row_pieces(shape, call.row_bytes);
    device_->launch("copy_rows", &ep::copy_rows, shape, args, call.stream);
}

void Runtime::sum_rows(const SumRowsCall& call) {
    const std::scoped_lock lock(mutex_);
    check_local_rows("sum_rows", call.row_bytes, {call.num_rows, call.width, call.num_sums});
    if (call.num_sums == 0) return;
    const SumRowsArgs& args = call;
    LaunchShape shape = shape_for_threads(int64_t{call.num_sums} * kWarpSize);
    shape.shared_bytes = SumRowsShared::bytes(call.width, shape.threads / kWarpSize);
    if (shape.shared_bytes > kMaxSharedBytes)
        throw std::runtime_error("sum_rows: a sum must not have so many rows");
    device_->launch("sum_rows", &ep::sum_rows, shape, args, call.stream);
}

void Runtime::normal_dispatch(const NormalDispatchCall& call) {
    const std::scoped_lock lock(mutex_);
    check_normal(call, "dispatch");
    auto args = normal_args<NormalDispatchArgs>(call, Operation::kNormalDispatch, call.fresh);
    static_cast<NormalDispatchTensors&>(args) = call;
    static_cast<NormalDispatchFlags&>(args) = call;
    static_cast<OperationOptions&>(args.common) = {call.wait_stats, call.counters};
    args.relay_counters = call.relay_counters;
    if (!call.fresh) args.common.dispatch_op = args.dispatch_op;
    if (!call.abandon) {
        pack({args.row,
              call.num_tokens,
              call.topk_idx,
              call.topk_weights,
              call.scales,
              call.scale_row_stride,
              call.scale_column_stride,
              call.packs},
             call.stream);
        prove({{args.common}, args.row, call.num_tokens, call.x, nullptr, 0, call.packs},
              call.stream);
    }
    LaunchShape shape = normal_shape(call);
    const int warps = shape.threads / kWarpSize;
    const int most_tasks =
        DispatchTasks::most_tasks(topology_, call.num_channels, shape.blocks, warps);
    shape.shared_bytes = NormalDispatchShared::bytes(most_tasks, topology_.ranks_per_node, warps);
    args.row_piece_bytes = add_row_pieces(shape, args.row.bytes());
    device_->launch_operation("normal_dispatch", &ep::normal_dispatch, shape, args, call.stream);
}

void Runtime::normal_combine(const NormalCombineCall& call) {
    const std::scoped_lock lock(mutex_);
    check_normal(call, "combine");
    // A tensor without rows has no address, so the numbers say whether there is an order.
    const auto is_within = [](int number, int least, int most) {
        return number >= least && number <= most;
    };
    if (call.order_experts_per_rank != 0 &&
        (!is_within(call.order_experts_per_rank, 1, kMaxExperts / topology_.num_ranks) ||
         !is_within(call.order_topk, 0, kMaxNormalTopk) ||
         (call.num_tokens > 0 && call.order_topk_idx == nullptr) ||
         (call.num_relay_rows > 0 && call.order_relay_topk_idx == nullptr))) {
        throw std::runtime_error(
            "combine: sums are in the order of at most 128 columns, of ranks with experts; the "
            "columns of relayed rows are needed, too");
    }
    auto args = normal_args<NormalCombineArgs>(call, Operation::kNormalCombine);
    static_cast<NormalCombineTensors&>(args) = call;
    static_cast<OperationOptions&>(args.common) = {call.wait_stats, call.counters};
    args.relay_counters = call.relay_counters;
    args.common.dispatch_op = args.dispatch_op;
    if (call.num_topk > 0) {
        pack({args.row, call.num_rows, nullptr, call.topk_weights, nullptr, 0, 0, call.packs},
             call.stream);
    }
    prove({{args.common},
           args.row,
           call.num_rows,
           reinterpret_cast<const std::byte*>(call.x),
           call.recv_tokens,
           call.recv_token_stride,
           call.packs},
          call.stream);
    LaunchShape shape = normal_shape(call);
    const int warps = shape.threads / kWarpSize;
    const int most_tasks =
        CombineTasks::most_tasks(topology_, call.num_channels, shape.blocks, warps);
    shape.shared_bytes = NormalCombineShared::bytes(most_tasks, topology_, warps);
    args.row_piece_bytes = add_row_pieces(shape, args.row.bytes());
    device_->launch_operation("normal_combine", &ep::normal_combine, shape, args, call.stream);
}

}  // namespace ep
