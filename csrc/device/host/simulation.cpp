#include "device/host/simulation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/host/launch_time.h"

namespace ep::host {
namespace {

thread_local Seat* this_seat = nullptr;

template <class T>
uint64_t first_ns(const ByTime<T>& scheduled) {
    return scheduled.empty() ? UINT64_MAX : scheduled.top().time_ns;
}

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
    ports_.resize(options.num_ranks);
}

void Simulation::set_costs(const CostModel& costs) {
    if (!kHasTimeModel) {
        throw std::logic_error(
            "Simulation: this module has no model of time; build one with DEEP_EP_TIME_MODEL=1");
    }
    const double shortest = std::min(costs.nvlink_latency_ns, costs.nic_latency_ns);
    if (shortest < 1)
        throw std::invalid_argument("Simulation: latencies of a CostModel must be at least 1 ns");
    costs_ = costs;
    shortest_ns_ = static_cast<uint64_t>(shortest);
    options_.step_ns = 0;
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
    seat.resumes_ns_ = time_ns;
    turns_.push({{time_ns, num_scheduled_++}, seat.rank_, ++seat.turn_});
}

bool Simulation::is_due(const Turn& turn) const {
    const Seat& seat = *seats_[turn.seat];
    return !seat.left_ && turn.turn == seat.turn_;
}

void Simulation::deliver(const Arrival& arrival) {
    const Sender& sender = senders_[arrival.messages];
    if (sender.messages != nullptr && arrival.time_ns <= seats_[sender.rank]->cut_off_ns_)
        sender.messages->arrive(arrival.message);
}

void Simulation::run_next() {
    running_ = -1;
    while (true) {
        const bool is_turn =
            arrivals_.empty() || (!turns_.empty() && arrivals_.top() > turns_.top());
        const uint64_t time_ns = is_turn ? first_ns(turns_) : first_ns(arrivals_);
        if (time_ns == Seat::kNever || (!ended_ && time_ns > options_.end_ns)) {
            // Nothing can happen any more, or not in time: everybody who is left ends.
            const bool anybody = std::any_of(
                seats_.begin(), seats_.end(), [](const auto& seat) { return !seat->left_; });
            if (!anybody) return;
            ended_ = true;
            for (const auto& seat : seats_) {
                if (!seat->left_) push_seat(*seat, now_ns_);
            }
            continue;
        }
        now_ns_ = std::max(now_ns_, time_ns);
        if (!is_turn) {
            const Arrival arrival = arrivals_.top();
            arrivals_.pop();
            deliver(arrival);
            continue;
        }
        const Turn turn = turns_.top();
        turns_.pop();
        if (!is_due(turn)) continue;
        Seat& seat = *seats_[turn.seat];
        seat.now_ns_ = std::max(seat.now_ns_, time_ns);
        running_ = turn.seat;
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
    arrivals_.push({{time_ns, num_scheduled_++}, messages, id});
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

bool Seat::sleep_until(uint64_t time_ns) {
    if (!simulation_.costs_) return give_way(time_ns);
    while (true) {
        const Advance advanced = advance(static_cast<double>(time_ns), kNever);
        if (advanced == Advance::kAgain) continue;
        now_ns_ = time_ns;
        return advanced == Advance::kGo;
    }
}

// ---- with a CostModel

uint64_t Simulation::seat_ns() const {
    return this_seat == nullptr ? now_ns_ : this_seat->now_ns();
}

void Simulation::written(int rank, size_t offset, double at_ns) {
    LaunchTime* time = seats_[rank]->time_;
    if (time != nullptr) time->written(time->memory() + offset, at_ns);
}

void Simulation::schedule_arrival_at(int rank, int messages, uint64_t id, double time_ns) {
    const auto at_ns = static_cast<uint64_t>(time_ns);
    Seat& seat = *seats_[rank];
    seat.arrivals_.push({{at_ns, num_scheduled_++}, messages, id});
    // What comes of it comes back later still.
    uint64_t& until_ns = seats_[running_]->may_run_until_ns_;
    until_ns = std::min(until_ns, rank == running_ ? at_ns : at_ns + shortest_ns_);
    if (rank != running_ && at_ns < seat.resumes_ns_) push_seat(seat, at_ns);
}

uint64_t Seat::now_ns() const {
    return current_executor == nullptr ? now_ns_
                                       : static_cast<uint64_t>(current_executor->fiber().clock_ns);
}

Seat::Advance Seat::advance(double time_ns, uint64_t deadline_ns) {
    std::unique_lock lock(simulation_.mutex_);
    Simulation& all = simulation_;
    if (all.ended_) return Advance::kEnded;
    while (!all.turns_.empty() && !all.is_due(all.turns_.top())) all.turns_.pop();
    const uint64_t limit_ns =
        all.turns_.empty() ? kNever : all.turns_.top().time_ns + all.shortest_ns_;
    const uint64_t arrival_ns = first_ns(arrivals_);
    const bool waits = time_ns >= static_cast<double>(kNever);
    const uint64_t next_ns = waits ? deadline_ns : static_cast<uint64_t>(time_ns);
    if (arrival_ns != kNever && arrival_ns <= std::min(next_ns, limit_ns)) {
        const Arrival arrival = arrivals_.top();
        arrivals_.pop();
        all.deliver(arrival);
        return Advance::kAgain;
    }
    if (!waits && next_ns <= limit_ns) {
        may_run_until_ns_ = std::min(limit_ns, arrival_ns);
        return Advance::kGo;
    }
    resumes_ns_ = kNever;
    const uint64_t resumes_ns = std::min(next_ns, arrival_ns);
    if (resumes_ns != kNever) all.push_seat(*this, resumes_ns);
    all.run_next();
    may_run_.wait(lock, [&] { return all.running_ == rank_; });
    return all.ended_ ? Advance::kEnded : Advance::kAgain;
}

void Seat::ended_launch(LaunchRecord record) {
    now_ns_ = static_cast<uint64_t>(record.end_ns);
    launches_.push_back(std::move(record));
}

}  // namespace ep::host
