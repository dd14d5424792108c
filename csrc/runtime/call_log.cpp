#include "runtime/call_log.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace ep {

namespace {

// Notes are made every kNoteIntervalNs; older ones than this say nothing of now.
constexpr uint64_t kFreshUnits = 3 * kNoteIntervalNs / WaitNote::kUnitNs;

int64_t utc_ns() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

template <class T>
T load(T& word) {
    return std::atomic_ref(word).load(std::memory_order_relaxed);
}

Series series_of(const OpShape& shape) {
    switch (static_cast<Operation>(shape.operation)) {
        case Operation::kBarrier:
            return Series::kBarriers;
        case Operation::kClockOffset:
            return Series::kClockRounds;
        default:
            return Series::kOperations;
    }
}

}  // namespace

void CallLog::open(Device& device, int num_calls) {
    if (num_calls <= 0) return;
    calls_.resize(static_cast<size_t>(num_calls));
    entries_ = static_cast<RecordedEntry*>(
        device.allocate_host_visible(sizeof(RecordedEntry) * calls_.size()));
    waits_ = static_cast<RecordedWaits*>(device.allocate_host_visible(sizeof(RecordedWaits)));
}

void CallLog::close(Device& device) {
    const std::scoped_lock lock(mutex_);
    if (entries_ == nullptr) return;
    device.release_host_visible(entries_);
    device.release_host_visible(waits_);
    entries_ = nullptr;
    waits_ = nullptr;
}

Record CallLog::add(
    const Agreed& agreed, int num_tokens, Stream stream, bool continues, bool has_hook) {
    const std::scoped_lock lock(mutex_);
    if (entries_ == nullptr) return {};
    const int64_t now = utc_ns();
    if (!continues || num_calls_ == 0) {
        const uint64_t call = ++num_calls_;
        const size_t place = call % calls_.size();
        calls_[place] = {call,
                         series_of(agreed.shape),
                         agreed,
                         num_tokens,
                         stream,
                         now,
                         0,
                         has_hook,
                         RecordedEntry{}};
        std::atomic_ref(entries_[place].entered_ns).store(0, std::memory_order_relaxed);
        std::atomic_ref(entries_[place].number).store(0, std::memory_order_relaxed);
        return {&entries_[place], waits_};
    }
    const size_t place = num_calls_ % calls_.size();
    calls_[place].receive_called_ns = now;
    return {&entries_[place], waits_};
}

RecordedEntry CallLog::read(uint64_t call) const {
    RecordedEntry& entry = entries_[call % calls_.size()];
    RecordedEntry seen{};
    seen.number = load(entry.number);
    if (seen.number == 0) return seen;
    seen.entered_ns = load(entry.entered_ns);
    seen.sent_ns = load(entry.sent_ns);
    seen.finished_ns = load(entry.finished_ns);
    seen.failed = load(entry.failed);
    return seen;
}

uint64_t CallLog::num_calls() const {
    const std::scoped_lock lock(mutex_);
    return num_calls_;
}

std::vector<RecordedCall> CallLog::calls(size_t most) const {
    const std::scoped_lock lock(mutex_);
    std::vector<RecordedCall> result;
    if (entries_ == nullptr) return result;
    const uint64_t kept = std::min<uint64_t>(num_calls_, std::min(most, calls_.size()));
    for (uint64_t call = num_calls_ - kept + 1; call <= num_calls_; ++call) {
        result.push_back(calls_[call % calls_.size()]);
        result.back().seen = read(call);
    }
    return result;
}

WaitsNow CallLog::waits(int num_ranks) const {
    WaitsNow now{};
    const std::vector<RecordedCall> all = calls(calls_.size());
    // What waits is what has entered last and not ended.
    const auto open = std::find_if(all.rbegin(), all.rend(), [](const RecordedCall& call) {
        return call.seen.entered_ns != 0 && call.seen.finished_ns == 0;
    });
    if (open == all.rend()) return now;
    const std::scoped_lock lock(mutex_);
    if (waits_ == nullptr) return now;
    uint64_t newest = 0;
    const auto for_each_note = [&](auto f) {
        for (size_t owed = 0; owed < now.missing.size(); ++owed) {
            for (int rank = 0; rank < num_ranks; ++rank) {
                const WaitNote note = WaitNote::unpack(load(waits_->noted[owed][rank]));
                if (note.is_of(open->series, open->seen.number)) f(owed, rank, note.waited);
            }
        }
    };
    for_each_note([&](size_t, int, uint64_t waited) { newest = std::max(newest, waited); });
    if (newest == 0) return now;
    now.series = open->series;
    now.number = open->seen.number;
    now.waited_s = static_cast<double>(newest * WaitNote::kUnitNs) * 1e-9;
    for_each_note([&](size_t owed, int rank, uint64_t waited) {
        if (waited + kFreshUnits >= newest) now.missing[owed].push_back(rank);
    });
    return now;
}

}  // namespace ep
