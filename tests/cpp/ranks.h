// Ranks of tests that run kernels of their own: a device and symmetric memory, and what an operation
// needs beside them.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device.cuh"
#include "kernels/protocol/operation_state.cuh"
#include "testing.h"
#include "transport/symmetric_memory.h"
#include "transport/transport.cuh"

namespace ep::testing {

constexpr size_t kControlBytes = 8192;
constexpr size_t kDataBytes = 1 << 20;
constexpr size_t kFlag = 64;                // control word
constexpr size_t kPayload = kControlBytes;  // first data word

// (flag, payload) as a receiver may see them, where 1 and 42 are sent.
constexpr std::pair<uint64_t, uint64_t> kFlagWithoutPayload{1, 0};
constexpr std::pair<uint64_t, uint64_t> kPayloadWithoutFlag{0, 42};

// A rank that has memory and a transport and nothing else; its kernels are lambdas.
struct Rank {
    Rank(int rank, int num_ranks, size_t control_bytes = kControlBytes)
        : device(0, "rank"),
          memory(device,
                 {.rank = rank,
                  .num_ranks = num_ranks,
                  .control_bytes = control_bytes,
                  .data_bytes = kDataBytes}) {}

    host::Link& link() { return *memory.transport().link; }
    uint64_t word(size_t offset) { return link().newest(offset); }
    uint64_t* words(size_t offset) {
        return reinterpret_cast<uint64_t*>(memory.local_base() + offset);
    }
    uint64_t data(size_t index) { return words(kPayload)[index]; }

    // kernel(transport) on every thread, from the calling OS thread.
    template <class F>
    void launch(F kernel, const LaunchShape& shape = {.blocks = 1, .threads = kWarpSize}) {
        struct Args {
            const F* kernel;
            Transport transport;
        };
        device.launch<Args>(
            "test",
            [](Args args) { (*args.kernel)(args.transport); },
            shape,
            {&kernel, memory.transport()},
            0);
    }
    template <class F>
    void launch(int warps, F kernel) {
        launch(kernel, {.blocks = 1, .threads = warps * kWarpSize});
    }

    Device device;
    SymmetricMemory memory;
};

// A rank that opens and closes operations, without rows.
struct OperatingRank : Rank {
    static constexpr size_t kDataBytes = 4096;
    static constexpr int kExpertsPerRank = 2;  // and queue pairs to each of the others
    static constexpr uint64_t kPatienceNs = 10'000'000'000;

    OperatingRank(int rank, int num_ranks)
        : Rank(rank, num_ranks, ControlMap{num_ranks}.bytes()), num_ranks(num_ranks) {}

    // Of an operation whose rows have this length.
    OperationArgs args(int hidden, uint64_t timeout_ns = kPatienceNs) {
        const ControlMap control{num_ranks};
        const int num_experts = num_ranks * kExpertsPerRank;
        OperationArgs args{};
        args.transport = memory.transport();
        args.workspace = workspace.get();
        args.failure = failure.get();
        args.control = control;
        args.map = {num_ranks, num_experts, 1, hidden, control.bytes()};
        args.shape = {1,
                      static_cast<uint32_t>(hidden),
                      static_cast<uint32_t>(num_experts),
                      0,
                      static_cast<uint16_t>(Operation::kDispatch)};
        args.layout = {{args.shape.word(0), args.shape.num_experts}};
        args.num_queue_pairs = kExpertsPerRank;
        args.timeout_ns = timeout_ns;
        return args;
    }

    int num_ranks;
    std::unique_ptr<Workspace> workspace = std::make_unique<Workspace>();
    std::unique_ptr<FailureRecord> failure = std::make_unique<FailureRecord>();
};

// body(rank object, rank) of simulated ranks R(rank, num_ranks), in the time of a GPU if there are costs. All
// live until all are done.
template <class R, class F>
std::shared_ptr<host::Simulation> simulate(const host::SimulationOptions& options,
                                           F body,
                                           const host::CostModel* costs = nullptr) {
    auto simulation = std::make_shared<host::Simulation>(options);
    if (costs != nullptr) simulation->set_costs(*costs);
    std::vector<std::unique_ptr<R>> ranks(options.num_ranks);
    std::vector<std::exception_ptr> errors(options.num_ranks);
    on_ranks(options.num_ranks, [&](int rank) {
        simulation->enter(rank);
        host::Seat& seat = *host::Simulation::seat();
        try {
            ranks[rank] = std::make_unique<R>(rank, options.num_ranks);
            seat.sleep_until(simulation->now_ns() + 1'000'000);
            std::vector<std::string> handles;
            for (const auto& one : ranks) handles.push_back(one->memory.local_handle());
            ranks[rank]->memory.connect(handles);
            seat.sleep_until(simulation->now_ns() + 1'000'000);
            body(*ranks[rank], rank);
        } catch (const host::RankDied&) {
        } catch (...) {
            errors[rank] = std::current_exception();
        }
        simulation->leave();
    });
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
    return simulation;
}

}  // namespace ep::testing
