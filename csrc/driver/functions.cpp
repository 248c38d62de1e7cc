#include "driver/functions.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/hash.hpp"
#include "driver/driver.hpp"

namespace cudasched::driver {
namespace {

// Launches accept a kernel cast to a function, and calls that describe functions refuse one. The call that answers for
// the number of registers is also used for the other attributes. A handle that was given out as a kernel is described
// as one, because tools report each failed call.
class Asker {
 public:
  Asker(const void* handle, bool given_as_kernel) noexcept
      : function_(static_cast<CUfunction>(const_cast<void*>(handle))),
        kernel_(static_cast<CUkernel>(const_cast<void*>(handle))) {
    is_kernel_ = given_as_kernel && answers_as_kernel();
    is_function_ = !is_kernel_ && answers_as_function();
    if (!is_function_ && !given_as_kernel) is_kernel_ = answers_as_kernel();
  }

  bool described() const noexcept { return is_function_ || is_kernel_; }

  // The owning module or library; `handle` is 0 where the driver does not tell.
  struct Owner {
    std::uint64_t handle = 0;
    bool is_library = false;
  };
  Owner owner() const noexcept {
    CUmodule module = nullptr;
    if (is_function_ && table().cuFuncGetModule != nullptr &&
        table().cuFuncGetModule(&module, function_) == CUDA_SUCCESS) {
      return {handle_word(module), false};
    }
    CUlibrary library = nullptr;
    if (is_kernel_ && table().cuKernelGetLibrary != nullptr &&
        table().cuKernelGetLibrary(&library, kernel_) == CUDA_SUCCESS) {
      return {handle_word(library), true};
    }
    return {0, is_kernel_};
  }

  int attribute(CUfunction_attribute attribute) const noexcept {
    int value = 0;
    if (is_function_) {
      if (table().cuFuncGetAttribute(&value, attribute, function_) != CUDA_SUCCESS) value = 0;
    } else {
      if (table().cuKernelGetAttribute(&value, attribute, kernel_, device_) != CUDA_SUCCESS) value = 0;
    }
    return std::max(value, 0);
  }

  std::string name() const {
    const char* text = nullptr;
    const auto told = [&](auto* get, auto handle) {
      return get != nullptr && get(&text, handle) == CUDA_SUCCESS && text != nullptr;
    };
    if (is_function_ ? told(table().cuFuncGetName, function_) : told(table().cuKernelGetName, kernel_)) return text;
    return {};
  }

  // False where the driver does not tell.
  bool parameters(std::vector<Parameter>& out) const {
    const auto list = [&](auto* get, auto handle) {
      if (get == nullptr) return false;
      std::size_t offset = 0;
      std::size_t bytes = 0;
      CUresult status = CUDA_SUCCESS;
      while ((status = get(handle, out.size(), &offset, &bytes)) == CUDA_SUCCESS) {
        out.push_back({static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(bytes)});
      }
      return status == CUDA_ERROR_INVALID_VALUE;  // no parameter of that number
    };
    return is_function_ ? list(table().cuFuncGetParamInfo, function_) : list(table().cuKernelGetParamInfo, kernel_);
  }

 private:
  bool answers_as_function() const noexcept {
    int value = 0;
    return table().cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, function_) == CUDA_SUCCESS;
  }
  bool answers_as_kernel() noexcept {
    int value = 0;
    if (table().cuCtxGetDevice(&device_) != CUDA_SUCCESS) device_ = 0;
    return table().cuKernelGetAttribute != nullptr &&
           table().cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel_, device_) == CUDA_SUCCESS;
  }

  CUfunction function_;
  CUkernel kernel_;
  CUdevice device_ = 0;
  bool is_function_ = false;
  bool is_kernel_ = false;
};

std::unique_ptr<KernelFacts> ask(const Asker& asker, const void* handle) {
  if (!asker.described()) return nullptr;
  auto result = std::make_unique<KernelFacts>();
  result->name = asker.name();
  predict::Function& facts = result->facts;
  facts.registers = static_cast<std::uint32_t>(asker.attribute(CU_FUNC_ATTRIBUTE_NUM_REGS));
  facts.local_bytes = static_cast<std::uint32_t>(asker.attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
  facts.static_shared_bytes = static_cast<std::uint32_t>(asker.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES));
  facts.max_threads = static_cast<std::uint32_t>(asker.attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
  const bool told = asker.parameters(result->parameters);
  std::uint32_t end = 0;
  for (const Parameter& parameter : result->parameters) end = std::max(end, parameter.offset + parameter.bytes);
  // In whole words, so that the block can be read as such.
  const std::uint32_t bytes = (end + 3) / 4 * 4;
  result->described = told;
  result->block_bytes = end;
  result->has_layout = told && bytes <= predict::Function::kMaxParameterBytes;
  if (result->has_layout) facts.parameter_bytes = bytes;
  facts.traits = predict::traits_of(result->name);
  // Without a name two kernels with the same attributes would be one; by the handle they are two, in this run alone.
  facts.identity = predict::identity_of(
      result->name.empty() ? "at " + std::to_string(reinterpret_cast<std::uintptr_t>(handle)) : result->name, facts);
  return result;
}

}  // namespace

bool read_packed(void* const* extra, std::span<const std::byte>& packed) noexcept {
  const void* block = nullptr;
  const std::size_t* bytes = nullptr;
  for (int i = 0; i < 2; ++i, extra += 2) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      block = extra[1];
    } else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      bytes = static_cast<const std::size_t*>(extra[1]);
    } else {
      return false;
    }
  }
  if (block == nullptr || bytes == nullptr || extra[0] != CU_LAUNCH_PARAM_END) return false;
  packed = {static_cast<const std::byte*>(block), *bytes};
  return true;
}

