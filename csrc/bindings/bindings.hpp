// What the source files of `_core` share. Each but core.cpp is the face of one room, NAME.cpp, and adds it to the
// module by `void bind_NAME(pybind11::module_&)`; CMakeLists.txt makes the table of them.
//
// Errors of base/error.hpp that a face throws become those of cudasched.errors that have their names.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace cudasched::bindings {

// Throws cudasched.errors.`type`. Call it with the GIL.
[[noreturn]] void raise(const char* type, const std::string& message);

}  // namespace cudasched::bindings
