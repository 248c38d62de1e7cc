// From a row of float32 features to the model's margin, bit for bit as XGBoost's sum, in about 100 ns.
//
// One interface over four walks through the trees; which one a machine and a model can have is asked at run time:
//   kNodes       node after node; any depth. For trees that are deeper than kMaxHeapDepth.
//   kPortable    every tree a perfect heap of one depth, walked without a branch, eight trees at a time.
//   kAvx2, kAvx512
//                the row's values become bytes first: how many of the feature's thresholds are <= the value. Then 32 or
//                64 trees walk side by side, one a byte lane; at each level the lane's node is chosen from all nodes
//                of the level by the turns taken so far, its feature's byte is fetched by a byte permute and compared.
//                Needs at most 255 thresholds a feature and kMaxSlots slots.
// A slot is a feature together with the side on which its missing values go. A missing value becomes a value that is on
// that side of every threshold, so the walks know nothing of NaN.
//
// margin() allocates nothing, takes no lock and makes no system call; an evaluator is immutable, so any number of
// threads may ask it. Making one throws ModelError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "predict/trees/model.hpp"

namespace cudasched::predict::trees {

enum class Isa : std::uint8_t { kNodes, kPortable, kNeon, kAvx2, kAvx512 };

inline constexpr Isa kIsas[] = {Isa::kNodes, Isa::kPortable, Isa::kNeon, Isa::kAvx2, Isa::kAvx512};

const char* name_of(Isa isa) noexcept;

class Evaluator {
 public:
  virtual ~Evaluator() = default;
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  // `row` has features() values; NaN is a missing one.
  virtual float margin(const float* row) const noexcept = 0;

  // `count` rows one after the other; `out` has room for as many.
  void margins(const float* rows, std::size_t count, float* out) const noexcept;

  std::uint32_t features() const noexcept { return features_; }

  // As Model has them.
  const std::vector<std::string>& feature_names() const noexcept { return feature_names_; }
  const std::string& architecture() const noexcept { return architecture_; }
  const std::string& gpu() const noexcept { return gpu_; }
  Isa isa() const noexcept { return isa_; }

  // The same model has the same in every run and by every walk; never 0.
  std::uint64_t identity() const noexcept { return identity_; }

 protected:
  Evaluator(const Model& model, Isa isa)
      : features_(model.features),
        isa_(isa),
        identity_(identity_of(model)),
        feature_names_(model.feature_names),
        architecture_(model.architecture),
        gpu_(model.gpu) {}

 private:
  std::uint32_t features_;
  Isa isa_;
  std::uint64_t identity_;
  std::vector<std::string> feature_names_;
  std::string architecture_;
  std::string gpu_;
};

// Whether this processor and this system can run these instructions.
bool can_run(Isa isa) noexcept;

// Whether make_evaluator(model, isa) has one.
bool can_walk(const Model& model, Isa isa);

// The fastest that the machine and the model allow.
std::unique_ptr<const Evaluator> make_evaluator(const Model& model);

// The evaluator of that kind; throws ModelError with the reason where the machine or the model does not allow that
// kind.
std::unique_ptr<const Evaluator> make_evaluator(const Model& model, Isa isa);

// Reads a saved model and replays the rows in the file. Throws ModelError if one bit of a margin differs.
std::unique_ptr<const Evaluator> load_evaluator(const std::string& path);

// Throws ModelError if a row's margin differs in a bit from the one saved with it.
void replay(const Evaluator& evaluator, const SavedModel& saved, const std::string& name);

}  // namespace cudasched::predict::trees
