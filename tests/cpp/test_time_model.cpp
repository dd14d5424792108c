// The time of a GPU: what kernels take whose time can be written down as a formula.
// Not under ThreadSanitizer: it changes neither who may run nor what they read.
// sanitize: address
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../../benchmarks/gpu_probes.cuh"
#include "ranks.h"
#include "testing.h"

using namespace ep;
using ep::testing::kFlag;
using ep::testing::kPayload;
using ep::testing::Rank;
using host::CostModel;
using host::LaunchRecord;
using host::Spent;

namespace {

constexpr uint64_t kPatienceNs = 1'000'000'000;
constexpr size_t kRow = 16384;

CostModel costs() {
    CostModel all;
    all.shared_ns = 17;
    all.load_ns = 10;
    all.store_ns = 5;
    all.device_fence_ns = 400;
    all.system_fence_ns = 700;
    all.warp_ns = 14;
    all.barrier_ns = 25;
    all.grid_barrier_ns = 1000;
    all.copy_ns = 300;
    all.bulk_ns = 500;
    all.sm_bytes_per_ns = 1000;
    all.nvlink_bytes_per_ns = 160;
    all.nvlink_latency_ns = 1000;
    all.nvlink_queued_ns = 1e9;
    all.nic_put_ns = 300;
    all.nic_bytes_per_ns = 50;
    all.nic_message_ns = 20;
    all.nic_latency_ns = 3000;
    return all;
}

using Kernel = std::function<void(const Transport&, int rank)>;

// The launches of `kernel` on all ranks, which begin at once.
std::vector<LaunchRecord> time_of(int num_ranks,
                                  int ranks_per_node,
                                  const CostModel& costs,
                                  const Kernel& kernel,
                                  const LaunchShape& shape = {.blocks = 1, .threads = kWarpSize},
                                  const std::function<void(Rank&, int)>& prepare = {}) {
    host::SimulationOptions options;
    options.num_ranks = num_ranks;
    options.ranks_per_node = ranks_per_node;
    const auto simulation = ep::testing::simulate<Rank>(
        options,
        [&](Rank& self, int rank) {
            if (prepare) prepare(self, rank);
            self.launch([&](const Transport& transport) { kernel(transport, rank); }, shape);
        },
        &costs);
    CHECK(!simulation->has_ended());
    std::vector<LaunchRecord> launches;
    for (int rank = 0; rank < num_ranks; ++rank)
        launches.push_back(simulation->launches(rank).at(0));
    return launches;
}

double ns_of(const LaunchRecord& launch) { return launch.end_ns - launch.begin_ns; }
double spent(const LaunchRecord& launch, Spent what) {
    return launch.spent_ns[static_cast<int>(what)];
}
// Within 1 %.
bool is_near(double found, double expected) {
    if (std::abs(found / expected - 1) < 0.01) return true;
    std::printf("%.1f ns, expected %.1f\n", found, expected);
    return false;
}

void await(const Transport& transport, size_t offset, uint64_t value) {
    if (!spin_until([&] { return transport.poll(offset) >= value; }, deadline_in(kPatienceNs)))
        host::current_executor->fail("nothing came");
}

void put_rows(const Transport& transport, int dst, int rows) {
    for (int i = 0; i < rows; ++i)
        transport.put_warp(dst, kPayload, transport.local(kPayload), kRow, 0);
}

// What a turn of a probe takes, as a GPU would tell it: more turns less fewer.
template <class Probe>
double ns_of_turn(const CostModel& costs) {
    std::vector<uint32_t> words(probes::kNumWords * probes::kWordStride);
    std::vector<std::byte> source(1 << 20);
    std::vector<std::byte> target(source.size());
    const probes::Memory memory{words.data(), source.data(), target.data(), source.size()};
    const auto ns_of_run = [&](int turns) {
        const auto launches = time_of(
            1, 1, costs, [&](const Transport&, int) { Probe(memory).run(turns); }, Probe::shape());
        return ns_of(launches[0]);
    };
    constexpr int kTurns = 4;
    return (ns_of_run(2 * kTurns) - ns_of_run(kTurns)) / kTurns;
}

}  // namespace

