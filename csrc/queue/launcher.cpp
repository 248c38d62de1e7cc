#include "queue/launcher.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/blocked_signals.hpp"
#include "base/clock.hpp"
#include "base/futex.hpp"
#include "base/processor.hpp"
#include "driver/driver.hpp"

namespace cudasched::queue {

using Direction = Operation::Direction;

Launcher::Launcher(Ring& ring, SpinLock& push_lock, Mailbox& mailbox, Admission& admission) noexcept
    : ring_(ring), push_lock_(push_lock), mailbox_(mailbox), admission_(admission) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&alive_, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

Launcher::~Launcher() {
  stop(kNsPerSecond);
  if (started_) pthread_join(thread_, nullptr);
  pthread_mutex_destroy(&alive_);
}

bool Launcher::start(Idle idle) noexcept {
  if (started_) return running();
  idle_ = idle;
  {
    const BlockedSignals blocked;
    started_ = pthread_create(&thread_, nullptr, &Launcher::run, this) == 0;
  }
  if (!started_) return false;
  while (settled_.load(std::memory_order_acquire) == 0) futex_sleep(settled_, 0, kNsPerMs);
  return running();
}

void* Launcher::run(void* self) {
  Launcher& launcher = *static_cast<Launcher*>(self);
  pthread_setname_np(pthread_self(), "cudasched-queue");
  prctl(PR_SET_TIMERSLACK, 1UL);  // else each sleep ends 50 us late
  pthread_mutex_lock(&launcher.alive_);
  launcher.state_.store(State::kRunning, std::memory_order_release);
  launcher.settled_.store(1, std::memory_order_release);
  futex_wake_all(launcher.settled_);
  launcher.work();
  pthread_mutex_unlock(&launcher.alive_);
  return nullptr;
}

void Launcher::work() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver::table().cuThreadExchangeStreamCaptureMode(&mode);
  while (!stopping_.load(std::memory_order_acquire)) {
    if (const Operation* operation = ring_.front()) {
      consume(*operation, /*gated=*/true);
      continue;
    }
    await_work();
  }
}

// The ring is empty; returns when it may have an operation.
void Launcher::await_work() {
  if (idle_ == Idle::kSpins) {
    for (int i = 0; i < 16; ++i) spin_pause();
    return;
  }
  const std::int64_t begin = now_ns();
  std::int64_t now = begin;
  while (ring_.front() == nullptr && !stopping_.load(std::memory_order_acquire)) {
    spin_saved_ns_ = std::min(spin_saved_ns_ + (now - spin_counted_ns_) / kSpinShare, kSpinSavedNs);
    spin_counted_ns_ = now;
    const std::int64_t spun_from = now;
    const std::int64_t spin_until = std::min(begin + kSpinNs, now + spin_saved_ns_);
    while (now < spin_until && ring_.front() == nullptr) {
      for (int i = 0; i < 16; ++i) spin_pause();
      now = now_ns();
    }
    spin_saved_ns_ -= now - spun_from;
    if (ring_.front() != nullptr) return;
    if (now - begin < kNapsNs) {
      ring_.nap(kNapNs, stopping_);
    } else {
      ring_.await_work(kSleepNs, stopping_);
    }
    now = now_ns();
  }
}

CUresult Launcher::make_current(CUcontext context) noexcept {
  const std::uint64_t epoch = context_epoch_.load(std::memory_order_acquire);
  if (context == current_ && epoch == current_epoch_) return CUDA_SUCCESS;
  const CUresult status = driver::table().cuCtxSetCurrent(context);
  current_ = status == CUDA_SUCCESS ? context : nullptr;
  current_epoch_ = status == CUDA_SUCCESS ? epoch : 0;
  return status;
}

void Launcher::consume(const Operation& operation, bool gated) {
  admitted_ns_ = 0;
  if (operation.made) return pass(gated);
  if (operation.kind == Operation::Kind::kChange) {
    admission_.change_graph(operation);
    return pass(gated);
  }
  const Position position = ring_.passed() + 1;
  CUresult status = make_current(operation.context);
  if (status == CUDA_SUCCESS) {
    status = operation.kind == Operation::Kind::kGraph ? submit_graph(operation, position, gated)
             : operation.kind == Operation::Kind::kCopy && gated
                 ? submit_copy(ring_.at(position), position)
                 : submit(operation, position, gated && operation.is_launch());
  }
  if (status != CUDA_SUCCESS) mailbox_.put(operation.thread, status);
  pass(gated);
}

