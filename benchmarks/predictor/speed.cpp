// The loops that are timed: one distinct row a call, each engine called as a C program calls it.
//
// Built by __main__.py into a shared library together with csrc/predict. A timer returns ns a row over `count` rows;
// rows lie `features` floats apart.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "predict/features.hpp"
#include "predict/outlook.hpp"
#include "predict/predictor.hpp"
#include "predict/trees/evaluator.hpp"

namespace {

using cudasched::predict::trees::Evaluator;
using cudasched::predict::trees::Isa;

template <typename Call>
double ns_a_row(const float* rows, std::size_t count, std::size_t features, Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < count; ++i) call(rows + i * features, i);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(count);
}

namespace predict = cudasched::predict;

constexpr std::size_t kLaunches = 512;  // as many as a few iterations of a model
constexpr std::size_t kFunctions = 64;
constexpr std::size_t kWords = 64;  // 256 bytes of parameters

std::uint64_t mixed(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// Launches of a few kernels with ever other shapes: each number is another launch.
class Launches {
 public:
  Launches() : functions_(kFunctions), launches_(kLaunches), words_(kLaunches * kWords) {
    for (std::size_t i = 0; i < kFunctions; ++i) {
      predict::Function& function = functions_[i];
      function.identity = mixed(i + 1) | 1;
      function.index = static_cast<std::uint32_t>(i);
      function.parameter_bytes = kWords * 4;
      function.registers = 32 + 8 * static_cast<std::uint32_t>(i % 24);
      function.max_threads = 1024;
    }
  }

  // Numbers [first, first + kLaunches).
  void fill(std::uint64_t first) {
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const std::uint64_t number = first + i;
      const std::uint64_t drawn = mixed(number);
      predict::Launch& launch = launches_[i];
      launch.function = &function(i);
      launch.grid[0] = 1 + static_cast<std::uint32_t>(drawn % 4096);
      launch.grid[1] = 1 + static_cast<std::uint32_t>(drawn >> 12 & 15);
      launch.block[0] = 32U << (drawn >> 16 & 3);
      std::uint32_t* const words = &words_[i * kWords];
      for (std::size_t word = 0; word < kWords; ++word) words[word] = static_cast<std::uint32_t>(mixed(word + 1000));
      words[0] = static_cast<std::uint32_t>(number);  // an address of device memory
      words[1] = 0x7f12;
      for (std::size_t word = 8; word < 12; ++word)
        words[word] = 1 + static_cast<std::uint32_t>(drawn >> 2 * word) % 8192;
      words[12] = static_cast<std::uint32_t>(number) + 1;  // no two launches are alike
    }
  }

  predict::Query query(std::size_t i) const {
    return {.launch = launches_[i],
            .function = &function(i),
            .words = {&words_[i * kWords], kWords},
            .residency = {.blocks_per_sm = 4, .sm_count = 132},
            .busy = false};
  }

 private:
  const predict::Function& function(std::size_t i) const { return functions_[i % kFunctions]; }

  std::vector<predict::Function> functions_;
  std::vector<predict::Launch> launches_;
  std::vector<std::uint32_t> words_;
};

// A predictor and what it is asked; one where every launch is known, one where none is.
struct Asked {
  predict::Predictor predictor;
  Launches launches;
  std::uint64_t next = 1;

  // ns a prediction; -1 where not all were hits, or misses. `outlook`: with all that is said of a launch before it
  // runs.
  double time(bool is_hit, bool outlook = false) {
    std::size_t hits = 0;
    std::int64_t sum = 0;
    float shares = 0;
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const predict::Prediction prediction = predictor.predict(launches.query(i));
      hits += prediction.hit ? 1 : 0;
      sum += prediction.bound_ns;
      if (outlook) {
        const predict::Outlook said = predict::outlook_of(launches.query(i), prediction.duration_ns);
        shares += said.occupancy + said.sm_utilisation + said.block_efficiency;
      }
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    const bool is_valid = hits == (is_hit ? kLaunches : 0) && sum > 0 && (!outlook || shares > 0);
    return is_valid ? took.count() / kLaunches : -1;
  }
};

}  // namespace