TEST(a_ping_pong_takes_the_latency_twice) {
    constexpr int kRounds = 20;
    const CostModel gpu = costs();
    const auto launches = time_of(2, 2, gpu, [](const Transport& transport, int rank) {
        if (thread_index() != 0) return;
        for (uint64_t round = 1; round <= kRounds; ++round) {
            if (rank == 1) await(transport, kFlag, round);
            transport.signal(1 - rank, kFlag, round, 0);
            if (rank == 0) await(transport, kFlag, round);
        }
    });
    // A look finds what has come half a look before, on average.
    const double one_way = gpu.store_ns + gpu.nvlink_latency_ns + gpu.load_ns / 2;
    CHECK(is_near(ns_of(launches[0]), 2 * kRounds * one_way));
    CHECK(spent(launches[0], Spent::kIdle) > 0.9 * ns_of(launches[0]));
    // While it waits, it looks without a pause, and finds something once a round.
    const host::Looks& looks = launches[0].looks;
    CHECK(looks.all - looks.in_vain == kRounds);
    CHECK(is_near(looks.all * gpu.load_ns, ns_of(launches[0]) - kRounds * gpu.store_ns));
}

TEST(an_incast_takes_what_the_receivers_port_takes) {
    constexpr int kRanks = 8;
    constexpr int kRows = 40;
    CostModel gpu = costs();
    gpu.copy_ns = 30;
    const auto launches = time_of(kRanks, kRanks, gpu, [](const Transport& transport, int rank) {
        if (rank != 0) {
            put_rows(transport, 0, kRows);
            if (!elect_one()) return;
            transport.fence(0, 0);
            transport.signal(0, kFlag + 8 * rank, 1, 0);
        } else if (elect_one()) {
            for (int source = 1; source < kRanks; ++source) await(transport, kFlag + 8 * source, 1);
        }
    });
    const double rows_ns = (kRanks - 1) * kRows * kRow / gpu.nvlink_bytes_per_ns;
    // The first row is copied in four steps; the last one is acknowledged before its signal sets out.
    const double expected =
        4 * gpu.copy_ns + 3 * gpu.nvlink_latency_ns + rows_ns + gpu.system_fence_ns;
    CHECK(is_near(ns_of(launches[0]), expected));
    // A sender's own port is free most of the time: it waits for what has been put to arrive.
    CHECK(spent(launches[1], Spent::kAcknowledgement) > 0.5 * ns_of(launches[1]));
}

TEST(a_nic_of_half_the_speed_takes_twice_as_long) {
    constexpr int kRows = 100;
    const CostModel gpu = costs();
    const auto time = [&](double bytes_per_s) {
        const auto launches = time_of(
            2,
            1,
            gpu,
            [](const Transport& transport, int rank) {
                if (rank == 0) {
                    put_rows(transport, 1, kRows);
                    if (!elect_one()) return;
                    transport.fence(1, 0);
                    transport.signal(1, kFlag, 1, 0);
                } else if (elect_one()) {
                    await(transport, kFlag, 1);
                }
            },
            {.blocks = 1, .threads = kWarpSize},
            [&](Rank& self, int rank) {
                if (rank == 0) self.link().set_path_fault(1, 0, bytes_per_s);
            });
        return ns_of(launches[1]);
    };
    const auto expected = [&](double bytes_per_ns) {
        return gpu.nic_put_ns + gpu.nic_latency_ns +
               kRows * (gpu.nic_message_ns + kRow / bytes_per_ns) + gpu.nic_message_ns;
    };
    CHECK(is_near(time(0), expected(gpu.nic_bytes_per_ns)));
    CHECK(is_near(time(25e9), expected(25)));
}

TEST(a_block_takes_as_long_as_its_last_warp) {
    constexpr int kWarps = 4;
    const CostModel gpu = costs();
    const auto launches = time_of(
        1,
        1,
        gpu,
        [](const Transport& transport, int) {
            for (int i = 0; i < 10 * (1 + warp_id()); ++i)
                copy_warp(transport.local(kPayload), transport.local(kPayload + kRow), 4096);
            block_sync();
        },
        {.blocks = 2, .threads = kWarps * kWarpSize});
    CHECK(is_near(ns_of(launches[0]), 10 * kWarps * gpu.copy_ns + gpu.barrier_ns));
    CHECK(is_near(spent(launches[0], Spent::kMoving), 10 * gpu.copy_ns));
    CHECK(is_near(spent(launches[0], Spent::kBarrier), 30 * gpu.copy_ns + gpu.barrier_ns));
}

TEST(what_a_thread_writes_wakes_who_looks_at_it) {
    const CostModel gpu = costs();
    const auto launches = time_of(
        1,
        1,
        gpu,
        [](const Transport& transport, int) {
            auto* word = reinterpret_cast<uint32_t*>(transport.local(kPayload));
            if (block_index() == 0 && elect_one()) {
                copy_warp(transport.local(kPayload + kRow), transport.local(kPayload), 4096);
                store_release<Scope::kDevice>(word, 1);
            } else if (elect_one()) {
                if (!spin_until([&] { return load_acquire<Scope::kDevice>(word) == 1; },
                                deadline_in(kPatienceNs)))
                    host::current_executor->fail("nothing was written");
            }
        },
        {.blocks = 2, .threads = kWarpSize});
    CHECK(is_near(ns_of(launches[0]),
                  gpu.copy_ns + gpu.device_fence_ns + gpu.store_ns + gpu.load_ns));
}

