"""Python's face of the engine (``include/cudasched/engine.h``). Import it through ``cudasched.hook.load_core``."""

import os
from array import array
from collections.abc import Callable
from typing import Any, Final

from numpy import float32, float64
from numpy.typing import NDArray

class State:
    """What the engine of this process does, beside what it counts; a copy, taken by ``state``."""

    attached: Final[bool]
    scheduling: Final[bool]
    process_class: Final[str]
    driver_version: Final[int]
    unknown_handles: Final[int]
    graphs_sliced: Final[int]
    graph_slices: Final[int]
    graph_slice_bytes: Final[int]
    graph_builds: Final[int]
    graph_build_ns: Final[int]
    graph_slices_dropped: Final[int]
    longest_whole_graph_ns: Final[int]
    graphs_whole: Final[dict[str, int]]
    off_reason: Final[str]
    driver_path: Final[str]

class Client:
    """One client of one table; a copy, taken by ``read_counts``."""

    slot: Final[int]
    client_class: Final[str]
    priority: Final[int]
    pid: Final[int]
    alive: Final[bool]
    active: Final[bool]
    waiting: Final[bool]
    regions: Final[int]
    hook_attached: Final[bool]
    age_ns: Final[int]
    heartbeat_age_ns: Final[int]
    active_since_ns: Final[int]
    slo_ns: Final[int]
    in_flight_ns: Final[int]
    overdue_ns: Final[int]
    policy_ns: Final[int]
    deadline_in_ns: Final[int]
    launches: Final[int]
    device_launches: Final[int]
    gate_waits: Final[int]
    gate_wait_ns: Final[int]
    process: Final[int]
    normal_beside_best_effort: Final[int]
    memory_bytes: Final[int]
    memory_peak_bytes: Final[int]
    memory_limit_bytes: Final[int]
    memory_away_bytes: Final[int]
    memory_given_bytes: Final[int]
    memory_refusals: Final[int]
    pool_reserved_bytes: Final[int]
    pool_allocated_bytes: Final[int]
    pool_largest_free_bytes: Final[int]
    process_class: Final[str]
    weight_milli: Final[int]
    time_slice_us: Final[int]
    time_slice_state: Final[int]
    policy: Final[str]
    name: Final[str]
    version: Final[str]

class RegionCounts:
    """Requests of the latency regions of one name (``include/cudasched/counts.h``); times in ns."""

    name: Final[str]
    slo_ns: Final[int]
    met: Final[int]
    missed: Final[int]
    times: Final[tuple[list[int], int]]

class Counts:
    """What a process has counted (``include/cudasched/counts.inc``); times in ns, as buckets and their sum."""

    numbers: Final[dict[str, int]]
    prediction_errors: Final[list[int]]
    kernels: Final[list[int]]
    gate_waits: Final[tuple[list[int], int]]
    queue_waits: Final[tuple[list[int], int]]
    preemptions: Final[tuple[list[int], int]]
    regions: Final[list[RegionCounts]]
    whole_graphs: Final[dict[str, tuple[int, int, int]]]

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

def region_enter(name: str, priority: int, slo_ms: float, counted_as: str) -> int:
    """Opens a region on the calling thread; the token closes it. Raises ConfigError, Error (nested too deep).

    Its requests are counted under the last argument.
    """

def region_enter_until(name: str, priority: int, deadline_ns: int) -> int:
    """The same for a step of a request, with the deadline of all its steps, as time.monotonic_ns() counts. 0: none."""

def region_exit(token: int) -> None:
    """Closes a region, on the thread that opened it. Raises Error."""

def region_may_move(token: int) -> None:
    """A region of the calling thread may be closed by another one, with `region_end_elsewhere`."""

def region_end_elsewhere(token: int) -> None:
    """Closes such a region on any thread: its own thread's launches are not in it from then on. Raises Error."""

