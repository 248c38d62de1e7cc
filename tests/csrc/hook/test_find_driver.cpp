#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hook/find_driver.h"
#include "hook/find_driver_internal.h"
#include "hook/images.hpp"
#include "private_directory.hpp"

namespace cudasched::hook::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// The parsers see a heap block of exactly the right size, so that a sanitizer sees the first byte too many.
cudasched_hook_library inspect(const Bytes& bytes) {
  const auto exact = std::make_unique<unsigned char[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), exact.get());
  return cudasched_hook_inspect_elf(exact.get(), bytes.size());
}

struct Scan {
  bool known;
  std::vector<std::string> paths;
};

Scan scan(const Bytes& bytes, const char* soname = "libcuda.so.1", bool stop_at_first = false) {
  struct Context {
    std::vector<std::string> paths;
    bool stop;
  } context{{}, stop_at_first};
  const auto visit = [](const char* path, void* raw) {
    auto* seen = static_cast<Context*>(raw);
    seen->paths.emplace_back(path);
    return seen->stop;
  };
  const auto exact = std::make_unique<unsigned char[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), exact.get());
  const bool known = cudasched_hook_scan_cache(exact.get(), bytes.size(), soname, visit, &context);
  return {known, context.paths};
}

// Between one and eight bytes of `original` changed, and sometimes its end cut off.
Bytes damaged(const Bytes& original, std::mt19937_64& random) {
  static constexpr unsigned char kTelling[] = {0, 1, 7, 8, 0x7f, 0x80, 0xfe, 0xff};
  Bytes bytes = original;
  const auto changes = 1 + random() % 8;
  for (std::uint64_t i = 0; i < changes; ++i) {
    auto& byte = bytes[random() % bytes.size()];
    byte = random() % 2 != 0 ? kTelling[random() % std::size(kTelling)] : static_cast<unsigned char>(random());
  }
  if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
  return bytes;
}

TEST(InspectElf, TakesASharedObjectForThisProcessor) {
  EXPECT_EQ(inspect(Library{}.image()), kLibraryUsable);
  EXPECT_EQ(inspect(Library{.base = 0}.image()), kLibraryUsable);
  EXPECT_EQ(inspect(Library{.needed = {}}.image()), kLibraryUsable);
}

TEST(InspectElf, RefusesAShimByTheNameItExports) {
  EXPECT_EQ(inspect(Library{.symbols = {"cuInit", "cudasched_shim_version"}}.image()), kLibraryShim);
  EXPECT_EQ(inspect(Library{.symbols = {"cuInit", "cudasched_shim_versions"}}.image()), kLibraryUsable);
}

TEST(InspectElf, RefusesWhatLeadsToAnotherLibcuda) {
  EXPECT_EQ(inspect(Library{.needed = {"libc.so.6", "libcuda.so.1"}}.image()), kLibraryForwarder);
  EXPECT_EQ(inspect(Library{.needed = {"libcuda.so.12"}}.image()), kLibraryUsable);
}

TEST(InspectElf, RefusesOtherProcessors) {
  EXPECT_EQ(inspect(Library{.machine = kOtherMachine}.image()), kLibraryOtherProcessor);
  EXPECT_EQ(inspect(Library{.elf_class = ELFCLASS32}.image()), kLibraryOtherProcessor);
  EXPECT_EQ(inspect(Library{.byte_order = ELFDATA2MSB}.image()), kLibraryOtherProcessor);
}

TEST(InspectElf, RefusesPrograms) {
  EXPECT_EQ(inspect(Library{.type = ET_EXEC}.image()), kLibraryNotShared);
  EXPECT_EQ(inspect(Library{.type = ET_REL}.image()), kLibraryNotShared);
  EXPECT_EQ(inspect(Library{.flags_1 = DF_1_PIE}.image()), kLibraryNotShared);
}

TEST(InspectElf, RefusesWhatIsNoElf) {
  EXPECT_EQ(inspect({}), kLibraryNotElf);
  EXPECT_EQ(inspect({'#', '!', '/', 'b', 'i', 'n', '/', 's', 'h', '\n'}), kLibraryNotElf);
}

TEST(InspectElf, RefusesDamage) {
  EXPECT_EQ(inspect(Library{.dynamic = false}.image()), kLibraryDamaged);
  // Every prefix that still has its magic and class is damaged: the string table is the last thing in the image.
  const Bytes whole = Library{}.image();
  for (std::size_t size = EI_NIDENT; size < whole.size(); ++size) {
    EXPECT_EQ(inspect(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))), kLibraryDamaged)
        << size;
  }
}

