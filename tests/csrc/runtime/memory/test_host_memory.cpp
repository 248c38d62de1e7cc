#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "private_directory.hpp"
#include "runtime/memory/host_memory.hpp"

namespace cudasched::runtime {
namespace {

std::uint64_t available(const std::string& text) {
  const test::PrivateDirectory directory;
  const std::string path = directory.path() + "/meminfo";
  std::ofstream(path) << text;
  return available_host_bytes(path.c_str());
}

TEST(HostMemory, IsTheAvailableMemoryInBytes) {
  EXPECT_EQ(available("MemTotal:       65 kB\nMemFree:        7 kB\nMemAvailable:       42 kB\nBuffers: 1 kB\n"),
            42u * 1024);
}

TEST(HostMemory, IsUnknownWhereTheFileDoesNotSay) {
  EXPECT_EQ(available("MemTotal: 65 kB\nMemFree: 7 kB\n"), kUnknownMemory);
  EXPECT_EQ(available("MemAvailable:"), kUnknownMemory);
  EXPECT_EQ(available("MemAvailable: 99999999999999999999 kB"), kUnknownMemory);
  EXPECT_EQ(available(""), kUnknownMemory);
  EXPECT_EQ(available_host_bytes("/nonexistent/meminfo"), kUnknownMemory);
}

TEST(HostMemory, IsThereOnThisMachine) { EXPECT_NE(available_host_bytes(), kUnknownMemory); }

}  // namespace
}  // namespace cudasched::runtime
