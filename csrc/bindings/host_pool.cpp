#include "runtime/host_pool.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ep {

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
             py::arg("num_bytes"),
             "At least this many bytes, uninitialised, through the buffer protocol.");
}

}  // namespace ep
