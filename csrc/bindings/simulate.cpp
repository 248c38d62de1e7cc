// `_core.replay` and its inputs: recorded launches under the scheduler's code and a virtual clock, for
// cudasched.simulate.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/class.hpp"
#include "base/error.hpp"
#include "bindings/bindings.hpp"
#include "schedule/policy.hpp"
#include "simulate/replay.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using schedule::Answer;
using schedule::Decision;
using schedule::Snapshot;
using simulate::RecordedLaunch;
using simulate::ReplayClient;
using simulate::ReplayResult;
using simulate::ReplaySettings;
using simulate::Sharing;
using simulate::TraceLaunch;

class Trace {
 public:
  Trace() = default;
  Trace(const std::vector<std::int64_t>& submitted_ns, const std::vector<std::int64_t>& start_ns,
        const std::vector<std::int64_t>& duration_ns, int kernels, std::int64_t recording_ns) {
    if (start_ns.size() != submitted_ns.size() || duration_ns.size() != submitted_ns.size()) {
      throw ConfigError("a trace has as many starts and durations as submissions");
    }
    recorded_.reserve(submitted_ns.size());
    for (std::size_t i = 0; i < submitted_ns.size(); ++i) {
      recorded_.push_back({submitted_ns[i], start_ns[i], duration_ns[i]});
    }
    launches_ = simulate::trace_launches(recorded_);
    for (TraceLaunch& launch : launches_) {
      launch.kernels = kernels;
      if (!launch.synchronised) launch.gap_ns = std::max<std::int64_t>(launch.gap_ns - recording_ns, 0);
    }
  }

  // From a known host: `waits` says where the program waited for the GPU before a launch.
  static Trace of_host(const std::vector<std::int64_t>& gap_ns, const std::vector<std::int64_t>& duration_ns,
                       const std::vector<bool>& waits) {
    if (gap_ns.size() != duration_ns.size() || waits.size() != duration_ns.size()) {
      throw ConfigError("a trace has as many gaps and waits as durations");
    }
    Trace made;
    for (std::size_t i = 0; i < gap_ns.size(); ++i) {
      made.launches_.push_back(
          {std::max<std::int64_t>(gap_ns[i], 0), std::max<std::int64_t>(duration_ns[i], 0), waits[i]});
    }
    return made;
  }

  // The same with the parts of the GPU that each launch takes.
  Trace with_shares(const std::vector<double>& sms, const std::vector<double>& bandwidth) const {
    if (sms.size() != launches_.size() || bandwidth.size() != launches_.size()) {
      throw ConfigError("a trace has as many shares as launches");
    }
    Trace made = *this;
    for (std::size_t i = 0; i < sms.size(); ++i) {
      made.launches_[i].sms = sms[i];
      made.launches_[i].bandwidth = bandwidth[i];
    }
    return made;
  }

  const std::vector<TraceLaunch>& launches() const noexcept { return launches_; }
  std::vector<std::size_t> request_ends(std::int64_t gap_ns) const { return simulate::request_ends(recorded_, gap_ns); }
  std::int64_t gpu_ns() const noexcept {
    return std::accumulate(launches_.begin(), launches_.end(), std::int64_t{0},
                           [](std::int64_t sum, const TraceLaunch& launch) { return sum + launch.duration_ns; });
  }

 private:
  std::vector<RecordedLaunch> recorded_;
  std::vector<TraceLaunch> launches_;
};

ReplayClient client(std::string name, const std::string& client_class, const Trace& trace, std::int32_t priority,
                    std::vector<std::size_t> request_ends, std::vector<std::int64_t> arrivals_ns, std::int64_t slo_ns,
                    std::int64_t prepare_ns, std::int64_t expect_ns) {
  const auto parsed = parse_class(client_class);
  if (!parsed) throw ConfigError("class '" + client_class + "' is unknown; there are latency and best_effort");
  ReplayClient made;
  made.name = std::move(name);
  made.client_class = *parsed;
  made.launches = trace.launches();
  made.priority = priority;
  made.request_ends = std::move(request_ends);
  made.arrivals_ns = std::move(arrivals_ns);
  made.slo_ns = slo_ns;
  made.prepare_ns = prepare_ns;
  made.expect_ns = expect_ns;
  return made;
}

