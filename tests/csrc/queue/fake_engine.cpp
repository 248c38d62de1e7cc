#include "fake_engine.hpp"

#include "hook/engine_calls.hpp"

namespace cudasched::hook {

queue::Site find_site(CUstream, CUevent) noexcept { return here; }
void note_record(CUevent, CUstream) noexcept {}
void note_wait(CUevent, CUstream) noexcept {}
void capture_may_begin() noexcept { ++uncounted_captures; }
CUresult free_counted(CUdeviceptr address, CUstream stream, CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept {
  return free(address, stream);
}

}  // namespace cudasched::hook
