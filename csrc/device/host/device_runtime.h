// The device of the host target: an executor on the calling thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "device/host/executor.h"

namespace ep {

using Stream = uintptr_t;  // unused here: a launch has ended when launch() returns

class Device {
  public:
    static constexpr bool kIsHost = true;
#if defined(EP_TIME_MODEL)
    // Launches are those of an H100, an H200 or an H800.
    static constexpr bool kHasGpuShapes = true;
    int num_multiprocessors() const { return 132; }
#else
    static constexpr bool kHasGpuShapes = false;
    int num_multiprocessors() const { return 1; }
#endif

    // device_index: only the GPU has several. clock: "rank" or "wall", see rank_clock.h.
    Device(int /*device_index*/, const std::string& clock)
        : executor_(clock == "wall" ? host::ClockMode::kWall : host::ClockMode::kRank) {}

    static int count() { return 1; }

    // Zeroed memory for kernels.
    void* allocate(size_t bytes) {
        void* memory = std::calloc(1, bytes);
        if (memory == nullptr) throw std::bad_alloc();
        return memory;
    }
    // Zeroed memory that kernels write and the host reads while they run.
    void* allocate_host_visible(size_t bytes) { return allocate(bytes); }
    void release(void* memory) { std::free(memory); }
    void release_host_visible(void* memory) { std::free(memory); }
    // Copies after everything enqueued on `stream` has ended.
    template <class T>
    T read(const T* source, Stream /*stream*/) const {
        return *source;
    }

    // Copies what is there now, without waiting for kernels that may still run.
    template <class T>
    T peek(const T* source) const {
        return std::atomic_ref(*const_cast<T*>(source)).load(std::memory_order_acquire);
    }

    // Writes what kernels that run may be reading.
    template <class T>
    void poke(T* destination, T value) const {
        std::atomic_ref(*destination).store(value, std::memory_order_release);
    }

    // The GPU loads kernels before their first launch; here they are loaded with the module.
    template <class... Kernels>
    void prepare(Kernels...) const {}

    // kernel(args) on every thread of the shape. Throws host::DeviceError when the kernel is wrong.
    template <class Args>
    void launch(const char* name,
                void (*kernel)(Args),
                const LaunchShape& shape,
                const Args& args,
                Stream /*stream*/) {
        struct Call {
            void (*kernel)(Args);
            const Args& args;
        } call{kernel, args};
        if (stopped_) {
            throw std::runtime_error(
                "an earlier operation was interrupted half way; build a new Buffer on all ranks");
        }
        executor_.clock().enter_operation();
        try {
            executor_.run(
                shape,
                [](void* argument) {
                    const auto* call = static_cast<const Call*>(argument);
                    call->kernel(call->args);
                },
                &call);
        } catch (...) {
            stopped_ = true;
            executor_.clock().leave_operation();
            throw;
        }
        executor_.note_launch(name);
        if (after_launch_) after_launch_();
        executor_.clock().leave_operation();
    }

    // The same for an operation. Here the one before has ended; what else its stream has to do takes time.
    template <class Args>
    void launch_operation(const char* name,
                          void (*kernel)(Args),
                          const LaunchShape& shape,
                          const Args& args,
                          Stream stream) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::exchange(blocked_ns_, 0)));
        launch(name, kernel, shape, args, stream);
    }

    host::Executor& executor() { return executor_; }
    void set_interrupt_check(std::function<void()> check) {
        executor_.set_interrupt_check(std::move(check));
    }
    void set_after_launch(std::function<void()> action) { after_launch_ = std::move(action); }

    uint64_t now_ns() { return executor_.clock().now_ns(); }
    void write_clock(uint64_t* where, Stream) { *where = now_ns(); }
    void delay(uint64_t ns) { executor_.clock().delay(ns); }
    // The kernel of the next operation enters so much later than it is called, in real time.
    void block_stream(uint64_t ns) { blocked_ns_ = ns; }
    void set_clock_fault(int64_t offset_ns, double drift_ppm) {
        executor_.clock().set_fault(offset_ns, drift_ppm);
    }
    void set_schedule(const std::string& policy, uint64_t seed) {
        executor_.set_schedule(policy == "random" ? host::make_random_schedule(seed)
                                                  : host::make_round_robin_schedule());
    }

  private:
    host::Executor executor_;
    bool stopped_ = false;  // a launch did not reach its end, so memory is not as kernels leave it
    std::function<void()> after_launch_;
    uint64_t blocked_ns_ = 0;
};

}  // namespace ep
