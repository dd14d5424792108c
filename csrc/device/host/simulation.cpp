#include "device/host/simulation.h"

#include <algorithm>
#include <string>

namespace ep::host {
namespace {

thread_local Seat* this_seat = nullptr;

}  // namespace

Simulation::Simulation(const SimulationOptions& options)
    : options_(options), random_(options.seed) {
    if (options.num_ranks < 1 || options.ranks_per_node < 1) {
        throw std::invalid_argument("Simulation: " + std::to_string(options.num_ranks) +
                                    " ranks, " + std::to_string(options.ranks_per_node) +
                                    " per node; both must be at least 1");
    }
    for (int rank = 0; rank < options.num_ranks; ++rank)
        seats_.push_back(std::make_unique<Seat>(*this, rank));
    if (options_.end_ns != UINT64_MAX) options_.end_ns += now_ns_;
}

Seat* Simulation::seat() { return this_seat; }

void Simulation::enter(int rank) {
    std::unique_lock lock(mutex_);
    Seat& seat = *seats_.at(rank);
    if (this_seat != nullptr || seat.entered_)
        throw std::logic_error("Simulation: a thread is one rank, and enters once");
    this_seat = &seat;
    seat.entered_ = true;
    if (++num_entered_ == options_.num_ranks) {
        for (const auto& one : seats_) push_seat(*one, now_ns_ + draw(2 * options_.step_ns + 1));
        run_next();
    }
    seat.may_run_.wait(lock, [&] { return running_ == rank; });
}

void Simulation::leave() {
    const std::scoped_lock lock(mutex_);
    if (this_seat == nullptr || &this_seat->simulation() != this) return;
    this_seat->left_ = true;
    ++this_seat->turn_;
    this_seat = nullptr;
    run_next();
}

void Simulation::push_seat(Seat& seat, uint64_t time_ns) {
    scheduled_.push({time_ns, num_scheduled_++, seat.rank_, ++seat.turn_, -1, 0});
}

void Simulation::run_next() {
    running_ = -1;
    while (true) {
        if (scheduled_.empty() || (!ended_ && scheduled_.top().time_ns > options_.end_ns)) {
            // Nothing can happen any more, or not in time: everybody who is left ends.
            const bool anybody = std::any_of(
                seats_.begin(), seats_.end(), [](const auto& seat) { return !seat->left_; });
            if (!anybody) return;
            ended_ = true;
            for (const auto& seat : seats_) {
                if (!seat->left_) push_seat(*seat, now_ns_);
            }
        }
        const Scheduled next = scheduled_.top();
        scheduled_.pop();
        if (next.seat < 0) {
            now_ns_ = std::max(now_ns_, next.time_ns);
            const Sender& sender = senders_[next.messages];
            if (sender.messages != nullptr && next.time_ns <= seats_[sender.rank]->cut_off_ns_)
                sender.messages->arrive(next.message);
            continue;
        }
        Seat& seat = *seats_[next.seat];
        if (seat.left_ || next.turn != seat.turn_) continue;
        now_ns_ = std::max(now_ns_, next.time_ns);
        running_ = next.seat;
        seat.may_run_.notify_one();
        return;
    }
}

int Simulation::add(InFlight* messages, int sender) {
    const std::scoped_lock lock(mutex_);
    senders_.push_back({messages, sender});
    return static_cast<int>(senders_.size()) - 1;
}

void Simulation::remove(int id) {
    const std::scoped_lock lock(mutex_);
    senders_[id].messages = nullptr;
}

void Simulation::schedule_arrival(int messages, uint64_t id, uint64_t time_ns) {
    scheduled_.push({time_ns, num_scheduled_++, -1, 0, messages, id});
}

void Simulation::signal(int rank) {
    Seat& seat = *seats_[rank];
    seat.has_mail_ = true;
    if (!seat.waits_) return;
    seat.waits_ = false;
    push_seat(seat, now_ns_ + 1 + draw(2 * options_.step_ns));
}

void Seat::stop_after(uint64_t points, uint64_t ns) {
    points_to_stop_ = points;
    stop_ns_ = ns;
}

bool Seat::give_way(uint64_t until_ns) {
    std::unique_lock lock(simulation_.mutex_);
    if (dead_ || simulation_.ended_) return false;
    if (until_ns != kNever) simulation_.push_seat(*this, until_ns);
    simulation_.run_next();
    may_run_.wait(lock, [&] { return simulation_.running_ == rank_; });
    return !simulation_.ended_;
}

bool Seat::reach_point() {
    if (points_to_death_ != kNever && points_to_death_-- == 0) {
        dead_ = true;
        // What it had handed over may still arrive, the later the less likely.
        const std::scoped_lock lock(simulation_.mutex_);
        cut_off_ns_ =
            simulation_.now_ns() + simulation_.draw(simulation_.options_.longest_delivery_ns);
    }
    if (dead_) return false;
    uint64_t pause_ns = 0;
    if (points_to_stop_ != kNever && points_to_stop_-- == 0) {
        points_to_stop_ = kNever;
        pause_ns = stop_ns_;
    }
    if (pause_ns == 0 && points_to_step_-- != 0) return true;
    points_to_step_ = simulation_.draw(2 * simulation_.options_.points_per_step + 1);
    pause_ns += 1 + simulation_.draw(2 * simulation_.options_.step_ns);
    return give_way(simulation_.now_ns() + pause_ns);
}

bool Seat::wait_for_signal(uint64_t deadline_ns) {
    const uint64_t now = simulation_.now_ns();
    if (has_mail_ || deadline_ns <= now) {
        has_mail_ = false;
        return give_way(now + 1 + simulation_.draw(2 * simulation_.options_.step_ns));
    }
    {
        const std::scoped_lock lock(simulation_.mutex_);
        waits_ = true;
        ++turn_;
    }
    const bool alive = give_way(deadline_ns);
    waits_ = has_mail_ = false;
    return alive;
}

bool Seat::sleep_until(uint64_t time_ns) { return give_way(time_ns); }

}  // namespace ep::host
