#include "simulated_driver/shared_device.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::uint64_t kMagic = 0x314d'4953'4344'5543;  // "CUDCSIM1"
constexpr std::uint32_t kVersion = 3;
constexpr std::int64_t kReapPeriodNs = kNsPerMs;

// The meanings of locks on bytes of the file.
constexpr std::int64_t kOpeningByte = 0;   // someone is opening or initializing
constexpr std::int64_t kPresentByte = 1;   // shared: a process has the device open
constexpr std::int64_t kContextByte = 64;  // + slot: the context's process lives

}  // namespace

int SharedDevice::open(const std::string& directory, int ordinal, double scale, std::uint64_t memory_bytes) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) return errno;
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) return errno;
  if (!S_ISDIR(status.st_mode)) return ENOTDIR;
  if (status.st_uid != geteuid() || (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return EPERM;
  const std::string path = directory + "/device-" + std::to_string(ordinal);
  int error = 0;
  struct stat named {};
  do {  // `cudasched clean` may have removed the file before the lock
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor_ < 0) return errno;
    error = lock_byte(kOpeningByte, F_WRLCK, true);
    if (error == 0 && fstat(descriptor_, &status) != 0) error = errno;
  } while (error == 0 && (lstat(path.c_str(), &named) != 0 || named.st_ino != status.st_ino));
  if (error == 0) error = initialize(scale, memory_bytes);
  if (error == 0) error = lock_byte(kPresentByte, F_RDLCK, true);
  lock_byte(kOpeningByte, F_UNLCK, false);
  if (error != 0) {
    if (layout_ != nullptr) munmap(layout_, sizeof(Layout));
    layout_ = nullptr;
    close(descriptor_);
    descriptor_ = -1;
  }
  return error;
}

int SharedDevice::initialize(double scale, std::uint64_t memory_bytes) noexcept {
  const bool in_use = byte_locked_elsewhere(kPresentByte);
  if (!in_use && ftruncate(descriptor_, 0) != 0) return errno;
  if (!in_use) {
    const int error = posix_fallocate(descriptor_, 0, sizeof(Layout));
    if (error != 0) return error;
  }
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) return errno;
  if (status.st_size != static_cast<off_t>(sizeof(Layout))) return EPROTO;
  void* const mapping = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (mapping == MAP_FAILED) return errno;
  layout_ = static_cast<Layout*>(mapping);
  if (in_use) {
    const bool ours = layout_->magic == kMagic && layout_->version == kVersion && layout_->bytes == sizeof(Layout);
    return ours ? 0 : EPROTO;
  }
  layout_->version = kVersion;
  layout_->bytes = sizeof(Layout);
  layout_->scale = scale;
  layout_->epoch_real_ns = cudasched::now_ns();
  layout_->last_reap_real_ns = 0;
  layout_->memory_bytes = memory_bytes;
  layout_->held_bytes.fill(0);
  layout_->device.initialize(0);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(&layout_->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (error == 0) layout_->magic = kMagic;
  return error;
}

void SharedDevice::lock() noexcept {
  if (pthread_mutex_lock(&layout_->mutex) == EOWNERDEAD) {
    layout_->device.rebuild();
    reap();
    pthread_mutex_consistent(&layout_->mutex);
  } else if (cudasched::now_ns() - layout_->last_reap_real_ns > kReapPeriodNs) {
    reap();
  }
  layout_->device.advance(simulated_now_ns());
}

void SharedDevice::unlock() noexcept { pthread_mutex_unlock(&layout_->mutex); }

void SharedDevice::reap() noexcept {
  for (int context = 0; context < kContextCount; ++context) {
    if (own_[static_cast<std::size_t>(context)] || !layout_->device.context_used(context)) continue;
    if (!byte_locked_elsewhere(kContextByte + context)) layout_->device.destroy_context(context);
  }
  layout_->last_reap_real_ns = cudasched::now_ns();
}

Status SharedDevice::create_context(Guard& guard, int* context) noexcept {
  Status status = guard->create_context(context);
  if (status == Status::kFull) {
    reap();
    status = guard->create_context(context);
  }
  if (status != Status::kOk) return status;
  if (lock_byte(kContextByte + *context, F_WRLCK, false) != 0) {
    guard->destroy_context(*context);
    return Status::kInvalid;
  }
  own_.set(static_cast<std::size_t>(*context));
  layout_->held_bytes[static_cast<std::size_t>(*context)] = 0;
  return Status::kOk;
}

void SharedDevice::destroy_context(Guard& guard, int context) noexcept {
  guard->destroy_context(context);
  own_.reset(static_cast<std::size_t>(context));
  lock_byte(kContextByte + context, F_UNLCK, false);
}

// Memory of a context that is gone counts no more, after removal by any process.
std::uint64_t SharedDevice::free_memory(Guard& guard) const noexcept {
  std::uint64_t held = 0;
  for (int context = 0; context < kContextCount; ++context) {
    if (guard->context_used(context)) held += layout_->held_bytes[static_cast<std::size_t>(context)];
  }
  return layout_->memory_bytes > held ? layout_->memory_bytes - held : 0;
}

bool SharedDevice::take_memory(Guard& guard, int context, std::uint64_t bytes) noexcept {
  if (bytes > free_memory(guard)) {
    reap();  // of a process that was killed a moment ago
    if (bytes > free_memory(guard)) return false;
  }
  layout_->held_bytes[static_cast<std::size_t>(context)] += bytes;
  return true;
}

void SharedDevice::give_memory_back(Guard&, int context, std::uint64_t bytes) noexcept {
  std::uint64_t& held = layout_->held_bytes[static_cast<std::size_t>(context)];
  held -= std::min(held, bytes);
}

std::int64_t SharedDevice::to_real_ns(std::int64_t simulated_ns) const noexcept {
  return static_cast<std::int64_t>(static_cast<double>(simulated_ns) * layout_->scale);
}

std::int64_t SharedDevice::simulated_now_ns() const noexcept {
  return static_cast<std::int64_t>(static_cast<double>(cudasched::now_ns() - layout_->epoch_real_ns) / layout_->scale);
}

bool SharedDevice::byte_locked_elsewhere(std::int64_t byte) const noexcept {
  struct flock probe {};
  probe.l_type = F_WRLCK;
  probe.l_whence = SEEK_SET;
  probe.l_start = byte;
  probe.l_len = 1;
  return fcntl(descriptor_, F_GETLK, &probe) != 0 || probe.l_type != F_UNLCK;
}

int SharedDevice::lock_byte(std::int64_t byte, short type, bool wait) const noexcept {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  while (fcntl(descriptor_, wait ? F_SETLKW : F_SETLK, &request) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace cudasched::simulated_driver
