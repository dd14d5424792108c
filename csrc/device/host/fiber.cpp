#include "device/host/fiber.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_THREAD__)
#include <unordered_map>
#include <vector>

#include <sanitizer/tsan_interface.h>
// Exported by the runtime, declared by none of its headers.
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// ep_switch_stack(void** save, void* load): pushes the callee-saved registers, stores the stack
// pointer to *save, takes `load` as the new one and pops in reverse.
extern "C" void ep_switch_stack(void** save, void* load);

#if defined(__x86_64__)
__asm__(
    ".text\n"
    ".globl ep_switch_stack\n"
    ".hidden ep_switch_stack\n"
    ".type ep_switch_stack,@function\n"
    "ep_switch_stack:\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n"
    ".size ep_switch_stack,.-ep_switch_stack\n");
static constexpr size_t kFrameWords = 7;
static constexpr size_t kReturnWord = 6;
#elif defined(__aarch64__)
__asm__(
    ".text\n"
    ".globl ep_switch_stack\n"
    ".hidden ep_switch_stack\n"
    ".type ep_switch_stack,%function\n"
    "ep_switch_stack:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".size ep_switch_stack,.-ep_switch_stack\n");
static constexpr size_t kFrameWords = 20;
static constexpr size_t kReturnWord = 11;  // x30
#else
#error "the host target has no fiber switch for this processor: x86-64 and aarch64 are supported"
#endif

namespace ep::host {
namespace {

constexpr size_t kGuardBytes = 64 * 1024;  // also valid where pages are 64 KiB

// Guard regions of all pools, for the fault handler, which may not lock or allocate.
struct GuardedRange {
    std::atomic<std::byte*> begin{nullptr};
    std::atomic<size_t> count{0};
};
constexpr size_t kMaxRanges = 256;
GuardedRange guarded_ranges[kMaxRanges];
std::atomic<DescribeFiber> describe_fiber{nullptr};
struct sigaction previous_action;

#if defined(__SANITIZE_THREAD__)
constinit thread_local FiberContext* running = nullptr;
#define EP_NOT_OBSERVED __attribute__((no_sanitize_thread))

// What ThreadSanitizer keeps of fibers that have ended, for those that the same thread makes later: it writes 1.5 MB for
// a new one, which takes longer than what it runs. All that an ended one has done happened before what its thread
// did afterwards, and so before what a new one does: to use it again orders nothing that was not ordered.
class EndedFibers {
  public:
    ~EndedFibers() {
        for (void* fiber : fibers_) __tsan_destroy_fiber(fiber);
    }

    // For a fiber that this thread has made ready in `context`.
    void* begin(const FiberContext& context) {
        if (fibers_.empty()) return __tsan_create_fiber(0);
        void* fiber = fibers_.back();
        fibers_.pop_back();
        void* caller = __tsan_get_current_fiber();
        __tsan_release(const_cast<FiberContext*>(&context));
        __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
        __tsan_acquire(const_cast<FiberContext*>(&context));
        __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
        return fiber;
    }

    void end(void* fiber) {
        // Its functions never return, so each use leaves some on the stack that reports are made from, which ends.
        if (++num_uses_[fiber] < kMostUses) {
            fibers_.push_back(fiber);
        } else {
            num_uses_.erase(fiber);
            __tsan_destroy_fiber(fiber);
        }
    }

  private:
    static constexpr int kMostUses = 200;

    std::vector<void*> fibers_;
    std::unordered_map<void*, int> num_uses_;
};
thread_local EndedFibers ended_fibers;
#else
#define EP_NOT_OBSERVED
#endif

constexpr size_t kStride = StackPool::kStackBytes + kGuardBytes;

void report_fault(int signal_number, siginfo_t* info, void* context) {
    auto* address = static_cast<std::byte*>(info->si_addr);
    for (const GuardedRange& range : guarded_ranges) {
        std::byte* begin = range.begin.load();
        if (begin == nullptr || address < begin || address >= begin + range.count * kStride)
            continue;
        if (static_cast<size_t>(address - begin) % kStride >= kGuardBytes) break;
        char text[160] = "deep_ep: stack overflow in a kernel on the host target: ";
        const size_t used = std::strlen(text);
        if (DescribeFiber describe = describe_fiber.load()) {
            describe(static_cast<size_t>(address - begin) / kStride,
                     text + used,
                     sizeof(text) - used - 1);
        }
        std::strcat(text, "\n");
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
        break;
    }
    // Not ours, or reported: whoever was there before decides.
    if (previous_action.sa_flags & SA_SIGINFO) {
        previous_action.sa_sigaction(signal_number, info, context);
    } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
        previous_action.sa_handler(signal_number);
    } else {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    }
}

}  // namespace

StackPool::~StackPool() {
    if (mapping_ == nullptr) return;
    for (GuardedRange& range : guarded_ranges) {
        if (range.begin.load() == mapping_) range.begin = nullptr;
    }
#if defined(__SANITIZE_ADDRESS__)
    // Fibers never return from their first functions, whose red zones the next mapping here would have.
    __asan_unpoison_memory_region(mapping_, count_ * kStride);
#endif
    munmap(mapping_, count_ * kStride);
}

void StackPool::reserve(size_t count, bool guarded) {
    if (count <= count_) return;
    this->~StackPool();
    mapping_ = nullptr;
    count_ = 0;
    void* mapping = mmap(nullptr,
                         count * kStride,
                         PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1,
                         0);
    if (mapping == MAP_FAILED) {
        throw std::runtime_error("host target: cannot map stacks for " + std::to_string(count) +
                                 " kernel threads; use a smaller launch shape");
    }
    auto* const begin = static_cast<std::byte*>(mapping);
    for (size_t i = 0; guarded && i < count; ++i) {
        if (mprotect(begin + i * kStride, kGuardBytes, PROT_NONE) == 0) continue;
        munmap(mapping, count * kStride);
        throw std::runtime_error("host target: cannot guard the stacks of " +
                                 std::to_string(count) +
                                 " kernel threads; use a smaller launch shape, or allow this "
                                 "process more mappings (sysctl vm.max_map_count)");
    }
    mapping_ = begin;
    count_ = count;
    if (!guarded) return;
    for (GuardedRange& range : guarded_ranges) {
        std::byte* expected = nullptr;
        if (range.begin.compare_exchange_strong(expected, mapping_)) {
            range.count = count;
            break;
        }
    }
}

std::byte* StackPool::stack_begin(size_t index) const {
    return mapping_ + index * kStride + kGuardBytes;
}

void prepare_fiber(FiberContext& context, std::byte* stack_begin, size_t color, void (*entry)()) {
    constexpr size_t kColors = 16;
    constexpr size_t kColorBytes = 256;
#if defined(__SANITIZE_ADDRESS__)
    // Abandoned fibers never left their functions, whose red zones are still marked.
    __asan_unpoison_memory_region(stack_begin, StackPool::kStackBytes);
#endif
    std::byte* top = stack_begin + StackPool::kStackBytes - (color % kColors) * kColorBytes;
    // The ABI wants the stack 16-byte aligned before a call, so 8 off at a function's first
    // instruction; on aarch64 the return address is in a register and the frame is a multiple of 16.
    auto* frame = reinterpret_cast<void**>(top) - kFrameWords;
    if (reinterpret_cast<uintptr_t>(frame + kFrameWords) % 16 == 0 && kFrameWords % 2 == 1)
        frame -= 1;
    std::memset(frame, 0, kFrameWords * sizeof(void*));
    frame[kReturnWord] = reinterpret_cast<void*>(entry);
    context.stack_pointer = frame;
    context.sanitizer.stack_bottom = stack_begin;
    context.sanitizer.stack_bytes = StackPool::kStackBytes;
#if defined(__SANITIZE_THREAD__)
    context.sanitizer.tsan_fiber = ended_fibers.begin(context);
#endif
}

void retire_fiber([[maybe_unused]] FiberContext& context) {
#if defined(__SANITIZE_THREAD__)
    void* fiber = context.sanitizer.tsan_fiber;
    if (fiber == nullptr) return;
    void* caller = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
    // An abandoned fiber has not come to the end of what it had begun.
    for (int& left = context.sanitizer.unobserved; left > 0; --left) __tsan_ignore_thread_end();
    __tsan_release(&context);
    __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
    __tsan_acquire(&context);
    ended_fibers.end(fiber);
    context.sanitizer.tsan_fiber = nullptr;
#endif
}

EP_NOT_OBSERVED void switch_fiber(FiberContext& from,
                                  FiberContext& to,
                                  [[maybe_unused]] bool final) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(final ? nullptr : &from.sanitizer.asan_fake_stack,
                                   to.sanitizer.stack_bottom,
                                   to.sanitizer.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    running = &to;
    __tsan_switch_to_fiber(to.sanitizer.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
    ep_switch_stack(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.sanitizer.asan_fake_stack, nullptr, nullptr);
#endif
}

void enter_fiber([[maybe_unused]] FiberContext& context) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

EP_NOT_OBSERVED void adopt_thread([[maybe_unused]] FiberContext& context) {
#if defined(__SANITIZE_THREAD__)
    context.sanitizer.tsan_fiber = __tsan_get_current_fiber();
    running = &context;
#endif
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    void* bottom = nullptr;
    pthread_attr_getstack(&attributes, &bottom, &context.sanitizer.stack_bytes);
    pthread_attr_destroy(&attributes);
    context.sanitizer.stack_bottom = bottom;
#endif
}

EP_NOT_OBSERVED void release_thread() {
#if defined(__SANITIZE_THREAD__)
    running = nullptr;
#endif
}

#if defined(__SANITIZE_THREAD__)

void order_memory(std::span<FiberContext* const> fibers) {
    void* caller = __tsan_get_current_fiber();
    const auto each = [&](auto action) {
        for (const FiberContext* fiber : fibers) {
            __tsan_switch_to_fiber(fiber->sanitizer.tsan_fiber, __tsan_switch_to_fiber_no_sync);
            action();
        }
        __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
    };
    // The first one's store forgets what others have released here before.
    std::atomic<int> meeting;
    bool is_first = true;
    each([&] {
        if (is_first) {
            meeting.store(0, std::memory_order_release);
        } else {
            meeting.fetch_add(1, std::memory_order_release);
        }
        is_first = false;
    });
    each([&] { (void)meeting.load(std::memory_order_acquire); });
}

EP_NOT_OBSERVED Unobserved::Unobserved() {
    if (running != nullptr) ++running->sanitizer.unobserved;
    __tsan_ignore_thread_begin();
}

EP_NOT_OBSERVED Unobserved::~Unobserved() {
    if (running != nullptr) --running->sanitizer.unobserved;
    __tsan_ignore_thread_end();
}

SanitizerThread::SanitizerThread() : tsan_fiber_(__tsan_create_fiber(0)) {}

SanitizerThread::~SanitizerThread() {
    take_back();
    __tsan_destroy_fiber(tsan_fiber_);
}

void SanitizerThread::hand_over() {
    __tsan_release(this);
    run([&] { __tsan_acquire(this); });
}

void SanitizerThread::take_back() {
    run([&] { __tsan_release(this); });
    __tsan_acquire(this);
}

void* SanitizerThread::enter() {
    void* caller = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_fiber_, __tsan_switch_to_fiber_no_sync);
    return caller;
}

void SanitizerThread::leave(void* caller) {
    __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
}

#else

void order_memory(std::span<FiberContext* const>) {}
SanitizerThread::SanitizerThread() = default;
SanitizerThread::~SanitizerThread() = default;
void SanitizerThread::hand_over() {}
void SanitizerThread::take_back() {}
void* SanitizerThread::enter() { return nullptr; }
void SanitizerThread::leave(void*) {}

#endif

void install_stack_overflow_report(DescribeFiber describe) {
    describe_fiber = describe;
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action = {};
        action.sa_sigaction = report_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &previous_action);
    });
}

}  // namespace ep::host
