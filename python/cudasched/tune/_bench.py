"""In a worker process: a problem's arrays on the GPU, the right outputs, and the measurement of a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudasched.errors import ConfigError, DriverError, Error
from cudasched.tune._driver import Arguments, Buffer, Device, Kernel, RefusedError
from cudasched.tune._need import need
from cudasched.tune.measurement import Measurement
from cudasched.tune.quiet import Pauses
from cudasched.tune.space import TYPES, Configuration, Launch, Problem, read

__all__ = ["Bench", "Job", "Plan"]

_ON_HOST_BYTES = 1 << 20
"""Outputs up to this size are compared on the host."""
_QUIET_TRIES = 20
_QUIET_PAUSE_S = 0.1


@dataclass(frozen=True)
class Plan:
    """A worker's task.

    Attributes:
        space: The space's file.
        shape: The problem's.
        device: The GPU's ordinal.
        cache: A directory for the right outputs, which are computed once.
        compare: The image of compare.cu; None: everything is compared on the host.
        seed: Of the inputs.
    """

    space: Path
    shape: Mapping[str, int | float]
    device: int
    cache: Path
    compare: bytes | None
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One configuration to measure.

    Attributes:
        image: The machine code.
        configuration: The values.
        samples: How many.
        launches: In a row for each sample: 1 measures the latency, more the throughput.
        give_up_us: A configuration that takes longer than this gets one sample.
        check: Whether to compare the output first.
        compile_s: The compilation's time, for the record.
    """

    image: bytes
    configuration: Configuration
    samples: int
    launches: int = 1
    give_up_us: float = math.inf
    check: bool = True
    compile_s: float = 0.0


