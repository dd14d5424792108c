// The Python face of one target: ep::Runtime with named arguments, pointers as integers, no torch.
// setup.py compiles this file into deep_ep._cpu; cuda_module.cu includes it for the CUDA modules.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#if defined(EP_TARGET_HOST)
#include "runtime/host_pool.h"
#endif

#ifndef EP_MODULE_NAME
#define EP_MODULE_NAME _cpu
#endif

namespace py = pybind11;
using py::operator""_a;

namespace ep {
namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

using CounterPointers = std::tuple<uintptr_t, uintptr_t, uintptr_t, int>;

CounterView counter_view(const CounterPointers& pointers) {
    return {pointer<int64_t>(std::get<0>(pointers)),
            pointer<int64_t>(std::get<1>(pointers)),
            pointer<int64_t>(std::get<2>(pointers)),
            std::get<3>(pointers)};
}

Payload payload_of(bool use_fp8, bool round_scale, bool use_ue8m0) {
    if (!use_fp8) return Payload::kBf16;
    if (use_ue8m0) return Payload::kFp8Ue8m0;
    return round_scale ? Payload::kFp8PowerOfTwo : Payload::kFp8;
}

const char* operation_name(uint32_t operation) {
    switch (static_cast<Operation>(operation)) {
        case Operation::kDispatch:
            return "low_latency_dispatch";
        case Operation::kCombine:
            return "low_latency_combine";
        case Operation::kBarrier:
            return "barrier";
        case Operation::kClockOffset:
            return "measure_clock_offsets";
        case Operation::kNone:
            break;
    }
    return "none";
}

std::string format_name(const OpShape& shape) {
    if (static_cast<Operation>(shape.operation) == Operation::kCombine)
        return shape.message_format ? "logfmt" : "bf16";
    switch (static_cast<Payload>(shape.message_format)) {
        case Payload::kBf16:
            return "bf16";
        case Payload::kFp8:
            return "fp8";
        case Payload::kFp8PowerOfTwo:
            return "fp8 round_scale";
        case Payload::kFp8Ue8m0:
            return "fp8 use_ue8m0";
    }
    return "format " + std::to_string(shape.message_format);
}

py::dict shape_dict(const OpShape& shape) {
    py::dict result;
    result["operation"] = operation_name(shape.operation);
    result["num_max_dispatch_tokens_per_rank"] = shape.num_max_tokens;
    result["hidden"] = shape.hidden;
    result["num_experts"] = shape.num_experts;
    result["dtype"] = format_name(shape);
    return result;
}

py::object failure_dict(Runtime& runtime) {
    std::optional<Failure> failure;
    {
        py::gil_scoped_release release;
        failure = runtime.take_failure();
    }
    if (!failure) return py::none();
    static constexpr const char* kKinds[] = {"none", "timeout", "mismatch", "abandoned", "index"};
    py::dict result;
    result["kind"] = kKinds[static_cast<int>(failure->kind)];
    result["operation"] = operation_name(static_cast<uint32_t>(failure->operation));
    result["op"] = failure->op;
    result["ranks"] = failure->ranks;
    py::dict last_op;
    for (size_t i = 0; i < failure->ranks.size(); ++i)
        last_op[py::int_(failure->ranks[i])] = failure->last_op[i];
    result["last_op"] = last_op;
    result["expected"] = shape_dict(failure->expected);
    result["seen"] = shape_dict(failure->seen);
    result["waited_ns"] = failure->waited_ns;
    return result;
}

#if defined(EP_TARGET_HOST)
// torch.frombuffer() keeps the object alive as long as any tensor uses its memory.
void bind_host_pool(py::module_& m) {
    py::class_<HostPool::Block>(m, "Block", py::buffer_protocol(), py::module_local())
        .def_buffer([](HostPool::Block& block) {
            return py::buffer_info(static_cast<uint8_t*>(block.memory()),
                                   static_cast<py::ssize_t>(block.bytes()));
        });
    py::class_<HostPool, std::shared_ptr<HostPool>>(
        m, "HostPool", py::module_local(), "Reuses the memory of freed output tensors.")
        .def(py::init([] { return std::make_shared<HostPool>(); }))
        .def("take",
             &HostPool::take,
             "num_bytes"_a,
             "At least this many bytes, uninitialised, through the buffer protocol.");
}

// Ctrl-C ends a wait for a missing rank; without this it would be heard after the timeout.
void allow_interrupts(Runtime& runtime) {
    runtime.device().set_interrupt_check([] {
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
}
#else
void bind_host_pool(py::module_&) {}
void allow_interrupts(Runtime&) {}
#endif

}  // namespace
}  // namespace ep

PYBIND11_MODULE(EP_MODULE_NAME, m) {
    using namespace ep;
    using Release = py::call_guard<py::gil_scoped_release>;
#if defined(EP_TARGET_HOST) && defined(__x86_64__) && defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        throw py::import_error(
            "this build of deep_ep._cpu needs a processor with AVX2 and FMA; rebuild with "
            "DEEP_EP_CPU_ARCH=x86-64");
    }
