#include <gtest/gtest.h>

#include <cerrno>

#include "private_directory.hpp"
#include "telemetry/block_file.hpp"

namespace cudasched::telemetry {
namespace {

constexpr BlockFile::Format kFormat{{'T', 'E', 'S', 'T'}, 1, 8, 0x4B4C'4254};

TEST(BlockFile, TheChecksumIsThatOfZlib) {
  EXPECT_EQ(crc32(0, bytes_of("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32(crc32(0, bytes_of("1234")), bytes_of("56789")), 0xCBF43926U) << "in parts";
}

TEST(BlockFile, TheOpenOneStaysWhereTheNextCannotBeMade) {
  const test::PrivateDirectory directory;
  const std::string path = directory.path() + "/blocks";
  BlockFile file;
  ASSERT_TRUE(file.create(path, kFormat));
  EXPECT_FALSE(file.create(path, kFormat));
  EXPECT_EQ(errno, EEXIST);
  EXPECT_EQ(file.append(1, 0, {bytes_of("abc")}), nullptr);
  EXPECT_EQ(file.bytes(), 16U + 24 + 3);
  EXPECT_TRUE(file.create(path + "-next", kFormat));
  EXPECT_EQ(file.bytes(), 16U);
}

}  // namespace
}  // namespace cudasched::telemetry
