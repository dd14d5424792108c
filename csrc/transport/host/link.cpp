#include "transport/host/link.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "device/host/launch_time.h"

namespace ep::host {
namespace {

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// EP_WEAKEN_SIGNAL builds exist to prove that ThreadSanitizer finds what they break.
#if defined(EP_WEAKEN_SIGNAL)
constexpr std::memory_order kSignalOrder = std::memory_order_relaxed;
#else
constexpr std::memory_order kSignalOrder = std::memory_order_release;
#endif

// A rank that still finds work rings after so much: some 100 us of copying. Chosen.
constexpr uint64_t kBytesPerRing = 512 << 10;

}  // namespace

Link::Link(RankClock& clock, int rank, size_t bytes, std::vector<PeerMemory> peers)
    : clock_(clock),
      rank_(rank),
      bytes_(bytes),
      peers_(std::move(peers)),
      path_faults_(peers_.size()),
      traffic_{std::vector<PathTraffic>(peers_.size())},
      to_ring_(peers_.size(), 0) {
    if (seat_ == nullptr) return;
    simulation_ = seat_->simulation().shared_from_this();
    sender_ = simulation_->add(this, rank);
    time_ = seat_->time();
    if (is_timed()) time_->set_memory(peers_[rank].base);
    in_order_ = false;
    for (int dst = 0; dst < static_cast<int>(peers_.size()); ++dst)
        all_direct_ = all_direct_ && is_direct(dst);
}

Link::~Link() {
    if (simulation_) simulation_->remove(sender_);
}

void Link::put(int dst, size_t offset, const void* src, size_t bytes, int qp, Step how) {
    if (is_timed() && is_direct(dst)) current_executor->interleave(how, nullptr, bytes);
    const auto* begin = static_cast<const std::byte*>(src);
    std::vector<std::byte> copy;
    if (is_direct(dst)) {
        copy.assign(begin, begin + bytes);
    } else if (begin < peers_[rank_].base || begin + bytes > peers_[rank_].base + bytes_) {
        current_executor->fail(
            "a put to another node takes its rows from outside of symmetric memory");
    }
    account(dst, bytes);
    HeldBack item{dst, qp, offset, std::move(copy)};
    if (!is_direct(dst)) {
        item.late_source = begin;
        item.late_bytes = bytes;
    }
    send(std::move(item));
}

void Link::put_word(int dst, size_t offset, uint64_t value, int qp) {
    const auto* begin = reinterpret_cast<const std::byte*>(&value);
    account_word(dst);
    send({dst, qp, offset, {begin, begin + sizeof(value)}});
}

void Link::send(HeldBack item) {
    nic_.hand_over();
    const Unobserved own_records;
    if (is_timed()) {
        const size_t bytes = item.late_source != nullptr ? item.late_bytes
                             : item.is_signal            ? sizeof(item.value)
                                                         : item.bytes.size();
        return send_in_time(std::move(item), bytes);
    }
    if (!simulation_) {
        item.generation = generations_[{item.dst, item.qp}];
        held_back_.push_back(std::move(item));
        return;
    }
    QueuePair& queue = queue_pairs_[{item.dst, item.qp}];
    const SimulationOptions& options = simulation_->options();
    const uint64_t delivery_ns =
        options.shortest_delivery_ns +
        simulation_->draw(options.longest_delivery_ns - options.shortest_delivery_ns + 1);
    const uint64_t at_ns = std::max(arrival_stamp(item.dst) + delivery_ns, queue.not_before_ns);
    queue.latest_ns = std::max(queue.latest_ns, at_ns);
    simulation_->schedule_arrival(sender_, num_sent_, at_ns);
    item.stamp_ns = at_ns;
    in_flight_.emplace(num_sent_++, std::move(item));
}

void Link::arrive(uint64_t id) {
    const auto entry = in_flight_.find(id);
    if (is_timed()) return arrive_in_time(id, entry->second);
    deliver(entry->second);
    if (entry->second.is_signal) simulation_->signal(entry->second.dst);
    in_flight_.erase(entry);
}

double Link::latency_ns(int dst) const {
    const CostModel& costs = time_->costs();
    if (dst == rank_) return costs.store_ns;
    return is_direct(dst) ? costs.nvlink_latency_ns : costs.nic_latency_ns;
}

void Link::send_in_time(HeldBack item, size_t bytes) {
    Executor& executor = *current_executor;
    const CostModel& costs = time_->costs();
    GpuPorts& ports = time_->ports();
    const bool by_nic = !is_direct(item.dst);
    item.origin = time_->put(executor.fiber(), by_nic);
    executor.spend(Spent::kMoving, by_nic ? costs.nic_put_ns : costs.store_ns);
    const PathFault& path = path_faults_[item.dst];
    double begin_ns = executor.fiber().clock_ns;
    if (item.dst != rank_) {
        const double ns_per_byte = std::max(
            1 / (by_nic ? costs.nic_bytes_per_ns : costs.nvlink_bytes_per_ns), path.ns_per_byte);
        item.transfer_ns = (by_nic ? costs.nic_message_ns : costs.nvlink_message_ns) +
                           static_cast<double>(bytes) * ns_per_byte;
        Port& out = by_nic ? ports.nic_out : ports.nvlink_out;
        begin_ns = out.take(begin_ns, item.transfer_ns);
        const double waits_ns = out.free_ns - executor.fiber().clock_ns - costs.nvlink_queued_ns;
        if (!by_nic && waits_ns > 0) executor.spend(Spent::kMoving, waits_ns);
    }
    item.at_ns = begin_ns + latency_ns(item.dst) + static_cast<double>(path.delay_ns);
    simulation_->schedule_arrival_at(item.dst, sender_, num_sent_, item.at_ns);
    in_flight_.emplace(num_sent_++, std::move(item));
}

void Link::arrive_in_time(uint64_t id, HeldBack& item) {
    GpuPorts& ports = simulation_->ports(item.dst);
    Port& in = is_direct(item.dst) ? ports.nvlink_in : ports.nic_in;
    switch (item.place) {
        case HeldBack::kSent:
            if (item.dst != rank_)
                item.at_ns = in.take(item.at_ns, item.transfer_ns) + item.transfer_ns;
            item.place = HeldBack::kAtPort;
            item.stamp_ns = static_cast<uint64_t>(item.at_ns);
            return simulation_->schedule_arrival_at(item.dst, sender_, id, item.at_ns);
        case HeldBack::kAtPort:
            deliver(item);
            simulation_->written(item.dst, item.offset, item.at_ns);
            item.place = HeldBack::kThere;
            item.at_ns += latency_ns(item.dst);
            return simulation_->schedule_arrival_at(rank_, sender_, id, item.at_ns);
        case HeldBack::kThere:
            time_->acknowledged(item.origin, item.at_ns);
            in_flight_.erase(id);
    }
}

void Link::fence(int dst, int qp) {
    const Unobserved own_records;
    ++traffic_.to[dst].fences;
    if (is_timed()) {
        // A NIC keeps the order of its queue pairs.
        if (is_direct(dst)) drain();
    } else if (simulation_) {
        QueuePair& queue = queue_pairs_[{dst, qp}];
        queue.not_before_ns = queue.latest_ns + 1;
    } else if (!in_order()) {
        ++generations_[{dst, qp}];
    }
}

void Link::drain() {
    current_executor->await_puts(false);
    current_executor->spend(Spent::kFence, time_->costs().system_fence_ns);
}

uint64_t Link::arrival_stamp(int dst) {
    const uint64_t now = clock_.true_ns();
    PathFault& path = path_faults_[dst];
    if (!faulty_ || (path.delay_ns == 0 && path.ns_per_byte == 0.0)) return now;
    const uint64_t begin = std::max(now, path.busy_until_ns);
    path.busy_until_ns =
        begin + static_cast<uint64_t>(static_cast<double>(path.bytes) * path.ns_per_byte);
    path.bytes = 0;
    return path.busy_until_ns + path.delay_ns;
}

void Link::signal(int dst, size_t offset, uint64_t value, int qp) {
    const Unobserved own_records;
    ++traffic_.to[dst].signals;
    // In a simulation the stamp is made when it is sent.
    const uint64_t stamp = simulation_ ? 0 : arrival_stamp(dst);
    if (in_order()) {
        deliver_signal(dst, offset, value, stamp);
    } else {
        HeldBack item{dst, qp, offset, {}};
        item.value = value;
        item.stamp_ns = stamp;
        item.is_signal = true;
        send(std::move(item));
    }
}

void Link::deliver_signal(int dst, size_t offset, uint64_t value, uint64_t stamp_ns) {
    const Unobserved own_records;
    peers_[dst].signal_stamps[offset / sizeof(uint64_t)].store(stamp_ns, std::memory_order_relaxed);
    auto* word = reinterpret_cast<uint64_t*>(peers_[dst].base + offset);
    std::atomic_ref<uint64_t>(*word).store(value, kSignalOrder);
    to_ring_[dst] = 1;
    any_to_ring_ = true;
}

void Link::deliver(const HeldBack& item) {
    if (item.is_signal) {
        deliver_signal(item.dst, item.offset, item.value, item.stamp_ns);
    } else if (item.late_source != nullptr) {
        std::memcpy(peers_[item.dst].base + item.offset, item.late_source, item.late_bytes);
    } else {
        std::memcpy(peers_[item.dst].base + item.offset, item.bytes.data(), item.bytes.size());
    }
}

uint64_t Link::poll(size_t offset) {
    const Unobserved own_records;
    ++traffic_.polls;
    if (is_timed()) current_executor->interleave(Step::kLoad, peers_[rank_].base + offset);
    if (unrung_bytes_ >= kBytesPerRing && any_to_ring_) ring();
    auto* word = reinterpret_cast<uint64_t*>(peers_[rank_].base + offset);
    const uint64_t value = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    if (value == 0) return 0;
    // A signal that arrives later by its stamp is there already but must not be seen yet.
    const bool is_late = offset >= receive_fault_.begin && offset < receive_fault_.end;
    const uint64_t stamp = stamp_of(offset) + (is_late ? receive_fault_.delay_ns : 0);
    // Reading the clock costs more than the rest.
    if (stamp <= now_at_least_ns_) return value;
    now_at_least_ns_ = clock_.true_ns();
    if (stamp <= now_at_least_ns_) return value;
    next_arrival_ns_ = std::min(next_arrival_ns_, stamp);
    return 0;
}

uint64_t Link::newest(size_t offset) {
    const Unobserved own_records;
    ++traffic_.polls;
    // Tests look outside of launches as well.
    if (is_timed() && current_executor != nullptr)
        current_executor->interleave(Step::kLoad, peers_[rank_].base + offset);
    auto* word = reinterpret_cast<uint64_t*>(peers_[rank_].base + offset);
    return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
}

uint64_t Link::stamp_of(size_t offset) const {
    return peers_[rank_].signal_stamps[offset / sizeof(uint64_t)].load(std::memory_order_relaxed);
}

uint64_t Link::arrival_ns(size_t offset) {
    const Unobserved own_records;
    return stamps_arrivals() ? clock_.bend(stamp_of(offset)) : clock_.now_ns();
}

bool Link::pass_time() {
    if (!stamps_arrivals() || next_arrival_ns_ == UINT64_MAX) return false;
    clock_.advance_to(next_arrival_ns_);
    next_arrival_ns_ = UINT64_MAX;
    return true;
}

void Link::ring() {
    const Unobserved own_records;
    any_to_ring_ = false;
    unrung_bytes_ = 0;
    for (size_t dst = 0; dst < peers_.size(); ++dst) {
        if (!to_ring_[dst]) continue;
        to_ring_[dst] = 0;
        // A read-modify-write orders the signal before the look at `sleeping`; see arm().
        Doorbell& doorbell = *peers_[dst].doorbell;
        if (doorbell.sleeping.fetch_or(0) == 0) continue;
        doorbell.rings.fetch_add(1);
        futex(&doorbell.rings, FUTEX_WAKE, INT_MAX, nullptr);
    }
}

void Link::flush() {
    while (pump()) {
    }
    nic_.take_back();
    ring();
}

void Link::set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s) {
    path_faults_[dst] = PathFault{delay_ns, bytes_per_s > 0.0 ? 1e9 / bytes_per_s : 0.0};
    faulty_ = std::any_of(path_faults_.begin(), path_faults_.end(), [](const PathFault& path) {
        return path.delay_ns != 0 || path.ns_per_byte != 0.0;
    });
}

