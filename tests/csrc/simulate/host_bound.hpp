// Host-bound servers and the programs beside them for simulations: what an eager PyTorch server does on the host and
// the GPU, and best-effort kernels as an H200 ran them (docs/facts.md).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "simulate/replay.hpp"

namespace cudasched::simulate {

inline constexpr std::int64_t kUsNs = 1'000;
inline constexpr std::int64_t kMsNs = 1'000'000;
inline constexpr std::int64_t kSecondNs = 1'000'000'000;

// Durations by their quantiles 0, 50, 90, 99 and 100%, us.
using Durations = std::array<double, 5>;
inline constexpr Durations kTransformerKernels{4, 63, 158, 201, 260};
inline constexpr Durations kResnet50Kernels{3, 35, 155, 459, 480};

inline std::int64_t draw(const Durations& quantiles, std::mt19937_64& random) {
  constexpr std::array<double, 5> kShares{0, 0.5, 0.9, 0.99, 1};
  const double share = std::uniform_real_distribution(0.0, 1.0)(random);
  std::size_t i = 1;
  while (kShares[i] < share && i + 1 < kShares.size()) ++i;
  const double part = (share - kShares[i - 1]) / (kShares[i] - kShares[i - 1]);
  return static_cast<std::int64_t>(1'000 * (quantiles[i - 1] + part * (quantiles[i] - quantiles[i - 1])));
}

// A step of `launches` kernels, at whose end the program waits for the GPU.
inline ReplayClient trainer(const Durations& kernels, std::uint64_t seed, std::int64_t gap_ns = 12 * kUsNs,
                            std::size_t launches = 800) {
  std::mt19937_64 random(seed);
  ReplayClient client;
  client.name = "training";
  for (std::size_t i = 0; i < launches; ++i) client.launches.push_back({gap_ns, draw(kernels, random), i == 0});
  return client;
}

// GEMMs of 1.5 ms, one after the other.
inline ReplayClient gemms() {
  ReplayClient client;
  client.name = "gemms";
  client.launches = {{12 * kUsNs, 1'500 * kUsNs, false}};
  return client;
}

// An eager server's requests. Each is of `segments` parts, between which it waits for the GPU.
struct HostBoundServer {
  int segments = 1;
  int launches = 250;                 // of a segment
  std::int64_t gap_ns = 20 * kUsNs;   // of the host, from launch to launch,
  double gap_sigma = 0.15;            // of its log from launch to launch,
  double request_sigma = 0.03;        // and of the whole request's
  std::int64_t least_ns = 4 * kUsNs;  // of a kernel,
  std::int64_t most_ns = 6 * kUsNs;   // evenly distributed, the same in each request
  double rate_hz = 60;
};

inline ReplayClient server(const HostBoundServer& model, std::uint64_t seed, std::int64_t end_ns) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<std::int64_t> kernel(model.least_ns, model.most_ns);
  std::vector<std::int64_t> kernels;
  for (int i = 0; i < model.launches; ++i) kernels.push_back(kernel(random));
  ReplayClient client;
  client.name = "server";
  client.client_class = Class::kLatency;
  for (int request = 0; request < 50; ++request) {
    const double slow = std::exp(model.request_sigma * normal(random));
    for (int segment = 0; segment < model.segments; ++segment) {
      for (int i = 0; i < model.launches; ++i) {
        const double gap = static_cast<double>(model.gap_ns) * slow * std::exp(model.gap_sigma * normal(random));
        const bool waits = i == 0 && segment > 0;
        client.launches.push_back({static_cast<std::int64_t>(gap), kernels[static_cast<std::size_t>(i)], waits});
      }
    }
    client.request_ends.push_back(client.launches.size());
  }
  std::exponential_distribution<double> gap(model.rate_hz / static_cast<double>(kSecondNs));
  for (double at = gap(random); at < static_cast<double>(end_ns); at += gap(random)) {
    client.arrivals_ns.push_back(static_cast<std::int64_t>(at));
  }
  return client;
}

inline double percentile_ns(std::vector<std::int64_t> values, double share) {
  std::sort(values.begin(), values.end());
  return static_cast<double>(values.at(static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))));
}

// A server beside a best-effort program: latencies over those alone, and what best effort keeps of the GPU time that
// the server leaves, over what it does alone.
struct Beside {
  double p50 = 0;
  double p99 = 0;
  double mean = 0;
  double kept = 0;
  double gpu_duty = 0;
  schedule::Segments::Counts segments;
  ReplayResult result;
};

// A client by itself, which no policy and no target says anything of: replayed once a test.
inline const ReplayResult& by_itself(const ReplayClient& client, const ReplaySettings& settings) {
  static std::map<std::vector<std::int64_t>, ReplayResult> known;
  std::vector<std::int64_t> key{static_cast<std::int64_t>(settings.sharing), settings.end_ns};
  for (const TraceLaunch& launch : client.launches) {
    key.insert(key.end(),
               {launch.gap_ns, launch.duration_ns, launch.synchronised, launch.kernels, launch.predicted_ns});
  }
  key.insert(key.end(), client.request_ends.begin(), client.request_ends.end());
  key.insert(key.end(), client.arrivals_ns.begin(), client.arrivals_ns.end());
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(std::move(key), replay(std::vector{client}, settings)).first->second;
}

inline Beside beside(const ReplayClient& serving, const ReplayClient& best_effort, ReplaySettings settings) {
  const ReplayResult& alone = by_itself(serving, settings);
  const ReplayResult& unhindered = by_itself(best_effort, settings);
  Beside found;
  found.result = replay(std::vector{serving, best_effort}, settings);
  const auto& times = found.result.clients[0].latencies_ns;
  const auto& times_alone = alone.clients[0].latencies_ns;
  found.p50 = percentile_ns(times, 0.5) / percentile_ns(times_alone, 0.5);
  found.p99 = percentile_ns(times, 0.99) / percentile_ns(times_alone, 0.99);
  const auto sum = [](const std::vector<std::int64_t>& all) {
    double total = 0;
    for (const std::int64_t one : all) total += static_cast<double>(one);
    return total / static_cast<double>(all.size());
  };
  found.mean = sum(times) / sum(times_alone);
  found.gpu_duty = static_cast<double>(alone.busy_ns) / static_cast<double>(alone.end_ns);
  found.kept = static_cast<double>(found.result.clients[1].gpu_ns) / static_cast<double>(unhindered.clients[0].gpu_ns) /
               (1 - found.gpu_duty);
  found.segments = found.result.clients[0].segments;
  return found;
}

}  // namespace cudasched::simulate