void Launcher::pass(bool gated) noexcept {
  if (gated) {
    const std::int64_t mean_ns = operation_ns();
    operation_ns_.store(mean_ns + (admitted_ns_ - mean_ns) / kLately, std::memory_order_relaxed);
  }
  ring_.pass();
}

// Makes the driver call of the ring's head, or of one of its parts.
CUresult Launcher::submit(const Operation& operation, Position position, bool at_gate, bool is_first, bool is_last) {
  if (at_gate) {
    // By the head's position: who waits for the head may not wait for an operation that overtakes it.
    at_gate_.store(true, std::memory_order_seq_cst);
    admitted_ns_ += admission_.admit(operation, ring_.passed() + 1, opening_);
    at_gate_.store(false, std::memory_order_relaxed);
  }
  begun_.store(position, std::memory_order_release);
  const bool timed = is_timed(position);
  const std::int64_t begin = timed ? now_ns() : 0;
  if (timed && at_gate && is_first) queue_waits_.add(begin - operation.pushed_ns);
  const CUresult status = operation.execute();
  if (timed) {
    const auto took = static_cast<std::int64_t>(kTimed) * (now_ns() - begin);
    driver_ns_.store(driver_ns_.load(std::memory_order_relaxed) + took, std::memory_order_relaxed);
  }
  if (at_gate) {
    const Operation* const next = is_last ? ring_.second() : nullptr;
    admission_.submitted(operation, status,
                         next != nullptr && next->stream == operation.stream && next->overlaps_predecessor());
  }
  return status;
}

