#include "predict/keys.hpp"

#include "predict/work.hpp"

namespace cudasched::predict {

std::uint64_t Keys::own(const Query& query, std::uint64_t geometry) const noexcept {
  const std::uint64_t kernel = shape_of(query, geometry);
  if (!has_words(query)) return finished(kernel);
  const std::uint64_t work = work_key(query.function->traits.layout, query.words, query.launch.blocks());
  return finished(mix(kernel, work != 0 ? work : words_.sum(*query.function, query.words)));
}

}  // namespace cudasched::predict