class Neighbours:
    """Whether a latency client used the GPU, by the client tables: for a program that is no client itself."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def look(self) -> tuple[bool, frozenset[tuple[int, float | None]]]:
        """Whether one is active now, and since when each was last: another answer than before says that one was."""
        from cudasched.status import status

        try:
            devices = status()
        except Error:  # the package is not built: no program is scheduled
            return False, frozenset()
        clients = [
            client
            for device in devices
            if device.uuid == self._uuid
            for client in device.clients
            if client.client_class == "latency"
        ]
        active = any(client.active for client in clients)
        return active, frozenset((client.process, client.active_since_s) for client in clients)


def _numpy_type(kind: str) -> str:
    return "uint16" if kind == "bfloat16" else kind


def rounded(values: Any, kind: str) -> Any:
    """float64 values as an array of a type; bfloat16 as its bits."""
    np = need("numpy", "the tuner")
    if kind != "bfloat16":
        return values.astype(kind)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(array: Any, kind: str) -> Any:
    """An array of a type as float64."""
    np = need("numpy", "the tuner")
    if kind == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def wrong_values(found: Any, right: Any, relative: float, absolute: float) -> tuple[int, int]:
    """The number of wrong elements, and the place of the first."""
    np = need("numpy", "the tuner")
    with np.errstate(invalid="ignore"):
        close = np.abs(found - right) <= absolute + relative * np.abs(right)
    wrong = ~(close | (found == right) | (np.isnan(found) & np.isnan(right)))
    return int(wrong.sum()), int(wrong.argmax())


def load_reference(path: Path, name: str) -> Callable[..., Mapping[str, Any]]:
    """The function of a reference file.

    Raises:
        ConfigError: The file cannot be run, or has no such function.
    """
    if not path.is_file():
        raise ConfigError(f"check: there is no reference file {path}")
    spec = importlib.util.spec_from_file_location("cudasched_tune_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: the reference cannot be run: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path}: the reference has no function {name}")
    return function  # type: ignore[no-any-return]


class Bench:
    """A problem on a GPU.

    Attributes:
        device: The GPU.
        problem: The problem.
    """

    def __init__(self, plan: Plan, device: Device | None = None) -> None:
        """Makes the arrays and computes, or reads, the right outputs.

        Raises:
            ConfigError: The reference's outputs differ from the space's.
            Error: There is no GPU, or no memory for the arrays.
        """
        self.device = device or Device(plan.device)
        self._plan = plan
        self.problem: Problem = read(plan.space).problem(self.device.gpu, plan.shape)
        self._space = self.problem.space
        self._pauses, self._neighbours = Pauses(), Neighbours(self.device.uuid)
        self._workspace: Buffer | None = None
        self._inputs = self._make_inputs()
        self._buffers: dict[str, Buffer] = {}
        sizes = self.problem.sizes()
        for one in self._space.arguments:
            if one.role in ("input", "output", "inout"):
                try:
                    self._buffers[one.name] = self.device.allocate(sizes[one.name] * TYPES[one.type])
                except RefusedError as error:
                    raise Error(
                        f"there is no GPU memory for {one.name}, {sizes[one.name]:,} elements: {error}"
                    ) from None
            if one.role == "input":
                self.device.upload(self._buffers[one.name], self._inputs[one.name])
        self._right = self._make_right()
        self._right_buffers: dict[str, Buffer] = {}
        self._comparers: dict[str, Kernel] = {}
        self._result = self.device.allocate(16)

    def _outputs(self) -> list[tuple[str, str]]:
        return [(one.name, one.type) for one in self._space.arguments if one.role in ("output", "inout")]

    def _make_inputs(self) -> dict[str, Any]:
        np = need("numpy", "the tuner")
        made: dict[str, Any] = {}
        sizes = self.problem.sizes()
        for place, one in enumerate(self._space.arguments):
            if one.role not in ("input", "inout"):
                continue
            random = np.random.default_rng([self._plan.seed, place])
            count = sizes[one.name]
            if one.fill == "normal":
                values = random.standard_normal(count, dtype=np.float32)
            elif one.fill == "uniform":
                values = random.random(count, dtype=np.float32)
            elif one.fill == "index":
                values = np.arange(count, dtype=np.float64)
            else:
                values = np.full(count, 1.0 if one.fill == "ones" else 0.0, np.float32)
            made[one.name] = rounded(values + one.mean if one.mean else values, one.type)
        return made

    def _cached(self) -> Path:
        told = f"{self._plan.space}|{self.problem.key()}|{self._plan.seed}"
        return self._plan.cache / f"right-{hashlib.sha256(told.encode()).hexdigest()[:16]}.npz"

    def _make_right(self) -> dict[str, Any] | None:
        """The right outputs; None: the first configuration that runs will give them."""
        np = need("numpy", "the tuner")
        if self._cached().exists():
            with np.load(self._cached()) as saved:
                return {name: saved[name] for name in saved.files}
        if self._space.reference is None:
            return None
        path, name = self._space.reference
        kinds = {one.name: one.type for one in self._space.arguments}
        function = load_reference(path, name)
        inputs = {key: widened(array, kinds[key]) for key, array in self._inputs.items()}
        try:
            answer = function(inputs, dict(self.problem.shape))
        except Exception as error:
            raise ConfigError(f"{path}: {name} failed: {type(error).__name__}: {error}") from None
        sizes = self.problem.sizes()
        right = {}
        for output, _ in self._outputs():
            if not isinstance(answer, Mapping) or output not in answer:
                raise ConfigError(f"{path}: {name} gives no {output}")
            array = np.ascontiguousarray(np.asarray(answer[output]).ravel(), dtype=np.float64)
            if array.size != sizes[output]:
                raise ConfigError(f"{path}: {name} gives {array.size:,} elements of {output}, not {sizes[output]:,}")
            right[output] = array
        if unchecked := self._unchecked(right):
            raise ConfigError(unchecked)
        self._keep_right(right)
        return right

    def _unchecked(self, right: Mapping[str, Any]) -> str:
        """Which output is NaN, or within the tolerances of zeros; empty: none."""
        np = need("numpy", "the tuner")
        for name, array in right.items():
            if array.size and np.isnan(array).all():
                return f"check: all elements of {name} are NaN: nothing would be checked"
            largest = float(np.nanmax(np.abs(array), initial=0.0))
            if 0 < largest <= self._space.absolute + self._space.relative * largest:
                return (
                    f"check: absolute = {self._space.absolute:g}, and no element of {name} is beyond {largest:.3g}: "
                    "nothing would be checked; set a smaller one"
                )
        return ""

    def _keep_right(self, right: Mapping[str, Any]) -> None:
        np = need("numpy", "the tuner")
        temporary = self._cached().with_suffix(".new.npz")
        np.savez(temporary, **right)
        temporary.replace(self._cached())

    def _arguments(self, configuration: Configuration) -> Arguments:
        scalars = self.problem.scalars()
        maps = self.problem.tensor_maps(configuration)
        given: list[tuple[str, int | float | bytes]] = []
        for one in self._space.arguments:
            if one.role == "scalar":
                given.append((one.type, scalars[one.name]))
            elif one.role == "workspace":
                given.append(("pointer", self._workspace.address if self._workspace else 0))
            elif one.role == "tensor_map":
                given.append((one.role, self.device.tensor_map(self._buffers[one.of].address, maps[one.name])))
            else:
                given.append(("pointer", self._buffers[one.name].address))
        return Arguments(given)

    def _take_workspace(self, nbytes: int) -> None:
        if self._workspace is not None and self._workspace.nbytes != nbytes:
            self.device.free(self._workspace)
            self._workspace = None
        if nbytes and self._workspace is None:
            self._workspace = self.device.allocate(nbytes)
        if self._workspace is not None:
            self.device.fill(self._workspace, 0)

    def _prepare(self) -> None:
        """Outputs are NaN, so that unwritten elements show."""
        for one in self._space.arguments:
            if one.role == "output":
                self.device.fill(self._buffers[one.name], 0xFF)
            elif one.role == "inout":
                self.device.upload(self._buffers[one.name], self._inputs[one.name])

    def _comparer(self, kind: str) -> Kernel | None:
        if self._plan.compare is None or kind not in ("float32", "float16", "bfloat16"):
            return None
        if kind not in self._comparers:
            self._comparers[kind] = self.device.load(self._plan.compare, f"compare_{kind}")
        return self._comparers[kind]

    def _check(self) -> str:
        """The fault in the outputs; empty: none."""
        if self._right is None:
            right = {name: widened(self._download(name, kind), kind) for name, kind in self._outputs()}
            if unchecked := self._unchecked(right):
                return unchecked
            for name, array in right.items():
                if count := int(need("numpy", "the tuner").isnan(array).sum()):
                    return f"{count:,} of {array.size:,} elements of {name} are NaN: it is no reference for the others"
            self._right = right
            self._keep_right(right)
            return ""
        for name, kind in self._outputs():
            count, place = self._differences(name, kind)
            if count:
                value = float(widened(self._download(name, kind, place, 1), kind)[0])
                wanted = float(self._right[name][place])
                total = self._right[name].size
                return (
                    f"{count:,} of {total:,} elements of {name} are wrong: [{place}] is {value:.7g}, not {wanted:.7g}"
                )
        return ""

    def _download(self, name: str, kind: str, first: int = 0, count: int | None = None) -> Any:
        buffer, width = self._buffers[name], TYPES[kind]
        count = buffer.nbytes // width if count is None else count
        return self.device.download(buffer.address + first * width, count * width, _numpy_type(kind))

    def _differences(self, name: str, kind: str) -> tuple[int, int]:
        np = need("numpy", "the tuner")
        assert self._right is not None
        right = self._right[name]
        relative, absolute = self._space.relative, self._space.absolute
        comparer = self._comparer(kind) if self._buffers[name].nbytes > _ON_HOST_BYTES else None
        if comparer is None:
            return wrong_values(widened(self._download(name, kind), kind), right, relative, absolute)
        if name not in self._right_buffers:
            self._right_buffers[name] = self.device.allocate(right.size * 4)
            self.device.upload(self._right_buffers[name], right.astype(np.float32))
        self.device.fill(self._result, 0)
        given = Arguments(
            [
                ("pointer", self._buffers[name].address),
                ("pointer", self._right_buffers[name].address),
                ("int64", right.size),
                ("float32", relative),
                ("float32", absolute),
                ("pointer", self._result.address),
            ]
        )
        blocks = min(4 * self.device.gpu.sms, -(-right.size // 256))
        self.device.launch(comparer, Launch((blocks, 1, 1), (256, 1, 1), 0, 0, ()), given)
        found = self.device.download(self._result.address, 16, "uint64")
        return int(found[0]), int(found[1])

    def _guards(self) -> str:
        buffers = {**self._buffers, **({"the workspace": self._workspace} if self._workspace else {})}
        for name, buffer in buffers.items():
            if not self.device.guards_hold(buffer):
                self.device.mend_guards(buffer)
                return f"it writes beyond {name}"
        return ""

    def run(self, job: Job) -> Measurement:
        """Checks and times a configuration.

        Raises:
            DriverError: The context is lost: the worker has to end.
        """
        begin = time.perf_counter()
        launch = self.problem.launch(job.configuration)
        kernel = None
        try:
            kernel = self.device.load(job.image, self._space.kernel)
            known = self._about(kernel, launch, job)
            if launch.threads > kernel.max_threads or known.occupancy == 0:
                why = f"a block of {launch.threads} threads with {kernel.registers} registers each does not fit"
                return self._ended(known, "does_not_fit", why, begin)
            self.device.allow_shared(kernel, launch.shared_bytes)
            self._take_workspace(launch.workspace_bytes)
            arguments = self._arguments(job.configuration)
            if job.check:
                self._prepare()
                self.device.launch(kernel, launch, arguments)
                self.device.wait()
                written = self._guards()
                if written:
                    return self._ended(known, "out_of_bounds", written, begin)
                wrong = self._check()
                if wrong:
                    return self._ended(known, "wrong", wrong, begin)
            samples, discarded = self._sample(kernel, launch, arguments, job)
            status = "ok" if samples else "disturbed"
            made = Measurement(
                **{
                    **known.__dict__,
                    "status": status,
                    "samples_us": tuple(samples),
                    "discarded": discarded,
                    "sm_clock_mhz": self.device.sm_clock_mhz(),
                    "message": "" if samples else "a latency client was active all the time",
                    "run_s": time.perf_counter() - begin,
                }
            )
            return made
        except RefusedError as error:
            return Measurement("launch_error", message=str(error), compile_s=job.compile_s, run_s=_since(begin))
        finally:
            if kernel is not None:
                self._unload(kernel)

    def _unload(self, kernel: Kernel) -> None:
        with contextlib.suppress(RefusedError, DriverError):  # the earlier fault is reported instead
            self.device.unload(kernel)

    def _ended(self, known: Measurement, status: str, message: str, begin: float) -> Measurement:
        return Measurement(**{**known.__dict__, "status": status, "message": message, "run_s": _since(begin)})

    def _about(self, kernel: Kernel, launch: Launch, job: Job) -> Measurement:
        return Measurement(
            "ok",
            registers=kernel.registers,
            local_bytes=kernel.local_bytes,
            static_shared_bytes=kernel.static_shared_bytes,
            occupancy=self.problem.occupancy(launch, kernel.registers, kernel.static_shared_bytes),
            workspace_bytes=launch.workspace_bytes,
            compile_s=job.compile_s,
        )

    def _sample(self, kernel: Kernel, launch: Launch, arguments: Arguments, job: Job) -> tuple[Sequence[float], int]:
        """Samples, all of them in pauses while no latency client was active, and how many were thrown away."""
        samples: list[float] = []
        discarded = 0
        for attempt in range(_QUIET_TRIES):
            with self._pauses.pause():
                before = self._latency()
                taken: list[float] = []
                began = time.perf_counter()
                while not before[0] and len(samples) + len(taken) < job.samples:
                    taken.append(self.device.time(kernel, launch, arguments, job.launches))
                    each_s = (time.perf_counter() - began) / len(taken)
                    if taken[0] > job.give_up_us or self._pauses.left_s() < 2 * each_s:
                        break
                quiet = not self._pauses.is_client or len(taken) == 1 or self._pauses.is_quiet()
                if taken and quiet and self._latency() == before:
                    samples += taken
                    if len(samples) == job.samples or samples[0] > job.give_up_us:
                        break
                    continue
                discarded += len(taken)
            if attempt + 1 < _QUIET_TRIES:
                time.sleep(_QUIET_PAUSE_S)
        return samples, discarded

    def _latency(self) -> tuple[bool, object]:
        return self._pauses.latency() if self._pauses.is_client else self._neighbours.look()


def _since(begin: float) -> float:
    return time.perf_counter() - begin
