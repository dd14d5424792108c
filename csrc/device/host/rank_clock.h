// The clock kernels read on the host target.
//
// Many ranks share few cores there, so wall time would mostly measure the operating system's
// scheduler. "Rank time" is as though every rank had a core of its own:
//   - inside an operation it advances with the CPU time of the rank's thread, not while polling;
//   - waiting follows from messages: a signal carries its arrival time (the sender's rank time plus
//     any injected path delay), and the waiting rank's clock advances to it;
//   - between operations it advances with wall time minus the time spent runnable but not running.
// All ranks of a group start near zero, so their rank times are comparable; set_fault() bends what
// a rank reads, to test the recovery of clock offsets.
// Wall mode (CLOCK_MONOTONIC) is for machines with a core per rank. A rank that is made inside of a
// simulation reads its virtual time.
#pragma once

#include <cstdint>
#include <memory>

namespace ep::host {

enum class ClockMode { kRank, kWall, kSimulated };

class Simulation;

uint64_t monotonic_ns();

class RankClock {
  public:
    explicit RankClock(ClockMode mode);

    ClockMode mode() const { return mode_; }

    // For deadlines.
    uint64_t monotonic_ns();
    // What a kernel reads: true time bent by the clock fault.
    uint64_t now_ns() { return bend(true_ns()); }
    // Comparable between ranks; stamps that leave the rank for the transport use it.
    uint64_t true_ns();
    uint64_t bend(uint64_t true_ns) const;

    // A signal that arrived at `true_ns` was waited for.
    void advance_to(uint64_t true_ns);
    // The rank is busy for `ns` before its next operation.
    void delay(uint64_t ns);
    void set_fault(int64_t offset_ns, double drift_ppm);

    // Bracket an operation.
    void enter_operation();
    void leave_operation();
    // Bracket polling without progress, whose CPU time is not the rank's own.
    void pause();
    void resume();

  private:
    uint64_t operation_ns();
    void anchor_here();

    ClockMode mode_;
    std::shared_ptr<Simulation> simulation_;
    int64_t fault_offset_ns_ = 0;
    double fault_drift_ = 0.0;
    uint64_t fault_since_ns_ = 0;

    // Rank time at the last anchor, and what the counters read then.
    uint64_t anchor_ns_ = 0;
    uint64_t anchor_cpu_ns_ = 0;
    uint64_t anchor_wall_ns_ = 0;
    uint64_t anchor_queued_ns_ = 0;
    int anchor_thread_ = 0;
    uint64_t latest_ns_ = 0;  // that has been read outside of operations
    bool in_operation_ = false;
    bool paused_ = false;
};

}  // namespace ep::host