extern "C" {

// For time_hit(), time_cold() or time_four(); `evaluator` takes the features of a launch.
void* open_predictor(const void* evaluator) {
  auto asked = std::make_unique<Asked>();
  asked->predictor.use_trees(static_cast<const Evaluator*>(evaluator));
  asked->launches.fill(0);
  for (std::int64_t sample = 0; sample < 3; ++sample) {
    for (std::size_t i = 0; i < kLaunches; ++i) {
      const predict::Query query = asked->launches.query(i);
      asked->predictor.observe(asked->predictor.predict(query), 5'000 + static_cast<std::int64_t>(i), false);
    }
  }
  return asked.release();
}

double time_hit(void* asked) { return static_cast<Asked*>(asked)->time(true); }

double time_new(void* opened, bool outlook) {
  auto* const asked = static_cast<Asked*>(opened);
  asked->launches.fill(kLaunches * asked->next++);
  return asked->time(false, outlook);
}

double time_cold(void* opened) { return time_new(opened, false); }

// Of new launches: their time, occupancy, use of the multiprocessors, and efficiency or throughput.
double time_four(void* opened) { return time_new(opened, true); }

// Null where it cannot be had; stderr says why.
const void* open_evaluator(const char* path, int isa) {
  try {
    return make_evaluator(cudasched::predict::trees::import_model_file(path).model, static_cast<Isa>(isa)).release();
  } catch (const cudasched::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return nullptr;
  }
}

const char* evaluator_isa(const void* evaluator) { return name_of(static_cast<const Evaluator*>(evaluator)->isa()); }

double time_evaluator(const void* evaluator, const float* rows, std::size_t count, std::size_t features, float* out) {
  const auto* trees = static_cast<const Evaluator*>(evaluator);
  return ns_a_row(rows, count, features, [&](const float* row, std::size_t i) { out[i] = trees->margin(row); });
}

using PredictFromDense = int (*)(void* booster, const char* values, const char* config, void* meta,
                                 const std::uint64_t** shape, std::uint64_t* dimensions, const float** result);

// Rows are copied to one place, so that the text that tells XGBoost where they are need not be written anew.
double time_xgboost(PredictFromDense predict, void* booster, const char* config, const float* rows, std::size_t count,
                    std::size_t features, float* out) {
  static float place[1024];
  char values[256];
  std::snprintf(values, sizeof values, R"({"data":[%zu,false],"shape":[1,%zu],"typestr":"<f4","version":3})",
                reinterpret_cast<std::size_t>(place), features);
  return ns_a_row(rows, count, features, [&](const float* row, std::size_t i) {
    std::memcpy(place, row, features * sizeof(float));
    const std::uint64_t* shape = nullptr;
    std::uint64_t dimensions = 0;
    const float* result = nullptr;
    if (predict(booster, values, config, nullptr, &shape, &dimensions, &result) == 0) out[i] = *result;
  });
}

using GtilPredict = int (*)(void* model, const void* input, const char* type, std::uint64_t rows, void* output,
                            void* config);

double time_gtil(GtilPredict predict, void* model, void* config, const float* rows, std::size_t count,
                 std::size_t features, float* out) {
  return ns_a_row(rows, count, features,
                  [&](const float* row, std::size_t i) { predict(model, row, "float32", 1, out + i, config); });
}

using CompiledPredict = void (*)(void* row, int margin, float* result);

// An entry is a float where nothing is missing.
double time_compiled(CompiledPredict predict, float* rows, std::size_t count, std::size_t features, float* out) {
  return ns_a_row(rows, count, features, [&](const float* row, std::size_t i) {
    out[i] = 0;
    predict(const_cast<float*>(row), 1, out + i);
  });
}
}
