// As much of the CUDA driver API as the example needs, looked up at run time: it builds without CUDA's headers, and
// runs on a GPU and on cudasched's simulated driver alike. A program of yours calls CUDA as it always does.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

// A device, its primary context, and a kernel that takes as long as its launch says. For any number of threads, each of
// which calls use() first.
class Gpu {
 public:
  using Stream = void*;  // a CUstream

  Gpu() {
    call<int(unsigned)>("cuInit", 0);
    int device = 0;
    call<int(int*, int)>("cuDeviceGet", &device, 0);
    char name[128] = {};
    call<int(char*, int, int)>("cuDeviceGetName", name, static_cast<int>(sizeof name), device);
    name_ = name;
    call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context_, device);
    use();
    void* module = nullptr;
    const auto load = function<int(void**, const void*)>("cuModuleLoadData");
    // The simulated driver runs no machine code; its image says what a kernel looks like.
    if (load(&module, kPtx) != 0) check("cuModuleLoadData", load(&module, kSimulatedImage));
    call<int(void**, void*, const char*)>("cuModuleGetFunction", &kernel_, module, "work");
  }

  const std::string& name() const { return name_; }

  // Makes the context the calling thread's.
  void use() const { call<int(void*)>("cuCtxSetCurrent", context_); }

  Stream new_stream() const {
    constexpr unsigned kNonBlocking = 1;
    Stream stream = nullptr;
    call<int(Stream*, unsigned)>("cuStreamCreate", &stream, kNonBlocking);
    return stream;
  }

  void launch(Stream stream, std::chrono::microseconds duration) const {
    auto us = static_cast<std::uint32_t>(duration.count());
    void* parameters[] = {&us};
    launch_(kernel_, 1, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr);
  }

  void synchronize(Stream stream) const { call<int(Stream)>("cuStreamSynchronize", stream); }

 private:
  static constexpr const char* kPtx = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry work(.param .u32 us)
{
  .reg .pred %more;
  .reg .u32 %us;
  .reg .u64 %span, %now, %end;
  ld.param.u32 %us, [us];
  mul.wide.u32 %span, %us, 1000;
  mov.u64 %now, %globaltimer;
  add.u64 %end, %now, %span;
again:
  mov.u64 %now, %globaltimer;
  setp.lt.u64 %more, %now, %end;
  @%more bra again;
  ret;
}
)";
  static constexpr const char* kSimulatedImage = "cudasched-sim 1\nkernel work params=4 block_us=param:0\n";

  static void check(const char* name, int status) {
    if (status != 0) throw std::runtime_error(std::string(name) + " failed with status " + std::to_string(status));
  }

  template <typename Signature>
  Signature* function(const char* name) const {
    void* const address = dlsym(library_, name);
    if (address == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Signature*>(address);
  }

  template <typename Signature, typename... Arguments>
  void call(const char* name, Arguments... arguments) const {
    check(name, function<Signature>(name)(arguments...));
  }

  static void* open() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return library;
  }

  using Launch = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                     void**);

  void* library_ = open();
  Launch* launch_ = function<Launch>("cuLaunchKernel");
  void* context_ = nullptr;
  void* kernel_ = nullptr;
  std::string name_;
};
