// Giving memory back. A latency client whose allocation fails asks the best-effort clients of its GPU to empty their
// caches, and tries again after each answer. Until the request is over, the freed memory is reserved for that client:
// best-effort allocations of clients that have answered wait.
//
// Every wait is bounded by the request's own time. A client owes an answer only while it lives and says that it has a
// cache to empty. One that cannot empty the cache now (a capture, latency work of its own) answers at once, with the
// cache full. A client that has not answered yet never waits: the thread that allocates may hold the lock that emptying
// its cache takes.
//
// Pure: functions over the shared table's words.
#pragma once

#include <cstdint>

namespace cudasched::schedule {

// Numbers only grow, over all clients of the GPU, so that an answer to one request answers those before it.
struct MemoryRequest {
  std::uint64_t number = 0;  // 0: none
  std::int64_t until_ns = 0;
};

struct MemoryGiver {
  bool alive = false;
  bool gives = false;  // it has a cache that it can empty
  std::uint64_t answered = 0;
};

// No request is believed for longer than that, whatever a damaged table says.
inline constexpr std::int64_t kLongestRequestNs = 60'000'000'000;

constexpr bool is_open(const MemoryRequest& request, std::int64_t now_ns) noexcept {
  return request.number != 0 && now_ns < request.until_ns && request.until_ns - now_ns <= kLongestRequestNs;
}

// Does the request still wait for this client?
constexpr bool owes_answer(const MemoryRequest& request, const MemoryGiver& giver) noexcept {
  return giver.alive && giver.gives && giver.answered < request.number;
}

// Is a best-effort allocation of this client to wait while the request is open?
constexpr bool yields(const MemoryRequest& request, const MemoryGiver& own, std::int64_t now_ns) noexcept {
  return is_open(request, now_ns) && (!own.gives || own.answered >= request.number);
}

// The number with which a client answers this request, if it has not answered before; 0: it owes no answer.
constexpr std::uint64_t answer_for(const MemoryRequest& request, const MemoryGiver& own, std::int64_t now_ns) noexcept {
  return is_open(request, now_ns) && own.gives && own.answered < request.number ? request.number : 0;
}

}  // namespace cudasched::schedule