void Link::set_receive_fault(size_t begin, size_t end, uint64_t delay_ns) {
    receive_fault_ = {begin, end, delay_ns};
}

void Link::set_reorder(std::optional<uint64_t> seed) {
    flush();
    reorder_.reset();
    if (seed) reorder_.emplace(*seed);
    in_order_ = !seed && !simulation_;
}

bool Link::is_fenced(const HeldBack& item) const {
    return std::any_of(held_back_.begin(), held_back_.end(), [&](const HeldBack& other) {
        return other.dst == item.dst && other.qp == item.qp && other.generation < item.generation;
    });
}

void Link::deliver_at(size_t index) {
    // Between launches the calling thread is the only one, and sees what it had delivered.
    const bool is_alone = current_executor == nullptr;
    if (is_alone) nic_.hand_over();
    nic_.run([&] { deliver(held_back_[index]); });
    if (is_alone) nic_.take_back();
    held_back_.erase(held_back_.begin() + static_cast<ptrdiff_t>(index));
    if (held_back_.empty()) generations_.clear();
}

void Link::quiet(int dst, int qp) {
    const Unobserved own_records;
    ++traffic_.to[dst].quiets;
    if (is_timed()) {
        if (is_direct(dst)) return drain();
        return current_executor->await_puts(true);
    }
    if (simulation_) {
        const uint64_t complete_ns = queue_pairs_[{dst, qp}].latest_ns + 1;
        if (complete_ns > simulation_->now_ns()) seat_->sleep_until(complete_ns);
        return;
    }
    // In the order of issue, which respects every fence.
    for (size_t i = 0; i < held_back_.size();) {
        const bool mine = held_back_[i].dst == dst && held_back_[i].qp == qp;
        if (mine) {
            deliver_at(i);
        } else {
            ++i;
        }
    }
    nic_.take_back();
}

