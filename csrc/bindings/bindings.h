// The Python face of one target: what each file of this folder adds to the module. Arguments have
// names, pointers are integers, and no torch header is needed, so one module serves every torch.
#pragma once

#include <pybind11/pybind11.h>

namespace ep {

// Limits, flags and names of fields.
void bind_constants(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);

// Host target only.
void bind_host_pool(pybind11::module_& m);
void bind_simulation(pybind11::module_& m);

}  // namespace ep
