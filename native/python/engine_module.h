#pragma once

#include <cstdio>  // as in module.cpp

#include <nanobind/nanobind.h>

namespace elastic {

// Adds Engine and Handle to the module.
void bind_engine(nanobind::module_& module);

}  // namespace elastic
