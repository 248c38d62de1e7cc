#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "queue/treatments.hpp"

namespace cudasched::queue {
namespace {

std::vector<std::string> symbols() {
  std::ifstream file(CUDASCHED_SYMBOLS);
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') names.push_back(line);
  }
  return names;
}

std::multimap<std::string, const Family*> entries() {
  std::multimap<std::string, const Family*> all;
  for (const Family& family : families()) {
    std::istringstream names{std::string(family.names)};
    for (std::string name; names >> name;) all.emplace(name, &family);
  }
  return all;
}

bool listed(std::string_view symbol) { return entries().count(std::string(base_name(symbol))) != 0; }

TEST(Treatments, EveryDriverFunctionHasOneDecisionAndNoNameIsStale) {
  const std::vector<std::string> known = symbols();
  ASSERT_GT(known.size(), 600U);
  std::set<std::string> bases;
  for (const std::string& symbol : known) bases.insert(std::string(base_name(symbol)));
  const auto all = entries();
  for (const std::string& base : bases) EXPECT_EQ(all.count(base), 1U) << base;
  for (const auto& [name, family] : all) EXPECT_TRUE(bases.contains(name)) << name << ": no such function";
}

TEST(Treatments, FamiliesSayWhy) {
  for (const Family& family : families()) {
    EXPECT_GT(family.why.size(), 15U) << family.names;
    EXPECT_TRUE(family.why.ends_with('.')) << family.why;
  }
}

TEST(Treatments, BaseNames) {
  EXPECT_EQ(base_name("cuMemcpyHtoDAsync_v2_ptsz"), "cuMemcpyHtoDAsync");
  EXPECT_EQ(base_name("cuMemcpy_ptds"), "cuMemcpy");
  EXPECT_EQ(base_name("cuStreamGetCaptureInfo_v3"), "cuStreamGetCaptureInfo");
  EXPECT_EQ(base_name("cuInit"), "cuInit");
  EXPECT_EQ(base_name("cuTexRefSetAddress2D_v3"), "cuTexRefSetAddress2D");
}

TEST(Treatments, AFunctionThatNoTableNamesIsDrainedToTheEnd) {
  const Rule rule = rule_of("cuSomethingOfTheFuture_v2");
  EXPECT_FALSE(listed("cuSomethingOfTheFuture_v2"));
  EXPECT_EQ(rule.treatment, Treatment::kDrained);
  EXPECT_EQ(rule.scope, Scope::kEnd);
}

// What takes a stream has a per-thread twin. It may be direct only where it enqueues nothing.
TEST(Treatments, WhatEnqueuesIsNeverDirect) {
  const std::set<std::string_view> only_reads{"cuStreamGetAttribute", "cuStreamGetCtx",        "cuStreamGetDevice",
                                              "cuStreamGetFlags",     "cuStreamGetId",         "cuStreamGetPriority",
                                              "cuStreamIsCapturing",  "cuStreamGetCaptureInfo"};
  // Called on capturing streams alone, on which nothing can be queued.
  const std::set<std::string_view> in_capture{"cuStreamEndCapture", "cuStreamUpdateCaptureDependencies"};
  // What nothing queued can know of.
  const std::set<std::string_view> allocates{"cuMemAllocAsync", "cuMemAllocFromPoolAsync"};
  int seen = 0;
  for (const std::string& symbol : symbols()) {
    if (!is_per_thread(symbol) && symbol.find("Async") == std::string::npos) continue;
    if (symbol.find("AsyncNotification") != std::string::npos) continue;  // of the device's memory use
    const std::string_view base = base_name(symbol);
    if (only_reads.contains(base) || in_capture.contains(base) || allocates.contains(base)) continue;
    ++seen;
    EXPECT_NE(rule_of(symbol).treatment, Treatment::kDirect) << symbol;
  }
  EXPECT_GT(seen, 120);
}

TEST(Treatments, EveryLaunchIsDeferredOrGatedAndNothingElseIsGated) {
  for (const std::string& symbol : symbols()) {
    const bool launch = symbol.starts_with("cuLaunch") || base_name(symbol) == "cuGraphLaunch";
    const Treatment treatment = rule_of(symbol).treatment;
    if (launch) {
      EXPECT_TRUE(treatment == Treatment::kDeferred || treatment == Treatment::kGated) << symbol;
    } else {
      EXPECT_NE(treatment, Treatment::kGated) << symbol;
    }
  }
}

// The lists of docs/order.md, word for word.
TEST(Treatments, AsTheDocumentSays) {
  const auto expect = [](Treatment treatment, std::initializer_list<const char*> names) {
    for (const char* name : names) EXPECT_EQ(rule_of(name).treatment, treatment) << name;
  };
  expect(Treatment::kDeferred,
         {"cuLaunchKernel", "cuLaunchKernelEx_ptsz", "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuMemsetD8Async",
          "cuMemsetD2D32Async", "cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2",
          "cuEventRecord", "cuEventRecordWithFlags", "cuStreamWaitEvent", "cuLaunchHostFunc", "cuEventDestroy_v2",
          "cuMemFreeAsync"});
  expect(Treatment::kDrained, {"cuMemcpy",
                               "cuMemcpyDtoH_v2",
                               "cuMemcpyHtoD_v2",
                               "cuMemsetD8_v2",
                               "cuStreamSynchronize",
                               "cuEventSynchronize",
                               "cuCtxSynchronize",
                               "cuMemFree_v2",
                               "cuMemFreeHost",
                               "cuMemUnmap",
                               "cuModuleUnload",
                               "cuLibraryUnload",
                               "cuStreamDestroy_v2",
                               "cuCtxDestroy_v2",
                               "cuStreamBeginCapture_v2",
                               "cuStreamBeginCaptureToGraph",
                               "cuGraphInstantiateWithFlags",
                               "cuGraphInstantiateWithParams",
                               "cuGraphExecUpdate_v2",
                               "cuGraphExecKernelNodeSetParams_v2",
                               "cuFuncSetAttribute",
                               "cuKernelSetAttribute",
                               "cuCtxSetLimit",
                               "cuStreamSetAttribute",
                               "cuTexObjectDestroy",
                               "cuSurfObjectDestroy",
                               "cuEventElapsedTime",
                               "cuMemcpyPeerAsync",
                               "cuMemcpyBatchAsync_v2",
                               "cuIpcGetEventHandle",
                               "cuDevicePrimaryCtxReset_v2",
                               "cuGraphUpload",
                               "cuStreamAddCallback"});
  expect(Treatment::kDirect,
         {"cuStreamCreate", "cuStreamCreateWithPriority", "cuEventCreate", "cuDeviceGetAttribute",
          "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuModuleLoadData", "cuLibraryLoadData", "cuMemAlloc_v2",
          "cuMemAllocHost_v2", "cuMemHostAlloc", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuCtxGetCurrent"});
  // Whatever frees memory, and what speaks of the whole context, waits for everything.
  for (const char* name : {"cuMemFree_v2", "cuMemFreeHost", "cuMemUnmap", "cuArrayDestroy", "cuCtxSynchronize",
                           "cuCtxDestroy_v2", "cuIpcCloseMemHandle", "cuModuleUnload"}) {
    EXPECT_EQ(rule_of(name).scope, Scope::kEnd) << name;
  }
}

TEST(Treatments, GreenContextsAreMadeAndReadDirectlyAndWhatSpeaksOfAllTheirStreamsDrains) {
  for (const char* name : {"cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuCtxFromGreenCtx", "cuStreamGetGreenCtx",
                           "cuGreenCtxGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"}) {
    EXPECT_EQ(rule_of(name).treatment, Treatment::kDirect) << name;
  }
  for (const char* name : {"cuGreenCtxDestroy", "cuGreenCtxRecordEvent", "cuGreenCtxWaitEvent"}) {
    EXPECT_EQ(rule_of(name), (Rule{Treatment::kDrained, Scope::kEnd, -1})) << name;
  }
}

TEST(Treatments, ScopesNameAnArgumentInARegister) {
  for (const Family& family : families()) {
    const Rule rule = family.rule;
    const bool has_handle = rule.scope != Scope::kNothing && rule.scope != Scope::kEnd;
    EXPECT_EQ(rule.treatment == Treatment::kDirect, rule.scope == Scope::kNothing) << family.names;
    // Launches differ in where the stream is; they are taken over by their signatures.
    const bool by_signature = family.names.starts_with("cuLaunchKernel");
    EXPECT_EQ(rule.argument >= 0, has_handle && !by_signature) << family.names;
    EXPECT_LT(rule.argument, 6) << family.names;
  }
}

}  // namespace
}  // namespace cudasched::queue
