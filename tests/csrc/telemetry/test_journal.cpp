#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.hpp"
#include "private_directory.hpp"
#include "telemetry/journal.hpp"

namespace cudasched::telemetry {
namespace {

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Journal, AppendsBlocksBehindItsHeader) {
  const test::PrivateDirectory directory;
  std::string path;
  {
    Journal journal(directory.path());
    path = journal.path();
    EXPECT_TRUE(journal.append(Journal::Block::kMeta, 0, {bytes_of("{}")}));
    EXPECT_TRUE(journal.append(Journal::Block::kTexts, 7, {bytes_of("ab"), bytes_of("c")}));
  }
  const std::string data = contents(path);
  ASSERT_EQ(data.size(), 16U + 24 + 2 + 24 + 3);
  EXPECT_EQ(data.substr(0, 7), "CSDJRNL");
  EXPECT_EQ(data.substr(16, 4), "CBLK");
  EXPECT_EQ(data.substr(data.size() - 3), "abc");
}

TEST(Journal, EachIsAFileOfItsOwn) {
  const test::PrivateDirectory directory;
  const Journal first(directory.path());
  const Journal second(directory.path());
  EXPECT_NE(first.path(), second.path());
}

TEST(Journal, SaysWhyItCannotBegin) {
  try {
    const Journal journal("/nonexistent/directory");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/directory"), std::string::npos);
  }
}

TEST(Journal, AFullDiskLeavesItWholeUpToTheLastBlock) {
  const test::PrivateDirectory directory;
  Journal journal(directory.path());
  ASSERT_TRUE(journal.append(Journal::Block::kMeta, 0, {bytes_of("{}")}));
  const auto whole = std::filesystem::file_size(journal.path());
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit little{whole + 100, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &little);
  const std::string large(1000, 'x');
  const bool written = journal.append(Journal::Block::kTexts, 0, {bytes_of(large)});
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(written);
  EXPECT_TRUE(journal.failed());
  EXPECT_EQ(std::filesystem::file_size(journal.path()), whole);
  EXPECT_FALSE(journal.append(Journal::Block::kMeta, 0, {bytes_of("{}")})) << "nothing goes behind a gap";
}

// Programs close descriptors that they did not open, and open files of their own in their place.
TEST(Journal, NeverWritesIntoAFileThatIsNotItsOwn) {
  const test::PrivateDirectory directory;
  Journal journal(directory.path());
  const std::string other = directory.path() + "/other";
  int file = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    if (std::filesystem::read_symlink(entry.path(), ignored) == journal.path())
      file = std::stoi(entry.path().filename());
  }
  ASSERT_GE(file, 0);
  std::FILE* const theirs = std::fopen(other.c_str(), "w");
  ASSERT_GE(dup2(fileno(theirs), file), 0);
  EXPECT_FALSE(journal.append(Journal::Block::kMeta, 0, {bytes_of("{}")}));
  EXPECT_EQ(std::filesystem::file_size(other), 0U);
  close(file);
  std::fclose(theirs);
}

}  // namespace
}  // namespace cudasched::telemetry
