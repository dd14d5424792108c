#include <pybind11/stl.h>

#include <iterator>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/names.h"
#include "device/launch_shape.h"
#include "kernels/normal/state.cuh"

namespace ep {
namespace {

template <class Names>
std::vector<std::string> list(const Names& names) {
    return {std::begin(names), std::end(names)};
}

}  // namespace

void bind_constants(pybind11::module_& m) {
    m.attr("COUNTER_FIELDS") = std::vector<std::string>{
#define EP_SOURCE_COUNTER(name) #name,
#include "kernels/protocol/counters.def"
    };
    m.attr("OWN_FIELDS") = std::vector<std::string>{
#define EP_OWN_COUNTER(name) #name,
#include "kernels/protocol/counters.def"
    };
    m.attr("RING_SOURCE_FIELDS") = std::vector<std::string>{
#define EP_RING_SOURCE(name) #name,
#include "kernels/protocol/counters.def"
    };
    m.attr("RING_OWN_FIELDS") = std::vector<std::string>{
#define EP_RING_OWN(name) #name,
#include "kernels/protocol/counters.def"
    };
    m.attr("NUM_RING_FIELDS") = kNumRingFields;
    m.attr("OPERATIONS") = list(kOperationNames);
    m.attr("FAILURE_REASONS") = list(kFailureReasonNames);
    m.attr("HANDLE_FAULTS") = list(kHandleFaultNames);
    m.attr("PHASE_SEND") = static_cast<int>(kPhaseSend);
    m.attr("PHASE_RECEIVE") = static_cast<int>(kPhaseReceive);
    m.attr("MAX_EXPERTS") = kMaxExperts;
    m.attr("MAX_TOPK") = kMaxTopk;
    m.attr("MAX_CHANNELS") = kMaxChannels;
    m.attr("MAX_NORMAL_TOPK") = kMaxNormalTopk;
    m.attr("MAX_NORMAL_SCALES") = kMaxNormalScales;
    m.attr("MAX_RANKS_PER_NODE") = kMaxRanksPerNode;
    m.attr("MAX_TOKENS") = kMaxTokens - 1;
    m.attr("MAX_HOST_THREADS") = kMaxHostThreads;
    m.attr("CHANNELS_PER_SCALE") = kChannelsPerScale;
    m.attr("LOGFMT_GROUP") = kLogGroup;
    m.attr("BUFFER_ALIGNMENT") = kBufferAlignment;
#if defined(EP_TARGET_CUDA)
    m.attr("MAX_WARPS") = kMaxThreads / kWarpSize;  // of a block
    m.attr("CUDA_MAJOR") = CUDART_VERSION / 1000;
#endif
#if defined(EP_NVSHMEM_VERSION)
    // What deep_ep._cuda_nvshmem is built with, known before it is loaded; see deep_ep/native/nvshmem.py.
    m.attr("NVSHMEM_VERSION") = EP_NVSHMEM_VERSION;
    m.attr("NVSHMEM_LIBRARY") = EP_NVSHMEM_LIBRARY;
#endif
}

}  // namespace ep
