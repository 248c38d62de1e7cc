#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "predict/predictor.hpp"

namespace cudasched::predict {
namespace {

using Block = std::vector<std::uint32_t>;

constexpr std::uint64_t kMapped = std::uint64_t{kMappedHalf} << 32;
constexpr std::uint64_t kProgram = std::uint64_t{kProgramHalf} << 32;
constexpr std::uint64_t kMemory = kMapped + 0xf12'0000'0000ULL;

void put_pointer(Block& block, std::size_t at, std::uint64_t pointer) {
  block[at] = static_cast<std::uint32_t>(pointer);
  block[at + 1] = static_cast<std::uint32_t>(pointer >> 32);
}

// One kernel of 40 words, asked about through the predictor, which is how keys are made.
class WordsTest : public ::testing::Test {
 protected:
  WordsTest() {
    allocations_.add(kMemory, std::uint64_t{1} << 30);
    predictor_->use_allocations(&allocations_);
    function_.identity = 77;
    function_.parameter_bytes = 160;
    launch_.grid[0] = 64;
    launch_.block[0] = 128;
  }

  static Block block() {
    Block words(40, 5);
    put_pointer(words, 4, kMemory + 4096);
    return words;
  }

  // `duration_ns` 0: not measured.
  Prediction launch(const Block& words, std::int64_t duration_ns) {
    const Prediction prediction = predictor_->predict({launch_, &function_, words, {4, 132}, false});
    if (prediction.wants_sample && duration_ns > 0) predictor_->observe(prediction, duration_ns, false);
    return prediction;
  }

  std::int64_t noisy(double duration_ns, double noise) {
    return std::llround(duration_ns * std::exp(noise * normal_(random_)));
  }

