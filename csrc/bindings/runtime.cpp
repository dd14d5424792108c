#include "runtime/runtime.h"

#include <pybind11/stl.h>

#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/keywords.h"
#include "bindings/records.h"

namespace py = pybind11;
using py::operator""_a;

namespace ep {
namespace {

// A fork has the memory of the process that built the runtime, but neither its threads, which may
// hold a lock, nor its CUDA context. What it has is left as it is until it ends.
class DeleteInOwnProcess {
  public:
    void operator()(Runtime* runtime) const {
        if (getpid() == process_) delete runtime;
    }

  private:
    pid_t process_ = getpid();
};
using RuntimeHolder = std::unique_ptr<Runtime, DeleteInOwnProcess>;

#if defined(EP_TARGET_HOST)
// Ctrl-C ends a wait for a missing rank; without this it would be heard after the timeout.
void allow_interrupts(Runtime& runtime) {
    runtime.device().set_interrupt_check([] {
        const AcquireGil gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
}
#else
void allow_interrupts(Runtime&) {}
#endif

constexpr std::tuple kOptions{
#define EP_OPTION(...) EP_KEYWORD(RuntimeOptions, __VA_ARGS__)
#include "runtime/options.def"
};
constexpr std::tuple kSize{
#define EP_SIZE(...) EP_KEYWORD(LowLatencySize, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kRouting{
#define EP_ROUTING(...) EP_KEYWORD(Routing, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kHandle{
#define EP_HANDLE(...) EP_KEYWORD(HandleTensors, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kOperation{
#define EP_OPERATION(...) EP_KEYWORD(OperationOptions, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kDispatch{
#define EP_DISPATCH(...) EP_KEYWORD(DispatchTensors, __VA_ARGS__)
#define EP_DISPATCH_FLAG(...) EP_KEYWORD(DispatchCall, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kCombine{
#define EP_COMBINE(...) EP_KEYWORD(CombineTensors, __VA_ARGS__)
#define EP_COMBINE_FLAG(...) EP_KEYWORD(CombineCall, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kLayout{
#define EP_LAYOUT(...) EP_KEYWORD(DispatchLayoutArgs, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kCopyRows{
#define EP_COPY_ROWS(...) EP_KEYWORD(CopyRowsTensors, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kSumRows{
#define EP_SUM_ROWS(...) EP_KEYWORD(SumRowsArgs, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kNormal{
#define EP_NORMAL_SIZE(...) EP_KEYWORD(NormalSize, __VA_ARGS__)
#define EP_NORMAL_HANDLE(...) EP_KEYWORD(NormalHandle, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kNotify{
#define EP_NOTIFY(...) EP_KEYWORD(NotifyTensors, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kNormalDispatch{
#define EP_NORMAL_DISPATCH(...) EP_KEYWORD(NormalDispatchTensors, __VA_ARGS__)
#define EP_NORMAL_FLAG(...) EP_KEYWORD(NormalDispatchFlags, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kNormalCombine{
#define EP_NORMAL_COMBINE(...) EP_KEYWORD(NormalCombineTensors, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
constexpr std::tuple kNormalOperation{
#define EP_NORMAL_OPERATION(...) EP_KEYWORD(NormalOperationOptions, __VA_ARGS__)
#define EP_STREAM(...) EP_KEYWORD(LaunchStream, __VA_ARGS__)
#include "kernels/protocol/calls.def"
};
// What a combine takes of its dispatch.
constexpr auto kRouted = std::tuple_cat(kSize, kRouting, kHandle);

RuntimeHolder make_runtime(const RuntimeOptions& options) {
    RuntimeHolder runtime(new Runtime(options));
    allow_interrupts(*runtime);
    return runtime;
}

}  // namespace

void bind_runtime(py::module_& m) {
    using Release = py::call_guard<ReleaseGil>;
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

    m.def(
        "normal_pack_bytes",
        [](int num_topk, int num_scales) {
            return NormalRow{0, num_topk, num_scales, false}.pack_bytes();
        },
        py::kw_only(),
        "num_topk"_a,
        "num_scales"_a);
    m.def(
        "normal_bytes",
        [](int num_ranks,
           int ranks_per_node,
           int num_channels,
           int row_bytes,
           int num_topk,
           int num_scales,
           int num_max_nvl_chunked_recv_tokens,
           int num_max_rdma_chunked_recv_tokens) {
            NormalSize size{};
            size.num_channels = num_channels;
            size.row_bytes = row_bytes;
            size.num_topk = num_topk;
            size.num_scales = num_scales;
            size.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens;
            size.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens;
            const NormalBytes bytes = Runtime::normal_bytes(size, {num_ranks, ranks_per_node});
            return std::pair(bytes.nvl, bytes.rdma);
        },
        py::kw_only(),
        "num_ranks"_a,
        "ranks_per_node"_a,
        "num_channels"_a,
        "row_bytes"_a,
        "num_topk"_a,
        "num_scales"_a,
        "num_max_nvl_chunked_recv_tokens"_a,
        "num_max_rdma_chunked_recv_tokens"_a);

    // Local to this module: the CUDA modules have classes of the same names.
    py::class_<Runtime, RuntimeHolder> runtime(m, "Runtime", py::module_local());
    with_keywords<RuntimeOptions>(kOptions, &make_runtime, [&](auto make, auto... names) {
        runtime.def(py::init(make), names...);
    });
    runtime.def("local_handle", [](const Runtime& self) { return py::bytes(self.local_handle()); })
        .def("connect", &Runtime::connect, "handles"_a, Release())
        .def("release_handle", &Runtime::release_handle, Release())
        .def("close", &Runtime::close, "keeps_memory"_a = false, Release())
        .def(
            "local_buffer",
            [](const Runtime& self, bool use_rdma) {
                const auto [begin, bytes] = self.local_buffer(use_rdma);
                return std::pair(reinterpret_cast<uintptr_t>(begin), bytes);
            },
            "use_rdma"_a)
        .def("operation", &Runtime::operation, Release())
        .def("entered_operation", &Runtime::entered_operation, Release())
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
        .def("take_failure", &failure_dict)
        .def("mark_gone", &Runtime::mark_gone, "rank"_a, "is_gone"_a = true, Release())
        .def("give_up", &Runtime::give_up, "op"_a, Release())
        .def("mark_out", &Runtime::mark_out, "rank"_a, "op"_a, Release())
        .def("update_mask",
             &Runtime::update_mask,
             py::kw_only(),
             "rank"_a,
             "masked"_a,
             "stream"_a = 0,
             Release())
        .def(
            "query_masks",
            [](Runtime& self, uintptr_t status, Stream stream) {
                self.query_masks(reinterpret_cast<int32_t*>(status), stream);
            },
            py::kw_only(),
            "status"_a,
            "stream"_a = 0,
            Release())
        .def("clean_masks", &Runtime::clean_masks, py::kw_only(), "stream"_a = 0, Release())
        .def("part", &Runtime::part, py::kw_only(), "stream"_a = 0, Release())
        .def("take_masked", &masked_list)
        .def("progress", &progress_dict)
        .def("num_calls", &Runtime::num_calls)
        .def("recorded_calls", &recorded_list, py::kw_only(), "most"_a)
        .def("waits", &waits_dict)
        .def("traffic", &traffic_dict)
        .def(
            "delay", [](Runtime& self, uint64_t ns) { self.device().delay(ns); }, "ns"_a, Release())
        .def(
            "block_stream",
            [](Runtime& self, uint64_t ns) { self.device().block_stream(ns); },
            "ns"_a)
        .def(
            "set_path_fault",
            [](Runtime& self, int dst, uint64_t delay_ns, double bytes_per_s) {
                self.memory().set_path_fault(dst, delay_ns, bytes_per_s);
            },
            py::kw_only(),
            "dst"_a,
            "delay_ns"_a,
            "bytes_per_s"_a)
        .def("set_receive_fault", &Runtime::set_receive_fault, py::kw_only(), "delay_ns"_a)
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
            [](Runtime& self, const std::string& policy, uint64_t seed) {
                self.device().set_schedule(policy, seed);
            },
            py::kw_only(),
            "policy"_a,
            "seed"_a)
        .def(
            "set_delivery",
            [](Runtime& self, const std::string& policy, uint64_t seed) {
                self.memory().set_delivery(policy, seed);
            },
            py::kw_only(),
            "policy"_a,
            "seed"_a)
        .def("set_launch_shape", &Runtime::set_launch_shape, py::kw_only(), "blocks"_a, "warps"_a)
        .def(
            "now_ns", [](Runtime& self) { return self.device().now_ns(); }, Release())
        .def(
            "write_clock",
            [](Runtime& self, uintptr_t where, Stream stream) {
                self.device().write_clock(reinterpret_cast<uint64_t*>(where), stream);
            },
            py::kw_only(),
            "where"_a,
            "stream"_a,
            "Has the device write its clock there, once the stream has come so far. Not while an "
            "operation runs.");

    const auto method = [&](const char* name, auto... guard) {
        return [&runtime, name, guard...](auto function, auto... names) {
            runtime.def(name, function, names..., guard...);
        };
    };
    with_keywords<DispatchCall, Runtime&>(std::tuple_cat(kRouted, kDispatch, kOperation),
                                          &Runtime::low_latency_dispatch,
                                          method("low_latency_dispatch", Release()));
    with_keywords<CombineCall, Runtime&>(std::tuple_cat(kRouted, kCombine, kOperation),
                                         &Runtime::low_latency_combine,
                                         method("low_latency_combine", Release()));
    with_keywords<DispatchLayoutCall, Runtime&>(
        kLayout, &Runtime::dispatch_layout, method("dispatch_layout", Release()));
    with_keywords<CopyRowsCall, Runtime&>(
        kCopyRows, &Runtime::copy_rows, method("copy_rows", Release()));
    with_keywords<SumRowsCall, Runtime&>(
        kSumRows, &Runtime::sum_rows, method("sum_rows", Release()));
    with_keywords<NotifyCall, Runtime&>(std::tuple_cat(kNormal, kNotify),
                                        &Runtime::normal_notify,
                                        method("normal_notify", Release()));
    with_keywords<NormalDispatchCall, Runtime&>(
        std::tuple_cat(kNormal, kNormalDispatch, kNormalOperation),
        &Runtime::normal_dispatch,
        method("normal_dispatch", Release()));
    with_keywords<NormalCombineCall, Runtime&>(
        std::tuple_cat(kNormal, kNormalCombine, kNormalOperation),
        &Runtime::normal_combine,
        method("normal_combine", Release()));
    runtime.def("normal_counts", &normal_counts_tuple);
    with_keywords<HandleCall, const Runtime&>(
        std::tuple_cat(kSize, kRouting),
        [](const Runtime& self, const HandleCall& call) {
            return self.handle_words(call, call.num_tokens, call.num_topk);
        },
        method("handle_words"));
    with_keywords<HandleCall, const Runtime&>(
        kRouted,
        [](const Runtime& self, const HandleCall& call) {
            return handle_fault_tuple(self.find_handle_fault(call));
        },
        method("find_handle_fault"));
    with_keywords<LowLatencySize, const Runtime&>(
        kSize,
        [](const Runtime& self, const LowLatencySize& size) {
            const auto [first, stride] = self.next_combine_buffer(size);
            return std::pair(reinterpret_cast<uintptr_t>(first), stride);
        },
        method("next_combine_buffer"));
}

}  // namespace ep
