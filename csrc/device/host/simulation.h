// A group of ranks as one deterministic simulation: every rank keeps its OS thread, but only one of
// them runs at a time, and the time is virtual.
//
// What is scheduled (a rank goes on, a message arrives) is worked off in the order of time. A rank that
// gives way says when it wants to go on; how long the steps between take is drawn from the seed, and
// from that follows who is ahead of whom. So a seed repeats exactly, ranks run at the same virtual time
// as though each had a core of its own, and waiting costs nothing: when all ranks wait, the time is that
// of the next arrival or deadline.
//
// A rank gives way where another rank could notice (the executor's points of interleaving) and where it
// waits. At such a point it may also be stopped for any time, or die.
//
// With a CostModel nothing of time is drawn: launches take what they would on such a GPU (launch_time.h), and
// messages what its ports take. Ranks then neither stop nor die, and have clocks of their own, of which none is
// further ahead of another than a message takes; each works off what arrives at it itself.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <stdexcept>
#include <vector>

#include "device/host/cost_model.h"
#include "device/host/schedule.h"

namespace ep::host {

struct SimulationOptions {
    int num_ranks = 1;
    // Ranks of one node reach each other's memory; a put to another node goes through its link.
    int ranks_per_node = 1;
    // From it follows what is drawn; with a CostModel nothing is.
    uint64_t seed = 0;
    // A rank gives way after up to twice this many points, and has then spent up to twice this time.
    uint64_t points_per_step = 16;
    uint64_t step_ns = 500;
    // Of a message.
    uint64_t shortest_delivery_ns = 500;
    uint64_t longest_delivery_ns = 20'000;
    // Whoever still waits then waits for ever.
    uint64_t end_ns = UINT64_MAX;
};

// A rank's thread has died where it stood, or the simulation has ended under it.
class RankDied final : public std::exception {
  public:
    const char* what() const noexcept override { return "the rank has died"; }
};

class LaunchTime;
class Simulation;

// Where messages of a link are kept until their time has come.
class InFlight {
  public:
    virtual ~InFlight() = default;
    virtual void arrive(uint64_t id) = 0;
};

// What a simulation works off in the order of time: ranks that go on, and messages that arrive.
struct Scheduled {
    uint64_t time_ns;
    uint64_t number;  // of two at the same time, the one asked for first
    bool operator>(const Scheduled& other) const {
        return time_ns != other.time_ns ? time_ns > other.time_ns : number > other.number;
    }
};
struct Turn : Scheduled {
    int seat;
    uint64_t turn;  // of this seat
};
struct Arrival : Scheduled {
    int messages;
    uint64_t message;  // of these
};
template <class T>
using ByTime = std::priority_queue<T, std::vector<T>, std::greater<>>;

// The place of one rank. Everything is called on the rank's own thread.
class Seat {
  public:
    Seat(Simulation& simulation, int rank) : simulation_(simulation), rank_(rank) {}

    Simulation& simulation() const { return simulation_; }
    int rank() const { return rank_; }

    // Where another rank could notice what this one does. False: the rank ends here.
    bool reach_point();
    // Until a signal has come since the last call, or `deadline_ns`. False: the rank ends here.
    bool wait_for_signal(uint64_t deadline_ns);
    bool sleep_until(uint64_t time_ns);

    // At the `points`-th point from now the rank stops for `ns`, or dies. UINT64_MAX: no longer.
    void stop_after(uint64_t points, uint64_t ns);
    void die_after(uint64_t points) { points_to_death_ = points; }
    // Whether a stop that was asked for has happened.
    bool has_stopped() const { return points_to_stop_ == kNever; }

    // ---- with a CostModel
    void set_time(LaunchTime* time) { time_ = time; }
    LaunchTime* time() const { return time_; }
    uint64_t now_ns() const;
    // When it was last let run.
    uint64_t resumed_ns() const { return now_ns_; }
    // The rank wants to do something at `time_ns`; infinite: when something has come, or at the deadline.
    // kAgain: something has come, so there may be something earlier to do.
    enum class Advance { kGo, kAgain, kEnded };
    Advance advance(double time_ns, uint64_t deadline_ns);
    // Whether advance() would say kGo.
    bool may_run_until(double time_ns) const {
        return time_ns <= static_cast<double>(may_run_until_ns_);
    }
    void ended_launch(LaunchRecord record);
    const std::vector<LaunchRecord>& launches() const { return launches_; }

