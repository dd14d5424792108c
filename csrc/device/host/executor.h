// The SIMT executor of the host target: runs all threads of all blocks of a launch as fibers on the
// calling OS thread. Collectives are one rendezvous each: a thread deposits a pointer to its operand,
// the last to arrive computes everyone's result. A launch that cannot go on (divergent collective,
// a lane gone while its warp waits, everybody waiting) ends with a DeviceError that names block,
// warp and lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/host/fiber.h"
#include "device/host/rank_clock.h"
#include "device/host/schedule.h"
#include "device/host/simulation.h"
#include "device/launch_shape.h"

namespace ep::host {

constexpr int kWarpSize = 32;
constexpr int kNumNamedBarriers = 16;  // as on Hopper

class LaunchTime;

class DeviceError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// How an idle rank sleeps until another rank may have written to it. The protocol avoids lost
// wake-ups: arm(), poll everything once more, then sleep().
class IdleWaiter {
  public:
    virtual ~IdleWaiter() = default;
    // Nobody can move: lets deferred work of this rank (bells, delayed delivery) make progress; true if some
    // is left.
    virtual bool pump() = 0;
    // Everybody waits: lets the clock go on to the next arrival that is known of, if it is that kind of
    // clock; true if it did.
    virtual bool pass_time() = 0;
    virtual void arm() = 0;
    virtual void sleep(uint64_t max_ns) = 0;
    virtual void disarm() = 0;
};

// What threads meet in, an object each for all who do.
struct Collective {
    const char* name;
    int exchanges = 0;  // of a warp: how many a GPU makes of it, one after the other
};

enum class Waiting : uint8_t { kNothing, kWarp, kBlock, kNamed, kGrid };

struct Fiber {
    FiberContext context;
    int block = 0;
    int thread = 0;
    bool exited = false;
    bool polling = false;
    bool interrupted = false;   // in the middle of its poll
    uint32_t last_look = 0;     // the round in which its poll failed last
    uint32_t idles_before = 0;  // its poll
    Waiting waiting = Waiting::kNothing;
    int barrier_id = 0;
    const Collective* collective = nullptr;  // what it waits in
    uint32_t mask = 0;                       // of a warp collective
    double clock_ns = 0;                     // in the time of a GPU; see launch_time.h
    double ahead_ns = 0;                     // of the look that it is in: that have passed already
};

class Executor {
  public:
    using Body = void (*)(void*);
    // Computes the results of a warp collective in place; slots[lane] is valid for lanes in mask.
    using Complete = void (*)(void* const* slots, uint32_t mask);

    explicit Executor(ClockMode clock_mode);
    ~Executor();

    // Runs body(argument) on every thread of the launch and returns when all have ended. Throws
    // DeviceError. Not reentrant.
    void run(const LaunchShape& shape, Body body, void* argument);

    // The time of a GPU has a schedule of its own.
    void set_schedule(std::unique_ptr<Schedule> schedule) {
        if (time_ == nullptr) schedule_ = std::move(schedule);
    }
    void set_idle_waiter(IdleWaiter* waiter) { idle_waiter_ = waiter; }
    // Called about every 100 ms while nobody can move, on the launching thread's own stack. What it
    // throws ends the launch where it stands and leaves run(): the way out for a user's interrupt.
    void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }
    RankClock& clock() { return clock_; }
    const Schedule& schedule() const { return *schedule_; }

    // nullptr outside of simulations in the time of a GPU. Of its functions those that take a Fiber& are for
    // running ones.
    LaunchTime* time() const { return time_; }
    bool is_timed() const { return kHasTimeModel && time_ != nullptr; }
    std::span<Fiber> fibers() { return fibers_; }
    // A fiber that waited for what LaunchTime knows of.
    void wake(Fiber* fiber) { make_ready(fiber); }
    // The launch that has ended, for the simulation's records.
    void note_launch(const char* name);

