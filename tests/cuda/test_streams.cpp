// The operations of one rank on the caller's streams: order, and what a graph capture allows.
#include <cstring>
#include <string>
#include <vector>

#include "driver.h"
#include "errors.h"
#include "kernels/low_latency/combine.cuh"
#include "kernels/normal/pack.cuh"
#include "runtime/runtime.h"
#include "testing.h"

namespace ep {
namespace {

constexpr LowLatencySize kSize{
    .num_max_dispatch_tokens_per_rank = 4, .hidden = 256, .num_experts = 2};

// A rank that is alone, with what its calls point to.
class Rank {
  public:
    Rank() {
        RuntimeOptions options{};
        options.num_ranks = 1;
        options.num_rdma_bytes = Runtime::low_latency_bytes(kSize, 1);
        options.low_latency_mode = true;
        options.num_qps_per_rank = 1;
        options.timeout_ns = 1;
        options.ranks_per_node = 1;
        options.bulk_copies = true;
        runtime_ = std::make_unique<Runtime>(options);
        runtime_->connect({runtime_->local_handle()});
    }

    Runtime& runtime() { return *runtime_; }

    void dispatch(cudaStream_t stream, int phases = kPhaseSend | kPhaseReceive) {
        DispatchCall call{};
        fill(call, stream, phases);
        runtime_->low_latency_dispatch(call);
    }
    void combine(cudaStream_t stream) {
        CombineCall call{};
        fill(call, stream, kPhaseSend | kPhaseReceive);
        runtime_->low_latency_combine(call);
    }

  private:
    template <class Call>
    void fill(Call& call, cudaStream_t stream, int phases) {
        static_cast<LowLatencySize&>(call) = kSize;
        call.num_tokens = 4;
        call.num_topk = 1;
        call.src_info = handle_.data();
        call.phases = phases;
        call.stream = reinterpret_cast<Stream>(stream);
    }

