#include <gmock/gmock.h>

#include "hook/other_shims.hpp"

namespace cudasched::hook::test {
namespace {

using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(OtherShims, NamesWhoSchedulesAlready) {
  const std::vector<std::string> xsched = {"", "/lib/libc.so.6", "/opt/xsched/lib/libhalcuda.so"};
  EXPECT_THAT(rival_among(xsched), HasSubstr("XSched (/opt/xsched/lib/libhalcuda.so) schedules"));
  EXPECT_THAT(rival_among(std::vector<std::string>{"libnvshare.so"}), HasSubstr("nvshare (libnvshare.so)"));
  EXPECT_THAT(limits_among(xsched), IsEmpty());
}

TEST(OtherShims, WorksBehindWhoLimits) {
  const std::vector<std::string> libraries = {"/usr/local/vgpu/libvgpu.so", "/etc/vgpu-manager/libvgpu-control.so"};
  EXPECT_THAT(rival_among(libraries), IsEmpty());
  EXPECT_EQ(limits_among(libraries),
            "/usr/local/vgpu/libvgpu.so (HAMi-core), /etc/vgpu-manager/libvgpu-control.so (vgpu-manager)");
}

TEST(OtherShims, GoesByTheWholeFileName) {
  const std::vector<std::string> others = {"/libvgpu.so/libm.so.6", "/a/mylibnvshare.so", "/a/libnvshare.so.1", ""};
  EXPECT_THAT(rival_among(others), IsEmpty());
  EXPECT_THAT(limits_among(others), IsEmpty());
}

TEST(OtherShims, SeesWhatIsLoaded) { EXPECT_THAT(loaded_libraries(), Contains(EndsWith("/libc.so.6"))); }

}  // namespace
}  // namespace cudasched::hook::test
