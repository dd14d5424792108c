#include "bindings/records.h"

#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>

#include "bindings/gil.h"
#include "bindings/names.h"

namespace py = pybind11;
using py::operator""_a;

namespace ep {
namespace {

// A number may come from another rank.
const char* operation_name(uint32_t operation) {
    return kOperationNames[operation < std::size(kOperationNames) ? operation : 0];
}

std::string format_name(const OpShape& shape) {
    const auto format = static_cast<uint16_t>(shape.message_format & ~kVerifiedFormat);
    if (static_cast<Operation>(shape.operation) == Operation::kCombine)
        return format ? "logfmt" : "bf16";
    switch (static_cast<Payload>(format)) {
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

bool is_normal(const OpShape& shape) {
    const auto operation = static_cast<Operation>(shape.operation);
    return operation == Operation::kNormalDispatch || operation == Operation::kNormalCombine;
}

py::dict agreed_dict(const Agreed& agreed) {
    const OpShape& shape = agreed.shape;
    py::dict result;
    result["operation"] = operation_name(shape.operation);
    if (is_normal(shape)) {
        result["num_sms"] = shape.num_max_tokens;
        result["bytes of a row"] = shape.hidden;
        result["num_experts"] = shape.num_experts;
        result["num_topk"] = shape.message_format >> 8;
        result["scales of a row"] = shape.message_format & 0xFFu;
        result["num_max_nvl_chunked_recv_tokens"] = agreed.capacities >> 32;
        result["num_max_rdma_chunked_recv_tokens"] = agreed.capacities & 0xFFFFFFFFu;
        const bool has_most_tokens = (agreed.dispatch_op & kMostTokens) != 0;
        result["num_max_tokens_per_rank"] = has_most_tokens ? agreed.dispatch_op & ~kMostTokens : 0;
        result["dispatch"] = has_most_tokens ? 0 : agreed.dispatch_op;
        return result;
    }
    result["num_max_dispatch_tokens_per_rank"] = shape.num_max_tokens;
    result["hidden"] = shape.hidden;
    result["num_experts"] = shape.num_experts;
    result["dtype"] = format_name(shape);
    if (agreed.dispatch_op != 0) result["dispatch"] = agreed.dispatch_op;
    return result;
}

}  // namespace

py::object failure_dict(Runtime& runtime) {
    std::optional<Failure> failure;
    {
        const ReleaseGil release;
        failure = runtime.take_failure();
    }
    if (!failure) return py::none();
    py::dict result;
    result["reason"] = kFailureReasonNames[static_cast<int>(failure->reason)];
    result["operation"] = operation_name(static_cast<uint32_t>(failure->operation));
    result["op"] = failure->op;
    result["ranks"] = failure->ranks;
    py::dict last_op;
    for (size_t i = 0; i < failure->ranks.size(); ++i)
        last_op[py::int_(failure->ranks[i])] = failure->last_op[i];
    result["last_op"] = last_op;
    py::dict given_up;
    for (size_t i = 0; i < failure->ranks.size(); ++i)
        given_up[py::int_(failure->ranks[i])] = failure->given_up[i];
    result["given_up"] = given_up;
    result["expected"] = agreed_dict(failure->expected);
    result["seen"] = agreed_dict(failure->seen);
    result["waited_ns"] = failure->waited_ns;
    const RowPlace& row = failure->row;
    result["row"] = py::dict("token"_a = row.token,
                             "owner"_a = row.owner,
                             "sender"_a = row.sender,
                             "hop"_a = kHopNames[static_cast<int>(row.hop)]);
    return result;
}

py::list masked_list(Runtime& runtime) {
    std::vector<Masked> masked;
    {
        const ReleaseGil release;
        masked = runtime.take_masked();
    }
    py::list result;
    for (const Masked& each : masked) {
        const char* series = each.series == Series::kOperations ? "operation"
                             : each.series == Series::kBarriers ? "barrier"
                                                                : "measure_clock_offsets";
        result.append(py::make_tuple(each.rank, series, each.number));
    }
    return result;
}

py::dict progress_dict(const Runtime& runtime) {
    Progress progress;
    {
        py::gil_scoped_release release;
        progress = runtime.progress();
    }
    py::dict result;
    result["closed"] = progress.closed;
    result["open"] = progress.open > progress.closed ? progress.open : 0;
    result["waiting"] = progress.waiting;
    return result;
}

py::list recorded_list(const Runtime& runtime, size_t most) {
    const std::vector<RecordedCall> calls = runtime.recorded_calls(most);
    py::list result;
    for (const RecordedCall& call : calls) {
        result.append(py::dict("call"_a = call.call,
                               "series"_a = kSeriesNames[static_cast<int>(call.series)],
                               "number"_a = call.seen.number,
                               "agreed"_a = agreed_dict(call.agreed),
                               "num_tokens"_a = call.num_tokens,
                               "stream"_a = call.stream,
                               "called_ns"_a = call.called_ns,
                               "receive_called_ns"_a = call.receive_called_ns,
                               "has_hook"_a = call.has_hook,
                               "entered_ns"_a = call.seen.entered_ns,
                               "sent_ns"_a = call.seen.sent_ns,
                               "finished_ns"_a = call.seen.finished_ns,
                               "failed"_a = kFailureReasonNames[call.seen.failed]));
    }
    return result;
}

py::object waits_dict(const Runtime& runtime) {
    const WaitsNow waits = runtime.waits_now();
    if (waits.number == 0) return py::none();
    py::dict missing;
    for (size_t owed = 0; owed < waits.missing.size(); ++owed)
        if (!waits.missing[owed].empty()) missing[kOwedNames[owed]] = waits.missing[owed];
    return py::dict("series"_a = kSeriesNames[static_cast<int>(waits.series)],
                    "number"_a = waits.number,
                    "waited_s"_a = waits.waited_s,
                    "missing"_a = missing);
}

py::dict traffic_dict(Runtime& runtime) {
    const Traffic& traffic = runtime.memory().traffic();
    py::list paths;
    for (const PathTraffic& path : traffic.to) {
        paths.append(py::dict("puts"_a = path.puts,
                              "put_bytes"_a = path.put_bytes,
                              "words"_a = path.words,
                              "signals"_a = path.signals,
                              "fences"_a = path.fences,
                              "quiets"_a = path.quiets));
    }
    return py::dict("to"_a = paths, "polls"_a = traffic.polls);
}

py::object normal_counts_tuple(Runtime& runtime) {
    std::optional<NormalCounts> counts;
    {
        const ReleaseGil release;
        counts = runtime.normal_counts();
    }
    if (!counts) return py::none();
    return py::make_tuple(counts->num_rows, counts->num_relayed, counts->per_expert);
}

py::object handle_fault_tuple(const HandleFault& fault) {
    if (fault.reason == HandleFault::kNone) return py::none();
    return py::make_tuple(
        kHandleFaultNames[fault.reason], fault.place[0], fault.place[1], fault.expected);
}

}  // namespace ep
