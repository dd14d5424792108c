#include "device/host/rank_clock.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "device/host/simulation.h"

namespace ep::host {
namespace {

uint64_t read_clock(clockid_t id) {
    timespec time;
    clock_gettime(id, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000ull +
           static_cast<uint64_t>(time.tv_nsec);
}

int thread_id() { return static_cast<int>(syscall(SYS_gettid)); }

// Time this thread has spent runnable but waiting for a core: second field of schedstat. Zero where
// the kernel does not say.
uint64_t queued_ns() {
    struct File {
        int descriptor = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        ~File() {
            if (descriptor >= 0) close(descriptor);
        }
    };
    static thread_local File file;
    char text[96];
    const ssize_t bytes =
        file.descriptor < 0 ? 0 : pread(file.descriptor, text, sizeof(text) - 1, 0);
    if (bytes <= 0) return 0;
    text[bytes] = '\0';
    unsigned long long running = 0;
    unsigned long long queued = 0;
    return std::sscanf(text, "%llu %llu", &running, &queued) == 2 ? queued : 0;
}

struct Reading {
    uint64_t wall_ns;
    uint64_t queued_ns;
};

// Of one moment. A thread that loses its core between the two would go back by as long as it waits for it.
Reading read_both() {
    for (;;) {
        const uint64_t before = queued_ns();
        const uint64_t wall = read_clock(CLOCK_MONOTONIC);
        if (before == queued_ns()) return {wall, before};
    }
}

}  // namespace

uint64_t monotonic_ns() { return read_clock(CLOCK_MONOTONIC); }

RankClock::RankClock(ClockMode mode) : mode_(mode) {
    if (const Seat* seat = Simulation::seat()) {
        mode_ = ClockMode::kSimulated;
        simulation_ = seat->simulation().shared_from_this();
    }
    anchor_here();
    // Far from zero, so that differences and artificial offsets of seconds stay positive.
    anchor_ns_ = 1'000'000'000'000ull;
    fault_since_ns_ = anchor_ns_;
}

uint64_t RankClock::operation_ns() {
    if (paused_) return anchor_ns_;
    // Reading CPU time is a system call (about 0.5 us here). Within a few microseconds of the last
    // reading wall time serves: a preemption would show as a longer gap.
    constexpr uint64_t kTrustWallNs = 4000;
    const uint64_t wall = host::monotonic_ns();
    if (wall - anchor_wall_ns_ < kTrustWallNs) return anchor_ns_ + (wall - anchor_wall_ns_);
    const uint64_t cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
    // Never backwards past what the wall-time shortcut has shown.
    anchor_ns_ +=
        std::max(cpu - anchor_cpu_ns_, std::min<uint64_t>(wall - anchor_wall_ns_, kTrustWallNs));
    anchor_cpu_ns_ = cpu;
    anchor_wall_ns_ = wall;
    return anchor_ns_;
}

uint64_t RankClock::monotonic_ns() {
    return mode_ == ClockMode::kSimulated ? simulation_->now_ns() : host::monotonic_ns();
}

uint64_t RankClock::true_ns() {
    if (mode_ != ClockMode::kRank) return monotonic_ns();
    if (in_operation_) return operation_ns();
    if (thread_id() != anchor_thread_) return anchor_ns_ + (host::monotonic_ns() - anchor_wall_ns_);
    const Reading now = read_both();
    const uint64_t wall = now.wall_ns - anchor_wall_ns_;
    const uint64_t queued = now.queued_ns - anchor_queued_ns_;
    // The scheduler counts waiting by a clock of its own, which can be ahead by a microsecond.
    latest_ns_ = std::max(latest_ns_, anchor_ns_ + (wall > queued ? wall - queued : 0));
    return latest_ns_;
}

uint64_t RankClock::bend(uint64_t true_ns) const {
    const double drift =
        fault_drift_ * (static_cast<double>(true_ns) - static_cast<double>(fault_since_ns_));
    return static_cast<uint64_t>(static_cast<int64_t>(true_ns) + fault_offset_ns_ +
                                 static_cast<int64_t>(drift));
}

void RankClock::set_fault(int64_t offset_ns, double drift_ppm) {
    fault_since_ns_ = true_ns();
    fault_offset_ns_ = offset_ns;
    fault_drift_ = drift_ppm * 1e-6;
}

void RankClock::advance_to(uint64_t true_ns) {
    if (mode_ == ClockMode::kRank && true_ns > operation_ns()) {
        if (paused_) {
            anchor_ns_ = true_ns;
            return;
        }
        anchor_ns_ = true_ns;
        anchor_cpu_ns_ = read_clock(CLOCK_THREAD_CPUTIME_ID);
        anchor_wall_ns_ = host::monotonic_ns();
    }
}

void RankClock::delay(uint64_t ns) {
    if (mode_ == ClockMode::kRank) {
        anchor_ns_ += ns;
        return;
    }
    if (mode_ == ClockMode::kSimulated) {
        Seat* seat = Simulation::seat();
        if (seat != nullptr && !seat->sleep_until(simulation_->now_ns() + ns)) throw RankDied();
        return;
    }
    const timespec pause{static_cast<time_t>(ns / 1'000'000'000ull),
                         static_cast<long>(ns % 1'000'000'000ull)};
    nanosleep(&pause, nullptr);
}

void RankClock::enter_operation() {
    if (mode_ != ClockMode::kRank) return;
    anchor_ns_ = true_ns();
    anchor_cpu_ns_ = read_clock(CLOCK_THREAD_CPUTIME_ID);
    anchor_wall_ns_ = host::monotonic_ns();
    in_operation_ = true;
    paused_ = false;
}

void RankClock::leave_operation() {
    if (mode_ != ClockMode::kRank) return;
    anchor_ns_ = operation_ns();
    in_operation_ = false;
    paused_ = false;
    anchor_here();
}

void RankClock::anchor_here() {
    const Reading now = read_both();
    anchor_wall_ns_ = now.wall_ns;
    anchor_queued_ns_ = now.queued_ns;
    anchor_thread_ = thread_id();
}

void RankClock::pause() {
    if (mode_ != ClockMode::kRank || paused_) return;
    anchor_ns_ = operation_ns();
    paused_ = true;
}

void RankClock::resume() {
    if (mode_ != ClockMode::kRank || !paused_) return;
    paused_ = false;
    anchor_cpu_ns_ = read_clock(CLOCK_THREAD_CPUTIME_ID);
    anchor_wall_ns_ = host::monotonic_ns();
}

}  // namespace ep::host
