// The host target's wire between ranks: stamps signals with their arrival time, wakes sleeping
// ranks, and on demand delivers late (path faults) or out of order (seeded), so that tests catch a
// missing fence and diagnosis has something to find.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "device/host/executor.h"

namespace ep::host {

// Where a rank sleeps; lies in its shared memory.
struct Doorbell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleeping;
};

struct PeerMemory {
    std::byte* base = nullptr;  // symmetric memory
    std::atomic<uint64_t>* signal_stamps =
        nullptr;  // per word of the control region: arrival, true time
    Doorbell* doorbell = nullptr;
};

class Link final : public IdleWaiter {
  public:
    Link(RankClock& clock, int rank, std::vector<PeerMemory> peers);

    // Whether puts may go straight to the destination's memory.
    bool in_order() const { return !reorder_.has_value(); }
    void put(int dst, size_t offset, const void* src, size_t bytes, int qp);
    void fence(int dst, int qp);
    void quiet(int dst, int qp);
    void signal(int dst, size_t offset, uint64_t value, int qp);
    // Bytes that went straight to memory, for paths with limited bandwidth.
    void account(int dst, size_t bytes) {
        if (faulty_) path_faults_[dst].bytes += bytes;
    }

    uint64_t poll(size_t offset);
    uint64_t newest(size_t offset) const;
    uint64_t arrival_ns(size_t offset);
    bool stamps_arrivals() const { return clock_.mode() == ClockMode::kRank; }
    // Rings everyone signalled since the last call. Ringing once per phase instead of once per
    // signal keeps ranks that share a core from waking each other for nothing.
    void ring();
    // Delivers everything that is still held back. Called when a launch has ended.
    void flush();

    void set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s);
    void set_reorder(std::optional<uint64_t> seed);

    bool pump() override;
    bool pass_time() override;
    void arm() override;
    void sleep(uint64_t max_ns) override;
    void disarm() override;

  private:
    struct PathFault {
        uint64_t delay_ns = 0;
        double ns_per_byte = 0.0;
        uint64_t busy_until_ns = 0;
        uint64_t bytes = 0;
    };
    struct HeldBack {
        int dst;
        int qp;
        uint64_t generation;  // fences on (dst, qp) before it
        size_t offset;
        std::vector<std::byte> bytes;  // a put
        uint64_t value = 0;            // a signal
        uint64_t stamp_ns = 0;
        bool is_signal = false;
    };

    uint64_t arrival_stamp(int dst);
    uint64_t stamp_of(size_t offset) const;
    bool is_fenced(const HeldBack& item) const;
    void deliver(const HeldBack& item);
    void deliver_at(size_t index);
    void deliver_signal(int dst, size_t offset, uint64_t value, uint64_t stamp_ns);

    RankClock& clock_;
    int rank_;
    std::vector<PeerMemory> peers_;
    std::vector<PathFault> path_faults_;
    bool faulty_ = false;
    std::vector<uint8_t> to_ring_;
    bool any_to_ring_ = false;
    std::optional<SeededRandom> reorder_;
    std::vector<HeldBack> held_back_;
    std::map<std::pair<int, int>, uint64_t> generations_;
    uint32_t rings_seen_ = 0;
    uint64_t now_at_least_ns_ = 0;
    uint64_t next_arrival_ns_ = UINT64_MAX;  // of the signals that poll() has hidden
};

}  // namespace ep::host
