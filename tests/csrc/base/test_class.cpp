#include <gtest/gtest.h>

#include "base/class.hpp"

namespace cudasched {
namespace {

TEST(ClassNames, RoundTrip) {
  for (const Class value : {Class::kNormal, Class::kLatency, Class::kBestEffort}) {
    EXPECT_EQ(parse_class(class_name(value)), value);
  }
  EXPECT_EQ(parse_class("best-effort"), Class::kBestEffort);
}

TEST(ClassNames, NothingElseIsAccepted) {
  for (const char* name : {"", "Latency", "latency ", "besteffort", "high", "0"}) {
    EXPECT_FALSE(parse_class(name).has_value()) << name;
  }
}

}  // namespace
}  // namespace cudasched
