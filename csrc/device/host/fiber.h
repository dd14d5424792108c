// Stackful fibers: the threads of the host target. A fiber is a stack and a saved stack pointer;
// switching saves the callee-saved registers of the C++ ABI and nothing else. Only the executor
// uses this; kernels never see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ep::host {

// What a sanitizer must know about a stack to follow a switch to it; empty in ordinary builds.
struct SanitizerState {
    void* tsan_fiber = nullptr;
    void* asan_fake_stack = nullptr;
    const void* stack_bottom = nullptr;
    size_t stack_bytes = 0;
};

struct FiberContext {
    void* stack_pointer = nullptr;
    SanitizerState sanitizer;
};

// Stacks for `count` fibers in one mapping, an inaccessible guard page below each. Kept between
// launches because mapping and guarding them costs more than a small launch.
class StackPool {
  public:
    static constexpr size_t kStackBytes = 64 * 1024;

    StackPool() = default;
    ~StackPool();
    StackPool(const StackPool&) = delete;
    StackPool& operator=(const StackPool&) = delete;

    void reserve(size_t count);
    std::byte* stack_begin(size_t index) const;

  private:
    std::byte* mapping_ = nullptr;
    size_t count_ = 0;
};

// Prepares `context` so that the first switch to it calls entry() on the given stack. entry must
// never return. `color` shifts the first frame, because equally aligned stacks would share a few
// cache sets.
void prepare_fiber(FiberContext& context, std::byte* stack_begin, size_t color, void (*entry)());

// Frees what prepare_fiber() made besides the stack.
void retire_fiber(FiberContext& context);

// Leaves `from` and continues `to`. `final` says that `from` will never be continued.
void switch_fiber(FiberContext& from, FiberContext& to, bool final = false);

// Must be the first call on a new fiber's stack.
void enter_fiber(FiberContext& context);

// Makes the calling thread's own stack a switch target.
void adopt_thread(FiberContext& context);

// "block 3 warp 1 lane 7" for a fault address inside a guard page; used by the fault handler.
using DescribeFiber = void (*)(size_t fiber_index, char* text, size_t text_bytes);
void install_stack_overflow_report(DescribeFiber describe);

}  // namespace ep::host
