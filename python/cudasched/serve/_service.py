"""The operations of `cudasched serve` for all protocols, with data and errors."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cudasched import __version__, control
from cudasched._text import one_line
from cudasched.advise import beside
from cudasched.advise.capacity import Program
from cudasched.config import ClientClass
from cudasched.errors import ArbiterError, ConfigError, Error
from cudasched.log import logger
from cudasched.observe import prometheus
from cudasched.observe._gpus import with_gpus
from cudasched.observe._metrics import Device, Process
from cudasched.observe._metrics import clients as read_clients
from cudasched.observe._rates import Look, Row, rows
from cudasched.serve._secret import AuditLog

__all__ = [
    "Changes",
    "ClientInfo",
    "Clients",
    "Failure",
    "ForecastRequest",
    "GpuInfo",
    "OperationError",
    "Region",
    "Sample",
    "Service",
    "TraceRequest",
    "Usage",
]

_LATE_LOOKS = 10
KEPT_SAMPLES = 600
"""How many samples are kept: ten minutes."""
FORECAST_S = 30.0
"""No forecast of a request begins later."""

ClientId = Field(pattern=r"^[0-9a-f]{16}$", description="16 hexadecimal digits, drawn when the process started.")


class Failure(Enum):
    """Why an operation failed; HTTP and gRPC each have a code for it."""

    INVALID = "invalid"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


_FAILURES = {
    "no_client": Failure.NOT_FOUND,
    "ended": Failure.NOT_FOUND,
    "regions": Failure.REFUSED,
    "policy_hangs": Failure.REFUSED,
    "unknown": Failure.REFUSED,
    "busy": Failure.REFUSED,
    "holds_more": Failure.REFUSED,
    "withdrawn": Failure.TIMEOUT,
    "unclear": Failure.TIMEOUT,
}


class OperationError(Exception):
    """An operation failed, for a reason that the caller may read.

    Attributes:
        failure: Which kind.
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(one_line(message))
        self.failure = failure


class Region(BaseModel):
    """Requests of the latency regions of one name, since the process started."""

    name: str
    slo_ms: float | None
    met: int = Field(ge=0)
    missed: int = Field(ge=0)
    requests: int = Field(ge=0)
    p99_ms: float | None


class ClientInfo(BaseModel):
    """One process under cudasched."""

    id: str = ClientId
    pid: int = Field(description="As its own pid namespace numbers it.")
    name: str
    client_class: str = Field(description="Of its launches that no region and no stream decides.")
    classes: list[str] = Field(description="Those that it has used.")
    priority: int
    weight: float
    policy: str = Field(description='A policy by name; "own": one that the program brings.')
    slo_ms: float | None
    memory_bytes: int = Field(ge=0, description="Allocated on its GPUs and not freed.")
    memory_limit_bytes: int | None = Field(description="Of each GPU; null: no limit.")
    gpus: list[str] = Field(description="UUIDs.")
    version: str
    state: str
    in_flight_ms: float
    launches_per_s: float | None
    request_p99_ms: float | None
    regions: list[Region]


class GpuInfo(BaseModel):
    """One GPU's table, and NVML's facts about the GPU where available."""

    uuid: str
    name: str
    error: str = Field(description="Why the table cannot be read; empty if it can.")
    sm_ratio: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    unaccounted_bytes: int | None
    foreign: list[str] = Field(description="Programs on the GPU that are no clients here.")


class Clients(BaseModel):
    """All clients of this user, and the GPUs that they have used."""

    clients: list[ClientInfo]
    gpus: list[GpuInfo]


_LEAST_LIMIT, _MOST_LIMIT = 2**20, 2**50


def _without_null(schema: dict[str, Any]) -> None:
    """A field is left out, or has a value; and one at least has."""
    for name, field in schema["properties"].items():
        (kind,) = (each for each in field["anyOf"] if each != {"type": "null"})
        schema["properties"][name] = {**kind, "description": field["description"]}
    schema["properties"]["memory_limit_bytes"] = {
        "description": schema["properties"]["memory_limit_bytes"]["description"],
        "anyOf": [{"const": 0}, {"type": "integer", "minimum": _LEAST_LIMIT, "maximum": _MOST_LIMIT}],
    }
    schema["minProperties"] = 1


