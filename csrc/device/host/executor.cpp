#include "device/host/executor.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "device/host/launch_time.h"

namespace ep::host {

constinit thread_local Executor* current_executor = nullptr;

namespace {

// The fault handler runs on this stack: the faulting one is full. Allocated, because thread-local
// storage that several megabytes of libraries share has no room for it.
class AlternateSignalStack {
  public:
    AlternateSignalStack() {
        stack_t current;
        if (sigaltstack(nullptr, &current) == 0 && !(current.ss_flags & SS_DISABLE)) return;
        bytes_ = std::make_unique<std::byte[]>(kBytes);
        const stack_t mine{.ss_sp = bytes_.get(), .ss_flags = 0, .ss_size = kBytes};
        sigaltstack(&mine, nullptr);
    }
    ~AlternateSignalStack() {
        if (!bytes_) return;
        const stack_t off{.ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
        sigaltstack(&off, nullptr);
    }

  private:
    static constexpr size_t kBytes = 32 * 1024;
    std::unique_ptr<std::byte[]> bytes_;
};

void use_alternate_signal_stack() {
    static thread_local const AlternateSignalStack stack;
    (void)stack;
}

void describe_overflowing_fiber(size_t, char* text, size_t bytes) {
    if (current_executor == nullptr) {
        std::snprintf(text, bytes, "no launch is running");
        return;
    }
    const Fiber& fiber = current_executor->fiber();
    std::snprintf(text,
                  bytes,
                  "block %d warp %d lane %d (stacks have %zu KiB)",
                  fiber.block,
                  fiber.thread / kWarpSize,
                  fiber.thread % kWarpSize,
                  StackPool::kStackBytes / 1024);
}

constexpr size_t kSharedAlignment = 128;

constexpr Collective kBlockSync{"block_sync"};
constexpr Collective kBarSync{"bar_sync"};
constexpr Collective kGridSync{"grid_sync"};

}  // namespace

std::string describe(const Fiber& fiber) {
    return "block " + std::to_string(fiber.block) + " warp " +
           std::to_string(fiber.thread / kWarpSize) + " lane " +
           std::to_string(fiber.thread % kWarpSize);
}

Executor::Executor(ClockMode clock_mode)
    : clock_(clock_mode), schedule_(make_round_robin_schedule()) {
    if (seat_ != nullptr && seat_->simulation().costs()) {
        auto time = std::make_unique<LaunchTime>(*this, *seat_, *seat_->simulation().costs());
        time_ = time.get();
        schedule_ = std::move(time);
    }
    install_stack_overflow_report(describe_overflowing_fiber);
}

Executor::~Executor() = default;

void Executor::run(const LaunchShape& shape, Body body, void* argument) {
    if (current_executor != nullptr)
        throw DeviceError("a kernel cannot launch a kernel on the host target");
    if (shape.blocks < 1 || shape.threads < kWarpSize || shape.threads % kWarpSize != 0 ||
        shape.threads > 1024 ||
        static_cast<size_t>(shape.blocks) * shape.threads > kMaxHostThreads) {
        throw DeviceError(
            "launch shape " + std::to_string(shape.blocks) + " blocks x " +
            std::to_string(shape.threads) +
            " threads: at least one block, 32 to 1024 threads in multiples of 32, and at most " +
            std::to_string(kMaxHostThreads) + " threads in all");
    }
    if (seat_ != nullptr && Simulation::seat() != seat_)
        throw DeviceError(
            "a simulated rank runs in its simulation only, on the thread it entered on");
    const Unobserved own_records;
    use_alternate_signal_stack();
    start_launch(shape);
    body_ = body;
    argument_ = argument;
    current_executor = this;
    adopt_thread(main_);
    current_ = schedule_->pop();
    --ready_not_polling_;
    std::exception_ptr interrupt;
    do {
        asks_launcher_ = false;
        switch_fiber(main_, current_->context);
        if (!asks_launcher_) break;
        try {
            if (dies_) throw RankDied();
            interrupt_check_();
        } catch (...) {
            interrupt = std::current_exception();
        }
    } while (!interrupt);
    current_executor = nullptr;
    current_ = nullptr;
    end_idle();
    for (Fiber& fiber : fibers_) retire_fiber(fiber.context);
    release_thread();
    if (interrupt) std::rethrow_exception(interrupt);
    if (!error_.empty()) throw DeviceError(error_);
}

void Executor::start_launch(const LaunchShape& shape) {
    shape_ = shape;
    error_.clear();
    const size_t num_fibers = static_cast<size_t>(shape.blocks) * shape.threads;
    stacks_.reserve(num_fibers, time_ == nullptr);
    fibers_.assign(num_fibers, Fiber{});
    warps_.assign(num_fibers / kWarpSize, Warp{});
    blocks_.assign(shape.blocks, Block{});
    grid_ = Barrier{};
    // At least one line each, so that the arena's address is valid; poisoned, because shared memory
    // starts undefined.
    shared_stride_ = (shape.shared_bytes + kSharedAlignment) / kSharedAlignment * kSharedAlignment;
    shared_.assign(shared_stride_ * shape.blocks + kSharedAlignment, std::byte{0xC5});
    live_ = static_cast<int>(num_fibers);
    ready_not_polling_ = num_polling_ = failed_polls_ = idle_rounds_ = 0;
    armed_ = false;
    schedule_->reset(num_fibers);
    schedule_preempts_ = schedule_->describe() != "round-robin" || seat_ != nullptr;
    next_deadline_ns_ = UINT64_MAX;
    for (size_t i = 0; i < num_fibers; ++i) {
        Fiber& fiber = fibers_[i];
        fiber.block = static_cast<int>(i / shape.threads);
        fiber.thread = static_cast<int>(i % shape.threads);
        blocks_[fiber.block].live = shape.threads;
        prepare_fiber(fiber.context, stacks_.stack_begin(i), i, &Executor::fiber_entry);
        make_ready(&fiber);
    }
}

void Executor::fiber_entry() {
    Executor& self = *current_executor;
    enter_fiber(self.current_->context);
    self.body_(self.argument_);
    const Unobserved own_records;
    self.exit_current();
}

void Executor::exit_current() {
    Fiber& fiber = *current_;
    fiber.exited = true;
    Warp& warp = warp_of(fiber);
    warp.exited |= 1u << (fiber.thread % kWarpSize);
    check_warp_at_exit(fiber);
    --live_;
    Block& block = blocks_[fiber.block];
    --block.live;
    if (block.live > 0 && block.sync.arrived == block.live) release_block(block);
    if (live_ > 0 && grid_.arrived == live_) release(grid_, &CostModel::grid_barrier_ns);
    if (live_ == 0) {
        switch_fiber(fiber.context, main_, true);
    }
    switch_to_next(true);
}

void Executor::check_warp_at_exit(const Fiber& fiber) {
    const uint32_t me = 1u << (fiber.thread % kWarpSize);
    const Warp& warp = warp_of(fiber);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (!(warp.arrived >> lane & 1)) continue;
        const Fiber& other = lane_of(fiber, lane);
        if (other.mask & me) {
            fail(describe(fiber) + " ended while lane " + std::to_string(lane) +
                 " of its warp waits for it in " + other.collective->name);
        }
    }
}

void Executor::make_ready(Fiber* fiber) {
    fiber->waiting = Waiting::kNothing;
    if (!fiber->polling) ++ready_not_polling_;
    schedule_->push(fiber);
}

void Executor::switch_to_next(bool final) {
    Fiber* next = schedule_->pop();
    if (next == nullptr) {
        if (seat_ != nullptr && seat_->simulation().has_ended()) die();
        fail(describe_stuck());
    }
    if (!next->polling) --ready_not_polling_;
    Fiber* previous = current_;
    if (next == previous) return;
    current_ = next;
    switch_fiber(previous->context, next->context, final);
}

void Executor::fail(std::string message) {
    error_ = std::move(message) + " (schedule " + schedule_->describe() + ")";
    // Every fiber is abandoned where it stands: kernels own no resources.
    switch_fiber(current_->context, main_, true);
    __builtin_unreachable();
}

void Executor::warp_collective(const Collective& collective,
                               uint32_t mask,
                               void* slot,
                               Complete complete) {
    const Unobserved own_records;
    Fiber& fiber = *current_;
    const int lane = fiber.thread % kWarpSize;
    const uint32_t me = 1u << lane;
    Warp& warp = warp_of(fiber);
    if (!(mask & me))
        fail(describe(fiber) + " calls " + collective.name +
             " with a mask that does not contain it");
    if (warp.exited & mask) {
        fail(describe(fiber) + " waits in " + collective.name + " for lane " +
             std::to_string(__builtin_ctz(warp.exited & mask)) + ", which has ended");
    }
    fiber.mask = mask;
    fiber.collective = &collective;
    warp.slots[lane] = slot;
    warp.arrived |= me;
    for (uint32_t rest = warp.arrived & mask & ~me; rest != 0; rest &= rest - 1) {
        const Fiber& other = lane_of(fiber, __builtin_ctz(rest));
        if (!(other.mask & me)) continue;
        if (other.mask != mask || other.collective != &collective) {
            fail("divergent warp collective: " + describe(fiber) + " is in " + collective.name +
                 " while lane " + std::to_string(other.thread % kWarpSize) + " waits in " +
                 other.collective->name);
        }
        // Lanes of one collective have been compared with each other when they arrived.
        break;
    }
    if ((warp.arrived & mask) != mask) return wait_for_lanes();
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        if (lane_of(fiber, __builtin_ctz(rest)).mask != mask) {
            // A lane of the mask waits in another collective; it may come here later.
            return wait_for_lanes();
        }
    }
    if (complete != nullptr) {
        complete(warp.slots, mask);
    } else {
        order_memory_of_lanes(fiber, mask);
    }
    if (is_timed()) {
        std::vector<Fiber*> lanes;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
            lanes.push_back(&lane_of(fiber, __builtin_ctz(rest)));
        meet(lanes, collective.exchanges * time_->costs().warp_ns);
    }
    warp.arrived &= ~mask;
    for (uint32_t rest = mask & ~me; rest != 0; rest &= rest - 1)
        make_ready(&lane_of(fiber, __builtin_ctz(rest)));
}

