// `_core.Batching`, `_core.aimd_limit` and `_core.gather`: when batches of requests start, and their inputs, for
// cudasched.inference.
#include "schedule/batching.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "bindings/bindings.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using schedule::BatchPolicy;
using schedule::BatchView;

BatchPolicy policy_of(const std::string& name) {
  if (name == "deadline") return BatchPolicy::kDeadline;
  if (name == "eager") return BatchPolicy::kEager;
  if (name == "delay") return BatchPolicy::kDelay;
  if (name == "aimd") return BatchPolicy::kAimd;
  throw ConfigError("policy '" + name + "' is unknown; there are deadline, eager, delay and aimd");
}

// The integers of an array('q'), for as long as the buffer is held.
class Integers {
 public:
  explicit Integers(const py::buffer& buffer) : held_(buffer.request()) {
    if (held_.ndim != 1 || held_.itemsize != sizeof(std::int64_t)) throw ConfigError("an array('q') is needed");
  }
  std::span<const std::int64_t> values() const noexcept {
    return {static_cast<const std::int64_t*>(held_.ptr), static_cast<std::size_t>(held_.size)};
  }

 private:
  py::buffer_info held_;
};

// The rules of one batcher.
class Batching {
 public:
  Batching(const std::string& policy, std::vector<std::int64_t> sizes, std::int64_t margin_ns, std::int64_t delay_ns)
      : sizes_(std::move(sizes)) {
    if (sizes_.empty() || sizes_[0] < 1 || !std::is_sorted(sizes_.begin(), sizes_.end())) {
      throw ConfigError("sizes of batches are ascending, and at least 1");
    }
    view_.policy = policy_of(policy);
    view_.margin_ns = margin_ns;
    view_.delay_ns = delay_ns;
  }

  std::pair<std::size_t, std::optional<std::int64_t>> next(std::int64_t now_ns, const py::buffer& deadlines_ns,
                                                           const py::buffer& arrivals_ns, const py::buffer& bounds_ns,
                                                           std::size_t most, std::int64_t gap_ns,
                                                           std::int64_t slack_ns) const {
    const Integers deadlines(deadlines_ns);
    const Integers arrivals(arrivals_ns);
    const Integers bounds(bounds_ns);
    BatchView view = seen(now_ns, deadlines, bounds, most);
    view.arrivals_ns = arrivals.values();
    if (view.arrivals_ns.size() != view.deadlines_ns.size())
      throw ConfigError("a request has a deadline and an arrival");
    view.gap_ns = gap_ns;
    view.slack_ns = slack_ns;
    const auto [take, look_ns] = schedule::next_batch(view);
    return {take, look_ns == schedule::kNeverNs ? std::nullopt : std::optional(look_ns)};
  }

  std::pair<std::int64_t, bool> admit(std::int64_t free_ns, const py::buffer& deadlines_ns, const py::buffer& bounds_ns,
                                      std::size_t most, std::size_t place, std::int64_t deadline_ns,
                                      std::size_t protected_count) const {
    const Integers deadlines(deadlines_ns);
    const Integers bounds(bounds_ns);
    const BatchView view = seen(free_ns, deadlines, bounds, most);
    if (std::max(place, protected_count) > view.deadlines_ns.size()) throw ConfigError("so many requests do not wait");
    const auto [end_ns, displaces] = schedule::admit_request(view, place, deadline_ns, protected_count);
    return {end_ns, displaces};
  }

 private:
  BatchView seen(std::int64_t now_ns, const Integers& deadlines, const Integers& bounds, std::size_t most) const {
    BatchView view = view_;
    view.now_ns = now_ns;
    view.deadlines_ns = deadlines.values();
    view.sizes = sizes_;
    view.bounds_ns = bounds.values();
    view.most = most;
    if (view.bounds_ns.size() != sizes_.size()) throw ConfigError("each size has a bound");
    if (most < 1 || std::cmp_greater(most, sizes_.back())) throw ConfigError("a batch has 1 to the last size requests");
    return view;
  }

  std::vector<std::int64_t> sizes_;
  BatchView view_;
};

// One release of the interpreter's lock for a batch: each would wait for threads that compute.
void gather(const std::vector<std::uintptr_t>& rows, std::size_t bytes, std::uintptr_t to) {
  const py::gil_scoped_release others;
  auto* place = reinterpret_cast<std::byte*>(to);
  for (const std::uintptr_t row : rows) {
    std::memcpy(place, reinterpret_cast<const void*>(row), bytes);
    place += bytes;
  }
}

}  // namespace

void bind_batching(py::module_& module) {
  py::class_<Batching>(module, "Batching")
      .def(py::init<const std::string&, std::vector<std::int64_t>, std::int64_t, std::int64_t>(), py::arg("policy"),
           py::arg("sizes"), py::arg("margin_ns"), py::arg("delay_ns"))
      .def("next", &Batching::next, py::arg("now_ns"), py::arg("deadlines_ns"), py::arg("arrivals_ns"),
           py::arg("bounds_ns"), py::arg("most"), py::arg("gap_ns"), py::arg("slack_ns") = schedule::kNeverNs)
      .def("admit", &Batching::admit, py::arg("free_ns"), py::arg("deadlines_ns"), py::arg("bounds_ns"),
           py::arg("most"), py::arg("place"), py::arg("deadline_ns"), py::arg("protected_count"));
  module.def("gather", &gather, py::arg("rows"), py::arg("bytes"), py::arg("to"));
  module.def("aimd_limit", &schedule::aimd_limit, py::arg("limit"), py::arg("full"), py::arg("in_time"),
             py::arg("most"));
}

}  // namespace cudasched::bindings
