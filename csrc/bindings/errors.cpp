// Exceptions of base/error.hpp on their way to Python.
#include <array>
#include <cstddef>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "bindings/bindings.hpp"
#include "cudasched/engine.h"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const ModelError& error) {
    set_error("ModelError", error.what());
  } catch (const StateError& error) {
    set_error("StateError", error.what());
  } catch (const ConfigError& error) {
    set_error("ConfigError", error.what());
  } catch (const Error& error) {
    set_error("Error", error.what());
  }
}

}  // namespace

py::str text_of(std::string_view text, const char* else_do) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), else_do));
}

void set_error(const char* type, const char* message, const char* module) {
  PyErr_SetObject(py::module_::import(module).attr(type).ptr(), text_of(message, "backslashreplace").ptr());
}

void check(int status) {
  if (status == CUDASCHED_OK) return;
  // In the order of enum cudasched_status.
  constexpr std::array kTypes{"Error", "HookError", "ConfigError", "ArbiterError", "DriverError", "Error"};
  raise(kTypes[static_cast<std::size_t>(status) % kTypes.size()], cudasched_last_error());
}

void raise(const char* type, const std::string& message) {
  set_error(type, message.c_str());
  throw py::error_already_set();
}

void bind_errors(py::module_& /*module*/) { py::register_local_exception_translator(&translate); }

}  // namespace cudasched::bindings
