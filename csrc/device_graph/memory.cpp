#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "device_graph/api.hpp"

namespace cudasched::graphs {
namespace {

bool at_once(const Use& a, const Use& b) { return a.first_step <= b.last_step && b.first_step <= a.last_step; }

struct Span {
  std::size_t begin;
  std::size_t end;
};

}  // namespace

Plan plan_memory(std::span<const Use> uses, std::size_t alignment) {
  if (!std::has_single_bit(alignment)) throw std::invalid_argument("the alignment of a pool is a power of two");
  const std::size_t most = std::numeric_limits<std::size_t>::max() / (uses.size() + 1);  // so that no sum overflows
  for (const Use& use : uses) {
    if (alignment > most || use.bytes > most - alignment) throw std::invalid_argument("a pool is too large");
    if (use.last_step < use.first_step) throw std::invalid_argument("a use of a pool ends before it begins");
  }
  std::vector<std::size_t> order(uses.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return uses[a].bytes > uses[b].bytes; });
  Plan plan{.offsets = std::vector<std::size_t>(uses.size(), 0), .bytes = 0};
  std::vector<std::size_t> placed;
  for (const std::size_t index : order) {
    std::vector<Span> taken;
    for (const std::size_t other : placed) {
      if (at_once(uses[index], uses[other]))
        taken.push_back({plan.offsets[other], plan.offsets[other] + uses[other].bytes});
    }
    std::sort(taken.begin(), taken.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::size_t offset = 0;
    for (const Span& span : taken) {
      if (span.end > span.begin && offset + uses[index].bytes > span.begin) {
        offset = std::max(offset, (span.end + alignment - 1) / alignment * alignment);
      } else if (span.end > span.begin) {
        break;
      }
    }
    plan.offsets[index] = offset;
    plan.bytes = std::max(plan.bytes, offset + uses[index].bytes);
    placed.push_back(index);
  }
  return plan;
}

StaticPool::StaticPool(std::span<const Use> uses, std::size_t alignment) : plan_(plan_memory(uses, alignment)) {
  if (plan_.bytes == 0) return;
  context_ = context_of_thread();
  constexpr std::size_t kDriverAlignment = 256;
  const std::size_t room = alignment > kDriverAlignment ? alignment - kDriverAlignment : 0;
  check(api().cuMemAlloc(&memory_, plan_.bytes + room), "cuMemAlloc");
  base_ = (memory_ + alignment - 1) & ~(CUdeviceptr{alignment} - 1);
}

StaticPool::~StaticPool() {
  if (memory_ == 0) return;
  if (const Current current(context_); current.ok()) api().cuMemFree(memory_);  // else the memory went with its context
}

}  // namespace cudasched::graphs