// None: submit; a number: look again after so many ns; "latency" and "turn": wait for that. All else is no answer.
Decision decision_of(const py::object& answer) {
  if (answer.is_none()) return {Answer::kSubmit, 0};
  if (py::isinstance<py::int_>(answer)) return {Answer::kWaitForTime, answer.cast<std::int64_t>()};
  if (py::isinstance<py::str>(answer)) {
    const auto text = answer.cast<std::string>();
    if (text == "latency") return {Answer::kWaitForLatency, 0};
    if (text == "turn") return {Answer::kWaitForTurn, 0};
  }
  return {static_cast<Answer>(-1), 0};
}

ReplayResult replay(const std::vector<ReplayClient>& clients, const ReplaySettings& given,
                    const std::optional<py::function>& policy) {
  ReplaySettings settings = given;
  std::optional<py::error_already_set> raised;
  if (policy) {
    settings.user_policy = [&](const Snapshot& snapshot) -> Decision {
      const py::gil_scoped_acquire acquired;
      if (raised) return {};
      try {
        return decision_of((*policy)(snapshot));
      } catch (const py::error_already_set& error) {
        raised = error;
        return {};
      }
    };
  }
  // Ctrl-C.
  settings.goes_on = [&] {
    const py::gil_scoped_acquire acquired;
    if (!raised && PyErr_CheckSignals() != 0) raised = py::error_already_set();
    return !raised;
  };
  ReplayResult result;
  {
    const py::gil_scoped_release released;
    result = simulate::replay(clients, settings);
  }
  if (raised) throw *raised;
  return result;
}

Sharing sharing_of(const std::string& name) {
  if (name == "one_process") return Sharing::kOneProcess;
  if (name == "mps") return Sharing::kMps;
  if (name == "two_processes") return Sharing::kTimeSlice;
  throw ConfigError("sharing '" + name + "' is unknown; there are one_process, mps and two_processes");
}

}  // namespace

