// The edge of the C boundary (include/cudasched/engine.h): an exception below becomes a status and the thread's last
// error.
#pragma once

#include <exception>

#include "base/error.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "runtime/last_error.hpp"

namespace cudasched::runtime {

template <typename Body>
int guarded(Body&& body) noexcept {
  int status = CUDASCHED_INTERNAL_ERROR;
  try {
    body();
    return CUDASCHED_OK;
  } catch (const HookError& error) {
    status = CUDASCHED_HOOK_ERROR;
    set_last_error(error.what());
  } catch (const ConfigError& error) {
    status = CUDASCHED_CONFIG_ERROR;
    set_last_error(error.what());
  } catch (const ArbiterError& error) {
    status = CUDASCHED_ARBITER_ERROR;
    set_last_error(error.what());
  } catch (const driver::DriverError& error) {
    status = CUDASCHED_DRIVER_ERROR;
    set_last_error(error.what());
  } catch (const std::exception& error) {
    set_last_error(error.what());
  }
  return status;
}

}  // namespace cudasched::runtime