    std::unique_ptr<Runtime> runtime_;
    std::vector<int32_t> handle_ = std::vector<int32_t>(1 << 16);
};

void check_legal() {
    CHECK_EQUAL(driver::illegal().empty() ? "" : driver::illegal().front(), std::string());
}

TEST(launches_on_different_streams_run_one_after_another) {
    Rank rank;
    rank.dispatch(driver::new_stream());              // async_finish, on the buffer's own stream
    rank.dispatch(driver::new_stream(), kPhaseSend);  // with a hook, without having waited
    rank.combine(driver::new_stream());
    rank.runtime().barrier(reinterpret_cast<Stream>(driver::new_stream()));
    CHECK_EQUAL(driver::launches().size(), size_t{4});
    for (size_t later = 1; later < 4; ++later) CHECK(driver::ordered(later - 1, later));
    check_legal();
}

TEST(a_receive_phase_on_an_earlier_stream_follows_what_was_launched_since) {
    Rank rank;
    const cudaStream_t first = driver::new_stream();
    rank.dispatch(first, kPhaseSend);
    rank.combine(driver::new_stream());
    rank.dispatch(first, kPhaseReceive);
    CHECK(driver::ordered(1, 2));
}

TEST(buffers_do_not_wait_for_each_other) {
    Rank one;
    Rank two;
    one.dispatch(driver::new_stream());
    two.dispatch(driver::new_stream());
    CHECK(!driver::ordered(0, 1));
}

TEST(a_launch_waits_for_nothing_on_the_host) {
    Rank rank;
    const int before =
        driver::count("cudaStreamSynchronize") + driver::count("cudaDeviceSynchronize");
    rank.dispatch(driver::new_stream());
    rank.combine(driver::new_stream());
    (void)rank.runtime().take_failure();
    CHECK_EQUAL(driver::count("cudaStreamSynchronize") + driver::count("cudaDeviceSynchronize"),
                before);
}

// By bulk copies, through shared memory.
TEST(long_rows_are_copied_within_a_rank) {
    Rank rank;
    CopyRowsCall call{};
    call.row_bytes = 14336;
    call.num_rows = 8;
    call.width = 1;
    call.num_out = 8;
    rank.runtime().copy_rows(call);
    CHECK_EQUAL(driver::launches().size(), size_t{1});
}

TEST(operations_may_be_captured) {
    Rank rank;
    rank.dispatch(driver::new_stream());  // not captured, and not waited for
    const cudaStream_t stream = driver::new_stream();
    driver::begin_capture(stream);
    rank.dispatch(stream);
    rank.combine(stream);
    driver::end_capture(stream);
    rank.dispatch(driver::new_stream());
    check_legal();
    CHECK_EQUAL(driver::count("cudaStreamWaitEvent external"), 1);
    CHECK(driver::ordered(1, 2));
}

TEST(a_captured_combine_does_not_know_how_many_came_before) {
    Rank rank;
    driver::machine().argument_bytes = sizeof(CombineArgs);
    const cudaStream_t stream = driver::new_stream();
    driver::begin_capture(stream);
    for (int i = 0; i < 3; ++i) rank.combine(stream);
    driver::end_capture(stream);
    for (const driver::Launch& launch : driver::launches()) {
        CombineArgs args{};
        std::memcpy(&args, launch.arguments.data(), sizeof(args));
        CHECK_EQUAL(args.zero_copy_half, CombineArgs::kNotStaged);
    }
}

TEST(a_capture_that_forks_keeps_the_order) {
    Rank rank;
    const cudaStream_t stream = driver::new_stream();
    const cudaStream_t fork = driver::new_stream();
    driver::begin_capture(stream);
    rank.dispatch(stream);
    driver::join_capture(fork, stream);
    rank.combine(fork);
    rank.dispatch(stream);
    check_legal();
    CHECK(driver::ordered(0, 1));
    CHECK(driver::ordered(1, 2));
}

TEST(a_second_capture_does_not_wait_for_events_of_the_first) {
    Rank rank;
    for (int i = 0; i < 2; ++i) {
        const cudaStream_t stream = driver::new_stream();
        driver::begin_capture(stream);
        rank.dispatch(stream);
        driver::end_capture(stream);
    }
    rank.dispatch(driver::new_stream());
    check_legal();
    CHECK_EQUAL(driver::count("cudaStreamWaitEvent external"), 2);
}

TEST(failures_are_read_in_memory_that_the_host_shares) {
    Rank rank;
    const size_t copies = driver::calls().size();
    CHECK(!rank.runtime().take_failure().has_value());
    CHECK_EQUAL(driver::calls().size(), copies);
    // The record of failures, the counts of a dispatch, and what values pass through.
    CHECK_EQUAL(driver::count("cudaHostAlloc"), 4);
}

TEST(progress_is_read_while_a_kernel_runs_on_a_stream_of_its_own) {
    Rank rank;
    const cudaStream_t stream = driver::new_stream();
    driver::begin_capture(stream);
    rank.dispatch(stream);
    (void)rank.runtime().progress();
    rank.runtime().give_up(3);
    check_legal();
}

TEST(a_look_beside_a_capture_leaves_the_mode_of_its_thread) {
    Rank rank;
    const auto mode = [] {
        cudaStreamCaptureMode found = cudaStreamCaptureModeGlobal;
        CHECK_EQUAL(cudaThreadExchangeStreamCaptureMode(&found), cudaSuccess);
        return found;
    };
    (void)rank.runtime().progress();
    rank.runtime().mark_gone(0, false);
    CHECK_EQUAL(mode(), cudaStreamCaptureModeGlobal);
}

// Rows prove themselves with the number of their operation, which the one before counts.
TEST(rows_are_proved_behind_the_operation_before) {
    NormalSize size{};
    size.num_tokens = 4;
    size.row_bytes = 512;
    size.num_channels = 1;
    size.num_max_nvl_chunked_send_tokens = size.num_max_nvl_chunked_recv_tokens = 4;
    size.num_max_rdma_chunked_send_tokens = size.num_max_rdma_chunked_recv_tokens = 4;
    RuntimeOptions options{};
    options.num_ranks = options.ranks_per_node = 1;
    options.num_nvl_bytes = Runtime::normal_bytes(size, {1, 1}).nvl;
    options.verify = true;
    Runtime rank(options);
    rank.connect({rank.local_handle()});
    const auto launch = [&](auto call, auto operation) {
        static_cast<NormalSize&>(call) = size;
        call.stream = reinterpret_cast<Stream>(driver::new_stream());
        (rank.*operation)(call);
    };
    NormalCombineCall combine{};
    combine.num_rows = 4;
    launch(combine, &Runtime::normal_combine);
    launch(NormalDispatchCall{}, &Runtime::normal_dispatch);  // with its handle
    launch(combine, &Runtime::normal_combine);
    const auto* prove = reinterpret_cast<const void*>(&normal_prove);
    int num_proved = 0;
    size_t operation_before = 0;
    for (size_t i = 0; i < driver::launches().size(); ++i) {
        if (driver::launches()[i].kernel != prove) continue;
        ++num_proved;
        if (num_proved > 1) CHECK(driver::ordered(operation_before, i));
        CHECK(driver::ordered(i, i + 1));
        operation_before = i + 1;
    }
    CHECK_EQUAL(num_proved, 3);
    check_legal();
}

}  // namespace
}  // namespace ep