void bind_simulate(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot")
      .def_readonly("latency_clients", &Snapshot::latency_clients)
      .def_readonly("latency_active", &Snapshot::latency_active)
      .def_readonly("since_latency_ns", &Snapshot::since_latency_ns)
      .def_readonly("linger_ns", &Snapshot::linger_ns)
      .def_readonly("my_turn", &Snapshot::my_turn)
      .def_readonly("in_flight_ns", &Snapshot::in_flight_ns)
      .def_readonly("predicted_ns", &Snapshot::predicted_ns)
      .def_property_readonly("bound_ns", &Snapshot::longest_ns)
      .def_readonly("lead_ns", &Snapshot::lead_ns)
      .def_property_readonly("slack_ns",
                             [](const Snapshot& self) {
                               return self.slack_ns == Snapshot::kUnknownNs ? std::optional<std::int64_t>()
                                                                            : self.slack_ns;
                             })
      .def_readonly("margin_ns", &Snapshot::margin_ns)
      .def_readonly("hint_ns", &Snapshot::hint_ns)
      .def_readonly("free_ns", &Snapshot::free_ns)
      .def_readonly("foreseen_over_ns", &Snapshot::foreseen_over_ns)
      .def_readonly("long_ns", &Snapshot::long_ns)
      .def_readonly("waited_ns", &Snapshot::waited_ns)
      .def_readonly("max_hold_ns", &Snapshot::max_hold_ns);

  py::class_<Trace>(module, "Trace")
      .def(py::init<const std::vector<std::int64_t>&, const std::vector<std::int64_t>&,
                    const std::vector<std::int64_t>&, int, std::int64_t>(),
           py::arg("submitted_ns"), py::arg("start_ns"), py::arg("duration_ns"), py::arg("kernels") = 1,
           py::arg("recording_ns") = 0)
      .def_static("of_host", &Trace::of_host, py::arg("gap_ns"), py::arg("duration_ns"), py::arg("waits"))
      .def("__len__", [](const Trace& self) { return self.launches().size(); })
      .def_property_readonly("gpu_ns", &Trace::gpu_ns)
      .def("with_shares", &Trace::with_shares, py::arg("sms"), py::arg("bandwidth"))
      .def("request_ends", &Trace::request_ends, py::arg("gap_ns"));

  py::class_<ReplayClient>(module, "ReplayClient")
      .def(py::init(&client), py::arg("name"), py::arg("client_class"), py::arg("trace"), py::arg("priority"),
           py::arg("request_ends"), py::arg("arrivals_ns"), py::arg("slo_ns"), py::arg("prepare_ns"),
           py::arg("expect_ns"));

  py::class_<ReplaySettings>(module, "ReplaySettings")
      .def(py::init<>())
      .def_property(
          "sharing",
          [](const ReplaySettings& self) {
            return self.sharing == Sharing::kOneProcess ? "one_process"
                   : self.sharing == Sharing::kMps      ? "mps"
                                                        : "two_processes";
          },
          [](ReplaySettings& self, const std::string& name) { self.sharing = sharing_of(name); })
      .def_readwrite("policy", &ReplaySettings::policy)
      .def_readwrite("offload", &ReplaySettings::offload)
      .def_readwrite("adaptive_lead", &ReplaySettings::adaptive_lead)
      .def_readwrite("lead_ns", &ReplaySettings::lead_ns)
      .def_property(
          "max_inflation", [](const ReplaySettings& self) { return self.lead_bounds.max_inflation; },
          [](ReplaySettings& self, double value) { self.lead_bounds.max_inflation = value; })
      .def_readwrite("host_bound_inflation", &ReplaySettings::host_bound_inflation)
      .def_readwrite("foresee", &ReplaySettings::foresee)
      .def_readwrite("miss_probability", &ReplaySettings::miss_probability)
      .def_readwrite("earliest_deadline_first", &ReplaySettings::earliest_deadline_first)
      .def_readwrite("priorities", &ReplaySettings::priorities)
      .def_readwrite("linger_ns", &ReplaySettings::linger_ns)
      .def_readwrite("margin_ns", &ReplaySettings::margin_ns)
      .def_readwrite("prediction_sigma", &ReplaySettings::prediction_sigma)
      .def_readwrite("switch_ns", &ReplaySettings::switch_ns)
      .def_readwrite("cold_ns", &ReplaySettings::cold_ns)
      .def_readwrite("slice_ns", &ReplaySettings::slice_ns)
      .def_readwrite("best_effort_slice_ns", &ReplaySettings::best_effort_slice_ns)
      .def_readwrite("latency_slice_ns", &ReplaySettings::latency_slice_ns)
      .def_readwrite("end_ns", &ReplaySettings::end_ns)
      .def_readwrite("seed", &ReplaySettings::seed);

  py::class_<simulate::ClientResult>(module, "ReplayedClient")
      .def_readonly("name", &simulate::ClientResult::name)
      .def_readonly("launches", &simulate::ClientResult::launches)
      .def_readonly("gpu_ns", &simulate::ClientResult::gpu_ns)
      .def_readonly("gate_wait_ns", &simulate::ClientResult::gate_wait_ns)
      .def_readonly("mean_lead_ns", &simulate::ClientResult::mean_lead_ns)
      .def_readonly("latencies_ns", &simulate::ClientResult::latencies_ns)
      .def_readonly("unserved", &simulate::ClientResult::unserved)
      .def_readonly("met", &simulate::ClientResult::met);

  py::class_<ReplayResult>(module, "ReplayResult")
      .def_readonly("clients", &ReplayResult::clients)
      .def_readonly("end_ns", &ReplayResult::end_ns)
      .def_readonly("busy_ns", &ReplayResult::busy_ns)
      .def_readonly("switch_ns", &ReplayResult::switch_ns)
      .def_readonly("launches", &ReplayResult::launches)
      .def_readonly("policy_refused", &ReplayResult::policy_refused);

  module.def("policies", [] {
    std::vector<std::pair<std::string, std::string>> known;
    for (const schedule::Policy& policy : schedule::policies()) known.emplace_back(policy.name, policy.summary);
    return known;
  });
  module.def("replay", &replay, py::arg("clients"), py::arg("settings"), py::arg("policy") = py::none());
}

}  // namespace cudasched::bindings
