// Stackful fibers: the threads of the host target. A fiber is a stack and a saved stack pointer;
// switching saves the callee-saved registers of the C++ ABI and nothing else. Only the executor
// uses this; kernels never see it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ep::host {

// What a sanitizer must know about a stack to follow a switch to it; empty in ordinary builds.
struct SanitizerState {
    void* tsan_fiber = nullptr;
    int unobserved = 0;  // Unobserved objects that live on it
    void* asan_fake_stack = nullptr;
    const void* stack_bottom = nullptr;
    size_t stack_bytes = 0;
};

struct FiberContext {
    void* stack_pointer = nullptr;
    SanitizerState sanitizer;
};

// Stacks for `count` fibers in one mapping, an inaccessible guard page below each, if they are guarded: Linux
// grants a process too few mappings for the threads of several GPUs. Kept between launches because mapping and
// guarding them costs more than a small launch.
class StackPool {
  public:
    static constexpr size_t kStackBytes = 64 * 1024;

    StackPool() = default;
    ~StackPool();
    StackPool(const StackPool&) = delete;
    StackPool& operator=(const StackPool&) = delete;

    void reserve(size_t count, bool guarded = true);
    std::byte* stack_begin(size_t index) const;

  private:
    std::byte* mapping_ = nullptr;
    size_t count_ = 0;
};

// Prepares `context` so that the first switch to it calls entry() on the given stack. entry must
// never return. `color` shifts the first frame, because equally aligned stacks would share a few
// cache sets.
void prepare_fiber(FiberContext& context, std::byte* stack_begin, size_t color, void (*entry)());

// Frees what prepare_fiber() made besides the stack. Everything the fiber did happened before.
void retire_fiber(FiberContext& context);

// Leaves `from` and continues `to`. `final` says that `from` will never be continued.
void switch_fiber(FiberContext& from, FiberContext& to, bool final = false);

// Must be the first call on a new fiber's stack.
void enter_fiber(FiberContext& context);

// Makes the calling thread's own stack a switch target.
void adopt_thread(FiberContext& context);
// And ends that.
void release_thread();

// ---- ThreadSanitizer. For it every fiber is a thread, and that they take turns on one OS thread
// orders nothing: only the kernels' atomics do, and what is said here. In other builds none of this
// does anything.
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// What the fibers did before the call happens before what they do after it, as at a barrier. All but
// the caller must be waiting.
void order_memory(std::span<FiberContext* const> fibers);

// Accesses of the calling fiber are not looked at while one lives: the executor's and the link's
// own records, which all fibers write, each in its turn.
class Unobserved {
  public:
#if defined(__SANITIZE_THREAD__)
    Unobserved();
    ~Unobserved();
#else
    Unobserved() {}
#endif
    Unobserved(const Unobserved&) = delete;
    Unobserved& operator=(const Unobserved&) = delete;
};

// A device that works beside the fibers: what it does is ordered by hand_over() alone.
class SanitizerThread {
  public:
    SanitizerThread();
    ~SanitizerThread();
    SanitizerThread(const SanitizerThread&) = delete;
    SanitizerThread& operator=(const SanitizerThread&) = delete;

    // Everything the caller did happens before what the device does from now on.
    void hand_over();
    // And the other way round.
    void take_back();
    template <class F>
    void run(F f) {
        void* caller = enter();
        f();
        leave(caller);
    }

  private:
    void* enter();
    void leave(void* caller);

    void* tsan_fiber_ = nullptr;
};

// "block 3 warp 1 lane 7" for a fault address inside a guard page; used by the fault handler.
using DescribeFiber = void (*)(size_t fiber_index, char* text, size_t text_bytes);
void install_stack_overflow_report(DescribeFiber describe);

}  // namespace ep::host
