#include <gtest/gtest.h>

#include <map>

#include "runtime/settings.hpp"

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

TEST(SettingsTest, DefaultsWithoutAnEnvironment) {
  const Read result = read({});
  EXPECT_TRUE(result.complaints.empty());
  EXPECT_EQ(result.settings.process_class, Class::kNormal);
  EXPECT_TRUE(result.settings.offload);
  EXPECT_EQ(result.settings.lead_ns, std::nullopt);
  EXPECT_EQ(result.settings.first_lead_ns(), 20'000);
  EXPECT_EQ(result.settings.policy, "strict");
  EXPECT_EQ(result.settings.max_idle_hold_ns, 5'000'000);
  EXPECT_EQ(result.settings.turn_ns, 3'000'000);
  EXPECT_EQ(result.settings.slices.when, SliceSettings::When::kAuto);
  EXPECT_FALSE(result.settings.offload_beside_tools);
  EXPECT_FALSE(result.settings.launcher_spins);
}

TEST(SettingsTest, ReadsEveryVariable) {
  const Read result = read({{"CUDASCHED_CLASS", "best-effort"},
                            {"CUDASCHED_PRIORITY", "-3"},
                            {"CUDASCHED_SLO_MS", "2.5"},
                            {"CUDASCHED_LEAD_US", "400"},
                            {"CUDASCHED_POLICY", "slack"},
                            {"CUDASCHED_MAX_INFLATION", "1.2"},
                            {"CUDASCHED_HOST_BOUND_INFLATION", "1.05"},
                            {"CUDASCHED_MARGIN_US", "150"},
                            {"CUDASCHED_LONG_US", "500"},
                            {"CUDASCHED_MISS_PROBABILITY", "0.05"},
                            {"CUDASCHED_LATENCY_ORDER", "deadline"},
                            {"CUDASCHED_OFFLOAD_BESIDE_TOOLS", "1"},
                            {"CUDASCHED_LAUNCHER_SPINS", "1"},
                            {"CUDASCHED_GRAPH_SLICES", "always"},
                            {"CUDASCHED_GRAPH_SLICE_US", "150"},
                            {"CUDASCHED_GRAPH_SLICE_MB", "50"},
                            {"CUDASCHED_GRAPH_BUILD_MS", "300"},
                            {"CUDASCHED_LINGER_US", "70"},
                            {"CUDASCHED_MAX_IDLE_HOLD_MS", "100"},
                            {"CUDASCHED_STALE_HEARTBEAT_MS", "2000"},
                            {"CUDASCHED_TURN_MS", "60"},
                            {"CUDASCHED_RUN_DIR", "/tmp/run"},
                            {"CUDASCHED_NAME", "trainer"},
                            {"CUDASCHED_COVERAGE_DIR", "/tmp/coverage"},
                            {"CUDASCHED_WEIGHT", "2.5"},
                            {"CUDASCHED_CUPTI", "/opt/libcupti.so"}});
  EXPECT_TRUE(result.complaints.empty());
  EXPECT_EQ(result.settings.process_class, Class::kBestEffort);
  EXPECT_EQ(result.settings.priority, -3);
  EXPECT_EQ(result.settings.weight_milli(), 2'500U);
  EXPECT_EQ(result.settings.slo_ns, 2'500'000);
  EXPECT_EQ(result.settings.lead_ns, 400'000);
  EXPECT_EQ(result.settings.policy, "slack");
  EXPECT_DOUBLE_EQ(result.settings.max_inflation, 1.2);
  EXPECT_DOUBLE_EQ(result.settings.host_bound_inflation, 1.05);
  EXPECT_EQ(result.settings.margin_ns, 150'000);
  EXPECT_EQ(result.settings.long_ns, 500'000);
  EXPECT_DOUBLE_EQ(result.settings.miss_probability, 0.05);
  EXPECT_TRUE(result.settings.earliest_deadline_first);
  EXPECT_EQ(result.settings.slices.when, SliceSettings::When::kAlways);
  EXPECT_TRUE(result.settings.offload_beside_tools);
  EXPECT_TRUE(result.settings.launcher_spins);
  EXPECT_EQ(result.settings.slices.slice_ns, 150'000);
  EXPECT_EQ(result.settings.slices.most_bytes, 50'000'000U);
  EXPECT_EQ(result.settings.slices.most_build_ns, 300'000'000);
  EXPECT_EQ(result.settings.linger_ns, 70'000);
  EXPECT_EQ(result.settings.max_idle_hold_ns, 100'000'000);
  EXPECT_EQ(result.settings.stale_heartbeat_ns, 2'000'000'000);
  EXPECT_EQ(result.settings.turn_ns, 60'000'000);
  EXPECT_EQ(result.settings.run_directory, "/tmp/run");
  EXPECT_EQ(result.settings.name, "trainer");
  EXPECT_EQ(result.settings.coverage_directory, "/tmp/coverage");
  EXPECT_EQ(result.settings.cupti_path, "/opt/libcupti.so");
}

TEST(SettingsTest, WithoutOffloadTheLeadCoversTheProgramsOwnTime) {
  const Read result = read({{"CUDASCHED_OFFLOAD", "0"}});
  EXPECT_FALSE(result.settings.offload);
  EXPECT_EQ(result.settings.first_lead_ns(), 60'000);
}

TEST(SettingsTest, NonsenseKeepsTheDefaultAndNamesTheVariable) {
  const std::map<std::string, std::vector<std::string>> nonsense = {
      {"CUDASCHED_CLASS", {"urgent", "Latency", " "}},
      {"CUDASCHED_PRIORITY", {"high", "1.5", "99999999999", "9", "-9"}},
      {"CUDASCHED_SLO_MS", {"-1", "0", "nan", "inf", "5ms", "1e300"}},
      {"CUDASCHED_LINGER_US", {"-1", "soon"}},
      {"CUDASCHED_OFFLOAD", {"maybe", "2"}},
      {"CUDASCHED_LEAD_US", {"-1", "abc", "1e18", "automatic"}},
      {"CUDASCHED_POLICY", {"fair", "Strict"}},
      {"CUDASCHED_MAX_INFLATION", {"1", "0.5", "much"}},
      {"CUDASCHED_MISS_PROBABILITY", {"1", "-0.1", "2%"}},
      {"CUDASCHED_LATENCY_ORDER", {"edf", "1"}},
      {"CUDASCHED_MAX_IDLE_HOLD_MS", {"0", "-5"}},
      {"CUDASCHED_STALE_HEARTBEAT_MS", {"0"}},
      {"CUDASCHED_TURN_MS", {"0"}},
  };
  for (const auto& [variable, values] : nonsense) {
    for (const std::string& value : values) {
      const Read result = read({{variable, value}});
      ASSERT_EQ(result.complaints.size(), 1U) << variable << "=" << value;
      EXPECT_NE(result.complaints[0].find(variable + "=" + value), std::string::npos);
      EXPECT_EQ(result.settings.first_lead_ns(), Settings::kLeadNs);
      EXPECT_EQ(result.settings.slo_ns, 0);
      EXPECT_EQ(result.settings.process_class, Class::kNormal);
    }
  }
}

TEST(SettingsTest, SwitchesAreSpeltAsOneLikes) {
  for (const char* const word : {"1", "true", "YES", "on"}) {
    EXPECT_TRUE(read({{"CUDASCHED_OFFLOAD", word}}).settings.offload) << word;
    EXPECT_TRUE(read({{"CUDASCHED_NODE_PRIORITY", word}}).settings.node_priority) << word;
    EXPECT_TRUE(read({{"CUDASCHED_CLASS_BY_STREAM_PRIORITY", word}}).settings.class_by_stream_priority) << word;
  }
  for (const char* const word : {"0", "false", "NO", "off"}) {
    EXPECT_FALSE(read({{"CUDASCHED_OFFLOAD", word}}).settings.offload) << word;
    EXPECT_FALSE(read({{"CUDASCHED_NODE_PRIORITY", word}}).settings.node_priority) << word;
  }
}

TEST(SettingsTest, AComplaintSaysTheBoundsInWords) {
  const Read slo = read({{"CUDASCHED_SLO_MS", "0"}});
  EXPECT_NE(slo.complaints.at(0).find("it takes a number of ms, from 0.001 to 3600000;"), std::string::npos)
      << slo.complaints[0];
  const Read margin = read({{"CUDASCHED_MARGIN_US", "-1"}});
  EXPECT_NE(margin.complaints.at(0).find("it takes a number of us, from 0 to 3600000000;"), std::string::npos)
      << margin.complaints[0];
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
