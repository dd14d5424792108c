// What the runtime reports, as Python objects.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/runtime.h"

namespace ep {

// Runtime::take_failure(); None if there is none.
pybind11::object failure_dict(Runtime& runtime);
// Runtime::take_masked(): (rank, series, number in that series) of each.
pybind11::list masked_list(Runtime& runtime);
pybind11::dict progress_dict(const Runtime& runtime);
// Runtime::recorded_calls() and waits_now(); the latter None if it waits for nobody.
pybind11::list recorded_list(const Runtime& runtime, size_t most);
pybind11::object waits_dict(const Runtime& runtime);
// SymmetricMemory::traffic(): {"to": counts by destination, "polls"}.
pybind11::dict traffic_dict(Runtime& runtime);
// Runtime::normal_counts(): (rows, rows relayed, rows by local expert); None if it failed.
pybind11::object normal_counts_tuple(Runtime& runtime);
// (reason, place, place, expected); None if there is none.
pybind11::object handle_fault_tuple(const HandleFault& fault);

}  // namespace ep
