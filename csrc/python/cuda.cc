#include "python/cuda.h"

#include <pybind11/stl.h>

#include "transport/cuda_links.h"

namespace py = pybind11;

namespace dpp {

namespace {

// (control descriptor, IPC handle or b"", memory descriptor or -1); the descriptors stay the
// links'.
py::tuple make_ipc_slots(CudaLinks& self, int peer, const std::vector<size_t>& channels,
                         bool legacy) {
  const CudaLinks::Offer offer = self.make_ipc_slots(peer, channels, legacy);
  return py::make_tuple(offer.control, py::bytes(offer.handle), offer.memory);
}

const char* access_name(cuda::Device::Access access) {
  switch (access) {
    case cuda::Device::Access::kSame: return "same";
    case cuda::Device::Access::kYes: return "yes";
    case cuda::Device::Access::kNo: return "no";
    case cuda::Device::Access::kHidden: break;
  }
  return "hidden";
}

}  // namespace

void bind_cuda(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<cuda::Device, std::shared_ptr<cuda::Device>>(module, "CudaDevice")
      .def(py::init([](int ordinal) {
        return std::const_pointer_cast<cuda::Device>(cuda::Device::open(ordinal));
      }))
      .def_property_readonly("uuid", &cuda::Device::uuid)
      .def_property_readonly("name", &cuda::Device::name)
      .def("access_to", [](const cuda::Device& self,
                           const std::string& uuid) { return access_name(self.access_to(uuid)); })
      .def("visible", &cuda::Device::visible);
  py::class_<CudaLinks>(module, "CudaLinks")
      .def(py::init<Transport&, int, uint32_t>(), py::keep_alive<1, 2>(), py::arg("transport"),
           py::arg("ordinal"), py::arg("max_pending"))
      .def("make_ipc_slots", &make_ipc_slots)
      .def(
          "use_ipc_slots",
          [](CudaLinks& self, int peer, const std::vector<size_t>& channels, int control,
             const std::string& handle, int memory) {
            self.use_ipc_slots(peer, channels, UniqueFd(control), handle, UniqueFd(memory));
          },
          "Owns the descriptors from here on.")
      .def("make_staged_slots", &CudaLinks::make_staged_slots, no_gil)
      .def(
          "use_staged_slots",
          [](CudaLinks& self, int peer, const std::vector<size_t>& channels, int control,
             int chunks, uint64_t workload) {
            self.use_staged_slots(peer, channels, UniqueFd(control), UniqueFd(chunks), workload);
          },
          "Owns the descriptors from here on.")
      .def("write_pattern", &CudaLinks::write_pattern, no_gil)
      .def("pattern_fault", &CudaLinks::pattern_fault, no_gil)
      .def("ahead_fault", &CudaLinks::ahead_fault);
}

}  // namespace dpp
