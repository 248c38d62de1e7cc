"""Python's face of the engine (``include/cudasched/engine.h``). Import it through ``cudasched.hook.load_core``."""

import os
from collections.abc import Callable
from typing import Any

from numpy import float32, float64
from numpy.typing import NDArray

class State:
    """What the engine of this process does, beside what it counts; a copy, taken by ``state``."""

    @property
    def attached(self) -> bool: ...
    @property
    def scheduling(self) -> bool: ...
    @property
    def process_class(self) -> str: ...
    @property
    def driver_version(self) -> int: ...
    @property
    def unknown_handles(self) -> int: ...
    @property
    def graphs_sliced(self) -> int: ...
    @property
    def graph_slices(self) -> int: ...
    @property
    def graph_slice_bytes(self) -> int: ...
    @property
    def graph_builds(self) -> int: ...
    @property
    def graph_build_ns(self) -> int: ...
    @property
    def graph_slices_dropped(self) -> int: ...
    @property
    def longest_whole_graph_ns(self) -> int: ...
    @property
    def graphs_whole(self) -> dict[str, int]: ...
    @property
    def clean_requests(self) -> int: ...
    @property
    def halved_budgets(self) -> int: ...
    @property
    def profile_fallbacks(self) -> int: ...
    @property
    def off_reason(self) -> str: ...
    @property
    def driver_path(self) -> str: ...