#endif
    m.doc() = "Kernels and transport of deep_ep, one target";

    m.attr("COUNTER_FIELDS") = std::vector<std::string>{
#define EP_SOURCE_COUNTER(name) #name,
#include "kernels/counters.def"
    };
    m.attr("OWN_FIELDS") = std::vector<std::string>{
#define EP_OWN_COUNTER(name) #name,
#include "kernels/counters.def"
    };
    m.attr("RING_SOURCE_FIELDS") = std::vector<std::string>{
#define EP_RING_SOURCE(name) #name,
#include "kernels/counters.def"
    };
    m.attr("RING_OWN_FIELDS") = std::vector<std::string>{
#define EP_RING_OWN(name) #name,
#include "kernels/counters.def"
    };
    m.attr("PHASE_SEND") = static_cast<int>(kPhaseSend);
    m.attr("PHASE_RECEIVE") = static_cast<int>(kPhaseReceive);
    m.attr("MAX_EXPERTS") = kMaxExperts;
    m.attr("MAX_TOPK") = kMaxTopk;
    m.attr("MAX_TOKENS") = kMaxTokens - 1;
    m.def("device_count", &Device::count);
    m.def(
        "low_latency_rdma_size_hint",
        [](int num_max_dispatch_tokens_per_rank, int num_ranks, int hidden, int num_experts) {
            return Runtime::low_latency_bytes(
                {num_max_dispatch_tokens_per_rank, hidden, num_experts}, num_ranks);
        },
        py::kw_only(),
        "num_max_dispatch_tokens_per_rank"_a,
        "num_ranks"_a,
        "hidden"_a,
        "num_experts"_a);

    bind_host_pool(m);

    // Local to this module: the CUDA modules have classes of the same names.
    py::class_<Runtime>(m, "Runtime", py::module_local())
        .def(py::init([](int rank,
                         int num_ranks,
                         size_t num_nvl_bytes,
                         size_t num_rdma_bytes,
                         bool low_latency_mode,
                         int num_qps_per_rank,
                         uint64_t timeout_ns,
                         int ranks_per_node,
                         int device_index,
                         bool allow_nvlink,
                         const std::string& clock,
                         uint64_t clock_interval_ns) {
                 auto runtime = std::make_unique<Runtime>(RuntimeOptions{rank,
                                                                         num_ranks,
                                                                         num_nvl_bytes,
                                                                         num_rdma_bytes,
                                                                         low_latency_mode,
                                                                         num_qps_per_rank,
                                                                         timeout_ns,
                                                                         ranks_per_node,
                                                                         device_index,
                                                                         allow_nvlink,
                                                                         clock,
                                                                         clock_interval_ns});
                 allow_interrupts(*runtime);
                 return runtime;
             }),
             py::kw_only(),
             "rank"_a,
             "num_ranks"_a,
             "num_nvl_bytes"_a,
             "num_rdma_bytes"_a,
             "low_latency_mode"_a,
             "num_qps_per_rank"_a,
             "timeout_ns"_a,
             "ranks_per_node"_a,
             "device_index"_a,
             "allow_nvlink"_a = true,
             "clock"_a = "rank",
             "clock_interval_ns"_a = 0)
        .def("local_handle", [](const Runtime& self) { return py::bytes(self.local_handle()); })
        .def("connect", &Runtime::connect, "handles"_a, Release())
        .def("release_handle", &Runtime::release_handle, Release())
        .def("close", &Runtime::close, Release())
        .def(
            "local_buffer",
            [](const Runtime& self, bool use_rdma) {
                const auto [begin, bytes] = self.local_buffer(use_rdma);
                return std::pair(reinterpret_cast<uintptr_t>(begin), bytes);
            },
            "use_rdma"_a)
        .def("operation", &Runtime::operation, Release())
        .def(
            "low_latency_dispatch",
            [](Runtime& self,
               uintptr_t x,
               int num_tokens,
               int hidden,
               uintptr_t topk_idx,
               int num_topk,
               int num_max_dispatch_tokens_per_rank,
               int num_experts,
               bool use_fp8,
               bool round_scale,
               bool use_ue8m0,
               uintptr_t recv_x,
               uintptr_t recv_scales,
               uintptr_t recv_count,
               uintptr_t src_info,
               uintptr_t layout_range,
               uintptr_t cumulative_local_expert_recv_stats,
               uintptr_t wait_stats,
               const CounterPointers& counters,
               int phases,
               Stream stream) {
                DispatchCall call;
                call.size = {num_max_dispatch_tokens_per_rank, hidden, num_experts};
                call.x = pointer<const void>(x);
                call.num_tokens = num_tokens;
                call.topk_idx = pointer<const int64_t>(topk_idx);
                call.num_topk = num_topk;
                call.payload = payload_of(use_fp8, round_scale, use_ue8m0);
                call.recv_x = pointer<void>(recv_x);
                call.recv_scales = pointer<void>(recv_scales);
                call.recv_count = pointer<int32_t>(recv_count);
                call.src_info = pointer<int32_t>(src_info);
                call.layout_range = pointer<int64_t>(layout_range);
                call.expert_stats = pointer<int32_t>(cumulative_local_expert_recv_stats);
                call.wait_stats = pointer<int64_t>(wait_stats);
                call.counters = counter_view(counters);
                call.phases = phases;
                call.stream = stream;
                self.low_latency_dispatch(call);
            },
            py::kw_only(),
            "x"_a,
            "num_tokens"_a,
            "hidden"_a,
            "topk_idx"_a,
            "num_topk"_a,
            "num_max_dispatch_tokens_per_rank"_a,
            "num_experts"_a,
            "use_fp8"_a,
            "round_scale"_a,
            "use_ue8m0"_a,
            "recv_x"_a,
            "recv_scales"_a,
            "recv_count"_a,
            "src_info"_a,
            "layout_range"_a,
            "cumulative_local_expert_recv_stats"_a,
            "wait_stats"_a,
            "counters"_a,
            "phases"_a,
            "stream"_a,
            Release())
        .def(
            "low_latency_combine",
            [](Runtime& self,
               uintptr_t x,
               uintptr_t topk_idx,
               uintptr_t topk_weights,
               uintptr_t src_info,
               uintptr_t layout_range,
               uintptr_t out,
               int num_tokens,
               int hidden,
               int num_topk,
               int num_max_dispatch_tokens_per_rank,
               int num_experts,
               bool use_logfmt,
               bool zero_copy,
               uintptr_t wait_stats,
               const CounterPointers& counters,
               int phases,
               Stream stream) {
                CombineCall call;
                call.size = {num_max_dispatch_tokens_per_rank, hidden, num_experts};
                call.x = pointer<const void>(x);
                call.num_tokens = num_tokens;
                call.topk_idx = pointer<const int64_t>(topk_idx);
                call.topk_weights = pointer<const float>(topk_weights);
                call.num_topk = num_topk;
                call.src_info = pointer<const int32_t>(src_info);
                call.layout_range = pointer<const int64_t>(layout_range);
                call.out = pointer<void>(out);
                call.use_logfmt = use_logfmt;
                call.zero_copy = zero_copy;
                call.wait_stats = pointer<int64_t>(wait_stats);
                call.counters = counter_view(counters);
                call.phases = phases;
                call.stream = stream;
                self.low_latency_combine(call);
            },
            py::kw_only(),
            "x"_a,
            "topk_idx"_a,
            "topk_weights"_a,
            "src_info"_a,
            "layout_range"_a,
            "out"_a,
            "num_tokens"_a,
            "hidden"_a,
            "num_topk"_a,
            "num_max_dispatch_tokens_per_rank"_a,
            "num_experts"_a,
            "use_logfmt"_a,
            "zero_copy"_a,
            "wait_stats"_a,
            "counters"_a,
            "phases"_a,
            "stream"_a,
            Release())
        .def(
            "next_combine_buffer",
            [](const Runtime& self,
               int num_max_dispatch_tokens_per_rank,
               int hidden,
               int num_experts) {
                const auto [first, stride] = self.next_combine_buffer(
                    {num_max_dispatch_tokens_per_rank, hidden, num_experts});
                return std::pair(reinterpret_cast<uintptr_t>(first), stride);
            },
            py::kw_only(),
            "num_max_dispatch_tokens_per_rank"_a,
            "hidden"_a,
            "num_experts"_a)
        .def("clean_low_latency_buffer",
             &Runtime::barrier,
             py::kw_only(),
             "stream"_a = 0,
             Release(),
             "Nothing needs cleaning, since every word carries its operation's number; ranks meet "
             "as they would.")
        .def("barrier", &Runtime::barrier, py::kw_only(), "stream"_a = 0, Release())
        .def("measure_clock_offsets",
             &Runtime::measure_clock_offsets,
             py::kw_only(),
             "samples"_a = 16,
             "stream"_a = 0,
             Release())
        .def(
            "dispatch_layout",
            [](Runtime& self,
               uintptr_t topk_idx,
               int num_tokens,
               int num_topk,
               int num_experts,
               int num_ranks,
               int ranks_per_node,
               uintptr_t num_tokens_per_rank,
               uintptr_t num_tokens_per_rdma_rank,
               uintptr_t num_tokens_per_expert,
               uintptr_t is_token_in_rank,
               Stream stream) {
                self.dispatch_layout({pointer<const int64_t>(topk_idx),
                                      num_tokens,
                                      num_topk,
                                      num_experts,
                                      num_ranks,
                                      ranks_per_node,
                                      pointer<int32_t>(num_tokens_per_rank),
                                      pointer<int32_t>(num_tokens_per_rdma_rank),
                                      pointer<int32_t>(num_tokens_per_expert),
                                      pointer<bool>(is_token_in_rank)},
                                     stream);
            },
            py::kw_only(),
            "topk_idx"_a,
            "num_tokens"_a,
            "num_topk"_a,
            "num_experts"_a,
            "num_ranks"_a,
            "ranks_per_node"_a,
            "num_tokens_per_rank"_a,
            "num_tokens_per_rdma_rank"_a,
            "num_tokens_per_expert"_a,
            "is_token_in_rank"_a,
            "stream"_a,
            Release())
        .def("take_failure", &failure_dict)
        .def(
            "delay", [](Runtime& self, uint64_t ns) { self.device().delay(ns); }, "ns"_a, Release())
        .def(
            "set_path_fault",
            [](Runtime& self, int dst, uint64_t delay_ns, double bytes_per_s) {
                self.memory().set_path_fault(dst, delay_ns, bytes_per_s);
            },
            py::kw_only(),
            "dst"_a,
            "delay_ns"_a,
            "bytes_per_s"_a)
        .def(
            "set_clock_fault",
            [](Runtime& self, int64_t offset_ns, double drift_ppm) {
                self.device().set_clock_fault(offset_ns, drift_ppm);
            },
            py::kw_only(),
            "offset_ns"_a,
            "drift_ppm"_a)
        .def(
            "set_schedule",
            [](Runtime& self, const std::string& kind, uint64_t seed) {
                self.device().set_schedule(kind, seed);
            },
            py::kw_only(),
            "kind"_a,
            "seed"_a)
        .def(
            "set_delivery",
            [](Runtime& self, const std::string& kind, uint64_t seed) {
                self.memory().set_delivery(kind, seed);
            },
            py::kw_only(),
            "kind"_a,
            "seed"_a)
        .def("set_launch_shape", &Runtime::set_launch_shape, py::kw_only(), "blocks"_a, "warps"_a)
        .def("now_ns", [](Runtime& self) { return self.device().now_ns(); }, Release());
}
