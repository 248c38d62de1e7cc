// Each kernel's facts, name and parameter layout, which the driver is asked for once, at the kernel's first launch.
// Also which launches have succeeded, so that similar ones may be deferred.
//
// find() is a few loads for a kernel that is known, from any thread. A new kernel is described under a lock, with
// allocation and driver calls: the first launch is slow anyway, because it loads the kernel's code. The result of
// find() stays valid and in place for the life of the process. A handle is forgotten before its module is unloaded,
// because the driver may give the handle to another kernel at once. The kernel's facts are kept and found again by
// identity. At most HandleTable::kMost handles are remembered; others are described at each launch and never deferred.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/handle_table.hpp"
#include "base/spin_lock.hpp"
#include "predict/function.hpp"
#include "predict/launch.hpp"

namespace cudasched::driver {

struct Parameter {
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

// The parameter block of a launch that passes it in one piece, by the `extra` of cuLaunchKernel, which is not null.
// False where `extra` has any other content.
bool read_packed(void* const* extra, std::span<const std::byte>& packed) noexcept;

struct KernelFacts {
  predict::Function facts;
  std::string name;  // mangled, as from the driver; empty before 12.3
  std::vector<Parameter> parameters;
  const void* image = nullptr;    // the code that the driver loaded, in memory that may be gone; null: not known
  bool described = false;         // `parameters` are all that there are; not before 12.4
  std::uint32_t block_bytes = 0;  // of all parameters and the padding between them
  bool has_layout = false;        // described, and a block of at most Function::kMaxParameterBytes

  // Copies the launch's parameters into `block`, which has room for facts.parameter_bytes; the padding between them
  // is zero. Returns the words written: 0 without a layout, or where the program passes a block of another size.
  std::size_t gather(const predict::Launch& launch, std::uint32_t* block) const noexcept;
};

class Functions {
 public:
  // A handle that is known. `serial` is given once in a process: a new one when the handle stands for another kernel,
  // and when an attribute of the kernel changes.
  struct Known {
    const KernelFacts* facts = nullptr;
    std::uint64_t serial = 0;
  };

  // Null where the driver will not describe it.
  const KernelFacts* find(const void* function) noexcept {
    Known known;
    return find(function, known) ? known.facts : describe(function);
  }
  // False where the function has not been described. Makes no driver call.
  bool find(const void* function, Known& known) const noexcept {
    HandleTable<3>::Words words{};
    if (!by_handle_.find(handle_word(function), words)) return false;
    known = {reinterpret_cast<const KernelFacts*>(words[kFacts]),
             (words[kOwner] & kIsKernel) != 0 ? words[kSerial] : mix(mix(1, words[kSerial]), settings_.load())};
    return true;
  }

  // The module or library was loaded from this image. Off the launch path.
  void loaded(std::uint64_t owner, const void* image) noexcept;

  // The driver gave this handle out as a kernel. The handle may later be a function's, and is then described as a
  // function.
  void given_as_kernel(CUkernel kernel) noexcept;

  // ---- launches that have succeeded, by a hash of their common traits (queue/queue.cpp)
  bool has_succeeded(std::uint64_t like) const noexcept { return succeeded_.contains(like); }
  void succeeded(std::uint64_t like) noexcept;

  // ---- changes, each told before the driver makes it

  // An attribute of one function, of one kernel and the functions that it has in contexts, of all functions.
  void changed(const void* function) noexcept;
  void kernel_changed(const void* kernel) noexcept;
  void all_changed() noexcept { settings_.fetch_add(1); }

  // Around a driver call that ends handles: the handles are forgotten before the call, and descriptions made during the
  // call are not kept.
  class Ending {
   public:
    explicit Ending(CUmodule module) noexcept;
    // The library's kernels; and every function, because any may be one of the library's in some context.
    explicit Ending(CUlibrary library) noexcept;
    ~Ending();
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;
  };

  // Before a context is destroyed or reset.
  void forget_handles() noexcept;

  // In a forked child.
  void reset_in_child() noexcept;

 private:
  enum : std::size_t { kFacts, kSerial, kOwner };  // words of by_handle_
  // Beside the owner, a module's or library's handle; 0: unknown, and forgotten with every module and library.
  static constexpr std::uint64_t kIsKernel = std::uint64_t{1} << 63;

  const KernelFacts* describe(const void* function) noexcept;
  void begin_ending(std::uint64_t owner, bool is_library) noexcept;

  HandleTable<3> by_handle_;
  HandleTable<1> succeeded_;
  SpinLock succeeded_lock_;
  HandleTable<1> images_;                    // of modules and libraries
  HandleTable<1> kernels_;                   // given out as such
  SpinLock images_lock_;                     // of both
  std::atomic<std::uint64_t> settings_{1};   // of all functions, times changed
  std::atomic<std::uint64_t> forgotten_{0};  // times
  int ending_ = 0;
  std::uint64_t last_serial_ = 0;
  std::mutex mutex_;
  std::map<std::uint64_t, std::unique_ptr<KernelFacts>> by_layout_;  // identity and parameters
};

// How many of the kernel's blocks an SM holds; `blocks_per_sm` stays unchanged where the driver does not answer.
void ask_occupancy(const predict::Launch& launch, int& blocks_per_sm) noexcept;

// The process's one table.
Functions& functions() noexcept;

}  // namespace cudasched::driver
