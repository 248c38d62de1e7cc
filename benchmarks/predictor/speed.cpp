// The loops that are timed: one distinct row a call, each engine called as a C program calls it.
//
// Built by __main__.py into a shared library together with csrc/predict/trees. A timer returns ns a row over `count`
// rows; rows lie `features` floats apart.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "predict/trees/evaluator.hpp"
#include "predict/trees/model_error.hpp"

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

}  // namespace

extern "C" {

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
