// Every decision of the gate in short generated replays, against those of decisions.txt: a change of the gate's code
// shows each launch that goes at another time. CUDASCHED_WRITE_DECISIONS=1 writes the file anew.
//
// A trace is a line with its name, then one word for each best-effort launch: a letter for its client, the time since
// the launch before it in us, and `!` where latency work was active. Times of the host and the GPU are integers of a
// generator of this file, and predictions have no noise, so that every machine computes the same.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "schedule/policy.hpp"
#include "simulate/replay.hpp"

namespace cudasched::simulate {
namespace {

constexpr std::int64_t kUsNs = 1'000;
constexpr std::int64_t kMsNs = 1'000'000;

class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::int64_t between(std::int64_t least, std::int64_t most) {
    state_ = state_ * 6'364'136'223'846'793'005ULL + 1'442'695'040'888'963'407ULL;
    return least + static_cast<std::int64_t>((state_ >> 33) % static_cast<std::uint64_t>(most - least + 1));
  }
  bool one_in(int count) { return between(1, count) == 1; }

 private:
  std::uint64_t state_;
};

ReplayClient trainer(Numbers& numbers, std::int64_t most_us) {
  ReplayClient client;
  client.name = "trainer";
  for (int i = 0; i < 60; ++i) {
    TraceLaunch launch{numbers.between(2, 15) * kUsNs, numbers.between(4, most_us) * kUsNs, i == 0};
    // Some are predicted badly.
    if (numbers.one_in(12)) launch.predicted_ns = launch.duration_ns * numbers.between(1, 30) / 10 + 1;
    client.launches.push_back(launch);
  }
  client.priority = static_cast<std::int32_t>(numbers.between(-1, 1));
  return client;
}

ReplayClient server(Numbers& numbers, std::int64_t end_ns, bool host_bound, bool periodic) {
  ReplayClient client;
  client.name = "server";
  client.client_class = Class::kLatency;
  const int launches = host_bound ? 60 : static_cast<int>(numbers.between(1, 6));
  for (int i = 0; i < launches; ++i) {
    const std::int64_t duration_us = host_bound ? numbers.between(3, 7) : numbers.between(50, 400);
    client.launches.push_back({numbers.between(10, 20) * kUsNs, duration_us * kUsNs, host_bound && i == 30});
  }
  client.slo_ns = numbers.between(4, 12) * kMsNs;
  const std::int64_t period_us = numbers.between(3'000, 6'000);
  for (std::int64_t at_us = numbers.between(1'000, 3'000); at_us * kUsNs < end_ns;) {
    client.arrivals_ns.push_back(at_us * kUsNs);
    at_us += periodic ? period_us : numbers.between(500, 2 * period_us);
  }
  return client;
}

struct Case {
  std::string name;
  std::vector<ReplayClient> clients;
  ReplaySettings settings;
  std::int64_t from_ns = 0;  // decisions before are left out, while the gate learns
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Numbers numbers(seed);
    Case made;
    ReplaySettings& settings = made.settings;
    settings.sharing = static_cast<Sharing>(seed % 3);
    settings.policy = std::vector<std::string>{"strict", "slack", "harvest", "strict", "slack"}[seed % 5];
    settings.offload = !numbers.one_in(3);
    settings.adaptive_lead = numbers.one_in(2);
    settings.foresee = numbers.one_in(2);
    settings.prediction_sigma = 0;
    settings.log = true;
    const bool learns = settings.policy != "strict";
    settings.end_ns = (learns ? 400 : 30) * kMsNs;
    made.from_ns = (learns ? 375 : 0) * kMsNs;
    const bool periodic = numbers.one_in(2);
    made.clients.push_back(server(numbers, settings.end_ns, settings.policy == "harvest", periodic));
    if (numbers.one_in(4)) made.clients[0].expect_ns = 400 * kUsNs;
    if (seed % 7 == 0) {
      made.clients[0].joins_ns = 10 * kMsNs;
      std::erase_if(made.clients[0].arrivals_ns, [](std::int64_t at) { return at < 10 * kMsNs; });
    }
    const std::int64_t trainers = numbers.between(1, 2);
    for (std::int64_t i = 0; i < trainers; ++i) {
      made.clients.push_back(trainer(numbers, numbers.one_in(3) ? 1'200 : 300));
    }
    made.name = std::to_string(seed) + " " + settings.policy + " " +
                std::vector<std::string>{"one process", "mps", "time slices"}[seed % 3];
    all.push_back(std::move(made));
  }
  return all;
}

std::string decisions(const Case& trace) {
  std::ostringstream words;
  std::int64_t before_us = trace.from_ns / kUsNs;
  std::size_t count = 0;
  for (const LaunchRecord& launch : replay(trace.clients, trace.settings).log) {
    if (launch.client == 0 || launch.submitted_ns < trace.from_ns) continue;
    const std::int64_t at_us = launch.submitted_ns / kUsNs;
    words << (count++ % 20 == 0 ? "\n " : "") << ' ' << static_cast<char>('a' + launch.client - 1) << at_us - before_us
          << (launch.latency_active ? "!" : "");
    before_us = at_us;
  }
  return words.str() + "\n";
}

TEST(Decisions, AreThoseThatWereRecorded) {
  std::ostringstream found;
  for (const Case& trace : cases()) found << trace.name << decisions(trace);
  if (std::getenv("CUDASCHED_WRITE_DECISIONS") != nullptr) std::ofstream(CUDASCHED_TEST_DECISIONS) << found.str();
  std::istringstream now(found.str());
  std::ifstream recorded(CUDASCHED_TEST_DECISIONS);
  std::string name;
  for (std::string line, expected; std::getline(now, line);) {
    if (!line.starts_with(' ')) name = line;
    std::getline(recorded, expected);
    ASSERT_EQ(line, expected) << "in trace " << name;
  }
}

}  // namespace
}  // namespace cudasched::simulate
