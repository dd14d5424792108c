// The operations of one rank share its workspace, so they run one after another, whichever streams they are
// launched on. Nothing here waits on the host, and all of it may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "device/cuda/error.h"

namespace ep::cuda_target {

class LaunchOrder {
  public:
    LaunchOrder() {
        create(&launched_);
        create(&captured_);
    }
    ~LaunchOrder() {
        (void)cudaEventDestroy(launched_);
        (void)cudaEventDestroy(captured_);
    }
    LaunchOrder(const LaunchOrder&) = delete;
    LaunchOrder& operator=(const LaunchOrder&) = delete;

    // What follows on `stream` begins after the operation before it has ended. Launches within one capture
    // become edges of its graph; the first of them waits, at every replay, for what was launched outside of
    // any capture until then. A replay is ordered by the stream it is launched on, as for any kernel.
    void before(cudaStream_t stream) const {
        const unsigned long long capture = capture_of(stream);
        const bool is_first = capture != 0 && capture != capture_;
        wait(stream,
             capture == 0 || is_first ? launched_ : captured_,
             is_first ? cudaEventWaitExternal : 0);
    }

    // After the launch on `stream`.
    void after(cudaStream_t stream) {
        const unsigned long long capture = capture_of(stream);
        check(cudaEventRecord(capture == 0 ? launched_ : captured_, stream),
              "cudaEventRecord",
              "the end of an operation");
        if (capture != 0) capture_ = capture;
    }

  private:
    static void create(cudaEvent_t* event) {
        check(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
              "cudaEventCreateWithFlags",
              "the order of operations");
    }

    // 0: none; else a number that no other capture of the process has.
    static unsigned long long capture_of(cudaStream_t stream) {
        cudaStreamCaptureStatus status{};
        unsigned long long id = 0;
        check(cudaStreamGetCaptureInfo(stream, &status, &id),
              "cudaStreamGetCaptureInfo",
              "the stream of an operation");
        return status == cudaStreamCaptureStatusActive ? id : 0;
    }

    static void wait(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
        check(cudaStreamWaitEvent(stream, event, flags),
              "cudaStreamWaitEvent",
              "the operation before this one");
    }

    cudaEvent_t launched_ = nullptr;  // the newest operation outside of captures
    cudaEvent_t captured_ = nullptr;  // the newest one of capture_
    unsigned long long capture_ = 0;
};

}  // namespace ep::cuda_target