std::size_t KernelFacts::gather(const predict::Launch& launch, std::uint32_t* block) const noexcept {
  if (!has_layout || facts.parameter_bytes == 0) return 0;
  auto* const bytes = reinterpret_cast<std::byte*>(block);
  if (launch.parameters != nullptr) {
    std::memset(bytes, 0, facts.parameter_bytes);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      std::memcpy(bytes + parameters[i].offset, launch.parameters[i], parameters[i].bytes);
    }
    return facts.parameter_bytes / 4;
  }
  std::span<const std::byte> packed;
  if (launch.extra == nullptr || !read_packed(launch.extra, packed) || packed.size() > facts.parameter_bytes) return 0;
  std::memset(bytes, 0, facts.parameter_bytes);
  std::memcpy(bytes, packed.data(), packed.size());
  return facts.parameter_bytes / 4;
}

const KernelFacts* Functions::describe(const void* function) noexcept {
  try {
    const RelaxedCapture relaxed;
    const std::uint64_t forgotten = forgotten_.load(std::memory_order_acquire);
    const Asker asker(function, kernels_.contains(handle_word(function)));
    std::unique_ptr<KernelFacts> asked = ask(asker, function);
    if (asked == nullptr) return nullptr;
    const Asker::Owner owner = asker.owner();
    HandleTable<1>::Words image{};
    if (images_.find(owner.handle, image)) asked->image = reinterpret_cast<const void*>(image[0]);
    const std::scoped_lock lock(mutex_);
    // Builds of one kernel may differ in their parameters alone (Triton leaves out constant ones), and the found layout
    // must be the function's own.
    std::uint64_t layout = asked->facts.identity;
    for (const Parameter& each : asked->parameters) layout = mix(layout, std::uint64_t{each.offset} << 32 | each.bytes);
    const auto [known, is_new] = by_layout_.try_emplace(layout, nullptr);
    if (is_new) {
      asked->facts.index = static_cast<std::uint32_t>(by_layout_.size() - 1);
      known->second = std::move(asked);
    }
    const KernelFacts* const facts = known->second.get();
    // A module that was unloaded meanwhile, or is being unloaded, may have been this handle's.
    if (ending_ == 0 && forgotten_.load(std::memory_order_relaxed) == forgotten) {
      by_handle_.set(handle_word(function),
                     {handle_word(facts), ++last_serial_, owner.handle | (owner.is_library ? kIsKernel : 0)});
    }
    return facts;
  } catch (const std::exception&) {
    return nullptr;  // no memory: the launch is not described
  }
}

void Functions::loaded(std::uint64_t owner, const void* image) noexcept {
  const std::scoped_lock lock(images_lock_);
  images_.set(owner, {handle_word(image)});
}

void Functions::given_as_kernel(CUkernel kernel) noexcept {
  const std::scoped_lock lock(images_lock_);
  kernels_.set(handle_word(kernel), {1});
}

void Functions::succeeded(std::uint64_t like) noexcept {
  if (has_succeeded(like)) return;
  const std::scoped_lock lock(succeeded_lock_);
  if (succeeded_.set(like, {1})) return;
  succeeded_.clear();  // each is launched directly once more
  succeeded_.set(like, {1});
}

void Functions::changed(const void* function) noexcept {
  const std::scoped_lock lock(mutex_);
  by_handle_.set_word(handle_word(function), kSerial, ++last_serial_);
}

void Functions::kernel_changed(const void* kernel) noexcept {
  changed(kernel);
  all_changed();
}

void Functions::begin_ending(std::uint64_t owner, bool is_library) noexcept {
  const std::scoped_lock lock(mutex_);
  ++ending_;
  by_handle_.erase_if([&](std::uint64_t, const HandleTable<3>::Words& words) {
    const bool is_kernel = (words[kOwner] & kIsKernel) != 0;
    const std::uint64_t of = words[kOwner] & ~kIsKernel;
    return of == 0 || of == owner || (is_library && !is_kernel);
  });
}

Functions::Ending::Ending(CUmodule module) noexcept { functions().begin_ending(handle_word(module), false); }
Functions::Ending::Ending(CUlibrary library) noexcept { functions().begin_ending(handle_word(library), true); }

Functions::Ending::~Ending() {
  Functions& all = functions();
  const std::scoped_lock lock(all.mutex_);
  --all.ending_;
  all.forgotten_.fetch_add(1, std::memory_order_release);
}

void Functions::forget_handles() noexcept {
  const std::scoped_lock lock(mutex_);
  forgotten_.fetch_add(1, std::memory_order_release);
  by_handle_.clear();
}

void Functions::reset_in_child() noexcept {
  // The parent's other threads may have held the mutex; a kernel they described is whole or not in the table.
  new (&mutex_) std::mutex;
  succeeded_lock_.unlock();
  images_lock_.unlock();
  ending_ = 0;
  by_handle_.abandon();
  images_.abandon();
  kernels_.abandon();
  succeeded_.abandon();
}

void ask_occupancy(const predict::Launch& launch, int& blocks_per_sm) noexcept {
  int blocks = 0;
  auto* const function = static_cast<CUfunction>(const_cast<void*>(launch.function));
  if (table().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function,
                                                          static_cast<int>(launch.threads_per_block()),
                                                          launch.dynamic_shared_bytes) == CUDA_SUCCESS) {
    blocks_per_sm = blocks;
  }
}

Functions& functions() noexcept {
  // Never destroyed: other threads may still launch while the process exits.
  alignas(Functions) static unsigned char storage[sizeof(Functions)];
  static Functions* const instance = new (storage) Functions();
  return *instance;
}

}  // namespace cudasched::driver
