// Declarations that the source files of `_core` share. Each file NAME.cpp but core.cpp is the face of one room, and
// `void bind_NAME(pybind11::module_&)` adds the room to the module; CMakeLists.txt makes the table of these functions.
//
// Errors of base/error.hpp that a face throws become the errors of the same names in cudasched.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace cudasched::bindings {

// Of a file, a path or another program: not always UTF-8.
pybind11::str text_of(std::string_view text, const char* else_do = "replace");

// Throws cudasched.errors.`type`. The caller holds the GIL.
[[noreturn]] void raise(const char* type, const std::string& message);
void set_error(const char* type, const char* message, const char* module = "cudasched.errors");

// Throws the error of a call of the C boundary that failed. The caller holds the GIL.
void check(int status);

// The same for a call that may wait, which is made without the GIL.
template <typename Call>
void check_unlocked(Call&& call) {
  int status = 0;
  {
    const pybind11::gil_scoped_release released;
    status = call();
  }
  check(status);
}

}  // namespace cudasched::bindings