bool Link::pump() {
    const Unobserved own_records;
    if (any_to_ring_) ring();
    if (held_back_.empty()) return false;
    // Any item may be next that no fence puts behind another one on its queue pair.
    const size_t start = reorder_ ? reorder_->below(held_back_.size()) : 0;
    for (size_t i = 0; i < held_back_.size(); ++i) {
        const size_t candidate = (start + i) % held_back_.size();
        if (is_fenced(held_back_[candidate])) continue;
        deliver_at(candidate);
        break;
    }
    return true;
}

void Link::arm() {
    ring();
    Doorbell& doorbell = *peers_[rank_].doorbell;
    rings_seen_ = doorbell.rings.load();
    doorbell.sleeping.exchange(1);
}

void Link::sleep(uint64_t max_ns) {
    // Nobody rings when a hidden signal's time has come.
    const uint64_t now = monotonic_ns();
    const uint64_t until_arrival = next_arrival_ns_ > now ? next_arrival_ns_ - now : 0;
    next_arrival_ns_ = UINT64_MAX;
    const timespec timeout{0, static_cast<long>(std::min(max_ns, until_arrival))};
    futex(&peers_[rank_].doorbell->rings, FUTEX_WAIT, rings_seen_, &timeout);
    disarm();
}

void Link::disarm() { peers_[rank_].doorbell->sleeping.store(0); }

}  // namespace ep::host
