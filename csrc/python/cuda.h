// The binding of what only machines with GPUs use.
#pragma once

#include <pybind11/pybind11.h>

namespace dpp {

void bind_cuda(pybind11::module_& module);

}  // namespace dpp
