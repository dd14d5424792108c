#include "device/host/launch_time.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "device/host/executor.h"
#include "device/work_numbers.h"

namespace ep::host {
namespace {

constexpr double kNothing = std::numeric_limits<double>::infinity();
constexpr size_t kVectorBytes = 16;

}  // namespace

LaunchTime::LaunchTime(Executor& executor, Seat& seat, const CostModel& costs)
    : executor_(executor), seat_(seat), costs_(costs) {
    seat_.set_time(this);
}

LaunchTime::~LaunchTime() { seat_.set_time(nullptr); }

LaunchTime::Thread& LaunchTime::thread(const Fiber& fiber) {
    return threads_[fiber.block * executor_.shape().threads + fiber.thread];
}

// ---- who runs next

void LaunchTime::reset(size_t num_fibers) {
    ready_ = {};
    threads_.assign(num_fibers, {});
    // The last one stands for the NIC.
    multiprocessors_.assign(executor_.shape().blocks + 1, {});
    lookers_.clear();
    std::fill(std::begin(spent_), std::end(spent_), 0.0);
    looks_ = {};
    deadline_ns_ = UINT64_MAX;
    begin_ns_ = static_cast<double>(seat_.now_ns());
    ++launch_;
}

void LaunchTime::push(Fiber* fiber) {
    if (fiber->clock_ns == 0) fiber->clock_ns = begin_ns_;
    ready_.push({fiber->clock_ns, num_ready_++, fiber});
}

Fiber* LaunchTime::pop() {
    while (true) {
        const double next_ns = ready_.empty() ? kNothing : ready_.top().at_ns;
        switch (seat_.advance(next_ns, deadline_ns_)) {
            case Seat::Advance::kEnded:
                return nullptr;
            case Seat::Advance::kAgain:
                if (ready_.empty() && seat_.resumed_ns() >= deadline_ns_) wake_all();
                continue;
            case Seat::Advance::kGo:
                break;
        }
        Fiber* fiber = ready_.top().fiber;
        ready_.pop();
        return fiber;
    }
}

bool LaunchTime::is_ahead(const Fiber& fiber) {
    while (true) {
        if (!ready_.empty() && ready_.top().at_ns < fiber.clock_ns) return true;
        if (seat_.may_run_until(fiber.clock_ns)) return false;
        switch (seat_.advance(fiber.clock_ns, UINT64_MAX)) {
            case Seat::Advance::kEnded:
                return true;
            case Seat::Advance::kAgain:
                continue;
            case Seat::Advance::kGo:
                return false;
        }
    }
}

void LaunchTime::end(const char* name) {
    double end_ns = begin_ns_;
    const int threads = executor_.shape().threads;
    const auto blocks = executor_.fibers();
    for (const Fiber& fiber : blocks) end_ns = std::max(end_ns, fiber.clock_ns);
    LaunchRecord record{name, begin_ns_, end_ns, {}, looks_};
    for (size_t first = 0; first < blocks.size(); first += threads)
        spent_[static_cast<int>(Spent::kIdle)] += end_ns - blocks[first].clock_ns;
    const int num_blocks = executor_.shape().blocks;
    for (int i = 0; i < kNumSpent; ++i) record.spent_ns[i] = spent_[i] / num_blocks;
    seat_.ended_launch(std::move(record));
}

// ---- what a thread does

void LaunchTime::spend(Fiber& fiber, Spent what, double ns) {
    const double passed_ns = std::min(fiber.ahead_ns, ns);
    fiber.ahead_ns -= passed_ns;
    ns -= passed_ns;
    fiber.clock_ns += ns;
    if (fiber.thread != 0) return;
    if (what == Spent::kWorking && thread(fiber).looks) what = Spent::kLooking;
    spent_[static_cast<int>(what)] += ns;
}

void LaunchTime::copy(Fiber& fiber, size_t bytes, int threads) {
    const size_t bytes_of_step = threads * kLoadsInFlight * kVectorBytes;
    const auto steps = static_cast<double>((bytes + bytes_of_step - 1) / bytes_of_step);
    spend_until(fiber,
                Spent::kMoving,
                std::max(fiber.clock_ns + steps * costs_.copy_ns, moved_ns(fiber, bytes)));
}

double LaunchTime::moved_ns(const Fiber& fiber, size_t bytes) {
    const double ns = static_cast<double>(bytes) / costs_.sm_bytes_per_ns;
    return begin_ns_ + multiprocessor(fiber).memory.take(fiber.clock_ns - begin_ns_, ns);
}

void LaunchTime::take(Fiber& fiber, Step step, const void* address, size_t amount) {
    switch (step) {
        case Step::kOther:
            return;
        case Step::kLoad:
            spend(fiber, Spent::kWorking, costs_.load_ns);
            return look_at(fiber, address);
        case Step::kUpdate:
            return spend(fiber, Spent::kWorking, costs_.load_ns);
        case Step::kRead:
            spend(fiber, Spent::kWorking, costs_.shared_ns);
            return look_at(fiber, address);
        case Step::kWrite:
            return spend(fiber, Spent::kWorking, costs_.shared_ns);
        case Step::kStore:
            return spend(fiber, Spent::kWorking, costs_.store_ns);
        case Step::kRelease:
            return spend(fiber, Spent::kFence, costs_.device_fence_ns + costs_.store_ns);
        case Step::kReleaseUpdate:
            spend(fiber, Spent::kFence, costs_.device_fence_ns);
            return spend(fiber, Spent::kWorking, costs_.load_ns);
        case Step::kCopyWarp:
            return copy(fiber, amount, kWarpSize);
        case Step::kCopyBlock:
            return copy(fiber, amount, executor_.shape().threads);
        case Step::kCopyThread:
            return copy(fiber, amount, 1);
        case Step::kLoadVector:
            return spend_until(fiber,
                               Spent::kMoving,
                               std::max(fiber.clock_ns + costs_.copy_ns / kLoadsInFlight,
                                        moved_ns(fiber, kVectorBytes)));
        case Step::kTakeRow:
            thread(fiber).row_is_there_ns =
                std::max(fiber.clock_ns + costs_.bulk_ns, moved_ns(fiber, amount));
            return spend(fiber, Spent::kMoving, costs_.store_ns);
        case Step::kGiveRow:
            spend_until(fiber, Spent::kMoving, thread(fiber).row_is_there_ns);
            return spend(fiber, Spent::kMoving, costs_.store_ns);
    }
}

// ---- looks

void LaunchTime::begin_looks(Fiber& fiber) {
    Thread& one = thread(fiber);
    one.looks = true;
    one.is_due = false;
    one.look_began_ns = fiber.clock_ns;
}

void LaunchTime::count_looks(const Fiber& fiber, uint64_t looks, bool in_vain) {
    if (fiber.thread % kWarpSize != 0) return;
    looks_.all += looks;
    if (in_vain) looks_.in_vain += looks;
}

void LaunchTime::look_at(Fiber& fiber, const void* address) {
    Thread& one = thread(fiber);
    if (!one.looks) return;
    const double after_ns = fiber.clock_ns - one.look_began_ns;
    for (auto& [word, when_ns] : one.looked_at) {
        if (word != address) continue;
        when_ns = after_ns;
        return;
    }
    one.looked_at.emplace_back(address, after_ns);
    lookers_[address].push_back(&fiber);
}

bool LaunchTime::falls_asleep(Fiber& fiber, uint64_t deadline_ns) {
    Thread& one = thread(fiber);
    fiber.ahead_ns = 0;
    count_looks(fiber, 1, true);
    deadline_ns_ = std::min(deadline_ns_, deadline_ns);
    if (std::exchange(one.is_due, false)) {
        one.look_began_ns = fiber.clock_ns;
        return false;
    }
    one.sleeps = true;
    return true;
}

void LaunchTime::end_looks(Fiber& fiber) {
    thread(fiber).looks = false;
    fiber.ahead_ns = 0;
    count_looks(fiber, 1, false);
}

void LaunchTime::written(const void* address, double at_ns) {
    const auto found = lookers_.find(address);
    if (found == lookers_.end()) return;
    const std::vector<Fiber*> lookers = std::move(found->second);
    lookers_.erase(found);
    for (Fiber* fiber : lookers) {
        Thread& one = thread(*fiber);
        const auto word = std::find_if(one.looked_at.begin(),
                                       one.looked_at.end(),
                                       [&](const auto& other) { return other.first == address; });
        const double after_ns = word->second;
        one.looked_at.erase(word);
        if (one.looks) warp_is_due(*fiber, at_ns, after_ns);
    }
}

// Lanes look together, and may meet in the middle of it.
void LaunchTime::warp_is_due(const Fiber& fiber, double written_ns, double after_ns) {
    const int first =
        fiber.block * executor_.shape().threads + fiber.thread / kWarpSize * kWarpSize;
    for (Fiber& lane : executor_.fibers().subspan(first, kWarpSize)) {
        if (thread(lane).sleeps) {
            look_again(lane, written_ns, after_ns);
        } else {
            thread(lane).is_due = thread(lane).looks;
        }
    }
}

void LaunchTime::look_again(Fiber& fiber, double written_ns, double after_ns) {
    Thread& one = thread(fiber);
    one.sleeps = false;
    const double look_ns = std::max(1.0, fiber.clock_ns - one.look_began_ns);
    const double looks = std::ceil(std::max(0.0, written_ns - fiber.clock_ns - after_ns) / look_ns);
    count_looks(fiber, static_cast<uint64_t>(looks), true);
    one.look_began_ns = fiber.clock_ns + looks * look_ns;
    wake(fiber, Spent::kIdle, std::max(one.look_began_ns, written_ns));
    // The look had begun before; what it did until then is done.
    fiber.ahead_ns = fiber.clock_ns - one.look_began_ns;
}

void LaunchTime::wake_all() {
    const auto at_ns = static_cast<double>(std::exchange(deadline_ns_, UINT64_MAX));
    for (Fiber& fiber : executor_.fibers())
        if (thread(fiber).sleeps) look_again(fiber, at_ns, 0);
}

void LaunchTime::wake(Fiber& fiber, Spent what, double at_ns) {
    fiber.ahead_ns = 0;
    spend_until(fiber, what, at_ns);
    executor_.wake(&fiber);
}

// ---- puts

PutOrigin LaunchTime::put(const Fiber& fiber, bool by_nic) {
    const int place = by_nic ? executor_.shape().blocks : fiber.block;
    ++multiprocessors_[place].num_put;
    return {launch_, place};
}

bool LaunchTime::has_arrived(Fiber& fiber, bool by_nic) {
    Multiprocessor& origin = multiprocessors_[by_nic ? executor_.shape().blocks : fiber.block];
    if (origin.num_arrived == origin.num_put) return true;
    thread(fiber).awaits = origin.num_put;
    origin.awaiting.push_back(&fiber);
    return false;
}

void LaunchTime::acknowledged(const PutOrigin& origin, double at_ns) {
    if (origin.launch != launch_) return;
    Multiprocessor& from = multiprocessors_[origin.place];
    ++from.num_arrived;
    std::vector<Fiber*> left;
    for (Fiber* fiber : std::exchange(from.awaiting, {})) {
        if (thread(*fiber).awaits > from.num_arrived) {
            left.push_back(fiber);
        } else {
            wake(*fiber, Spent::kAcknowledgement, at_ns);
        }
    }
    from.awaiting = std::move(left);
}

}  // namespace ep::host
