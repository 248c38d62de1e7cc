// The exception tree. A message states the fault, the place and the remedy. Nothing on the launch path throws.
//
//   Error
//   +-- HookError      the driver shim could not be installed, or CUDA was there first
//   +-- ConfigError    a setting has no meaning
//   +-- ArbiterError   the shared table of clients cannot be opened, or is full
//   +-- ModelError     saved trees cannot be used
//   +-- StateError     a predictor's saved state cannot be used
//   +-- DriverError    a driver call failed; carries its status and the source location (driver/driver.hpp)
//
// Python has the same names (python/cudasched/errors.py).
#pragma once

#include <stdexcept>
#include <string>

namespace cudasched {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class HookError : public Error {
 public:
  using Error::Error;
};

class ConfigError : public Error {
 public:
  using Error::Error;
};

class ArbiterError : public Error {
 public:
  using Error::Error;
};

class ModelError : public Error {
 public:
  using Error::Error;
};

class StateError : public Error {
 public:
  using Error::Error;
};

}  // namespace cudasched
