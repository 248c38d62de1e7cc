// Python's global interpreter lock (GIL), where Python is loaded.
#pragma once

namespace cudasched::runtime {

// PyGILState_Check: does the calling thread hold the GIL? False before find_gil_check(), and without Python.
bool holds_gil() noexcept;
void find_gil_check() noexcept;

// Python's other threads run for the length of a scope, where the calling thread holds the GIL.
class GilReleased {
 public:
  GilReleased() noexcept;
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace cudasched::runtime