def _whole(value: Any) -> Any:
    """To JSON Schema, 2.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Changes(BaseModel):
    """Changes of a client; a field that is left out stays unchanged."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_without_null)

    client_class: ClientClass | None = Field(default=None, description="Of its launches from now on.")
    priority: Annotated[int, Field(ge=-8, le=8), BeforeValidator(_whole)] | None = Field(
        default=None, description="Higher first."
    )
    weight: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        default=None, description="Multiplies a best-effort client's share."
    )
    policy: Literal["strict", "slack", "harvest", "open"] | None = Field(
        default=None, description="The rule that decides over its best-effort launches."
    )
    memory_limit_bytes: Annotated[int, Field(ge=0, le=_MOST_LIMIT), BeforeValidator(_whole)] | None = Field(
        default=None, description="Of each GPU, in whole MiB; 0: no limit. Not below the memory that the client holds."
    )

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, values: Any) -> Any:
        if isinstance(values, dict) and (not values or None in values.values()):
            raise ValueError("nothing is to be changed: name a setting, with a value")
        return values


class TraceRequest(BaseModel):
    """How a client is to be traced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: Annotated[float, Field(ge=0.01, le=20)] = 1.0
    format: Literal["perfetto", "json"] = "perfetto"


Name = Annotated[str, Field(min_length=1, max_length=200)]


class ForecastRequest(BaseModel):
    """A server and best-effort programs, each by its name in the file of `cudasched serve --models`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    server: Name
    programs: Annotated[list[Name], Field(min_length=1, max_length=16)]
    rate_hz: Annotated[float, Field(ge=0.001, le=100_000)] | None = Field(
        default=None, description="Requests a second; null: as in the file."
    )


class Sample(BaseModel):
    """The events of the second before a moment; null where there were none, or they are not known.

    Of each client: the share of the time in which its kernels ran, sampled by the driver; predicted GPU seconds of its
    best effort a second; P95 of waits at the gate, ms; the share of requests that kept their target; and its memory,
    bytes. Of each GPU: busy ratio and memory in use by all, bytes.
    """

    number: int
    at_s: float = Field(description="Since the epoch.")
    clients: dict[str, tuple[float | None, float | None, float | None, float | None, int]]
    gpus: dict[str, tuple[float | None, int | None]]


class Usage(BaseModel):
    """Samples of the last minutes, the oldest first, and the names of their clients."""

    interval_s: float
    kept: int = Field(description="How many samples are kept at most.")
    samples: list[Sample]
    names: dict[str, str]


def _region(seen: object) -> Region:
    from cudasched.observe._metrics import RegionMetrics

    assert isinstance(seen, RegionMetrics)
    return Region(
        name=seen.name,
        slo_ms=seen.slo_ms,
        met=seen.met,
        missed=seen.missed,
        requests=seen.requests,
        p99_ms=seen.times.p99_ms,
    )


def _client(process: Process, row: Row) -> ClientInfo:
    found = control.client_of(process)
    return ClientInfo(
        id=found.id,
        pid=found.pid,
        name=found.name,
        client_class=found.client_class,
        classes=list(found.classes),
        priority=found.priority,
        weight=found.weight,
        policy=found.policy,
        slo_ms=row.slo_ms,
        memory_bytes=found.memory_bytes,
        memory_limit_bytes=found.memory_limit_bytes,
        gpus=list(found.gpus),
        version=found.version,
        state=row.state,
        in_flight_ms=row.in_flight_ms,
        launches_per_s=row.launches_per_s,
        request_p99_ms=row.request_ms,
        regions=[_region(region) for region in process.metrics.regions] if process.metrics else [],
    )


def _gpu(device: Device) -> GpuInfo:
    gpu = device.gpu
    return GpuInfo(
        uuid=device.uuid,
        name=device.name,
        error=device.error,
        sm_ratio=gpu.sm_ratio if gpu else None,
        memory_used_bytes=gpu.memory_used_bytes if gpu else None,
        memory_total_bytes=gpu.memory_total_bytes if gpu else None,
        unaccounted_bytes=gpu.unaccounted_bytes if gpu else None,
        foreign=[f"{each.name} ({each.pid})" for each in gpu.foreign] if gpu else [],
    )


def _until(end_s: float, recordings: list[beside.Recording]) -> Iterator[beside.Recording]:
    """The recordings, as long as there is time."""
    for number, recording in enumerate(recordings):
        if time.monotonic() > end_s:
            raise OperationError(
                Failure.TIMEOUT, f"{number} of {len(recordings)} forecasts took {FORECAST_S:g} s: ask for fewer"
            )
        yield recording


