// Best effort beside host-bound servers, simulated: what `harvest` promises, and what it must survive; and `slack`,
// which looks into requests by the same profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "simulate/host_bound.hpp"

namespace cudasched::simulate {
namespace {

// Simulated seconds, and random servers. What a sanitizer looks for, it meets with each kind of trainer and target; the
// promise is measured in the plain build, which takes a tenth of the time.
#ifdef __SANITIZE_ADDRESS__
constexpr std::int64_t kEndNs = 4 * kSecondNs;
constexpr int kServers = 6;
constexpr double kChance = 0.04;  // of a share of requests, which are fewer
#else
constexpr std::int64_t kEndNs = 12 * kSecondNs;
constexpr int kServers = 24;
constexpr double kChance = 0.01;
#endif

ReplaySettings harvesting(Sharing sharing, double inflation = 1.03) {
  ReplaySettings settings;
  settings.sharing = sharing;
  settings.policy = "harvest";
  settings.host_bound_inflation = inflation;
  settings.end_ns = kEndNs;
  return settings;
}

Beside strictly(const ReplayClient& serving, const ReplayClient& best_effort, Sharing sharing) {
  ReplaySettings settings = harvesting(sharing);
  settings.policy = "strict";
  return beside(serving, best_effort, settings);
}

#ifndef __SANITIZE_ADDRESS__  // what shows in a longer time only; the others meet the same code
HostBoundServer decoder() {
  HostBoundServer model;
  model.segments = 32;
  model.launches = 300;
  model.gap_ns = 15 * kUsNs;
  model.least_ns = 3 * kUsNs;
  model.most_ns = 7 * kUsNs;
  model.rate_hz = 2.4;
  return model;
}

TEST(HostBound, StrictLeavesTheGpuIdleAndHarvestDoesNot) {
  constexpr std::int64_t kLongerNs = 12 * kSecondNs;  // in less, what it does not harvest while it learns counts
  const ReplayClient bert = server({}, 7, kLongerNs);
  // Of one process the model says what it says of MPS.
  for (const Sharing sharing : {Sharing::kMps, Sharing::kTimeSlice}) {
    const bool sliced = sharing == Sharing::kTimeSlice;
    ReplaySettings settings = harvesting(sharing);
    settings.end_ns = kLongerNs;
    for (const auto& beside_it : {trainer(kTransformerKernels, 3), trainer(kResnet50Kernels, 4)}) {
      const Beside found = beside(bert, beside_it, settings);
      EXPECT_LT(found.p50, 1.02);
      EXPECT_LT(found.p99, 1.05);
      EXPECT_GT(found.kept, sliced ? 0.91 : 0.95);
      EXPECT_EQ(found.segments.fallbacks, 0u);
    }
    const Beside found = beside(bert, gemms(), settings);
    EXPECT_LT(found.p50, 1.02);
    EXPECT_GT(found.kept, sliced ? 0.87 : 0.89);
    settings.policy = "strict";
    EXPECT_LT(beside(bert, trainer(kTransformerKernels, 3), settings).kept, 0.8);
  }
}

// What is owed at a call that waits inside a request cannot be caught up later.
TEST(HostBound, ADecoderKeepsItsPaceThroughAllOfItsWaits) {
  constexpr std::int64_t kLongerNs = 40 * kSecondNs;  // it learns for ten of its long requests
  const ReplayClient decoding = server(decoder(), 7, kLongerNs);
  for (const Sharing sharing : {Sharing::kMps, Sharing::kTimeSlice}) {
    ReplaySettings settings = harvesting(sharing);
    settings.end_ns = kLongerNs;
    const Beside found = beside(decoding, trainer(kTransformerKernels, 3), settings);
    EXPECT_LT(found.p50, 1.03);
    EXPECT_LT(found.p99, 1.05);
    EXPECT_GT(found.kept, 0.9);
  }
}
#endif

std::int64_t between(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

// A server of at least so many launches a segment, a gap of at least so much between them, and kernels of which some
// take so much longer than others, at most.
HostBoundServer any_server(std::mt19937_64& random, int fewest_launches, std::int64_t least_gap_us,
                           std::int64_t most_longer_us) {
  HostBoundServer model;
  model.segments = static_cast<int>(between(random, 1, 5));
  model.launches = static_cast<int>(between(random, fewest_launches, 300));
  model.gap_ns = between(random, least_gap_us, 30) * kUsNs;
  model.least_ns = between(random, 2, 4) * kUsNs;
  model.most_ns = model.least_ns + between(random, 1, most_longer_us) * kUsNs;
  model.request_sigma = 0.01;
  return model;
}

// With honest predictions a request is slowed by what was stated, and what noise leaves of that, on any server.
TEST(HostBound, RequestsAreSlowedByNoMoreThanWasStated) {
  std::mt19937_64 random(5);
  for (int i = 0; i < kServers; ++i) {
    HostBoundServer model = any_server(random, 40, 8, 8);
    // Without queues, in which a small slowdown of one request adds up in those behind it.
    model.rate_hz = 0.15e9 / static_cast<double>(model.segments * model.launches * model.gap_ns);
    model.rate_hz = std::min(model.rate_hz, 100.0);
    const ReplayClient serving = server(model, static_cast<std::uint64_t>(i), kEndNs);
    const ReplayClient best_effort = i % 3 == 0   ? trainer(kTransformerKernels, 3)
                                     : i % 3 == 1 ? trainer(kResnet50Kernels, 4)
                                                  : gemms();
    const double inflation = i % 2 == 0 ? 1.03 : 1.06;
    const Sharing sharing = i / 2 % 2 == 0 ? Sharing::kMps : Sharing::kTimeSlice;
    const Beside strict = strictly(serving, best_effort, sharing);
    const Beside found = beside(serving, best_effort, harvesting(sharing, inflation));
    // To another context and back, once a segment.
    const auto segment_ns = static_cast<double>(model.launches * model.gap_ns);
    const double switches = sharing == Sharing::kMps ? 0 : 2 * schedule::kContextSwitchNs / segment_ns;
    EXPECT_LE(found.mean, strict.mean + (inflation - 1) + switches + 0.01)
        << i << ' ' << model.segments << ' ' << model.launches;
    EXPECT_GE(found.kept, strict.kept - 0.01) << i;
  }
}

// Marks in the server's stream say how far the GPU is, whatever is predicted of best effort.
TEST(HostBound, PredictionsThatAreTooShortDoNotSlowRequests) {
  for (const double share : {0.8, 0.5}) {
    ReplayClient training = trainer(kTransformerKernels, 3);
    for (TraceLaunch& launch : training.launches) {
      launch.predicted_ns = static_cast<std::int64_t>(share * static_cast<double>(launch.duration_ns));
    }
    const ReplayClient bert = server({}, 7, kEndNs);
    const Beside together = beside(bert, training, harvesting(Sharing::kMps));
    EXPECT_LT(together.p50, 1.02) << share;
    EXPECT_LT(together.p99, 1.05) << share;
    EXPECT_GT(together.kept, 0.94) << share;
    // By turns, what is in flight when the gate closes is longer than predicted.
    EXPECT_LT(beside(bert, training, harvesting(Sharing::kTimeSlice)).p50, 1.12) << share;
  }
}

TEST(HostBound, OtherRequestsUnderTheSameTargetMeanStrict) {
  // Requests of three kinds in turn: nothing that was learned of one holds for the next.
  std::mt19937_64 random(3);
  ReplayClient confused = server({}, 7, kEndNs);
  confused.launches.clear();
  confused.request_ends.clear();
  for (int request = 0; request < 60; ++request) {
    const int launches = request % 3 == 0 ? 250 : request % 3 == 1 ? 60 : 140;
    const std::int64_t gap_ns = std::uniform_int_distribution<std::int64_t>(5 * kUsNs, 40 * kUsNs)(random);
    for (int i = 0; i < launches; ++i) confused.launches.push_back({gap_ns, 5 * kUsNs, false});
    confused.request_ends.push_back(confused.launches.size());
  }
  const ReplayClient training = trainer(kTransformerKernels, 3);
  const Beside strict = strictly(confused, training, Sharing::kMps);
  const Beside found = beside(confused, training, harvesting(Sharing::kMps));
  EXPECT_GE(found.segments.fallbacks, 1u);
  EXPECT_LT(found.mean, strict.mean + 0.05);
  EXPECT_NEAR(found.kept, strict.kept, 0.1);
}

TEST(HostBound, ADifferentModelBehindTheSameServerIsStrictAgainWithinAFewRequests) {
  ReplayClient reloaded = server({}, 7, kEndNs);
  const ReplayClient before = server({}, 8, kEndNs);
  HostBoundServer other;
  other.launches = 90;
  other.least_ns = other.most_ns = 30 * kUsNs;  // the GPU is slower than its host
  const ReplayClient after = server(other, 9, kEndNs);
  const std::size_t requests = reloaded.arrivals_ns.size() / 2;
  reloaded.launches.clear();
  reloaded.request_ends.clear();
  for (std::size_t request = 0; request < 2 * requests; ++request) {
    const ReplayClient& model = request < requests ? before : after;
    const std::size_t which = request % model.request_ends.size();
    const std::size_t first = which == 0 ? 0 : model.request_ends[which - 1];
    for (std::size_t i = first; i < model.request_ends[which]; ++i) reloaded.launches.push_back(model.launches[i]);
    reloaded.request_ends.push_back(reloaded.launches.size());
  }
  const ReplaySettings settings = harvesting(Sharing::kMps);
  const auto alone = replay(std::vector{reloaded}, settings);
  const auto both = replay(std::vector{reloaded, trainer(kTransformerKernels, 3)}, settings);
  EXPECT_GE(both.clients[0].segments.fallbacks, 1u);
  int slowed = 0;
  for (std::size_t i = requests; i < both.clients[0].latencies_ns.size(); ++i) {
    const auto [now, then] = std::pair(both.clients[0].latencies_ns[i], alone.clients[0].latencies_ns[i]);
    slowed += static_cast<double>(now) > 1.2 * static_cast<double>(then) ? 1 : 0;
  }
  EXPECT_LE(slowed, 20) << "of " << requests;
}

// Every tenth request hangs on its host, in mid-request, for a second.
TEST(HostBound, IntoARequestThatDoesNotEndNothingIsLetInAnyMore) {
  ReplayClient hanging = server({}, 7, kEndNs);
  for (std::size_t request = 9; request < hanging.request_ends.size(); request += 10) {
    hanging.launches[hanging.request_ends[request] - 100].gap_ns = kSecondNs;
  }
  hanging.arrivals_ns.clear();
  for (std::int64_t at = 0; at < 2 * kEndNs / 3; at += 150 * kMsNs) hanging.arrivals_ns.push_back(at);
  ReplaySettings settings = harvesting(Sharing::kMps);
  settings.log = true;
  const auto both = replay(std::vector{hanging, trainer(kTransformerKernels, 3)}, settings);
  EXPECT_TRUE(std::any_of(both.clients[0].latencies_ns.begin(), both.clients[0].latencies_ns.end(),
                          [](std::int64_t latency_ns) { return latency_ns > kSecondNs; }));
  // Launches that went while latency work was active, by the time since the server's last launch.
  std::int64_t last_ns = 0;
  std::int64_t longest_ns = 0;
  std::uint64_t in_gaps = 0;
  std::vector<LaunchRecord> log = both.log;
  std::sort(log.begin(), log.end(), [](const auto& a, const auto& b) { return a.submitted_ns < b.submitted_ns; });
  for (const LaunchRecord& launch : log) {
    if (launch.client == 0) last_ns = launch.submitted_ns;
    if (launch.client != 1 || !launch.latency_active) continue;
    ++in_gaps;
    longest_ns = std::max(longest_ns, launch.submitted_ns - last_ns);
  }
  EXPECT_GT(in_gaps, 100u);
  EXPECT_LT(longest_ns, 25 * kMsNs) << "four times what such a segment takes, and no longer";
}

// A region that is left open holds request after request: each wait ends a segment, the later ones are taken for alike.
TEST(HostBound, ARegionThatHoldsManyRequestsIsHarvestedAndKeptToItsPace) {
  HostBoundServer model;
  model.segments = 40;
  model.launches = 60;
  model.rate_hz = 8;
  const ReplayClient region = server(model, 7, kEndNs);
  for (const Sharing sharing : {Sharing::kMps, Sharing::kOneProcess}) {
    const Beside strict = strictly(region, trainer(kTransformerKernels, 3), sharing);
    const Beside found = beside(region, trainer(kTransformerKernels, 3), harvesting(sharing));
    EXPECT_LT(found.p50, strict.p50 + 0.06);
    EXPECT_GE(found.kept, strict.kept - 0.01);
  }
}

// Two servers of one process, of different lengths, whose requests meet now and then.
TEST(HostBound, TwoServersOfDifferentProfilesAreSlowedByNoMoreThanUnderStrictAndTheTarget) {
  HostBoundServer small;
  small.launches = 80;
  small.gap_ns = 12 * kUsNs;
  small.rate_hz = 25;
  ReplayClient one = server({}, 7, kEndNs);
  ReplayClient two = server(small, 9, kEndNs);
  one.slo_ns = 20 * kMsNs;
  two.slo_ns = 5 * kMsNs;
  const auto run = [&](const std::string& policy) {
    ReplaySettings settings = harvesting(Sharing::kOneProcess);
    settings.policy = policy;
    return replay(std::vector{one, two, trainer(kTransformerKernels, 3)}, settings);
  };
  const ReplayResult strict = run("strict");
  const ReplayResult found = run("harvest");
  for (const std::size_t client : {std::size_t{0}, std::size_t{1}}) {
    EXPECT_LT(percentile_ns(found.clients[client].latencies_ns, 0.5),
              1.06 * percentile_ns(strict.clients[client].latencies_ns, 0.5))
        << client;
  }
  EXPECT_GT(found.clients[2].gpu_ns, strict.clients[2].gpu_ns);
}

// ---- slack ---------------------------------------------------------------------------------------------------------

// `slo`: of the median alone. Without a profile, `slack` takes what launches take out of a request's slack, though they
// run where the GPU is idle.
Beside within(double slo, ReplayClient serving, const ReplayClient& best_effort, Sharing sharing, bool profile = true,
              const char* policy = "slack") {
  ReplaySettings settings = harvesting(sharing, profile ? 1.03 : 1);
  settings.policy = policy;
  const ReplayResult& alone = by_itself(serving, settings);
  serving.slo_ns = static_cast<std::int64_t>(slo * percentile_ns(alone.clients[0].latencies_ns, 0.5));
  return beside(serving, best_effort, settings);
}

double met(const Beside& found) {
  const ClientResult& served = found.result.clients[0];
  return static_cast<double>(served.met) / static_cast<double>(served.latencies_ns.size());
}

TEST(HostBoundSlack, TheGapsOfARequestCostItNoSlack) {
  const ReplayClient bert = server({}, 7, kEndNs);
  for (const Sharing sharing : {Sharing::kMps, Sharing::kTimeSlice}) {
    for (const double slo : {1.3, 3.0}) {
      SCOPED_TRACE(slo);
      const ReplayClient training = trainer(kTransformerKernels, 3);
      const Beside blind = within(slo, bert, training, sharing, /*profile=*/false);
      const Beside found = within(slo, bert, training, sharing);
      EXPECT_LT(found.p50, 1.03);
      EXPECT_LT(found.p99, 1.03);
      EXPECT_GE(met(found), met(blind) - kChance);
      EXPECT_GT(found.kept, blind.kept + (slo < 2 ? 0.05 : -0.01));
      if (slo < 2) continue;
      EXPECT_GT(blind.p50, 1.2) << "the slack is spent on what the gaps have room for";
      EXPECT_GT(met(found), met(blind) + (sharing == Sharing::kMps ? 0.04 : -kChance));
    }
  }
}

// With honest predictions, what meets its target alone meets it beside best effort, on any server. Requests do not
// queue: by how much one may end later is asked for itself, not for those that may come behind it.
TEST(HostBoundSlack, ATargetThatCanBeMetIsMet) {
  std::mt19937_64 random(6);
  double gained = 0;
  constexpr int kHere = kServers / 2;
  for (int i = 0; i < kHere; ++i) {
    const HostBoundServer model = any_server(random, 100, 15, 5);
    ReplayClient serving = server(model, static_cast<std::uint64_t>(i), kEndNs);
    const std::int64_t request_ns = model.segments * model.launches * model.gap_ns;
    serving.arrivals_ns.clear();
    for (std::int64_t at = kMsNs; at < kEndNs; at += between(random, 4, 8) * request_ns)
      serving.arrivals_ns.push_back(at);
    const ReplayClient best_effort = i % 2 == 0 ? trainer(kTransformerKernels, 3) : trainer(kResnet50Kernels, 4);
    const Sharing sharing = i / 2 % 2 == 0 ? Sharing::kMps : Sharing::kTimeSlice;
    const double slo = static_cast<double>(between(random, 115, 300)) / 100;
    const Beside found = within(slo, serving, best_effort, sharing);
    const Beside strict = within(slo, serving, best_effort, sharing, /*profile=*/true, "strict");
    EXPECT_GE(met(found), met(strict) - kChance) << i << ' ' << slo;
    EXPECT_GE(found.kept, strict.kept - 0.01) << i;
    gained += (found.kept - strict.kept) / kHere;
  }
  EXPECT_GT(gained, 0.05);
}

TEST(HostBoundSlack, PredictionsThatAreTooShortHarmNoMoreThanWithoutAProfile) {
  for (const double share : {0.5, 0.25}) {
    ReplayClient training = trainer(kTransformerKernels, 3);
    for (TraceLaunch& launch : training.launches) {
      launch.predicted_ns = static_cast<std::int64_t>(share * static_cast<double>(launch.duration_ns));
    }
    const ReplayClient bert = server({}, 7, kEndNs);
    for (const Sharing sharing : {Sharing::kMps, Sharing::kTimeSlice}) {
      const Beside blind = within(2, bert, training, sharing, /*profile=*/false);
      const Beside found = within(2, bert, training, sharing);
      EXPECT_LT(found.p50, 1.2) << share;
      EXPECT_LE(found.p50, blind.p50 + 0.02) << share;
      EXPECT_GE(met(found), met(blind) - kChance) << share;
    }
  }
}

TEST(HostBound, AServerOfOneGraphIsServedAsUnderStrict) {
  ReplayClient graphs = server({}, 7, kEndNs);
  graphs.launches = {{0, 480 * kUsNs, false, 70}};
  graphs.request_ends.clear();
  for (const Sharing sharing : {Sharing::kMps, Sharing::kTimeSlice}) {
    const Beside strict = strictly(graphs, trainer(kTransformerKernels, 3), sharing);
    ReplaySettings settings = harvesting(sharing);
    settings.log = true;
    const Beside found = beside(graphs, trainer(kTransformerKernels, 3), settings);
    const auto let_in = std::count_if(found.result.log.begin(), found.result.log.end(), [](const LaunchRecord& launch) {
      return launch.client == 1 && launch.latency_active;
    });
    EXPECT_LE(let_in, 10) << "of " << found.result.clients[0].latencies_ns.size() << " requests";
    EXPECT_LT(found.p50, strict.p50 + 0.01);
    EXPECT_NEAR(found.kept, strict.kept, 0.01);
  }
}

}  // namespace
}  // namespace cudasched::simulate
