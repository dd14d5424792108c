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
#include "transport/traffic.h"

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

class Link final : public IdleWaiter, public InFlight {
  public:
    Link(RankClock& clock, int rank, size_t bytes, std::vector<PeerMemory> peers);
    ~Link() override;

    // Whether puts may go straight to the destination's memory.
    bool in_order() const { return in_order_; }
    // Whether the destination's memory can be addressed.
    bool is_direct(int dst) const {
        return seat_ == nullptr || seat_->simulation().is_same_node(rank_, dst);
    }
    bool all_direct() const { return all_direct_; }
    // The source is read now or, in a simulation and for a rank on another node, when the put arrives.
    // `how` the threads read it, in the time of a GPU.
    void put(int dst,
             size_t offset,
             const void* src,
             size_t bytes,
             int qp,
             Step how = Step::kCopyThread);
    void put_word(int dst, size_t offset, uint64_t value, int qp);
    void fence(int dst, int qp);
    void quiet(int dst, int qp);
    void signal(int dst, size_t offset, uint64_t value, int qp);
    // A put that went straight to memory.
    void account(int dst, size_t bytes) {
        const Unobserved own_records;
        ++traffic_.to[dst].puts;
        traffic_.to[dst].put_bytes += bytes;
        unrung_bytes_ += bytes;
        if (faulty_) path_faults_[dst].bytes += bytes;
    }
    // The same of a word, which takes no time of a path with limited bandwidth.
    void account_word(int dst) {
        const Unobserved own_records;
        ++traffic_.to[dst].words;
    }
    const Traffic& traffic() const { return traffic_; }

    uint64_t poll(size_t offset);
    uint64_t newest(size_t offset);
    uint64_t arrival_ns(size_t offset);
    bool stamps_arrivals() const { return clock_.mode() != ClockMode::kWall; }
    // Rings everyone signalled since the last call. Ringing when this rank has nothing to do, or has done
    // much, instead of once per signal keeps ranks that share a core from waking each other for nothing.
    void ring();
    // Delivers everything that is still held back. Called when a launch has ended.
    void flush();

    void set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s);
    // This rank sees the words at begin to end so much after they have arrived.
    void set_receive_fault(size_t begin, size_t end, uint64_t delay_ns);
    void set_reorder(std::optional<uint64_t> seed);

    bool pump() override;
    bool pass_time() override;
    void arm() override;
    void sleep(uint64_t max_ns) override;
    void disarm() override;
    void arrive(uint64_t id) override;

  private:
    struct PathFault {
        uint64_t delay_ns = 0;
        double ns_per_byte = 0.0;
        uint64_t busy_until_ns = 0;
        uint64_t bytes = 0;
    };
    struct ReceiveFault {
        size_t begin = 0;
        size_t end = 0;
        uint64_t delay_ns = 0;
    };
    struct HeldBack {
        int dst;
        int qp;
        size_t offset;
        std::vector<std::byte> bytes;            // a put
        const std::byte* late_source = nullptr;  // the same, read on arrival
        size_t late_bytes = 0;
        uint64_t value = 0;  // a signal
        uint64_t stamp_ns = 0;
        bool is_signal = false;
        uint64_t generation = 0;  // fences on (dst, qp) before it
        // In the time of a GPU: when its first byte comes to the port of `dst`, then when its last one has come, then
        // when the sender knows.
        double at_ns = 0;
        double transfer_ns = 0;
        enum { kSent, kAtPort, kThere } place = kSent;
        PutOrigin origin = {};
    };

    // Arrivals on one queue pair of a simulation.
    struct QueuePair {
        uint64_t not_before_ns = 0;  // what is put now comes after what a fence covered
        uint64_t latest_ns = 0;
    };

    void send(HeldBack item);
    // The same in the time of a GPU, and what comes of it.
    void send_in_time(HeldBack item, size_t bytes);
    void arrive_in_time(uint64_t id, HeldBack& item);
    double latency_ns(int dst) const;
    void drain();
    bool is_timed() const { return kHasTimeModel && time_ != nullptr; }
    uint64_t arrival_stamp(int dst);
    uint64_t stamp_of(size_t offset) const;
    bool is_fenced(const HeldBack& item) const;
    void deliver(const HeldBack& item);
    void deliver_at(size_t index);
    void deliver_signal(int dst, size_t offset, uint64_t value, uint64_t stamp_ns);

    RankClock& clock_;
    SanitizerThread nic_;  // delivers what is held back
    int rank_;
    size_t bytes_;  // of symmetric memory
    std::vector<PeerMemory> peers_;
    std::vector<PathFault> path_faults_;
    bool faulty_ = false;
    ReceiveFault receive_fault_;
    Traffic traffic_;
    std::vector<uint8_t> to_ring_;
    bool any_to_ring_ = false;
    uint64_t unrung_bytes_ = 0;  // put since the last ring
    bool in_order_ = true;
    bool all_direct_ = true;
    std::optional<SeededRandom> reorder_;
    std::vector<HeldBack> held_back_;
    std::map<std::pair<int, int>, uint64_t> generations_;
    uint32_t rings_seen_ = 0;
    uint64_t now_at_least_ns_ = 0;
    Seat* seat_ = Simulation::seat();
    std::shared_ptr<Simulation> simulation_;  // alive as long as the seat is needed
    LaunchTime* time_ = nullptr;              // in the time of a GPU
    int sender_ = -1;
    uint64_t num_sent_ = 0;
    std::map<uint64_t, HeldBack> in_flight_;
    std::map<std::pair<int, int>, QueuePair> queue_pairs_;
    uint64_t next_arrival_ns_ = UINT64_MAX;  // of the signals that poll() has hidden
};

}  // namespace ep::host