TEST(what_returns_something_behind_a_fence_takes_the_fence_and_a_load) {
    constexpr int kTimes = 10;
    const CostModel gpu = costs();
    const auto time = [&](auto update) {
        const auto launches = time_of(1, 1, gpu, [&](const Transport& transport, int) {
            auto* word = reinterpret_cast<uint32_t*>(transport.local(kPayload));
            if (elect_one())
                for (int i = 0; i < kTimes; ++i) update(word);
        });
        return ns_of(launches[0]) / kTimes;
    };
    CHECK(
        is_near(time([](uint32_t* word) { add_relaxed<Scope::kDevice>(word, 1); }), gpu.store_ns));
    CHECK(is_near(time([](uint32_t* word) { add_release<Scope::kDevice>(word, 1); }),
                  gpu.device_fence_ns + gpu.store_ns));
    CHECK(is_near(time([](uint32_t* word) { exchange_relaxed<Scope::kDevice>(word, 1); }),
                  gpu.load_ns));
    CHECK(is_near(time([](uint32_t* word) { add_acq_rel<Scope::kDevice>(word, 1); }),
                  gpu.device_fence_ns + gpu.load_ns));
}

TEST(a_warp_exchanges_once_for_each_half_of_its_lanes) {
    const CostModel gpu = costs();
    const auto exchanges = [&](auto collective) {
        const auto launches = time_of(1, 1, gpu, [&](const Transport&, int) { collective(); });
        return ns_of(launches[0]) / gpu.warp_ns;
    };
    CHECK(is_near(exchanges([] { warp_sync(); }), 1));
    CHECK(is_near(exchanges([] { shuffle(1, 0); }), 1));
    CHECK(is_near(exchanges([] { ballot(true); }), 1));
    CHECK(is_near(exchanges([] { warp_reduce<Sum>(1); }), 5));
    CHECK(is_near(exchanges([] { warp_prefix_sum(1); }), 5));
    CHECK(is_near(exchanges([] {
                      int values[2] = {1, 2};
                      group_reduce<16, Max>(values);
                  }),
                  4));
}

TEST(a_multiprocessor_and_a_port_bound_what_its_warps_move) {
    constexpr int kWarps = 8;
    constexpr int kRows = 20;
    CostModel gpu = costs();
    gpu.sm_bytes_per_ns = 50;
    const auto time = [&] {
        const auto launches = time_of(2,
                                      2,
                                      gpu,
                                      [](const Transport& transport, int rank) {
                                          if (rank == 0) put_rows(transport, 1, kRows);
                                      },
                                      {.blocks = 1, .threads = kWarps * kWarpSize});
        return ns_of(launches[0]);
    };
    constexpr double kBytes = kWarps * kRows * kRow;
    CHECK(is_near(time(), kBytes / gpu.sm_bytes_per_ns));
    // Stores wait for a port that is narrower, once the first row has been read.
    gpu.nvlink_bytes_per_ns = 25;
    gpu.nvlink_queued_ns = 100;
    CHECK(is_near(time(), 4 * gpu.copy_ns + kBytes / gpu.nvlink_bytes_per_ns));
}

TEST(what_one_gpu_tells_is_what_the_model_charges) {
    CostModel gpu = costs();
    CHECK(is_near(ns_of_turn<probes::SharedAccess>(gpu), gpu.shared_ns));
    CHECK(is_near(ns_of_turn<probes::Load>(gpu), gpu.load_ns));
    CHECK(is_near(ns_of_turn<probes::Store>(gpu), gpu.store_ns));
    CHECK(is_near(ns_of_turn<probes::Exchange>(gpu), gpu.warp_ns));
    CHECK(is_near(ns_of_turn<probes::Barrier>(gpu), gpu.barrier_ns));
    CHECK(is_near(ns_of_turn<probes::GridBarrier>(gpu), gpu.grid_barrier_ns));
    CHECK(is_near(ns_of_turn<probes::CopyStep>(gpu), gpu.copy_ns));
    // A row is also issued into memory.
    CHECK(is_near(ns_of_turn<probes::BulkRow>(gpu), gpu.bulk_ns + gpu.store_ns));
    gpu.sm_bytes_per_ns = 60;
    CHECK(is_near(probes::ManyBulkRows::kTurnBytes / ns_of_turn<probes::ManyBulkRows>(gpu),
                  gpu.sm_bytes_per_ns));
}
