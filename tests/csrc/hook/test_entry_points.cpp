// The table of the driver's entry points against itself, against what csrc/hook takes over, and against docs/order.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "hook/entry_points.hpp"
#include "hook/intercept.hpp"
#include "symbol_names.h"

namespace cudasched::hook {
namespace {

const EntryPoint& point(std::string_view symbol) {
  const EntryPoint* const found = find_symbol(symbol);
  if (found == nullptr) throw std::runtime_error(std::string(symbol) + " is not in the table");
  return *found;
}

std::vector<std::string> symbols() { return {cudasched_hook_names, cudasched_hook_names + kSymbolCount}; }

std::string_view version_name(std::string_view name, int version) {
  const EntryPoint* const found = find_version(name, version);
  return found == nullptr ? "none" : found->symbol;
}

TEST(EntryPoints, EveryExportedSymbolHasOneLine) {
  ASSERT_GT(kSymbolCount, 700);
  std::size_t count = 0;
  for (const EntryPoint& each : entry_points()) count += each.twin.empty() ? 1 : 2;
  EXPECT_EQ(count, static_cast<std::size_t>(kSymbolCount));
  for (const std::string& symbol : symbols()) {
    const EntryPoint* const found = find_symbol(symbol);
    ASSERT_NE(found, nullptr) << symbol;
    EXPECT_EQ(is_twin(symbol) ? found->twin : found->symbol, symbol);
  }
}

TEST(EntryPoints, WhatIsTakenOverIsMarkedAndTheReverse) {
  std::map<std::string_view, TakenOver> taken;
  for (const TakenOver& each : taken_over()) {
    EXPECT_TRUE(taken.emplace(each.symbol, each).second) << each.symbol << " is taken over twice";
    EXPECT_TRUE(point(each.symbol).taken_over) << each.symbol << " is not marked `hook`";
    EXPECT_NE(each.legacy, nullptr) << each.symbol;
    EXPECT_EQ(each.per_thread == nullptr, point(each.symbol).twin.empty()) << each.symbol << ": the twin";
  }
  for (const EntryPoint& each : entry_points()) {
    EXPECT_EQ(each.taken_over, taken.contains(each.symbol)) << each.symbol << " has no function in csrc/hook";
  }
}

TEST(EntryPoints, ANameMeansTheNewestVersionThatTheProgramKnows) {
  EXPECT_EQ(version_name("cuMemcpyHtoDAsync", 2000), "cuMemcpyHtoDAsync");
  EXPECT_EQ(version_name("cuMemcpyHtoDAsync", 3010), "cuMemcpyHtoDAsync");
  EXPECT_EQ(version_name("cuMemcpyHtoDAsync", 3020), "cuMemcpyHtoDAsync_v2");
  EXPECT_EQ(version_name("cuLaunchHostFunc", 13000), "cuLaunchHostFunc");
  EXPECT_EQ(version_name("cuLaunchHostFunc", 13010), "cuLaunchHostFunc_v2");
  EXPECT_EQ(version_name("cuStreamGetCaptureInfo", 12020), "cuStreamGetCaptureInfo_v2");
  EXPECT_EQ(version_name("cuGraphInstantiate", 11000), "cuGraphInstantiate_v2");
  EXPECT_EQ(version_name("cuGraphInstantiate", 12000), "cuGraphInstantiateWithFlags");
  EXPECT_EQ(version_name("cuGraphInstantiateWithFlags", 11040), "cuGraphInstantiateWithFlags");
  EXPECT_EQ(version_name("cuLaunchKernelEx", 11050), "none");
  EXPECT_EQ(version_name("cuEGLApiInit", 1), "cuEGLApiInit");  // the headers say nothing of its version
  EXPECT_EQ(version_name("cuSomethingOfTheFuture", 99000), "none");
}

TEST(EntryPoints, SymbolsAreFoundWithTheirTwinsAndNoOthers) {
  EXPECT_EQ(point("cuMemcpyHtoDAsync_v2_ptsz").symbol, "cuMemcpyHtoDAsync_v2");
  EXPECT_EQ(point("cuMemcpy_ptds").symbol, "cuMemcpy");
  for (const char* symbol : {"cuMemcpy_ptsz", "cuMemAlloc_v2_ptsz", "cuLaunchHostFunc_v9", "cuMem", "", "_ptsz"}) {
    EXPECT_EQ(find_symbol(symbol), nullptr) << symbol;
  }
}

// Of the versions of a deferred function only those with a function of our own are deferred.
TEST(EntryPoints, OtherVersionsOfDeferredFunctionsDrain) {
  std::set<std::string_view> deferred;
  for (const EntryPoint& each : entry_points()) {
    if (each.treatment == Treatment::kDefer) deferred.insert(each.name);
  }
  std::set<std::string_view> others;
  for (const EntryPoint& each : entry_points()) {
    if (each.treatment == Treatment::kDefer || !deferred.contains(each.name)) continue;
    others.insert(each.symbol);
    EXPECT_EQ(each.treatment, Treatment::kDrain) << each.symbol;
  }
  EXPECT_TRUE(others.contains("cuLaunchHostFunc_v2") && others.contains("cuMemcpyHtoDAsync"));
}

TEST(EntryPoints, WhatEnqueuesIsNeverDirect) {
  const std::set<std::string_view> only_reads{
      "cuStreamGetAttribute", "cuStreamGetCtx",      "cuStreamGetDevice",      "cuStreamGetFlags",      "cuStreamGetId",
      "cuStreamGetPriority",  "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuStreamGetDevResource"};
  // Called on capturing streams alone, on which nothing can be queued.
  const std::set<std::string_view> in_capture{"cuStreamEndCapture", "cuStreamEndCaptureToCig",
                                              "cuStreamUpdateCaptureDependencies"};
  // What nothing queued can know of.
  const std::set<std::string_view> allocates{"cuMemAllocAsync", "cuMemAllocFromPoolAsync"};
  int seen = 0;
  for (const std::string& symbol : symbols()) {
    if (!is_twin(symbol) && symbol.find("Async") == std::string::npos) continue;
    if (symbol.find("AsyncNotification") != std::string::npos) continue;  // of the device's memory use
    const std::string_view base = point(symbol).name;
    if (only_reads.contains(base) || in_capture.contains(base) || allocates.contains(base)) continue;
    ++seen;
    EXPECT_NE(point(symbol).treatment, Treatment::kDirect) << symbol;
  }
  EXPECT_GT(seen, 120);
}

TEST(EntryPoints, EveryLaunchIsDeferredOrGatedAndNothingElseIsGated) {
  for (const std::string& symbol : symbols()) {
    const std::string_view name = point(symbol).name;
    const bool launch = (name.starts_with("cuLaunch") && name != "cuLaunchHostFunc") || name == "cuGraphLaunch";
    EXPECT_EQ(point(symbol).meaning == Meaning::kLaunch, launch) << symbol;
    const Treatment treatment = point(symbol).treatment;
    if (launch) {
      EXPECT_TRUE(treatment == Treatment::kDefer || treatment == Treatment::kGate) << symbol;
    } else {
      EXPECT_NE(treatment, Treatment::kGate) << symbol;
    }
  }
}

// The functions that docs/order.md names between these two, in backticks.
std::set<std::string> named_between(const std::string& begin, const std::string& end) {
  static const std::string page = [] {
    std::ifstream file(CUDASCHED_TEST_ORDER_PAGE);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }();
  const std::size_t first = page.find(begin);
  const std::size_t last = page.find(end, first);
  if (first == std::string::npos || last == std::string::npos) {
    throw std::runtime_error("docs/order.md has nothing from \"" + begin + "\" to \"" + end + "\"");
  }
  std::set<std::string> names;
  const std::string part = page.substr(first, last - first);
  const std::regex name("`(cu[A-Z][A-Za-z0-9_]*)`");
  for (std::sregex_iterator each(part.begin(), part.end(), name); each != std::sregex_iterator(); ++each) {
    names.insert((*each)[1]);
  }
  return names;
}

// All names of which some version is treated so.
std::set<std::string> names_of(Treatment treatment) {
  std::set<std::string> names;
  for (const EntryPoint& each : entry_points()) {
    if (each.treatment == treatment) names.emplace(each.name);
  }
  return names;
}

// The lists of docs/order.md, as they are there.
TEST(EntryPoints, AsTheDocumentSays) {
  const std::string deferred = "1. **Deferred**:";
  const std::string drained = "2. **Drained, direct**:";
  const std::string direct = "3. **Direct**:";
  const std::string behind = "A treatment belongs to a *version*";
  EXPECT_EQ(named_between(deferred, drained), names_of(Treatment::kDefer));
  EXPECT_EQ(named_between("Launches of the old interface", "are **gated**"), names_of(Treatment::kGate));
  const auto expect = [](const std::set<std::string>& names, Treatment treatment) {
    EXPECT_GT(names.size(), 10U);
    for (const std::string& name : names) {
      const EntryPoint* const newest = find_version(name, kNewestVersion);
      ASSERT_NE(newest, nullptr) << name;
      EXPECT_EQ(newest->treatment, treatment) << name;
    }
  };
  expect(named_between(drained, direct), Treatment::kDrain);
  expect(named_between(direct, behind), Treatment::kDirect);
  // Whatever frees memory waits for everything (a table in which it does not ends the build), and these are said to.
  for (const char* name : {"cuMemFree_v2", "cuMemFreeHost", "cuMemUnmap", "cuArrayDestroy", "cuIpcCloseMemHandle",
                           "cuModuleUnload", "cuLibraryUnload", "cuMemFreeAsync"}) {
    EXPECT_EQ(point(name).meaning, Meaning::kFree) << name;
  }
  EXPECT_EQ(point("cuCtxSynchronize").scope, Scope::kContext);
}

TEST(EntryPoints, GreenContextsAreMadeAndReadDirectlyAndWhatSpeaksOfAllTheirStreamsDrains) {
  for (const char* name : {"cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuCtxFromGreenCtx", "cuStreamGetGreenCtx",
                           "cuGreenCtxGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"}) {
    EXPECT_EQ(point(name).treatment, Treatment::kDirect) << name;
  }
  for (const char* name : {"cuGreenCtxDestroy", "cuGreenCtxRecordEvent", "cuGreenCtxWaitEvent"}) {
    EXPECT_EQ(point(name).treatment, Treatment::kDrain) << name;
    EXPECT_EQ(point(name).scope, Scope::kProcess) << name;
  }
}

}  // namespace
}  // namespace cudasched::hook