class Service:
    """The operations. For any number of threads; a thread of its own looks at the clients each `interval_s`.

    Args:
        audit: Where changes are noted.
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.
        interval_s: Between two looks.
        clock: For tests.
        programs: Of which forecasts may be asked for, by name.
    """

    def __init__(
        self,
        audit: AuditLog,
        directory: str | os.PathLike[str] | None = None,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        programs: Mapping[str, Program] | None = None,
    ) -> None:
        self._audit = audit
        self._directory = directory
        self._interval_s = interval_s
        self._clock = clock
        self._programs = programs or {}
        self._forecasting = threading.Lock()  # one forecast at a time: each takes a core for seconds
        self._lock = threading.Lock()  # guards the following members
        self._look: Look | None = None
        self._looked_at = time.monotonic()
        self._rows: dict[int, Row] = {}
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._names: dict[str, str] = {}
        self._number = 0
        self._ended = threading.Event()
        control.remove_left_traces(directory)
        self._thread = threading.Thread(target=self._watch, name="cudasched-serve", daemon=True)
        self.look()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self.look()
            except Exception as error:  # a look that fails is one, and not the end of looking
                logger.warning("the clients could not be looked at: %s: %s", type(error).__name__, error)

    def check(self) -> None:
        """Whether the clients have been looked at lately.

        Raises:
            OperationError: They have not.
        """
        with self._lock:
            late_s = time.monotonic() - self._looked_at
        if late_s > _LATE_LOOKS * self._interval_s:
            raise OperationError(Failure.INTERNAL, f"the clients have not been looked at for {late_s:.0f} s")

    def look(self) -> None:
        """Looks at the clients once. Where their tables cannot be read there is no sample, not one of no client."""
        try:
            devices, processes = read_clients(self._directory)
            devices = with_gpus(devices, processes)
        except Error as error:
            devices, processes = [Device(uuid="", name="", error=str(error))], []
        if not processes and any(device.error for device in devices):
            if all(device.uuid for device in devices):  # else nothing can be read, and that is no look
                with self._lock:
                    self._looked_at = time.monotonic()
            return
        # One that has said no number yet cannot be told from others.
        now = Look(time.monotonic(), tuple(devices), tuple(each for each in processes if each.number != 0))
        with self._lock:
            found = rows(now, self._look)
            self._look, self._looked_at = now, now.at_s
            self._rows = {row.number: row for row in found}
            held = {each.number: sum(client.memory_bytes for _, client in each.clients) for each in now.processes}
            self._number += 1
            self._samples.append(
                Sample(
                    number=self._number,
                    at_s=self._clock(),
                    clients={
                        f"{row.number:016x}": (
                            row.sm_ratio,
                            row.best_effort_ratio,
                            row.gate_wait_ms,
                            row.attainment,
                            held[row.number],
                        )
                        for row in found
                    },
                    gpus={
                        device.uuid: (device.gpu.sm_ratio, device.gpu.memory_used_bytes) if device.gpu else (None, None)
                        for device in devices
                    },
                )
            )
            shown = set().union(*(sample.clients for sample in self._samples))
            self._names.update({f"{each.number:016x}": each.name for each in now.processes})
            self._names = {client: name for client, name in self._names.items() if client in shown}

    def clients(self) -> Clients:
        """Every client, as of now, with rates of the last second."""
        try:
            devices, processes = read_clients(self._directory)
        except Error as error:
            raise OperationError(Failure.INTERNAL, str(error)) from None
        if unread := next((device.error for device in devices if device.error and not device.uuid), ""):
            raise OperationError(Failure.INTERNAL, unread)
        with self._lock:
            known, seen = dict(self._rows), {each.uuid: each.gpu for each in (self._look.devices if self._look else ())}
        infos = []
        for process in processes:
            if process.number == 0:
                continue
            (fresh,) = rows(Look(0.0, (), (process,)), None)
            rates = known.get(process.number, fresh)
            info = _client(process, fresh)
            infos.append(
                info.model_copy(update={"launches_per_s": rates.launches_per_s, "request_p99_ms": rates.request_ms})
            )
        gpus = [_gpu(Device(each.uuid, each.name, each.error, each.path, seen.get(each.uuid))) for each in devices]
        return Clients(clients=sorted(infos, key=lambda info: (info.pid, info.id)), gpus=gpus)

    def client(self, client: str) -> ClientInfo:
        """One client, as of now.

        Raises:
            OperationError: There is none of that id.
        """
        for info in self.clients().clients:
            if info.id == client:
                return info
        raise OperationError(Failure.NOT_FOUND, f"client {client}: there is no such client; it may have ended")

    def change(self, client: str, changes: Changes, caller: str) -> ClientInfo:
        """Changes settings of a client, notes this, and waits until they hold.

        Args:
            client: The client's id.
            changes: The changes.
            caller: Who asks, for the audit log.

        Raises:
            OperationError: A value has no meaning, or the client cannot be changed so.
        """
        wanted = changes.model_dump(exclude_none=True)
        if (limit := wanted.pop("memory_limit_bytes", None)) is not None:
            wanted["memory_limit"] = limit
        outcome, applied = "applied", tuple(wanted)
        try:
            self._audit.write("asked", caller=caller, client=client, changes=wanted)
            found = control.change(client, directory=self._directory, **wanted)
            outcome = f"applied to {found.name}"
        except control.ControlError as error:
            outcome, applied = error.reason, error.applied
            raise OperationError(_FAILURES.get(error.reason, Failure.REFUSED), str(error)) from None
        except ConfigError as error:
            outcome, applied = "invalid", ()
            raise OperationError(Failure.INVALID, str(error)) from None
        except ArbiterError as error:
            outcome, applied = "table", ()
            raise OperationError(Failure.INTERNAL, str(error)) from None
        except Error as error:
            outcome, applied = "failed", ()
            raise OperationError(Failure.INTERNAL, str(error)) from None
        finally:
            if outcome != "failed":
                self._note("answered", caller=caller, client=client, outcome=outcome, applied=list(applied))
        return self.client(client)

    def trace(self, client: str, wanted: TraceRequest, caller: str) -> bytes:
        """Traces a client for a while.

        Args:
            client: The client's id.
            wanted: For how long, and in which form.
            caller: Who asks, for the audit log.

        Returns:
            The trace.

        Raises:
            OperationError: The client cannot be traced.
        """
        try:
            self._audit.write("traces", caller=caller, client=client, seconds=wanted.seconds)
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / "trace"
                control.trace(client, path, wanted.seconds, format=wanted.format, directory=self._directory)
                return path.read_bytes()
        except control.ControlError as error:
            raise OperationError(_FAILURES.get(error.reason, Failure.REFUSED), str(error)) from None
        except ConfigError as error:
            raise OperationError(Failure.INVALID, str(error)) from None
        except (Error, OSError) as error:
            raise OperationError(Failure.INTERNAL, str(error)) from None

    def forecast(self, wanted: ForecastRequest) -> list[beside.Forecast]:
        """What a server and each of some programs cost one another, the best partner first.

        Raises:
            OperationError: A program is not loaded or of another class, they cannot share a GPU, another forecast is
                being made, or these take too long.
        """
        server = self._program(wanted.server, "latency")
        others = [self._program(name, "best_effort").recording for name in wanted.programs]
        if not self._forecasting.acquire(blocking=False):
            raise OperationError(Failure.REFUSED, "another forecast is being made: ask again in some seconds")
        try:
            return beside.rank(
                server.recording,
                _until(time.monotonic() + FORECAST_S, others),
                rate_hz=wanted.rate_hz or server.rate_hz,
                arrivals=server.arrivals,
                slo_ms=server.slo_ms,
                alone_ms=server.alone_ms,
            )
        except Error as error:
            raise OperationError(Failure.INVALID, str(error)) from None
        finally:
            self._forecasting.release()

    def _program(self, name: str, client_class: ClientClass) -> Program:
        if (found := self._programs.get(name)) is None:
            known = f"loaded are {', '.join(self._programs)}" if self._programs else "none is: see --models"
            raise OperationError(Failure.NOT_FOUND, f"no program {name!r} is loaded; {known}")
        if found.client_class != client_class:
            raise OperationError(Failure.INVALID, f"{name} is of class {found.client_class}, not {client_class}")
        return found

    def wrong_token(self, address: str) -> None:
        """Notes that a caller had a wrong token.

        Args:
            address: The caller's address.
        """
        self._note("wrong token", caller=address)

    def _note(self, event: str, **fields: object) -> None:
        """An action that cannot be undone any more is noted where possible."""
        with contextlib.suppress(Error):
            self._audit.write(event, **fields)

    def usage(self, after: int = 0) -> Usage:
        """The samples that are numbered higher than `after`."""
        with self._lock:
            samples = [sample for sample in self._samples if sample.number > after]
            return Usage(interval_s=self._interval_s, kept=KEPT_SAMPLES, samples=samples, names=dict(self._names))

    def metrics(self) -> str:
        """As `cudasched metrics serve` has them."""
        return prometheus.text(self._directory)

    def version(self) -> str:
        """Of cudasched."""
        return __version__