def to_its_end(function: Callable[..., Any]) -> Any:
    """A method that calls `function` with an empty list before its arguments, and if it raises again with that list."""

def finish() -> None:
    """Before the process ends by `_exit`: what exit handlers would do is done now, once, in 5 s at most."""

def expect(within_ms: float) -> None:
    """Latency work will come within so many ms, over 0 and at most 1000. Raises ConfigError."""

def measure(pause_ms: float) -> tuple[int, int, int, bool]:
    """Best-effort work of other processes on the current device pauses for so many ms, at most 50.

    0 ends pauses, or announces them; a negative number only looks. Returns the ns until a pause may begin (over 0: none
    has begun), the ns that others' work in flight still takes, the beginning of the last latency work (monotonic ns, 0:
    none), and whether latency work is under way. Raises ConfigError.
    """

def order(stream: int, ahead: tuple[int, ...], yields: bool) -> None:
    """What a CUstream gets from here on comes after what others have now: each of `ahead`, followed by an event for it.

    `yields`: without the GIL meanwhile. Raises Error.
    """

def is_idle(stream: int) -> bool:
    """Whether `order` has nothing to wait for on that CUstream. Waits for nothing. Raises HookError."""

def new_event() -> int:
    """A CUevent without timing, of the current context, for `order` on one thread at a time. Raises Error."""

def bind_stream(stream: int, name: str) -> None:
    """Gives a CUstream a class. Raises ConfigError, Error (the default stream, or too many)."""

def partition_stream(fraction: float) -> int:
    """The CUstream of that part of the SMs. Raises ConfigError, HookError, DriverError, Error (no primary context)."""

def unbind_stream(stream: int) -> None:
    """Takes it away; a stream without one is left alone."""

def run_directory() -> str:
    """Where the tables of this user are."""

def read_counts(path: str) -> tuple[str, list[tuple[Client, Counts | None]]]:
    """The GPU's name and its clients, with what their processes have counted, once a process. Raises ArbiterError."""

def counted() -> dict[str, tuple[str, str]]:
    """The metric, without ``cudasched_``, and the meaning of each number and each histogram of `Counts`."""

def counts() -> Counts:
    """What this process has counted. Raises Error."""

def change(path: str, process: int, setting: str, value: str, timeout_ns: int) -> str:
    """Changes a setting of the running client with that process number; what became of it, "applied" for one.

    Raises ConfigError, ArbiterError.
    """

def settings() -> dict[str, tuple[str, tuple[str, ...], object, float, float]]:
    """Kind, words, default and bounds of each setting (``csrc/runtime/settings.inc``), by the end of its variable."""

def parse_setting(name: str, text: bytes) -> Any:
    """A setting's value as text says it. Raises ValueError with how it must be written instead."""

def in_flight_ns() -> int:
    """Predicted GPU time still to run of this process's best-effort launches."""

def graph_ns(graph: int) -> int:
    """The predicted time of an executable graph (its CUgraphExec) of the current device; 0: not known."""

def others_slack_ns() -> int:
    """How long requests of other latency programs can wait, the least; ``2**63 - 1``: there are none, or unknown."""

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
    features: Final[int]
    feature_names: Final[list[str]]
    architecture: Final[str]
    gpu: Final[str]
    trees: Final[int]
    depth: Final[int]
    objective: Final[str]
    isa: Final[str]
    base_score: Final[float]
    def isas(self) -> list[str]: ...
    def nodes(self) -> dict[str, NDArray[Any]]:
        """Columns with a value a node: tree, left, right, feature, value, cover, default_left."""
    def margins(self, rows: NDArray[float32]) -> NDArray[float32]: ...
    def contributions(self, rows: NDArray[float32]) -> NDArray[float64]: ...

