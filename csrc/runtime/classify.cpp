#include "runtime/classify.hpp"

namespace cudasched::runtime {

constinit thread_local ThreadState thread_state;

bool StreamClasses::find(std::uint64_t stream, Class& value) const noexcept {
  HandleTable<1>::Words words{};
  if (!table_.find(stream, words)) return false;
  value = static_cast<Class>(words[0]);
  return true;
}

}  // namespace cudasched::runtime
