// What each kernel is: facts, name and the layout of its parameter block, asked of the driver once, at its first
// launch.
//
// find() is a few loads for a kernel that is known, from any thread. A kernel that is new is described under a lock,
// with allocation and driver calls: its first launch is slow anyway, because its code is loaded then. What find() gave
// stays true and in place for the life of the process. Handles are forgotten when a module goes (a later kernel may get
// the same handle); what they stood for is kept and found again by identity.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/handle_table.hpp"
#include "predict/function.hpp"
#include "predict/launch.hpp"

namespace cudasched::driver {

struct Parameter {
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

struct KernelFacts {
  predict::Function facts;
  std::string name;  // as the driver gives it: mangled; empty before 12.3
  std::vector<Parameter> parameters;
  bool has_layout = false;  // of a block of at most Function::kMaxParameterBytes; not before 12.4

  // Copies the launch's parameters into `block`, which has room for facts.parameter_bytes; what lies between them is
  // zero. Returns the words written: 0 without a layout, or where the program passes a block of another size.
  std::size_t gather(const predict::Launch& launch, std::uint32_t* block) const noexcept;
};

class Functions {
 public:
  // Null where the driver will not describe it.
  const KernelFacts* find(const void* function) noexcept {
    const KernelFacts* const known = by_handle_.find(function);
    return known != nullptr ? known : describe(function);
  }

  // A module or a context has gone, and with it handles.
  void forget_handles() noexcept;

  // In a forked child.
  void reset_in_child() noexcept;

 private:
  const KernelFacts* describe(const void* function) noexcept;

  HandleTable<KernelFacts, 16384> by_handle_;
  std::atomic<std::uint64_t> forgotten_{0};  // times
  std::mutex mutex_;
  std::map<std::uint64_t, std::unique_ptr<KernelFacts>> by_layout_;  // identity and parameters
};

// How many of the kernel's blocks an SM holds; `blocks_per_sm` stays as it is where the driver will not say.
void ask_occupancy(const predict::Launch& launch, int& blocks_per_sm) noexcept;

// The process's one table.
Functions& functions() noexcept;

}  // namespace cudasched::driver
