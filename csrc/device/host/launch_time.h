// The time of a launch on a GPU as a CostModel describes it: every thread has a clock of its own, which advances
// with what it does, and the thread whose clock is earliest runs next. Collectives set the clocks of all who meet to
// the latest one. A thread that has looked in vain sleeps until what it looked at is written, and goes on with the
// look that would have been next had it spun.
//
// Ranks advance together: one runs no further ahead of another than a message between them takes.
#pragma once

#include <cstdint>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/host/cost_model.h"
#include "device/host/executor.h"
#include "device/host/schedule.h"
#include "device/host/simulation.h"

namespace ep::host {

class LaunchTime final : public Schedule {
  public:
    LaunchTime(Executor& executor, Seat& seat, const CostModel& costs);
    ~LaunchTime() override;

    // Of the executor.
    void reset(size_t num_fibers) override;
    void push(Fiber* fiber) override;
    Fiber* pop() override;
    bool preempt() override { return false; }
    std::string describe() const override { return "time of a GPU"; }
    // When the last thread has ended. Notes the launch under `name`.
    void end(const char* name);

    // Of the running thread. What `amount` says depends on the step: bytes, or 0.
    void take(Fiber& fiber, Step step, const void* address, size_t amount);
    // Whether another thread must run before what is next.
    bool is_ahead(const Fiber& fiber);
    void spend(Fiber& fiber, Spent what, double ns);
    void spend_until(Fiber& fiber, Spent what, double at_ns) {
        if (at_ns > fiber.clock_ns) spend(fiber, what, at_ns - fiber.clock_ns);
    }
    void begin_looks(Fiber& fiber);
    // False: what it looked at has been written since, so it looks again at once.
    bool falls_asleep(Fiber& fiber, uint64_t deadline_ns);
    void end_looks(Fiber& fiber);
    void look_at(Fiber& fiber, const void* address);

    // Of a put that has been issued, by its multiprocessor or by the NIC, and not yet acknowledged.
    PutOrigin put(const Fiber& fiber, bool by_nic);
    // False: the thread is woken when all have arrived that its multiprocessor, or the NIC, has put so far.
    bool has_arrived(Fiber& fiber, bool by_nic);
    void acknowledged(const PutOrigin& origin, double at_ns);

    // Whoever looked at it looks again.
    void written(const void* address, double at_ns);
    // The rank's symmetric memory, as it looks at it.
    void set_memory(const std::byte* base) { memory_ = base; }
    const std::byte* memory() const { return memory_; }

    const CostModel& costs() const { return costs_; }
    GpuPorts& ports() { return seat_.simulation().ports(seat_.rank()); }

  private:
    struct Waking {
        double at_ns;
        uint64_t number;  // of two at the same time, the one that was ready first
        Fiber* fiber;
        bool operator>(const Waking& other) const {
            return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
        }
    };
    struct Thread {
        bool looks = false;
        bool sleeps = false;
        bool is_due = false;  // what it looked at has been written
        double look_began_ns = 0;
        double row_is_there_ns = 0;
        uint64_t awaits = 0;  // of its multiprocessor's puts
        // And how long after the begin of a look.
        std::vector<std::pair<const void*, double>> looked_at;
    };
    struct Multiprocessor {
        SharedRate memory;
        uint64_t num_put = 0;
        uint64_t num_arrived = 0;
        std::vector<Fiber*> awaiting;
    };

    Thread& thread(const Fiber& fiber);
    Multiprocessor& multiprocessor(const Fiber& fiber) { return multiprocessors_[fiber.block]; }
    void count_looks(const Fiber& fiber, uint64_t looks, bool in_vain);
    void copy(Fiber& fiber, size_t bytes, int threads);
    // When the multiprocessor has moved so much.
    double moved_ns(const Fiber& fiber, size_t bytes);
    void warp_is_due(const Fiber& fiber, double written_ns, double after_ns);
    // With the look that comes to a word, so long after its begin, when that has been written.
    void look_again(Fiber& fiber, double written_ns, double after_ns);
    void wake_all();
    void wake(Fiber& fiber, Spent what, double at_ns);

    Executor& executor_;
    Seat& seat_;
    const CostModel& costs_;  // of the simulation
    const std::byte* memory_ = nullptr;
    std::priority_queue<Waking, std::vector<Waking>, std::greater<>> ready_;
    uint64_t num_ready_ = 0;
    uint64_t launch_ = 0;
    double begin_ns_ = 0;
    uint64_t deadline_ns_ = UINT64_MAX;  // the first one of those who sleep
    std::vector<Thread> threads_;
    std::vector<Multiprocessor> multiprocessors_;
    std::unordered_map<const void*, std::vector<Fiber*>> lookers_;
    double spent_[kNumSpent] = {};  // of the first threads of all blocks
    Looks looks_;
};

}  // namespace ep::host
