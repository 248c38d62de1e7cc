// Runs the model checker spin over order.pml, where it is installed: the protocol holds in every interleaving, and the
// model is not empty, because each part that is taken out of it breaks it.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "private_directory.hpp"

namespace cudasched::queue {
namespace {

std::string output_of(const std::string& command) {
  std::string text;
  if (std::FILE* pipe = popen((command + " 2>&1").c_str(), "r")) {
    std::array<char, 4096> part{};
    while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
    pclose(pipe);
  }
  return text;
}

bool installed(const char* program) {
  return std::system((std::string("command -v ") + program + " >/dev/null 2>&1").c_str()) == 0;
}

class Model : public testing::Test {
 protected:
  void SetUp() override {
    if (!installed("spin") || !installed("cc")) GTEST_SKIP() << "needs the model checker spin, and cc";
  }

  // What the checker says of the model without the part that `without` names.
  std::string check(const std::string& without) const {
    const std::string flag = without.empty() ? "" : " -D" + without;
    return output_of("cd " + directory_.path() + " && spin -a" + flag +
                     " " CUDASCHED_MODEL " && cc -w -DSAFETY -o pan pan.c && ./pan -m100000");
  }

  const test::PrivateDirectory directory_;
};

TEST_F(Model, Holds) {
  const std::string report = check("");
  EXPECT_NE(report.find("errors: 0"), std::string::npos) << report;
  EXPECT_EQ(report.find("max search depth too small"), std::string::npos) << report;
}

class ModelWithout : public Model, public testing::WithParamInterface<const char*> {};

TEST_P(ModelWithout, Fails) {
  const std::string report = check(GetParam());
  EXPECT_NE(report.find("errors: 1"), std::string::npos) << report;
}
INSTANTIATE_TEST_SUITE_P(A, ModelWithout,
                         testing::Values("NO_CLAIM", "NO_OPEN", "NO_GATE_WAKE", "NO_RECHECK", "NO_WANTED"),
                         [](const auto& parameter) { return std::string(parameter.param); });

}  // namespace
}  // namespace cudasched::queue