class Snapshot:
    """What a policy decides on (``csrc/schedule/admission.hpp``); times in ns."""

    latency_clients: Final[bool]
    latency_active: Final[bool]
    since_latency_ns: Final[int]
    linger_ns: Final[int]
    my_turn: Final[bool]
    in_flight_ns: Final[int]
    predicted_ns: Final[int]
    bound_ns: Final[int]
    lead_ns: Final[int]
    slack_ns: Final[int | None]
    margin_ns: Final[int]
    hint_ns: Final[int]
    free_ns: Final[int]
    foreseen_over_ns: Final[int]
    long_ns: Final[int]
    waited_ns: Final[int]
    max_hold_ns: Final[int]

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
    @staticmethod
    def of_host(gap_ns: list[int], duration_ns: list[int], waits: list[bool]) -> Trace: ...
    def __len__(self) -> int: ...
    gpu_ns: Final[int]
    def with_shares(self, sms: list[float], bandwidth: list[float]) -> Trace: ...
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
    prediction_sigma: float
    switch_ns: int
    cold_ns: int
    slice_ns: int
    best_effort_slice_ns: int
    latency_slice_ns: int
    end_ns: int
    seed: int

class ReplayedClient:
    """What a program did in a simulation."""

    name: Final[str]
    launches: Final[int]
    gpu_ns: Final[int]
    gate_wait_ns: Final[int]
    mean_lead_ns: Final[float]
    latencies_ns: Final[list[int]]
    unserved: Final[int]
    met: Final[int]

class ReplayResult:
    """What a simulation gave."""

    clients: Final[list[ReplayedClient]]
    end_ns: Final[int]
    busy_ns: Final[int]
    switch_ns: Final[int]
    launches: Final[int]
    policy_refused: Final[str]

def policies() -> list[tuple[str, str]]:
    """Names of the scheduling policies, and what each does."""

def replay(
    clients: list[ReplayClient], settings: ReplaySettings, policy: Callable[[Snapshot], object] | None = None
) -> ReplayResult:
    """Runs a simulation. Raises ConfigError, and what the policy raises."""

class Batching:
    """When batches of requests start, and which requests can meet their deadlines (csrc/schedule/batching.hpp)."""

    def __init__(self, policy: str, sizes: list[int], margin_ns: int, delay_ns: int) -> None: ...
    def next(
        self,
        now_ns: int,
        deadlines_ns: array[int],
        arrivals_ns: array[int],
        bounds_ns: array[int],
        most: int,
        gap_ns: int,
        slack_ns: int = ...,
    ) -> tuple[int, int | None]: ...
    def admit(
        self,
        free_ns: int,
        deadlines_ns: array[int],
        bounds_ns: array[int],
        most: int,
        place: int,
        deadline_ns: int,
        protected_count: int,
    ) -> tuple[int, bool]: ...

def gather(rows: list[int], bytes: int, to: int) -> None:
    """Copies so many bytes of the host's memory from each address, one behind the other, to the address `to`."""

def aimd_limit(limit: float, full: bool, in_time: bool, most: float) -> float:
    """The most requests of a batch after one more, by additive increase and multiplicative decrease."""

def demangled(name: bytes) -> str:
    """A kernel's whole name as the predictor reads it; as it is where it is not mangled or cannot be read."""

def feature_names() -> list[str]:
    """What the trees see of a launch, in the order of a row's values."""

def launch_outlooks(
    columns: dict[str, Any], durations_ns: NDArray[float64], sm_count: int, max_threads_per_sm: int = 2048
) -> dict[str, NDArray[float32]]:
    """What launches make of the GPU in these times, and ``level``, by its place in ``cudasched.status.LEVELS``."""

def launch_features(columns: dict[str, Any], sm_count: int, max_threads_per_sm: int = 2048) -> NDArray[float32]:
    """Rows of features of recorded launches; ``columns`` as csrc/bindings/predictor.cpp has it. Raises Error."""