void Executor::wait_for_lanes() {
    current_->waiting = Waiting::kWarp;
    switch_to_next(false);
}

void Executor::order_memory_of_lanes(const Fiber& fiber, uint32_t mask) {
    if constexpr (kThreadSanitizer) {
        std::vector<FiberContext*> lanes;
        for (; mask != 0; mask &= mask - 1)
            lanes.push_back(&lane_of(fiber, __builtin_ctz(mask)).context);
        order_memory(lanes);
    }
}

// All who meet go on at the same time.
void Executor::meet(std::span<Fiber* const> fibers, double ns) {
    double latest_ns = 0;
    for (const Fiber* fiber : fibers) latest_ns = std::max(latest_ns, fiber->clock_ns);
    for (Fiber* fiber : fibers) time_->spend_until(*fiber, Spent::kBarrier, latest_ns + ns);
}

void Executor::release(Barrier& barrier, double CostModel::* cost) {
    // Swapped out first: a released thread may enter the barrier again.
    std::vector<Fiber*> waiting;
    waiting.swap(barrier.waiting);
    barrier.arrived = 0;
    if constexpr (kThreadSanitizer) {
        std::vector<FiberContext*> all;
        for (Fiber* fiber : waiting) all.push_back(&fiber->context);
        if (!current_->exited) all.push_back(&current_->context);
        order_memory(all);
    }
    if (is_timed()) {
        std::vector<Fiber*> all = waiting;
        if (!current_->exited) all.push_back(current_);
        meet(all, time_->costs().*cost);
    }
    for (Fiber* fiber : waiting) make_ready(fiber);
    waiting.clear();
    if (barrier.waiting.empty()) barrier.waiting.swap(waiting);
}

