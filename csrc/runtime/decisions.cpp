#include "runtime/decisions.hpp"

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "runtime/engine.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::array<std::string_view, telemetry::kWaitReasons> kReasons{
    "a policy",
    "latency work",
    "latency work just done",
    "announced latency work",
    "foreseen work",
    "work in flight",
    "another client's turn",
    "members of its job",
    "a short backlog",
    "a request of its process",
};
constexpr std::array<std::string_view, queue::kDrainKinds> kDrains{
    "calls that wait for the GPU",
    "launches that cannot be deferred",
    "other calls",
};

// "12 for latency work, 3 for another client's turn"; empty: nothing has happened.
template <std::size_t kCount>
std::string changes(const std::array<std::uint64_t, kCount>& now, std::array<std::uint64_t, kCount>& before,
                    const std::array<std::string_view, kCount>& names) {
  std::string text;
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::uint64_t more = now[i] - std::exchange(before[i], now[i]);
    if (more == 0) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(more) + " for " + std::string(names[i]);
  }
  return text;
}

}  // namespace

void Decisions::say(std::int64_t now) noexcept {
  if (now - said_ns_ < kNsPerSecond || !log::writes(log::Level::kDebug)) return;
  said_ns_ = now;
  try {
    std::array<std::uint64_t, telemetry::kWaitReasons> held{};
    for (std::size_t i = 0; i < held.size(); ++i) held[i] = hot().counters.held[i].load(std::memory_order_relaxed);
    std::array<std::uint64_t, queue::kDrainKinds> drains{};
    engine().for_each_device([&](const Device& device) {
      for (std::size_t i = 0; device.queue() != nullptr && i < drains.size(); ++i)
        drains[i] += device.queue()->drains(i);
    });
    if (const std::string text = changes(held, held_, kReasons); !text.empty()) {
      log::debug("the gate held launches: " + text);
    }
    if (const std::string text = changes(drains, drains_, kDrains); !text.empty()) {
      log::debug("the ring was drained: " + text);
    }
  } catch (const std::exception&) {
    return;  // no memory for a line
  }
}

}  // namespace cudasched::runtime
