#include "device/host/schedule.h"

#include <bit>

namespace ep::host {
namespace {

class RoundRobin final : public Schedule {
  public:
    void reset(size_t num_fibers) override {
        ring_.assign(std::bit_ceil(num_fibers + 1), nullptr);
        head_ = tail_ = 0;
    }
    void push(Fiber* fiber) override { ring_[tail_++ & (ring_.size() - 1)] = fiber; }
    Fiber* pop() override { return head_ == tail_ ? nullptr : ring_[head_++ & (ring_.size() - 1)]; }
    bool preempt() override { return false; }
    std::string describe() const override { return "round-robin"; }

  private:
    std::vector<Fiber*> ring_;  // a power of two
    size_t head_ = 0;
    size_t tail_ = 0;
};

class Random final : public Schedule {
  public:
    explicit Random(uint64_t seed) : seed_(seed), random_(seed) {}
    void reset(size_t num_fibers) override {
        ready_.clear();
        ready_.reserve(num_fibers);
    }
    void push(Fiber* fiber) override { ready_.push_back(fiber); }
    Fiber* pop() override {
        if (ready_.empty()) return nullptr;
        std::swap(ready_[random_.below(ready_.size())], ready_.back());
        Fiber* fiber = ready_.back();
        ready_.pop_back();
        return fiber;
    }
    bool preempt() override { return random_.below(4) == 0; }
    std::string describe() const override { return "random:" + std::to_string(seed_); }

  private:
    uint64_t seed_;
    SeededRandom random_;
    std::vector<Fiber*> ready_;
};

}  // namespace

std::unique_ptr<Schedule> make_round_robin_schedule() { return std::make_unique<RoundRobin>(); }

std::unique_ptr<Schedule> make_random_schedule(uint64_t seed) {
    return std::make_unique<Random>(seed);
}

}  // namespace ep::host