void Executor::wait_in(Barrier& barrier, Waiting waiting, const Collective& collective, int id) {
    Fiber& fiber = *current_;
    fiber.waiting = waiting;
    fiber.collective = &collective;
    fiber.barrier_id = id;
    barrier.waiting.push_back(&fiber);
    switch_to_next(false);
}

void Executor::release_block(Block& block) {
    block.outcome = block.vote;
    block.vote = false;
    release(block.sync);
}

bool Executor::block_barrier(bool vote) {
    const Unobserved own_records;
    Block& block = blocks_[current_->block];
    block.vote = block.vote || vote;
    if (++block.sync.arrived == block.live) {
        release_block(block);
    } else {
        wait_in(block.sync, Waiting::kBlock, kBlockSync, 0);
    }
    // The next round cannot end before this thread has come to it.
    return block.outcome;
}

void Executor::named_barrier(int id, int num_threads) {
    const Unobserved own_records;
    if (id < 0 || id >= kNumNamedBarriers || num_threads % kWarpSize != 0 || num_threads <= 0 ||
        num_threads > shape_.threads) {
        fail(describe(*current_) + " calls bar_sync(" + std::to_string(id) + ", " +
             std::to_string(num_threads) +
             "): ids are 0..15, counts multiples of 32 up to the block's threads");
    }
    Barrier& barrier = blocks_[current_->block].named[id];
    if (barrier.arrived == 0) barrier.expected = num_threads;
    if (barrier.expected != num_threads) {
        fail(describe(*current_) + " calls bar_sync(" + std::to_string(id) + ") for " +
             std::to_string(num_threads) + " threads while others wait in it for " +
             std::to_string(barrier.expected));
    }
    if (++barrier.arrived == num_threads) {
        release(barrier);
    } else {
        wait_in(barrier, Waiting::kNamed, kBarSync, id);
    }
}