class Replay:
    """A predictor that recorded launches are shown to in their order, as on the launch path."""

    def __init__(self, model: str = "", coverage: float = 0.9) -> None: ...
    def run(self, columns: dict[str, Any], sm_count: int, max_threads_per_sm: int = 2048) -> dict[str, Any]: ...
    def save(self) -> bytes: ...
    def restore(self, state: bytes) -> None: ...

class GraphBuilder:
    """A graph that nodes are added to. This and what follows are ``cudasched.graphs``, with handles as integers."""

    def __init__(self, graph: int) -> None: ...
    @property
    def handle(self) -> int: ...
    @property
    def node_count(self) -> int: ...
    def add_kernel(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: list[bytes],
        after: list[int],
    ) -> int: ...
    def add_copy(self, to: int, source: int, nbytes: int, after: list[int]) -> int: ...
    def add_fill(self, to: int, value: int, nbytes: int, after: list[int]) -> int: ...
    def add_graph(self, child: GraphBuilder, after: list[int]) -> int: ...
    def add_empty(self, after: list[int]) -> int: ...
    def add_if(self, condition: int, with_else: bool, after: list[int]) -> tuple[int, list[int]]: ...
    def add_while(self, condition: int, after: list[int]) -> tuple[int, list[int]]: ...
    def add_switch(self, condition: int, bodies: int, after: list[int]) -> tuple[int, list[int]]: ...

class Graph(GraphBuilder):
    """A graph of its own."""

    def __init__(self) -> None: ...
    @staticmethod
    def driver_version() -> int: ...
    def condition(self, start: int | None) -> int: ...

class GraphCapture:
    """A capture that is open until finish() or close()."""

    def __init__(self, stream: int, into: GraphBuilder | None, after: list[int]) -> None: ...
    def finish(self) -> Graph: ...
    def close(self) -> None: ...

class GraphExecutable:
    """A graph that can be launched."""

    def __init__(self, graph: Graph, device_launch: bool) -> None: ...
    handle: Final[int]
    def launch(self, stream: int) -> None: ...
    def upload(self, stream: int) -> None: ...
    def update(self, graph: Graph) -> tuple[bool, int, int]: ...
    def set_kernel(
        self,
        node: int,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: list[bytes],
    ) -> None: ...
    def set_enabled(self, node: int, enabled: bool) -> None: ...

class GraphPool:
    """One allocation for several uses."""

    def __init__(self, uses: list[tuple[int, int, int]], alignment: int) -> None: ...
    nbytes: Final[int]
    def address(self, use: int) -> int: ...
    @staticmethod
    def plan(uses: list[tuple[int, int, int]], alignment: int) -> tuple[list[int], int]: ...

class MemoryStatistics:
    """Of a memory pool; bytes but for the last three and the fragmentation."""

    @property
    def reserved(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    @property
    def fragmentation(self) -> float: ...
    @property
    def peak_reserved(self) -> int: ...
    @property
    def peak_allocated(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def moved(self) -> int: ...

class MemoryPool:
    """A pool over virtual memory (csrc/memory/pool.hpp); streams and addresses are integers."""

    def __init__(self, device: int, limit_bytes: int, chunk_bytes: int) -> None: ...
    def allocate(self, nbytes: int, stream: int) -> int: ...
    def free(self, address: int, stream: int) -> None: ...
    def trim(self, keep_bytes: int) -> int: ...
    def statistics(self) -> MemoryStatistics: ...
    def close(self) -> None: ...
    def serve_torch(self) -> None: ...

class LinkedModule:
    """Images linked with CUDA's device runtime."""

    def __init__(self, images: list[bytes], device_runtime: str) -> None: ...
    handle: Final[int]
    def function(self, name: str) -> int: ...
    @staticmethod
    def find_device_runtime() -> str: ...

class Collectives:
    """Communicators of NCCL."""

    def __init__(self, devices: list[int]) -> None: ...
    def sum(self, data: list[int], count: int, streams: list[int]) -> None: ...
    @staticmethod
    def enable_peer_access(context: int, peer: int) -> None: ...
