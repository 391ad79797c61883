// The binding of what only machines with RDMA devices use.
#pragma once

#include <pybind11/pybind11.h>

namespace dpp {

void bind_rdma(pybind11::module_& module);

}  // namespace dpp