void Executor::grid_barrier() {
    const Unobserved own_records;
    if (!shape_.cooperative)
        fail(describe(*current_) + " calls grid_sync() in a launch that is not cooperative");
    if (++grid_.arrived == live_) {
        release(grid_, &CostModel::grid_barrier_ns);
    } else {
        wait_in(grid_, Waiting::kGrid, kGridSync, 0);
    }
}

void Executor::check_block_scope(const void* address) {
    const auto* byte = static_cast<const std::byte*>(address);
    const std::byte* begin = shared_memory();
    if (shape_.blocks == 1 || (byte >= begin && byte < begin + shared_stride_)) return;
    fail(describe(*current_) +
         " uses an atomic of block scope outside of shared memory in a launch of " +
         std::to_string(shape_.blocks) + " blocks: use device scope");
}

void Executor::poll_failed(uint64_t deadline_ns) {
    const Unobserved own_records;
    Fiber& fiber = *current_;
    if (!std::exchange(fiber.polling, true)) {
        ++num_polling_;
        fiber.idles_before = num_idles_;
    }
    if (!is_timed()) {
        if (ready_not_polling_ != 0) begin_look();
        // What it read may have changed since it was interrupted, or since the launch was idle while it waited for
        // other lanes.
        const bool is_new = fiber.idles_before == num_idles_;
        if (!std::exchange(fiber.interrupted, false) && is_new && fiber.last_look != look_) {
            fiber.last_look = look_;
            ++failed_polls_;
        }
        next_deadline_ns_ = std::min(next_deadline_ns_, deadline_ns);
        // Nobody but pollers, and each has looked since anything happened.
        if (failed_polls_ == num_polling_ && ready_not_polling_ == 0) idle();
        make_ready(&fiber);
    } else if (!time_->falls_asleep(fiber, deadline_ns)) {
        make_ready(&fiber);
    }
    switch_to_next(false);
    fiber.idles_before = num_idles_;
}

void Executor::begin_looks_in_time() { time_->begin_looks(*current_); }

void Executor::poll_succeeded() {
    const Unobserved own_records;
    if (is_timed()) time_->end_looks(*current_);
    if (std::exchange(current_->polling, false)) --num_polling_;
    begin_look();
    if (idle_rounds_ != 0) end_idle();
}

void Executor::idle() {
    begin_look();
    ++num_idles_;
    const uint64_t deadline_ns = std::exchange(next_deadline_ns_, UINT64_MAX);
    if (seat_ != nullptr) {
        if (!seat_->wait_for_signal(deadline_ns)) die();
        return;
    }
    clock_.pause();
    ++idle_rounds_;
    if (idle_waiter_ == nullptr) {
        sched_yield();
        return;
    }
    if (idle_waiter_->pump() || idle_waiter_->pass_time()) return;
    constexpr int kSpinRounds = 4;
    constexpr uint64_t kMaxSleepNs = 1'000'000;
    if (idle_rounds_ < kSpinRounds) return;
    if (!armed_) {
        idle_waiter_->arm();
        armed_ = true;
        return;  // everyone polls once more before sleeping
    }
    idle_waiter_->sleep(kMaxSleepNs);
    armed_ = false;
    allow_interrupt();
}