  std::unique_ptr<Predictor> predictor_ = std::make_unique<Predictor>();
  Allocations allocations_;
  Function function_;
  Launch launch_;
  std::mt19937_64 random_{1};
  std::normal_distribution<double> normal_;
};

TEST_F(WordsTest, PointersAreOut) {
  Block words = block();
  const std::uint64_t key = launch(words, 10'000).key;
  for (int i = 0; i < 100; ++i) {
    put_pointer(words, 4, kMemory + random_() % (std::uint64_t{1} << 30));
    EXPECT_EQ(launch(words, 10'000).key, key);
  }
}

TEST_F(WordsTest, APointerThatWasNullAtFirstIsOut) {
  Block words = block();
  put_pointer(words, 10, 0);
  const std::uint64_t key = launch(words, 10'000).key;
  put_pointer(words, 10, kMemory);
  const Prediction prediction = launch(words, 10'000);
  EXPECT_EQ(prediction.key, key);
  EXPECT_TRUE(prediction.hit);
}

TEST_F(WordsTest, WithoutAllocationsAddressesAreOut) {
  predictor_->use_allocations(nullptr);
  Block words = block();
  put_pointer(words, 4, kMemory + 0x0345'6700);
  const std::uint64_t key = launch(words, 10'000).key;
  put_pointer(words, 4, kMemory + 0x1234'5600);
  EXPECT_EQ(launch(words, 10'000).key, key);
  // Sizes side by side are no address.
  words[6] = 4096;
  words[7] = 1024;
  const std::uint64_t other = launch(words, 10'000).key;
  words[7] = 2048;
  EXPECT_NE(launch(words, 10'000).key, other);
}

TEST_F(WordsTest, EveryWordTellsKeysApart) {
  std::set<std::uint64_t> keys{launch(block(), 10'000).key};
  for (std::size_t at = 0; at < 40; ++at) {
    if (at == 4 || at == 5) continue;
    for (const std::uint32_t value : {0U, 6U, 0x0fff'ffffU, 0x3f80'0000U}) {
      Block words = block();
      words[at] = value;
      EXPECT_TRUE(keys.insert(launch(words, 10'000).key).second) << at << ' ' << value;
    }
  }
}

TEST_F(WordsTest, ValuesThatAreNoSizesAreOne) {
  for (std::size_t at = 0; at < 40; ++at) {
    if (at == 4 || at == 5) continue;
    Block words = block();
    words[at] = 0x1000'0000;
    const std::uint64_t key = launch(words, 10'000).key;
    for (const std::uint32_t value : {0x1000'0001U, 0x3f80'0000U, 0x7fff'ffffU, 0xffff'ffffU}) {
      words[at] = value;
      EXPECT_EQ(launch(words, 10'000).key, key) << at << ' ' << value;
    }
  }
}

// A kernel's unfilled arrays hold what the stack held: addresses of the program itself, which CUDA does not know.
TEST_F(WordsTest, AddressesOfTheHostAreOutAtOnce) {
  for (const std::uint64_t address :
       {kMapped + 0xffc'b795'fb50ULL, kMapped + 0xf53'cd81'a5d0ULL, kMapped + 0xe12'0123'4560ULL,
        kProgram + 0x55'5575'4000ULL, kProgram + 0x1ff'0fff'0000ULL}) {
    function_.index = ++function_.identity % 1'000;
    Block words = block();
    put_pointer(words, 20, address);
    const std::uint64_t key = launch(words, 10'000).key;
    put_pointer(words, 20, address + 0x210'0010);
    EXPECT_EQ(launch(words, 10'000).key, key);
    put_pointer(words, 20, 0);
    EXPECT_EQ(launch(words, 10'000).key, key);
  }
}

TEST_F(WordsTest, SizesSideBySideAreNoAddressOfTheHost) {
  std::set<std::uint64_t> keys;
  for (const std::uint32_t high : {1'024U, 4'096U, 30'522U, 32'000U, 32'768U, 50'257U, 65'536U}) {
    Block words = block();
    words[20] = 1U << 21;
    words[21] = high;
    EXPECT_TRUE(keys.insert(launch(words, 10'000).key).second) << high;
  }
}

TEST_F(WordsTest, KeysAreTheSameInEveryRunAndForEveryLength) {
  for (std::uint32_t count : {1U, 7U, 8U, 9U, 40U, 1023U, 1024U}) {
    Block words(count);
    for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random_() % (1U << 28));
    function_.identity = function_.index = count;
    const auto other = std::make_unique<Predictor>();
    Block first = words;
    first[count - 1] ^= 1;  // another launch comes first there
    const std::uint64_t key = launch(words, 0).key;
    const std::uint64_t first_key = other->predict({launch_, &function_, first, {}, false}).key;
    EXPECT_EQ(other->predict({launch_, &function_, words, {}, false}).key, key);
    EXPECT_NE(first_key, key) << "the last word of " << count;
  }
}

TEST_F(WordsTest, TheKOfAGemmIsInTheKeyAfterALongRunOfOneK) {
  Block words = block();
  words[8] = 512;
  std::set<std::uint64_t> keys;
  for (int i = 0; i < 5'000; ++i) keys.insert(launch(words, noisy(50'000, 0.02)).key);
  EXPECT_EQ(keys.size(), 1U);
  for (std::uint32_t k = 513; k < 1'100; ++k) {
    words[8] = k;
    keys.insert(launch(words, noisy(50'000.0 * k / 512, 0.02)).key);
  }
  EXPECT_EQ(keys.size(), 588U);
}

// What such a kernel does shows in its geometry; the rest is padding and what the stack held.
TEST_F(WordsTest, ElementwiseKernelsHitAtTheFirstRepeatWhateverElseTheirBlocksHold) {
  for (const Family family : {Family::kElementwise, Family::kIndex, Family::kCopy, Family::kMemory}) {
    function_.index = ++function_.identity % 1'000;
    function_.traits.family = static_cast<std::uint8_t>(family);
    Block words = block();
    const std::uint64_t key = launch(words, 12'000).key;
    for (int i = 0; i < 50; ++i) {
      words[1] = static_cast<std::uint32_t>(random_() % 256);
      words[7] = static_cast<std::uint32_t>(random_() % (1U << 28));
      words[20] = static_cast<std::uint32_t>(random_());
      const Prediction prediction = launch(words, noisy(12'000, 0.05));
      EXPECT_TRUE(prediction.hit);
      EXPECT_EQ(prediction.key, key);
    }
    words[0] = 6;
    EXPECT_NE(launch(words, 12'000).key, key);
    launch_.grid[0] += 1;
    EXPECT_FALSE(launch(words, 12'000).hit);
  }
}

TEST_F(WordsTest, ASharedKeyIsSplitWhereWordsChangeTheDuration) {
  function_.traits.family = static_cast<std::uint8_t>(Family::kElementwise);
  const std::uint32_t strides[] = {1, 64, 4096};
  Block words = block();
  const auto next = [&](std::uint32_t stride) {
    words[8] = stride;
    return launch(words, noisy(10'000.0 * (1 + std::log2(stride)), 0.02));
  };
  for (int i = 0; i < 20; ++i) next(strides[i % 3]);
  std::set<std::uint64_t> keys;
  for (const std::uint32_t stride : strides) {
    const Prediction prediction = next(stride);
    EXPECT_TRUE(prediction.hit);
    EXPECT_NEAR(static_cast<double>(prediction.duration_ns), 10'000.0 * (1 + std::log2(stride)),
                1'500.0 * std::log2(2 * stride));
    keys.insert(prediction.key);
  }
  EXPECT_EQ(keys.size(), 3U);

  // And stays so in the next run.
  const auto other = std::make_unique<Predictor>();
  other->use_allocations(&allocations_);
  other->restore(predictor_->save());
  for (const std::uint32_t stride : strides) {
    words[8] = stride;
    const Prediction prediction = other->predict({launch_, &function_, words, {4, 132}, false});
    EXPECT_TRUE(prediction.hit);
    EXPECT_TRUE(keys.contains(prediction.key));
  }
}

TEST_F(WordsTest, ADoubtIsNotAskedAboutForeverWhereNothingIsMeasured) {
  function_.traits.family = static_cast<std::uint8_t>(Family::kElementwise);
  Block words = block();
  for (int i = 0; i < 3; ++i) launch(words, 10'000);
  words[8] = 4096;
  int asked = 0;
  for (int i = 0; i < 100 && asked == 0; ++i) asked += launch(words, 20'000).wants_sample ? 1 : 0;
  ASSERT_EQ(asked, 1);
  ASSERT_TRUE(launch(words, 0).wants_sample);
  asked = 0;
  for (int i = 0; i < 200'000; ++i) asked += launch(words, 0).wants_sample ? 1 : 0;
  EXPECT_LE(asked, 200'000 / static_cast<int>(Sampling::kPeriod) +
                       static_cast<int>(Sampling::kMostEarlyDraws + Sampling::kMostUnanswered) + 1'000);
}

// What a launch has learned is not lost when its key is split.
TEST_F(WordsTest, NoLaunchThatWasTimedIsNewWhenItsKeyIsSplit) {
  function_.traits.family = static_cast<std::uint8_t>(Family::kCopy);
  Block words = block();
  const auto next = [&](int kind) {
    words[8] = kind == 0 ? 1 : 4096;
    return launch(words, kind == 0 ? 10'000 : 30'000);
  };
  EXPECT_FALSE(next(0).hit);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(next(i % 2).hit) << i;
  EXPECT_NE(next(0).key, next(1).key);
}

// Of kernels whose sizes may stand in any word no two that differ in one share a key: few values or many, measured or
// not, far apart or near, and also where all else suggests that the word is free.
TEST_F(WordsTest, ProductsThatDifferInKAloneNeverShareAKey) {
  for (const Family family :
       {Family::kGemm, Family::kConvolution, Family::kAttention, Family::kNormalisation, Family::kSoftmax,
        Family::kReduction, Family::kSortScan, Family::kOptimizer, Family::kTriton, Family::kOther}) {
    for (const int values : {2, 3, 5, 40}) {
      for (const bool measured : {true, false}) {
        function_.index = ++function_.identity % 1'000;
        function_.traits.family = static_cast<std::uint8_t>(family);
        std::vector<std::set<std::uint64_t>> keys(static_cast<std::size_t>(values));
        Block words = block();
        for (int i = 0; i < 8 * values; ++i) {
          const auto number = random_() % keys.size();
          words[8] = 64 * (1 + static_cast<std::uint32_t>(number));
          keys[number].insert(launch(words, measured ? noisy(5'000 + 1'000.0 * words[8] / 64, 0.02) : 0).key);
        }
        std::set<std::uint64_t> all;
        std::size_t seen = 0;
        for (const std::set<std::uint64_t>& mine : keys) {
          EXPECT_LE(mine.size(), 1U);
          all.insert(mine.begin(), mine.end());
          seen += mine.empty() ? 0 : 1;
        }
        EXPECT_EQ(all.size(), seen) << static_cast<int>(family) << ' ' << values << ' ' << measured;
      }
    }
  }
}

TEST_F(WordsTest, ATileInTheNameSpeaksOfAProductWhateverElseItSays) {
  function_.traits = traits_of("gather_copy_128x64x32_kernel");
  ASSERT_EQ(function_.traits.family, static_cast<std::uint8_t>(Family::kIndex));
  Block words = block();
  const std::uint64_t key = launch(words, 12'000).key;
  words[8] = 4096;
  EXPECT_NE(launch(words, 12'000).key, key);
}

// And a list of tensors is told by the tensors that it has, whatever earlier launches left behind them.
TEST_F(WordsTest, AListOfTensorsIsKnownByItsElements) {
  function_.traits = traits_of(
      "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
      "namespace)::TensorListMetadata<2>, int>(int)");
  const std::size_t first = std::size_t{2} * 2 * 64;
  const std::size_t map = first + std::size_t{2} * 64;
  Block words(788, 5);
  words[map] = 0x0701'0100;
  launch_.grid[0] = 3;
  words[first] = 1'000;
  words[first + 2] = 2'000;
  const std::uint64_t key = launch(words, 12'000).key;
  for (int i = 0; i < 20; ++i) {
    for (std::size_t at = map + 1; at < words.size(); ++at) words[at] = static_cast<std::uint32_t>(random_());
    words[first + 4] = static_cast<std::uint32_t>(random_() % 10'000);  // of a tensor that no block works on
    EXPECT_EQ(launch(words, 12'000).key, key);
  }
  words[first + 2] = 2'001;
  EXPECT_NE(launch(words, 12'000).key, key);
}

// Their launches are told apart by all words, and pointers are still out.
TEST_F(WordsTest, FunctionsBeyondTheTableGoByAllWords) {
  function_.index = kMaxFunctions;
  Block words = block();
  const std::uint64_t key = launch(words, 1'000).key;
  put_pointer(words, 4, kMemory + 8192);
  EXPECT_TRUE(launch(words, 1'000).hit);
  words[8] = 9;
  EXPECT_NE(launch(words, 1'000).key, key);
  EXPECT_GT(predictor_->words().without_room(), 0U);
}

TEST_F(WordsTest, TheArenaHasRoomForEveryFunctionOfTheTable) {
  for (std::uint32_t i = 0; i < kMaxFunctions; ++i) {
    function_.index = i;
    function_.identity = 1'000 + i;
    Block words(kMaxWords, i);
    const std::uint64_t key = launch(words, 1'000).key;
    words[kMaxWords - 1] = 7'777;
    ASSERT_NE(launch(words, 1'000).key, key) << i;
  }
  EXPECT_EQ(predictor_->words().without_room(), 0U);
  EXPECT_EQ(predictor_->words().used_bytes(), Words::kArenaBytes);
}

// Never another shape's key, and the same key for the same launch.
TEST_F(WordsTest, AFunctionWithoutRoomInTheArenaGoesByAllWords) {
  const auto words = std::make_unique<Words>(64);
  words->use_allocations(&allocations_);
  Block first = block();
  words->meet(function_, first);
  EXPECT_EQ(words->without_room(), 0U);
  Function other = function_;
  other.index = 1;
  other.identity = 78;
  words->meet(other, first);
  EXPECT_EQ(words->without_room(), 1U);
  EXPECT_EQ(words->used_bytes(), 64U);
  EXPECT_TRUE(words->knows(other));
  EXPECT_EQ(words->sum(other, first), words->sum(function_, first));
  Block moved = first;
  put_pointer(moved, 4, kMemory + 8192);
  EXPECT_EQ(words->sum(other, moved), words->sum(other, first));
  EXPECT_FALSE(words->mask_pointers(other, moved));
  Block larger = first;
  larger[39] = 6;
  EXPECT_NE(words->sum(other, larger), words->sum(other, first));
  EXPECT_EQ(words->first(other, first), 5U);
}

}  // namespace
}  // namespace cudasched::predict