CUresult Launcher::submit_graph(const Operation& operation, Position position, bool at_gate) {
  const std::uint32_t parts = admission_.begin_graph(operation);
  CUresult status = CUDA_SUCCESS;
  Operation part = operation;
  Overtaking overtaking(operation, position);
  bool goes_whole = parts == 0;
  for (std::uint32_t i = 0; i < parts && status == CUDA_SUCCESS; ++i) {
    if (i > 0) {
      while (at_gate && make_next(overtaking)) {
      }
      status = make_current(operation.context);
      if (status != CUDA_SUCCESS) break;
    }
    part.launch.what.function = admission_.part(i);
    status = part.graph() == nullptr ? CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
                                     : submit(part, position, at_gate, /*is_first=*/i == 0, /*is_last=*/i + 1 == parts);
    goes_whole = i == 0 && status != CUDA_SUCCESS && !is_sticky(status);
  }
  if (goes_whole && admission_.may_go_whole()) {
    status = submit(operation, position, at_gate);
  } else if (goes_whole && status == CUDA_SUCCESS) {
    status = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  admission_.end_graph(operation, status);
  return status;
}

// The ring's head. Returns when all of it is submitted; an error of a piece has been put into the mailbox.
CUresult Launcher::submit_copy(Operation& copy, Position position) {
  Overtaking overtaking(copy, position);
  while (!copy.made) {
    if (const CUresult status = make_current(copy.context); status != CUDA_SUCCESS) {
      std::replace(in_pieces_.begin(), in_pieces_.end(), position, Position{0});
      return status;
    }
    if (!goes_in_pieces(copy, position)) return submit(copy, position, /*at_gate=*/false);
    const auto under_way = in_pieces_;
    submit_pieces();
    if (in_pieces_ != under_way) overtaking = Overtaking(copy, position);  // what waited for that copy may go now
    if (copy.made || make_next(overtaking)) continue;
    std::this_thread::sleep_for(std::chrono::nanoseconds(Opening::kPieceLookNs));
  }
  return CUDA_SUCCESS;
}

// True: it is under way, or will be once no other copy of its direction is.
bool Launcher::goes_in_pieces(const Operation& copy, Position position) noexcept {
  if (std::find(in_pieces_.begin(), in_pieces_.end(), position) != in_pieces_.end()) return true;
  const Direction direction = admission_.direction_of_pieces(copy);
  if (direction == Direction::kAny) return false;
  Position& under_way = in_pieces_[Operation::place_of(direction)];
  if (under_way == 0) under_way = position;
  return true;
}

bool Launcher::submit_pieces() {
  for (const Direction direction : {Direction::kToDevice, Direction::kToHost}) {
    Position& position = in_pieces_[Operation::place_of(direction)];
    while (position != 0 && ring_.at(position).context == current_) {
      Operation& copy = ring_.at(position);
      Operation piece = copy;
      piece.copy.bytes = admission_.next_piece(copy, direction, opening_.is_open_for(position));
      if (piece.copy.bytes == 0) break;
      copy.copy.to += piece.copy.bytes;
      copy.copy.from += piece.copy.bytes;
      copy.copy.bytes -= piece.copy.bytes;
      copy.made = true;  // before the call, which may end this thread: no piece is copied twice
      begun_.store(position, std::memory_order_release);
      const CUresult status = piece.execute();
      admission_.piece_submitted(piece, direction, status);
      if (status != CUDA_SUCCESS) mailbox_.put(copy.thread, status);
      copy.made = status != CUDA_SUCCESS || copy.copy.bytes == 0;
      if (copy.made) position = 0;
    }
  }
  return in_pieces_[0] != 0 || in_pieces_[1] != 0;
}

// Between two parts of the ring's head: makes the next operation behind it if that may overtake. False: there is none
// to look at.
bool Launcher::make_next(Overtaking& overtaking) {
  const Position position = overtaking.next();
  if (overtaking.ended() || position > ring_.pushed()) return false;
  Operation& operation = ring_.at(position);
  if (!overtaking.may_pass(operation)) return true;
  CUresult status = make_current(operation.context);
  if (status == CUDA_SUCCESS && operation.kind == Operation::Kind::kCopy && goes_in_pieces(operation, position)) {
    overtaking.stays(operation);
    return true;
  }
  operation.made = true;  // before the call, which may end this thread: no call is made twice
  if (status == CUDA_SUCCESS) {
    status = submit(operation, position, /*at_gate=*/operation.is_launch(), /*is_first=*/true, /*is_last=*/false);
  }
  if (status != CUDA_SUCCESS) mailbox_.put(operation.thread, status);
  return true;
}

void Launcher::open_until(Position position) noexcept {
  if (opening_.open_until(position) && at_gate_.load(std::memory_order_seq_cst)) admission_.wake();
}

void Launcher::drain(Position position) noexcept {
  while (ring_.passed() < position && !off()) {
    if (!ring_.await(position, kLookNs)) check();
  }
}

void Launcher::check() noexcept {
  if (!running()) return;
  const int taken = pthread_mutex_trylock(&alive_);
  if (taken == EBUSY) return;
  if (taken == EOWNERDEAD) pthread_mutex_consistent(&alive_);
  if (taken != 0 && taken != EOWNERDEAD) return;
  if (running()) run_what_is_left();
  pthread_mutex_unlock(&alive_);
}

void Launcher::run_what_is_left() {
  state_.store(State::kLeft, std::memory_order_release);
  // A push under way on another thread ends first, and later ones see the new state.
  { const SpinGuard push_is_over(push_lock_); }
  CUcontext mine = nullptr;
  driver::table().cuCtxGetCurrent(&mine);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver::table().cuThreadExchangeStreamCaptureMode(&mode);
  current_epoch_ = 0;
  if (ring_.front() != nullptr) admission_.end_graph(*ring_.front(), CUDA_ERROR_UNKNOWN);
  if (const Position begun = begun_.load(std::memory_order_acquire); begun > ring_.passed()) {
    mailbox_.put(ring_.at(begun).thread, CUDA_ERROR_UNKNOWN);
    ring_.at(begun).made = true;
  }
  while (const Operation* operation = ring_.front()) consume(*operation, /*gated=*/false);
  driver::table().cuCtxSetCurrent(mine);
  driver::table().cuThreadExchangeStreamCaptureMode(&mode);
}

void Launcher::stop(std::int64_t longest_ns) noexcept {
  open_until(~Position{0});
  const std::int64_t end = now_ns() + longest_ns;
  for (std::int64_t now = now_ns(); running() && !ring_.empty() && now < end; now = now_ns()) {
    if (!ring_.await(ring_.pushed(), std::min(kLookNs, end - now))) check();
  }
  stopping_.store(true, std::memory_order_seq_cst);
  state_.store(State::kOff, std::memory_order_release);
  ring_.notify();
  admission_.wake();
}

LauncherTime Launcher::time() const noexcept {
  clockid_t clock{};
  timespec used{};
  if (!running() || pthread_getcpuclockid(thread_, &clock) != 0 || clock_gettime(clock, &used) != 0) return {};
  return {used.tv_sec * kNsPerSecond + used.tv_nsec, driver_ns_.load(std::memory_order_relaxed)};
}

void Launcher::abandon() noexcept {
  // Not joined, not unlocked: neither the thread nor the mutex's owner is in this process.
  started_ = false;
  state_.store(State::kOff, std::memory_order_release);
}

}  // namespace cudasched::queue
