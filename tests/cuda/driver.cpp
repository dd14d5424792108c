#include "driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "nvshmem.h"

extern char** environ;

// Streams and events know which launches have ended when they get there.
struct CUstream_st {
    std::set<size_t> seen;
    unsigned long long capture = 0;
};
struct CUevent_st {
    std::set<size_t> seen;
    unsigned long long capture = 0;  // in which it was recorded
    bool is_recorded = false;
};

namespace ep::driver {
namespace {

CUstream_st default_stream;
std::set<unsigned long long> open_captures;
unsigned long long num_captures = 0;
int current_device = 0;

CUstream_st& get(cudaStream_t stream) { return stream == nullptr ? default_stream : *stream; }

// A benchmark makes more calls than can be kept.
#if defined(EP_FORGETFUL_DRIVER)
constexpr bool kRemembers = false;
#else
constexpr bool kRemembers = true;
#endif

cudaError_t record(const std::string& call) {
    if (!kRemembers) return cudaSuccess;
    calls().push_back(call);
    const auto found = machine().failing.find(call);
    return found == machine().failing.end() ? cudaSuccess : found->second;
}

// Dynamic shared memory of a block that a kernel may have; only those that have asked are listed.
std::map<const void*, size_t> shared_memory_asked_for;

bool has_shared_memory(const void* kernel, size_t bytes) {
    constexpr size_t kWithoutAsking = 48 * 1024;
    const auto asked = shared_memory_asked_for.find(kernel);
    return bytes <= (asked == shared_memory_asked_for.end() ? kWithoutAsking : asked->second);
}

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// A call that may allocate or wait: forbidden while anybody captures in global mode, to threads that are not in
// relaxed mode.
cudaError_t unsafe(const std::string& call) {
    if (const cudaError_t status = record(call); status != cudaSuccess) return status;
    if (open_captures.empty() || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    illegal().push_back(call);
    return cudaErrorStreamCaptureUnsupported;
}

std::map<const std::byte*, size_t> pinned;  // begin, bytes

bool is_pinned(const void* memory, size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(memory);
    auto next = pinned.upper_bound(begin);
    if (next == pinned.begin()) return false;
    const auto [first, length] = *--next;
    return begin + bytes <= first + length;
}

cudaError_t refuse(const std::string& call, cudaError_t error) {
    illegal().push_back(call);
    return error;
}

std::map<std::string, std::string> environment;
bool has_read_environment = false;

void nvshmem(const std::string& call) {
    calls().push_back(call);
    if (std::exchange(has_read_environment, true)) return;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string text = *entry;
        if (text.rfind("NVSHMEM_", 0) != 0) continue;
        const size_t equals = text.find('=');
        environment[text.substr(0, equals)] = text.substr(equals + 1);
    }
}

}  // namespace

std::vector<std::string>& calls() {
    static std::vector<std::string> all;
    return all;
}
int count(const std::string& call) {
    return static_cast<int>(std::count(calls().begin(), calls().end(), call));
}
std::vector<Launch>& launches() {
    static std::vector<Launch> all;
    return all;
}
bool ordered(size_t earlier, size_t later) {
    const auto& after = launches().at(later).after;
    return std::find(after.begin(), after.end(), earlier) != after.end();
}
std::vector<std::string>& illegal() {
    static std::vector<std::string> all;
    return all;
}
Machine& machine() {
    static Machine one;
    return one;
}
const std::map<std::string, std::string>& nvshmem_environment() { return environment; }

cudaStream_t new_stream() { return new CUstream_st; }
void begin_capture(cudaStream_t stream) {
    get(stream).capture = ++num_captures;
    open_captures.insert(num_captures);
}
void join_capture(cudaStream_t stream, cudaStream_t captured) {
    get(stream).capture = get(captured).capture;
}
void end_capture(cudaStream_t stream) {
    open_captures.erase(get(stream).capture);
    get(stream).capture = 0;
}

}  // namespace ep::driver

using namespace ep::driver;

// ---- errors and devices

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorInsufficientDriver:
            return "cudaErrorInsufficientDriver";
        case cudaErrorNotPermitted:
            return "cudaErrorNotPermitted";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorDevicesUnavailable:
            return "cudaErrorDevicesUnavailable";
        default:
            return "cudaErrorOfTheStandIn";
    }
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorInsufficientDriver:
            return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorNotPermitted:
            return "operation not permitted";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorDevicesUnavailable:
            return "CUDA-capable device(s) is/are busy or unavailable";
        default:
            return "an error of the stand-in";
    }
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
    *count = machine().devices;
    return record("cudaGetDeviceCount");
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = machine().driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = machine().runtime_version;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? machine().multiprocessors
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin
                 ? machine().most_shared_bytes
                 : cudaGPUDirectRDMAWritesOrderingAllDevices;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    std::memset(properties, 0, sizeof(*properties));
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return unsafe("cudaDeviceSynchronize"); }
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
    *possible = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