void Executor::allow_interrupt() {
    constexpr uint64_t kIntervalNs = 100'000'000;
    if (!interrupt_check_ || monotonic_ns() < next_interrupt_check_ns_) return;
    next_interrupt_check_ns_ = monotonic_ns() + kIntervalNs;
    asks_launcher_ = true;
    switch_fiber(current_->context, main_);
}

void Executor::end_idle() {
    idle_rounds_ = 0;
    if (armed_) idle_waiter_->disarm();
    armed_ = false;
    clock_.resume();
}

void Executor::die() {
    dies_ = true;
    asks_launcher_ = true;
    switch_fiber(current_->context, main_, true);
}

void Executor::await_puts(bool by_nic) {
    if (!time_->has_arrived(*current_, by_nic)) switch_to_next(false);
}

void Executor::spend(Spent what, double ns) { time_->spend(*current_, what, ns); }

void Executor::take_step(Step step, size_t bytes) { time_->take(*current_, step, nullptr, bytes); }

void Executor::note_launch(const char* name) {
    if (is_timed()) time_->end(name);
}

void Executor::maybe_preempt(Step step, const void* address, size_t bytes) {
    const Unobserved own_records;
    if (is_timed()) {
        const bool releases = step == Step::kRelease || step == Step::kReleaseUpdate;
        if (releases) await_puts(false);
        time_->take(*current_, step, address, bytes);
        if (time_->is_ahead(*current_)) {
            make_ready(current_);
            switch_to_next(false);
        }
        const bool writes =
            releases || step == Step::kStore || step == Step::kWrite || step == Step::kUpdate;
        if (writes) time_->written(address, current_->clock_ns);
        return;
    }
    if (seat_ != nullptr && !seat_->reach_point()) die();
    if (!schedule_->preempt()) return;
    // Seldom: messages must pile up for a missing fence to show.
    if (idle_waiter_ != nullptr && schedule_->preempt() && schedule_->preempt())
        idle_waiter_->pump();
    current_->interrupted = current_->polling;
    make_ready(current_);
    switch_to_next(false);
}

std::string Executor::describe_stuck() const {
    std::string text = "deadlock: every thread of the launch waits for another:";
    int described = 0;
    for (size_t first = 0; first < fibers_.size() && described < 8;) {
        const Fiber& fiber = fibers_[first];
        if (fiber.exited || fiber.waiting == Waiting::kNothing) {
            ++first;
            continue;
        }
        // Neighbouring lanes of a warp that wait in the same place share a line.
        size_t last = first;
        while (last + 1 < fibers_.size() && (last + 1) / kWarpSize == first / kWarpSize &&
               !fibers_[last + 1].exited && fibers_[last + 1].collective == fiber.collective) {
            ++last;
        }
        text += (described == 0 ? " " : "; ") + describe(fiber);
        if (last != first) text += ".." + std::to_string(fibers_[last].thread % kWarpSize);
        text += std::string(" in ") + fiber.collective->name;
        if (fiber.waiting == Waiting::kNamed) text += " " + std::to_string(fiber.barrier_id);
        ++described;
        first = last + 1;
    }
    return text;
}

#if defined(EP_TIME_MODEL)
void load_vector_takes_time() {
    if (current_executor != nullptr) current_executor->take_time(Step::kLoadVector);
}
#endif

}  // namespace ep::host

#if defined(EP_TIME_MODEL)
// The compiler puts a call into each basic block of the kernels.
extern "C" void __sanitizer_cov_trace_pc() {
    using ep::host::current_executor;
    if (current_executor == nullptr || current_executor->time() == nullptr) return;
    current_executor->spend(ep::host::Spent::kWorking, current_executor->time()->costs().step_ns);
}
#endif
