// Which kernel thread runs next. The executor hands every thread that can run to a Schedule and asks it for the
// next one. Two are made here; the time of a GPU is a third (launch_time.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ep::host {

struct Fiber;

class Schedule {
  public:
    virtual ~Schedule() = default;
    // Called before a launch with the number of threads it may have to hold.
    virtual void reset(size_t num_fibers) = 0;
    virtual void push(Fiber* fiber) = 0;
    // nullptr when nothing can run.
    virtual Fiber* pop() = 0;
    // Whether a running thread should give way at a memory operation other ranks or blocks can see.
    virtual bool preempt() = 0;
    // What a failing test prints to get the same order again.
    virtual std::string describe() const = 0;
};

// First in, first out.
std::unique_ptr<Schedule> make_round_robin_schedule();

// A uniformly random runnable thread each time, and random preemption. The same seed and the same
// sequence of calls give the same order.
std::unique_ptr<Schedule> make_random_schedule(uint64_t seed);

// splitmix64 (Steele, Lea, Flood 2014): one 64-bit state word, good enough to order test runs.
class SeededRandom {
  public:
    explicit SeededRandom(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t bound) { return next() % bound; }

  private:
    uint64_t state_;
};

}  // namespace ep::host
