#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "runtime/settings.hpp"
#include "schedule/fair.hpp"
#include "schedule/policy.hpp"

namespace cudasched::runtime {
namespace {

struct Read {
  Settings settings;
  std::vector<std::string> complaints;
};

Read read(const std::map<std::string, std::string>& environment) {
  Read result;
  result.settings = Settings::read(
      [&](const char* name) -> const char* {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
      },
      result.complaints);
  return result;
}

TEST(SettingsTest, AVariableOfEachTypeReachesItsMember) {
  EXPECT_EQ(read({}).settings.lead_ns, std::nullopt);
  EXPECT_EQ(read({}).settings.first_lead_ns(), 20'000);
  const Read result = read({{"CUDASCHED_CLASS", "best-effort"},
                            {"CUDASCHED_PRIORITY", "-3"},
                            {"CUDASCHED_SLO_MS", "2.5"},
                            {"CUDASCHED_LEAD_US", "400"},
                            {"CUDASCHED_POLICY", "slack"},
                            {"CUDASCHED_MAX_INFLATION", "1.2"},
                            {"CUDASCHED_LATENCY_ORDER", "deadline"},
                            {"CUDASCHED_TIME_SLICE_US", "off"},
                            {"CUDASCHED_GRAPH_SLICES", "always"},
                            {"CUDASCHED_GRAPH_SLICE_MB", "50"},
                            {"CUDASCHED_MEMORY_LIMIT", "2GiB"},
                            {"CUDASCHED_NODE_PRIORITY", "no"},
                            {"CUDASCHED_RUN_DIR", "/tmp/run"},
                            {"CUDASCHED_WEIGHT", "2.5"}});
  EXPECT_TRUE(result.complaints.empty());
  EXPECT_EQ(result.settings.process_class, Class::kBestEffort);
  EXPECT_EQ(result.settings.priority, -3);
  EXPECT_EQ(result.settings.weight_milli(), 2'500U);
  EXPECT_EQ(result.settings.slo_ns, 2'500'000);
  EXPECT_EQ(result.settings.lead_ns, 400'000);
  EXPECT_EQ(result.settings.policy, "slack");
  EXPECT_DOUBLE_EQ(result.settings.max_inflation, 1.2);
  EXPECT_TRUE(result.settings.earliest_deadline_first);
  EXPECT_EQ(result.settings.time_slice_us, 0U);
  EXPECT_EQ(result.settings.slices.when, SliceSettings::When::kAlways);
  EXPECT_EQ(result.settings.slices.most_bytes, 50'000'000U);
  EXPECT_EQ(result.settings.memory_limit, std::uint64_t{2} << 30);
  EXPECT_FALSE(result.settings.node_priority);
  EXPECT_EQ(result.settings.run_directory, "/tmp/run");
}

TEST(SettingsTest, WithoutOffloadTheLeadCoversTheProgramsOwnTime) {
  const Read result = read({{"CUDASCHED_OFFLOAD", "0"}});
  EXPECT_FALSE(result.settings.offload);
  EXPECT_EQ(result.settings.first_lead_ns(), 60'000);
}

TEST(SettingsTest, NonsenseKeepsTheDefaultAndNamesTheVariable) {
  const std::pair<std::string, std::string> nonsense[] = {
      {"CUDASCHED_CLASS", "urgent"}, {"CUDASCHED_SLO_MS", "0"},           {"CUDASCHED_LEAD_US", "automatic"},
      {"CUDASCHED_OFFLOAD", "2"},    {"CUDASCHED_MAX_INFLATION", "much"}, {"CUDASCHED_POLICY", "Strict"},
  };
  for (const auto& [variable, value] : nonsense) {
    const Read result = read({{variable, value}});
    ASSERT_EQ(result.complaints.size(), 1U) << variable << "=" << value;
    EXPECT_EQ(result.complaints[0].find(variable + "=" + value + " has no meaning: it takes "), 0U);
    EXPECT_EQ(result.settings.first_lead_ns(), Settings::kLeadNs);
    EXPECT_EQ(result.settings.slo_ns, 0);
    EXPECT_EQ(result.settings.process_class, Class::kNormal);
  }
}

TEST(SettingsTest, EveryPolicyHasAName) {
  for (const schedule::Policy& policy : schedule::policies()) {
    EXPECT_EQ(read({{"CUDASCHED_POLICY", std::string(policy.name)}}).settings.policy, policy.name);
  }
  EXPECT_EQ(schedule::kLargestPriority, 8);  // as settings.inc has it
}

TEST(SettingsTest, TheProgramHasAName) { EXPECT_NE(program_name().find("test_runtime"), std::string::npos); }

TEST(SettingsTest, HarvestBacksOffForTheWholeOfARequest) {
  Settings settings;
  EXPECT_EQ(settings.host_backoff_limit_ns(), 2'000'000);
  settings.policy = "harvest";
  EXPECT_EQ(settings.host_backoff_limit_ns(), 20'000'000);
  settings.host_backoff_ns = 30'000'000;
  EXPECT_EQ(settings.host_backoff_limit_ns(), 30'000'000);
  settings.host_backoff_ns = 0;
  EXPECT_EQ(settings.host_backoff_limit_ns(), 0);
}

}  // namespace
}  // namespace cudasched::runtime