class Client:
    """One client of one table; a copy, taken by ``read_table``."""

    @property
    def slot(self) -> int: ...
    @property
    def client_class(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def active(self) -> bool: ...
    @property
    def waiting(self) -> bool: ...
    @property
    def regions(self) -> int: ...
    @property
    def hook_attached(self) -> bool: ...
    @property
    def age_ns(self) -> int: ...
    @property
    def heartbeat_age_ns(self) -> int: ...
    @property
    def slo_ns(self) -> int: ...
    @property
    def in_flight_ns(self) -> int: ...
    @property
    def overdue_ns(self) -> int: ...
    @property
    def policy_ns(self) -> int: ...
    @property
    def deadline_in_ns(self) -> int: ...
    @property
    def launches(self) -> int: ...
    @property
    def device_launches(self) -> int: ...
    @property
    def gate_waits(self) -> int: ...
    @property
    def gate_wait_ns(self) -> int: ...
    @property
    def process(self) -> int: ...
    @property
    def normal_beside_best_effort(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

class RegionCounts:
    """Requests of the latency regions of one name (``include/cudasched/counts.h``); times in ns."""

    @property
    def name(self) -> str: ...
    @property
    def slo_ns(self) -> int: ...
    @property
    def met(self) -> int: ...
    @property
    def missed(self) -> int: ...
    @property
    def times(self) -> tuple[list[int], int]: ...

class Counts:
    """What a process has counted (``include/cudasched/counts.h``); times in ns, histograms as buckets and their sum."""

    @property
    def process(self) -> int: ...
    @property
    def normal_launches(self) -> int: ...
    @property
    def latency_launches(self) -> int: ...
    @property
    def best_effort_launches(self) -> int: ...
    @property
    def gated_launches(self) -> int: ...
    @property
    def offloaded_launches(self) -> int: ...
    @property
    def untracked_launches(self) -> int: ...
    @property
    def gate_exceptions(self) -> int: ...
    @property
    def backed_off(self) -> int: ...
    @property
    def graph_launches(self) -> int: ...
    @property
    def sliced_launches(self) -> int: ...
    @property
    def slice_launches(self) -> int: ...
    @property
    def prioritised_graphs(self) -> int: ...
    @property
    def unprioritised_graphs(self) -> int: ...
    @property
    def normal_beside_best_effort(self) -> int: ...
    @property
    def contested_streams(self) -> int: ...
    @property
    def unmet_collectives(self) -> int: ...
    @property
    def device_launches(self) -> int: ...
    @property
    def without_room(self) -> int: ...
    @property
    def best_effort_gpu_ns(self) -> int: ...
    @property
    def latency_active_ns(self) -> int: ...
    @property
    def launcher_cpu_ns(self) -> int: ...
    @property
    def launcher_driver_ns(self) -> int: ...
    @property
    def predictions(self) -> int: ...
    @property
    def within_bound(self) -> int: ...
    @property
    def predicted_ns(self) -> int: ...
    @property
    def measured_ns(self) -> int: ...
    @property
    def prediction_off_ns(self) -> int: ...
    @property
    def prediction_errors(self) -> list[int]: ...
    @property
    def gate_waits(self) -> tuple[list[int], int]: ...
    @property
    def queue_waits(self) -> tuple[list[int], int]: ...
    @property
    def preemptions(self) -> tuple[list[int], int]: ...
    @property
    def regions(self) -> list[RegionCounts]: ...

def version() -> str:
    """Version of the engine."""

def find_driver() -> str:
    """Path of the real driver. Raises HookError; the message says what was searched."""

def install() -> None:
    """Puts the shim beside the engine in front of the driver. Raises HookError."""

def state() -> State:
    """What the engine does. Never raises."""

def set_process_class(name: str, priority: int, slo_ms: float) -> None:
    """The class of launches that no region and no stream decides. slo_ms 0: none. Raises ConfigError."""

def region_enter(name: str, priority: int, slo_ms: float) -> int:
    """Opens a region on the calling thread; the token closes it. Raises ConfigError, Error (nested too deep)."""

def region_enter_named(client_class: str, priority: int, slo_ms: float, name: str) -> int:
    """The same with a name, under which its requests are counted. Raises ConfigError."""

def region_enter_until(name: str, priority: int, deadline_ns: int) -> int:
    """The same for a step of a request, with the deadline of all its steps, as time.monotonic_ns() counts. 0: none."""

def region_exit(token: int) -> None:
    """Closes a region, on the thread that opened it. Raises Error."""

def expect(within_ms: float) -> None:
    """Latency work will come within so many ms, over 0 and at most 1000. Raises ConfigError."""

def bind_stream(stream: int, name: str) -> None:
    """Gives a CUstream a class. Raises ConfigError, Error (the default stream, or too many)."""

def partition_stream(fraction: float) -> int:
    """The CUstream of that part of the SMs. Raises ConfigError, HookError, DriverError, Error (no primary context)."""

def unbind_stream(stream: int) -> None:
    """Takes it away; a stream without one is left alone."""

def coverage_start(cupti_path: str | None) -> None:
    """Counts what the device runs from here on. None: the loader's search. Raises Error, HookError."""

def coverage_flush() -> None:
    """Waits until the device's finished work is counted. Raises Error."""

def run_directory() -> str:
    """Where the tables of this user are."""

def read_table(path: str) -> tuple[str, list[Client]]:
    """The GPU's name and its clients. Raises ArbiterError."""

def read_counts(path: str) -> tuple[str, list[tuple[Client, Counts | None]]]:
    """The same with what the clients' processes have counted, once a process. Raises ArbiterError."""

def counts() -> Counts:
    """What this process has counted. Raises Error."""

def in_flight_ns() -> int:
    """Predicted GPU time still to run of this process's best-effort launches."""

def collect_start(directory: str, timing: str, cupti_path: str | None, capacity_bytes: int) -> None:
    """Starts to record launches into a journal in `directory`; `timing` is "cupti", "events" or "both"."""

def collect_stop() -> tuple[str, int, int]:
    """Ends it: the journal's path, its rows, the launches that were lost."""

def collect_label(text: str) -> None:
    """What launches of the process are called from here on."""

def trace_start(directory: str, limit_bytes: int) -> None:
    """Starts to record launches, gate waits and regions into files in `directory`, of at most `limit_bytes` in all."""

def trace_stop() -> tuple[str, int, int, int]:
    """Ends it: what the files' paths begin with, and the records written, dropped, and in files that were deleted."""

class Trees:
    """A saved model of trees; see ``cudasched.predictor.Model``."""

    def __init__(self, source: bytes | str | os.PathLike[str], isa: str | None = None) -> None: ...
    @property
    def features(self) -> int: ...
    @property
    def feature_names(self) -> list[str]: ...
    @property
    def architecture(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def trees(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def objective(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def base_score(self) -> float: ...
    def isas(self) -> list[str]: ...
    def nodes(self) -> dict[str, NDArray[Any]]:
        """Columns with a value a node: tree, left, right, feature, value, cover, default_left."""
    def margins(self, rows: NDArray[float32]) -> NDArray[float32]: ...
    def contributions(self, rows: NDArray[float32]) -> NDArray[float64]: ...

class Snapshot:
    """What a policy decides on (``csrc/schedule/admission.hpp``); times in ns."""

    @property
    def latency_clients(self) -> bool: ...
    @property
    def latency_active(self) -> bool: ...
    @property
    def since_latency_ns(self) -> int: ...
    @property
    def linger_ns(self) -> int: ...
    @property
    def my_turn(self) -> bool: ...
    @property
    def in_flight_ns(self) -> int: ...
    @property
    def predicted_ns(self) -> int: ...
    @property
    def bound_ns(self) -> int: ...
    @property
    def lead_ns(self) -> int: ...
    @property
    def slack_ns(self) -> int | None: ...
    @property
    def margin_ns(self) -> int: ...
    @property
    def hint_ns(self) -> int: ...
    @property
    def free_ns(self) -> int: ...
    @property
    def foreseen_over_ns(self) -> int: ...
    @property
    def long_ns(self) -> int: ...
    @property
    def waited_ns(self) -> int: ...
    @property
    def max_hold_ns(self) -> int: ...

class Trace:
    """Recorded launches as ``replay`` wants them; see ``cudasched.simulate.Trace``."""

    def __init__(
        self,
        submitted_ns: list[int],
        start_ns: list[int],
        duration_ns: list[int],
        kernels: int = 1,
        recording_ns: int = 0,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def gpu_ns(self) -> int: ...
    def request_ends(self, gap_ns: int) -> list[int]: ...

class ReplayClient:
    """A program of a simulation (``csrc/simulate/replay.hpp``)."""

    def __init__(
        self,
        name: str,
        client_class: str,
        trace: Trace,
        priority: int,
        request_ends: list[int],
        arrivals_ns: list[int],
        slo_ns: int,
        prepare_ns: int,
        expect_ns: int,
    ) -> None: ...

class ReplaySettings:
    """How the programs share the GPU (``csrc/simulate/replay.hpp``)."""

    sharing: str
    policy: str
    offload: bool
    adaptive_lead: bool
    lead_ns: int
    max_inflation: float
    host_bound_inflation: float
    foresee: bool
    miss_probability: float
    earliest_deadline_first: bool
    priorities: bool
    linger_ns: int
    margin_ns: int
    long_ns: int
    turn_ns: int
    prediction_sigma: float
    switch_ns: int
    end_ns: int
    seed: int

class ReplayedClient:
    """What a program did in a simulation."""

    @property
    def name(self) -> str: ...
    @property
    def launches(self) -> int: ...
    @property
    def gpu_ns(self) -> int: ...
    @property
    def gate_wait_ns(self) -> int: ...
    @property
    def longest_gate_wait_ns(self) -> int: ...
    @property
    def mean_lead_ns(self) -> float: ...
    @property
    def latencies_ns(self) -> list[int]: ...
    @property
    def unserved(self) -> int: ...
    @property
    def met(self) -> int: ...

class ReplayResult:
    """What a simulation gave."""

    @property
    def clients(self) -> list[ReplayedClient]: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def switch_ns(self) -> int: ...
    @property
    def launches(self) -> int: ...
    @property
    def policy_refused(self) -> str: ...

def policies() -> list[tuple[str, str]]:
    """Names of the scheduling policies, and what each does."""

def replay(
    clients: list[ReplayClient], settings: ReplaySettings, policy: Callable[[Snapshot], object] | None = None
) -> ReplayResult:
    """Runs a simulation. Raises ConfigError, and what the policy raises."""

def demangled(name: bytes) -> str:
    """A kernel's whole name as the predictor reads it; as it is where it is not mangled or cannot be read."""

def feature_names() -> list[str]:
    """What the trees see of a launch, in the order of a row's values."""

def launch_outlooks(
    columns: dict[str, Any], durations_ns: NDArray[float64], sm_count: int, max_threads_per_sm: int = 2048
) -> dict[str, NDArray[float32]]:
    """What launches make of the GPU in these times; see ``cudasched.predictor.outlook``."""

def launch_features(columns: dict[str, Any], sm_count: int, max_threads_per_sm: int = 2048) -> NDArray[float32]:
    """Rows of features of recorded launches; ``columns`` as csrc/bindings/predictor.cpp has it. Raises Error."""

class Replay:
    """A predictor that recorded launches are shown to in their order, as on the launch path."""

    def __init__(self, model: str = "", coverage: float = 0.9) -> None: ...
    def run(self, columns: dict[str, Any], sm_count: int, max_threads_per_sm: int = 2048) -> dict[str, Any]: ...
    def save(self) -> bytes: ...
    def restore(self, state: bytes) -> None: ...