  private:
    friend class Simulation;
    static constexpr uint64_t kNever = UINT64_MAX;

    bool give_way(uint64_t until_ns);

    Simulation& simulation_;
    int rank_;
    std::condition_variable may_run_;
    bool entered_ = false;
    bool left_ = false;
    bool dead_ = false;
    bool waits_ = false;     // for a signal
    bool has_mail_ = false;  // a signal came since the last wait
    uint64_t turn_ = 0;      // of those scheduled only the newest counts
    uint64_t points_to_step_ = 0;
    uint64_t points_to_stop_ = kNever;
    uint64_t stop_ns_ = 0;
    uint64_t points_to_death_ = kNever;
    uint64_t cut_off_ns_ = kNever;  // what arrives later died with its sender
    LaunchTime* time_ = nullptr;
    uint64_t now_ns_ = 0;
    uint64_t resumes_ns_ = kNever;
    uint64_t may_run_until_ns_ = 0;
    ByTime<Arrival> arrivals_;
    std::vector<LaunchRecord> launches_;
};

class Simulation : public std::enable_shared_from_this<Simulation> {
  public:
    explicit Simulation(const SimulationOptions& options);

    // The seat of the calling thread; nullptr outside of simulations.
    static Seat* seat();

    const SimulationOptions& options() const { return options_; }
    // Before anybody enters: launches and messages take the time of such a GPU. Throws std::logic_error in a module
    // without that model.
    void set_costs(const CostModel& costs);
    // The calling thread is `rank` from now on, and runs when this returns. Once all ranks have entered,
    // the simulation begins.
    void enter(int rank);
    void leave();

    // With a CostModel the calling rank's clock. Without one every reading is later than the one before.
    uint64_t now_ns() { return costs_ ? seat_ns() : ++now_ns_; }
    uint64_t draw(uint64_t bound) { return bound == 0 ? 0 : random_.below(bound); }
    bool is_same_node(int a, int b) const {
        return a / options_.ranks_per_node == b / options_.ranks_per_node;
    }
    // Whether somebody waited for ever.
    bool has_ended() const { return ended_; }

    int add(InFlight* messages, int sender);
    void remove(int id);
    void schedule_arrival(int messages, uint64_t id, uint64_t time_ns);
    // With a CostModel: it arrives at this rank.
    void schedule_arrival_at(int rank, int messages, uint64_t id, double time_ns);
    void signal(int rank);
    const std::optional<CostModel>& costs() const { return costs_; }
    GpuPorts& ports(int rank) { return ports_[rank]; }
    const std::vector<LaunchRecord>& launches(int rank) const { return seats_[rank]->launches(); }
    // A word of a rank's symmetric memory has been written.
    void written(int rank, size_t offset, double at_ns);

  private:
    friend class Seat;
    struct Sender {
        InFlight* messages;
        int rank;
    };

    uint64_t seat_ns() const;
    void push_seat(Seat& seat, uint64_t time_ns);
    bool is_due(const Turn& turn) const;
    void deliver(const Arrival& arrival);
    // Works off what is scheduled until a rank goes on, and lets that rank run.
    void run_next();

    SimulationOptions options_;
    std::optional<CostModel> costs_;
    SeededRandom random_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Seat>> seats_;
    std::vector<Sender> senders_;
    ByTime<Turn> turns_;
    ByTime<Arrival> arrivals_;
    std::vector<GpuPorts> ports_;
    uint64_t shortest_ns_ = 0;  // that something takes from one rank to another, by the CostModel
    uint64_t num_scheduled_ = 0;
    // Far from zero, as rank clocks are.
    uint64_t now_ns_ = 1'000'000'000'000ull;
    int num_entered_ = 0;
    int running_ = -1;
    bool ended_ = false;
};

}  // namespace ep::host