TEST(InspectElf, RefusesOffsetsThatWrapAround) {
  Bytes bytes = Library{}.image();
  Elf64_Ehdr header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.e_phoff = ~std::uint64_t{0} - 8;
  std::memcpy(bytes.data(), &header, sizeof header);
  EXPECT_EQ(inspect(bytes), kLibraryDamaged);
}

TEST(InspectElf, StaysInBoundsWhateverTheBytes) {
  std::mt19937_64 random(20);
  const Bytes originals[] = {Library{}.image(), Library{.needed = {"libcuda.so.1"}}.image(),
                             Library{.symbols = {"cudasched_shim_version"}}.image()};
  int refused = 0;
  for (int round = 0; round < 60'000; ++round) {
    refused += inspect(damaged(originals[round % 3], random)) != kLibraryUsable ? 1 : 0;
  }
  EXPECT_GT(refused, 20'000);  // the damage reaches what the reader looks at
}

TEST(ScanCache, FindsTheEntriesOfOneName) {
  const Bytes cache = new_cache(
      {{"libcuda.so.1", "/a/libcuda.so.1"}, {"libcuda.so", "/a/libcuda.so"}, {"libcuda.so.1", "/b/libcuda.so.1"}});
  EXPECT_THAT(scan(cache).paths, ElementsAre("/a/libcuda.so.1", "/b/libcuda.so.1"));
  EXPECT_THAT(scan(cache, "libcuda.so.1", true).paths, ElementsAre("/a/libcuda.so.1"));
  EXPECT_THAT(scan(cache, "libcuda").paths, IsEmpty());
}

TEST(ScanCache, ReadsTheFormatBehindTheOlderOne) {
  const Bytes cache = new_cache({{"libcuda.so.1", "/a/libcuda.so.1"}});
  for (const std::uint32_t old_entries : {0U, 1U, 2U, 3U, 100U}) {
    EXPECT_THAT(scan(old_and_new_cache(old_entries, cache)).paths, ElementsAre("/a/libcuda.so.1")) << old_entries;
  }
}

TEST(ScanCache, PassesOverOtherProcessorsAndRelativePaths) {
  const Bytes cache = new_cache({{"libcuda.so.1", "/i386", 0x0003},
                                 {"libcuda.so.1", "/x32", 0x0803},
                                 {"libcuda.so.1", "/newer-processor", kCacheFlags, std::uint64_t{1} << 62},
                                 {"libcuda.so.1", "relative"},
                                 {"libcuda.so.1", "/good"}});
  EXPECT_THAT(scan(cache).paths, ElementsAre("/good"));
}

TEST(ScanCache, KnowsByteOrders) {
  const std::vector<CacheEntry> entries = {{"libcuda.so.1", "/a"}};
  EXPECT_TRUE(scan(new_cache(entries, 0)).known);
  EXPECT_TRUE(scan(new_cache(entries, 2)).known);
  EXPECT_FALSE(scan(new_cache(entries, 3)).known);
}

TEST(ScanCache, RefusesWhatIsNoCache) {
  EXPECT_FALSE(scan({}).known);
  EXPECT_FALSE(scan(Bytes(4096, 'x')).known);
  EXPECT_FALSE(scan(new_cache({{"libcuda.so.1", "/a"}}, 2, 1'000)).known);
  EXPECT_FALSE(scan(new_cache({{"libcuda.so.1", "/a"}}, 2, 0xffff'fff0U)).known);
  Bytes only_old = old_and_new_cache(3, {});
  EXPECT_FALSE(scan(only_old).known);
  std::memset(only_old.data() + 12, 0xff, 4);
  EXPECT_FALSE(scan(only_old).known);
}

TEST(ScanCache, PassesOverEntriesThatPointOutside) {
  Bytes cache = new_cache({{"libcuda.so.1", "/a"}, {"libcuda.so.1", "/b"}});
  const std::uint32_t outside = static_cast<std::uint32_t>(cache.size());
  std::memcpy(cache.data() + 48 + 8, &outside, sizeof outside);
  EXPECT_THAT(scan(cache).paths, ElementsAre("/b"));
  cache.pop_back();  // "/b" has lost its end
  EXPECT_TRUE(scan(cache).known);
  EXPECT_THAT(scan(cache).paths, IsEmpty());
}

TEST(ScanCache, StaysInBoundsWhateverTheBytes) {
  std::mt19937_64 random(21);
  const Bytes plain = new_cache({{"libcuda.so.1", "/a"}, {"libc.so.6", "/c"}, {"libcuda.so.1", "/b"}});
  const Bytes originals[] = {plain, old_and_new_cache(3, plain)};
  int changed = 0;
  for (int round = 0; round < 60'000; ++round) {
    const Scan result = scan(damaged(originals[round % 2], random));
    changed += result.paths != std::vector<std::string>{"/a", "/b"} ? 1 : 0;
  }
  EXPECT_GT(changed, 20'000);
}

TEST(ScanCache, ReadsThisMachinesCache) {
  std::ifstream file("/etc/ld.so.cache", std::ios::binary);
  if (!file) GTEST_SKIP() << "this machine has no /etc/ld.so.cache";
  const Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const Scan result = scan(bytes, "libc.so.6");
  EXPECT_TRUE(result.known);
  ASSERT_FALSE(result.paths.empty());
  EXPECT_TRUE(std::filesystem::exists(result.paths.front())) << result.paths.front();
}

class Search : public testing::Test {
 protected:
  std::string at(const std::string& name) const { return (root_ / name).string(); }

  std::string put(const std::string& name, const Bytes& bytes) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return at(name);
  }

  // Searches with what the members say; the result is the path, or "" with why_ saying why not.
  std::string find(std::size_t path_bytes = 4096) {
    std::vector<const char*> directories;
    for (const auto& directory : directories_) directories.push_back(directory.c_str());
    directories.push_back(nullptr);
    const cudasched_hook_places places = {driver_.empty() ? nullptr : driver_.c_str(),
                                          library_path_.empty() ? nullptr : library_path_.c_str(),
                                          cache_.empty() ? nullptr : cache_.c_str(), directories.data()};
    std::vector<char> path(path_bytes, 'x');
    std::vector<char> why(4096, 'x');
    const int result = cudasched_hook_search(&places, path.data(), path.size(), why.data(), why.size());
    why_ = why.data();
    return result == 0 ? path.data() : "";
  }

  const cudasched::test::PrivateDirectory private_;
  const std::filesystem::path root_ = std::filesystem::canonical(private_.path());
  std::string driver_, library_path_, cache_, why_;
  std::vector<std::string> directories_;
};

TEST_F(Search, GoesFromTheVariableOverPathAndCacheToTheDirectories) {
  const Bytes library = Library{}.image();
  const auto fixed = put("fixed/libcuda.so.1", library);
  directories_ = {at("missing"), at("fixed")};
  EXPECT_EQ(find(), fixed);

  const auto cached = put("cached/driver", library);
  cache_ = put("cache", new_cache({{"libcuda.so.1", at("gone")}, {"libcuda.so.1", cached}}));
  EXPECT_EQ(find(), cached);

  const auto second = put("second/libcuda.so.1", library);
  library_path_ = at("first") + ":" + at("second") + ";" + at("fixed");
  EXPECT_EQ(find(), second);
  const auto first = put("first/libcuda.so.1", library);
  EXPECT_EQ(find(), first);

  driver_ = put("named/any-name.so", library);
  EXPECT_EQ(find(), driver_);
  EXPECT_EQ(why_, "");
}

TEST_F(Search, DoesNotFallBackFromTheVariable) {
  put("fixed/libcuda.so.1", Library{}.image());
  directories_ = {at("fixed")};
  const std::pair<std::string, std::string> cases[] = {
      {at("missing"), "no such file"},
      {at("fixed"), "cannot be read"},
      {put("script", {'#', '!'}), "not an ELF file"},
      {put("arm", Library{.machine = kOtherMachine}.image()), std::string("not for ") + kProcessor},
      {put("program", Library{.type = ET_EXEC}.image()), "not a shared object"},
      {put("shim", Library{.symbols = {"cudasched_shim_version"}}.image()), "a cudasched shim"},
      {put("cut", Bytes(40, 0x7f)), "not an ELF file"},
  };
  for (const auto& [path, reason] : cases) {
    driver_ = path;
    EXPECT_EQ(find(), "");
    EXPECT_THAT(why_, HasSubstr("CUDASCHED_DRIVER=" + path + ": " + reason));
  }
}

TEST_F(Search, SkipsWhatIsNoDriverAndSaysSo) {
  const auto shim = put("shim/libcuda.so.1", Library{.symbols = {"cudasched_shim_version"}}.image());
  const auto arm = put("arm/libcuda.so.1", Library{.machine = kOtherMachine}.image());
  const auto forwarder = put("forwarder/libcuda.so.1", Library{.needed = {"libcuda.so.1"}}.image());
  const auto link_stub = put("lib64/stubs/libcuda.so", Library{}.image());
  std::filesystem::create_directory(root_ / "link");
  std::filesystem::create_symlink(link_stub, root_ / "link/libcuda.so.1");
  library_path_ = at("shim") + ":" + at("arm") + ":" + at("forwarder") + ":" + at("link") + ":" + at("missing");
  EXPECT_EQ(find(), "");
  EXPECT_THAT(why_, HasSubstr("Looked in LD_LIBRARY_PATH=" + library_path_));
  EXPECT_THAT(why_, HasSubstr("(" + shim + ": a cudasched shim)"));
  EXPECT_THAT(why_, HasSubstr("(" + arm + ": not for " + kProcessor + ")"));
  EXPECT_THAT(why_, HasSubstr("(" + forwarder + ": needs another libcuda.so.1)"));
  EXPECT_THAT(why_, HasSubstr("(" + at("link/libcuda.so.1") + ": a stub for linking)"));
  EXPECT_THAT(why_, Not(HasSubstr("(" + at("missing"))));

  const auto real = put("real/libcuda.so.1", Library{}.image());
  directories_ = {at("real")};
  EXPECT_EQ(find(), real);
}

TEST_F(Search, RefusesTheShimAndTheStubAsBuilt) {
  for (const std::string library : {CUDASCHED_TEST_SHIM, CUDASCHED_TEST_STUB}) {
    driver_ = library;
    EXPECT_EQ(find(), "") << library;
  }
  EXPECT_THAT(why_, HasSubstr("needs another libcuda.so.1"));
}

TEST_F(Search, MakesRelativePathsAbsolute) {
  const auto real = put("here/libcuda.so.1", Library{}.image());
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(root_);
  library_path_ = "nowhere:here";
  EXPECT_EQ(find(), real);
  std::filesystem::current_path(root_ / "here");
  library_path_ = ":/nowhere";  // an empty element is the working directory
  EXPECT_EQ(find(), real);
  library_path_.clear();
  driver_ = "libcuda.so.1";
  EXPECT_EQ(find(), real);
  std::filesystem::current_path(before);
}

TEST_F(Search, PassesOverADamagedCache) {
  const auto fixed = put("fixed/libcuda.so.1", Library{}.image());
  cache_ = put("cache", Bytes(100, 'x'));
  EXPECT_EQ(find(), "");
  EXPECT_THAT(why_, HasSubstr(cache_ + " (damaged, or in an unknown format)"));
  directories_ = {at("fixed")};
  EXPECT_EQ(find(), fixed);
  cache_ = put("empty", {});
  EXPECT_EQ(find(), fixed);
}

TEST_F(Search, DoesNotWaitForAPipe) {
  std::filesystem::create_directory(root_ / "pipe");
  ASSERT_EQ(mkfifo(at("pipe/libcuda.so.1").c_str(), 0600), 0);
  library_path_ = at("pipe");
  EXPECT_EQ(find(), "");
  EXPECT_THAT(why_, HasSubstr("cannot be read"));
}

TEST_F(Search, WritesNoFurtherThanTheBuffers) {
  const auto real = put("real/libcuda.so.1", Library{}.image());
  directories_ = {at("real")};
  EXPECT_EQ(find(real.size() + 1), real);
  EXPECT_EQ(find(real.size()), "");
  EXPECT_THAT(why_, HasSubstr("its path is too long"));
  EXPECT_EQ(find(0), "");

  const char* const none[] = {nullptr};
  const cudasched_hook_places places = {nullptr, nullptr, nullptr, none};
  for (std::size_t bytes = 0; bytes < 40; ++bytes) {
    const auto why = std::make_unique<char[]>(bytes);
    char path[8];
    EXPECT_EQ(cudasched_hook_search(&places, path, sizeof path, why.get(), bytes), -1);
    if (bytes > 0) {
      EXPECT_LT(strnlen(why.get(), bytes), bytes);
    }
  }
}

TEST_F(Search, PassesOverDirectoriesWithLongNames) {
  const auto real = put("real/libcuda.so.1", Library{}.image());
  library_path_ = "/" + std::string(4090, 'a') + ":/" + std::string(100'000, 'b') + ":" + at("real");
  EXPECT_EQ(find(), real);
}

TEST(FindDriver, ReadsTheEnvironment) {
  char path[4096];
  char why[2048];
  ASSERT_EQ(setenv("CUDASCHED_DRIVER", "/nonexistent/libcuda.so.1", 1), 0);
  EXPECT_EQ(cudasched_hook_find_driver(path, sizeof path, why, sizeof why), -1);
  EXPECT_EQ(why, std::string("CUDASCHED_DRIVER=/nonexistent/libcuda.so.1: no such file. It must name the driver's ") +
                     kProcessor + " libcuda.so.1; unset it to search.");
  ASSERT_EQ(unsetenv("CUDASCHED_DRIVER"), 0);
}

}  // namespace
}  // namespace cudasched::hook::test