    // For code on a fiber, through device.h.
    const Fiber& fiber() const { return *current_; }
    const LaunchShape& shape() const { return shape_; }
    std::byte* shared_memory() { return shared_.data() + current_->block * shared_stride_; }
    // Without `complete` it is a warp_sync(), which orders memory; on a GPU the others do not.
    void warp_collective(const Collective& collective,
                         uint32_t mask,
                         void* slot,
                         Complete complete);
    // Whether any thread of the block came with `vote`.
    bool block_barrier(bool vote);
    void named_barrier(int id, int num_threads);
    void grid_barrier();
    // A failed poll: gives way to others and, when nobody can move, to other ranks. `deadline_ns` is when
    // the caller will give up.
    void poll_failed(uint64_t deadline_ns);
    void poll_succeeded();
    void begin_looks() {
        if (is_timed()) begin_looks_in_time();
    }
    // A point where another thread may run first, if the schedule wants so. What is done next, and on how many
    // bytes, matters to the time of a GPU alone.
    void interleave(Step step = Step::kOther, const void* address = nullptr, size_t bytes = 0) {
        if (schedule_preempts_) maybe_preempt(step, address, bytes);
    }
    // In the time of a GPU: until all has arrived that the multiprocessor, or the NIC, has put.
    void await_puts(bool by_nic);
    // The same for what a RowCopy has given, in any time.
    void await_rows() {
        if (is_timed()) await_puts(false);
    }
    // In the time of a GPU, without a point: it shows to nobody.
    void spend(Spent what, double ns);
    void take_time(Step step, size_t bytes = 0) {
        if (is_timed()) take_step(step, bytes);
    }
    // Ends the launch if another block could reach `address`, which an atomic of block scope uses.
    void check_block_scope(const void* address);
    // For deadlines.
    uint64_t monotonic_ns() { return clock_.monotonic_ns(); }
    // By value: the caller's frame is abandoned, so nothing of the message may stay with it.
    [[noreturn]] void fail(std::string message);

  private:
    struct Warp {
        uint32_t arrived = 0;
        uint32_t exited = 0;
        void* slots[kWarpSize] = {};
    };
    struct Barrier {
        int arrived = 0;
        int expected = 0;
        std::vector<Fiber*> waiting;
    };
    struct Block {
        int live = 0;
        bool vote = false;     // of those who have come to `sync`
        bool outcome = false;  // of its last round
        Barrier sync;
        Barrier named[kNumNamedBarriers];
    };

    static void fiber_entry();
    void start_launch(const LaunchShape& shape);
    void exit_current();
    void make_ready(Fiber* fiber);
    void switch_to_next(bool final);
    void release(Barrier& barrier, double CostModel::* cost = &CostModel::barrier_ns);
    void release_block(Block& block);
    void wait_in(Barrier& barrier, Waiting waiting, const Collective& collective, int id);
    void check_warp_at_exit(const Fiber& fiber);
    void wait_for_lanes();
    void order_memory_of_lanes(const Fiber& fiber, uint32_t mask);
    void idle();
    void allow_interrupt();
    void end_idle();
    void begin_looks_in_time();
    void take_step(Step step, size_t bytes);
    void maybe_preempt(Step step, const void* address, size_t bytes);
    void meet(std::span<Fiber* const> fibers, double ns);
    void die();
    void begin_look() {
        failed_polls_ = 0;
        ++look_;
    }
    Warp& warp_of(const Fiber& fiber) {
        return warps_[(fiber.block * shape_.threads + fiber.thread) / kWarpSize];
    }
    Fiber& lane_of(const Fiber& fiber, int lane) {
        return fibers_[fiber.block * shape_.threads + fiber.thread / kWarpSize * kWarpSize + lane];
    }
    std::string describe_stuck() const;

    Seat* seat_ =
        Simulation::seat();  // of a simulation, in which this executor was made; or nullptr
    RankClock clock_;
    std::unique_ptr<Schedule> schedule_;
    LaunchTime* time_ = nullptr;  // is the schedule
    IdleWaiter* idle_waiter_ = nullptr;
    std::function<void()> interrupt_check_;
    uint64_t next_interrupt_check_ns_ = 0;
    bool asks_launcher_ = false;  // the fiber that switched to main_ wants to go on
    bool dies_ = false;
    bool schedule_preempts_ = false;
    uint64_t next_deadline_ns_ = UINT64_MAX;  // of those who poll

    StackPool stacks_;
    std::vector<Fiber> fibers_;
    std::vector<Warp> warps_;
    std::vector<Block> blocks_;
    Barrier grid_;
    std::vector<std::byte> shared_;
    size_t shared_stride_ = 0;

    LaunchShape shape_;
    Body body_ = nullptr;
    void* argument_ = nullptr;
    FiberContext main_;
    Fiber* current_ = nullptr;
    int live_ = 0;
    int ready_not_polling_ = 0;
    int num_polling_ = 0;
    // Threads whose poll has failed since anything else happened, and the number of that stretch: under a
    // random schedule one thread may poll often before another does.
    int failed_polls_ = 0;
    uint32_t look_ = 1;
    int idle_rounds_ = 0;
    uint32_t num_idles_ = 0;
    bool armed_ = false;
    std::string error_;
};

// The executor whose launch runs on this OS thread; nullptr outside of launches.
// constinit spares every access the check whether it has been initialised.
extern constinit thread_local Executor* current_executor __attribute__((tls_model("initial-exec")));

// "block 3 warp 1 lane 7"
std::string describe(const Fiber& fiber);

}  // namespace ep::host