// ---- memory: the host's, so that what is written can be read

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    const cudaError_t status = unsafe("cudaMalloc");
    if (status == cudaSuccess) *memory = std::calloc(1, bytes);
    return status;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return unsafe("cudaFree");
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
    const cudaError_t status = unsafe("cudaHostAlloc");
    if (status != cudaSuccess) return status;
    *memory = std::calloc(1, bytes);
    pinned[static_cast<const std::byte*>(*memory)] = bytes;
    return status;
}
cudaError_t cudaFreeHost(void* memory) {
    pinned.erase(static_cast<const std::byte*>(memory));
    std::free(memory);
    return unsafe("cudaFreeHost");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return unsafe("cudaMemcpy");
}
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    std::memcpy(to, from, bytes);
    const bool is_pinned_host = is_pinned(kind == cudaMemcpyHostToDevice ? from : to, bytes);
    return unsafe(is_pinned_host ? "cudaMemcpyAsync" : "cudaMemcpyAsync, not pinned");
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    std::memset(memory, value, bytes);
    return unsafe("cudaMemset");
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return record("cudaMemsetAsync");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
    return record("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned) {
    *memory = nullptr;
    return record("cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void*) { return record("cudaIpcCloseMemHandle"); }

// ---- streams and events

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new CUstream_st;
    return record("cudaStreamCreateWithFlags");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return record("cudaStreamDestroy");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const cudaError_t status = unsafe("cudaStreamSynchronize");
    if (status != cudaSuccess || get(stream).capture == 0) return status;
    return refuse("cudaStreamSynchronize", cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
    *id = get(stream).capture;
    *status = *id == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, capture_mode);
    return record("cudaThreadExchangeStreamCaptureMode");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return unsafe("cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return record("cudaEventDestroy");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->seen = get(stream).seen;
    event->capture = get(stream).capture;
    event->is_recorded = true;
    return record("cudaEventRecord");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    CUstream_st& waiting = get(stream);
    const bool external = (flags & cudaEventWaitExternal) != 0;
    const cudaError_t status =
        record(external ? "cudaStreamWaitEvent external" : "cudaStreamWaitEvent");
    if (status != cudaSuccess) return status;
    if (external && waiting.capture == 0)
        return refuse("cudaStreamWaitEvent external outside of a capture", cudaErrorInvalidValue);
    if (!event->is_recorded) return cudaSuccess;
    if (external) {
        if (event->capture != 0)
            return refuse("cudaStreamWaitEvent external for a captured event",
                          cudaErrorCapturedEvent);
    } else if (waiting.capture != 0 && event->capture != waiting.capture) {
        return refuse("cudaStreamWaitEvent across captures", cudaErrorStreamCaptureIsolation);
    } else if (waiting.capture == 0 && event->capture != 0) {
        // It would draw the stream into the capture, which its owner does not know of.
        return refuse("cudaStreamWaitEvent for a captured event", cudaErrorCapturedEvent);
    }
    waiting.seen.insert(event->seen.begin(), event->seen.end());
    return cudaSuccess;
}

// ---- launches

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
    return record("cudaFuncGetAttributes");
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
        return record("cudaFuncSetAttribute, division " + std::to_string(value));
    if (value > machine().most_shared_bytes) return cudaErrorInvalidValue;
    shared_memory_asked_for[kernel] = static_cast<size_t>(value);
    return record("cudaFuncSetAttribute");
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                          const void* kernel,
                                                          int,
                                                          size_t shared_bytes) {
    const bool fits = has_shared_memory(kernel, shared_bytes);
    *blocks = fits ? machine().blocks_per_multiprocessor : 0;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                const void* kernel,
                                void** arguments) {
    if (const cudaError_t status = record("cudaLaunchKernelExC"); status != cudaSuccess)
        return status;
    if (!has_shared_memory(kernel, config->dynamicSmemBytes)) return cudaErrorInvalidValue;
    if (!kRemembers) return cudaSuccess;
    CUstream_st& stream = get(config->stream);
    if (config->stream == nullptr && !open_captures.empty())
        return refuse("a launch on the default stream while another one is captured",
                      cudaErrorStreamCaptureImplicit);
    const auto* argument = static_cast<const std::byte*>(arguments[0]);
    launches().push_back({kernel,
                          config->stream,
                          config->gridDim.x,
                          config->numAttrs != 0,
                          {stream.seen.begin(), stream.seen.end()},
                          stream.capture,
                          {argument, argument + machine().argument_bytes}});
    stream.seen.insert(launches().size() - 1);
    return cudaSuccess;
}

// ---- NVSHMEM

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t*) {
    nvshmem("nvshmemx_get_uniqueid");
    return 0;
}
int nvshmemx_set_attr_uniqueid_args(int, int, const nvshmemx_uniqueid_t*, nvshmemx_init_attr_t*) {
    nvshmem("nvshmemx_set_attr_uniqueid_args");
    return 0;
}
int nvshmemx_init_attr(unsigned, nvshmemx_init_attr_t*) {
    nvshmem("nvshmemx_init_attr");
    return 0;
}
int nvshmemx_init_status() { return machine().nvshmem_status; }
int nvshmemx_qp_create(int count, nvshmemx_qp_handle_t** handles) {
    nvshmem("nvshmemx_qp_create");
    if (!machine().has_queue_pairs) return 1;
    *handles = static_cast<nvshmemx_qp_handle_t*>(std::calloc(count, sizeof(**handles)));
    const int32_t next = machine().is_first_handle_alone ? 100 : machine().first_handle;
    for (int i = 0; i < count; ++i) (*handles)[i] = i == 0 ? machine().first_handle : next + i;
    return 0;
}
void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    *major = 3;
    *minor = 8;
    *patch = 0;
}
void* nvshmem_align(size_t alignment, size_t bytes) {
    nvshmem("nvshmem_align");
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void nvshmem_barrier_all() { nvshmem("nvshmem_barrier_all"); }
void* nvshmem_ptr(const void* memory, int rank) {
    nvshmem("nvshmem_ptr");
    const auto& reachable = machine().reachable;
    return rank < static_cast<int>(reachable.size()) && reachable[rank] ? const_cast<void*>(memory)
                                                                        : nullptr;
}
