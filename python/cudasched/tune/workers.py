"""Worker processes that compile and measure, so that a hang, crash or fault ends only a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cudasched import hook
from cudasched._scratch import Scratch
from cudasched.errors import Error
from cudasched.tune import compile as compilation
from cudasched.tune._bench import Job, Plan
from cudasched.tune.compile import Compiled, Compiler
from cudasched.tune.measurement import Measurement
from cudasched.tune.space import Gpu, Launch, Problem, Space

__all__ = ["Limits", "Live", "Request", "Worker"]

_OPEN_TRIES = 3
_COMPARE = Path(__file__).parent / "compare.cu"


@dataclass(frozen=True)
class Limits:
    """How long things may take, s, before a worker is killed."""

    compile_s: float = 120.0
    run_s: float = 20.0
    open_s: float = 300.0


@dataclass(frozen=True)
class Request:
    """One configuration that is wanted.

    Attributes:
        index: The place among the problem's configurations.
        samples: How many.
        check: Whether to compare the output first.
        give_up_us: A configuration that takes longer gets one sample.
    """

    index: int
    samples: int
    check: bool = True
    give_up_us: float = float("inf")


class Worker:
    """One worker process and the request that it works on."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.deadline = 0.0
        self.work: Any = None

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self.work is not None

    def start(self) -> None:
        """Starts the process, where there is none."""
        if self.connection is not None:
            return
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "cudasched.tune._worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("CUDASCHED_LOG") == "debug" else subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=self._environment,
            start_new_session=True,
        )
        theirs.close()
        self.connection = ours

    def ask(self, what: str, given: Any, seconds: float, work: Any) -> None:
        """Sends a request; `work` is the caller's name of the request."""
        self.start()
        assert self.connection is not None
        self.deadline = time.monotonic() + seconds
        self.work = work
        with contextlib.suppress(OSError):  # a process that is gone shows when the answer is read
            self.connection.send((what, given))

    def answer(self) -> tuple[str, Any]:
        """The answer: ("done", value), ("compile_error", log), ("error", why), or ("gone", exit code)."""
        assert self.connection is not None
        self.work = None
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.kill()
            return "gone", code

    def kill(self) -> int:
        """Ends the process and gives its exit code; the next request starts another one."""
        self.work = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        code = 0
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with a compiler that the worker has started
            try:
                code = self._process.wait(30)
            except subprocess.TimeoutExpired:  # inside the driver, which tears a context down: init gets it
                code = -9
            self._process = None
        return code


def _gpu_environment() -> dict[str, str]:
    """A measuring worker is a best-effort client that launches on its own thread."""
    return {"CUDASCHED_CLASS": "best_effort", "CUDASCHED_NAME": "tune", "CUDASCHED_OFFLOAD": "0"}


class Live:
    """Measures configurations of a problem on a GPU of this machine.

    Attributes:
        problem: The problem.
        uuid: The GPU's, as the client tables name it.
    """

    def __init__(
        self,
        space: Space,
        source: Path,
        shape: Mapping[str, int | float] | None = None,
        *,
        device: int = 0,
        compiler: str = "auto",
        options: Sequence[str] = (),
        processes: int | None = None,
        limits: Limits | None = None,
        launches: int = 1,
        keep_images: int = 64,
        seed: int = 0,
    ) -> None:
        """Starts a worker on the GPU, and finds the GPU's properties.

        Args:
            space: The space.
            source: The kernel's file.
            shape: The differences from the space's shape.
            device: The GPU's ordinal.
            compiler: "auto", "nvrtc" or "nvcc".
            options: More for the compiler.
            processes: That compile at once; None: one a core, up to 16.
            limits: Time-outs.
            launches: In a row for each sample.
            keep_images: How many images are kept for configurations that are measured again.
            seed: Of the inputs.

        Raises:
            Error: There is no compiler, no GPU, or the source cannot be read.
            ConfigError: The space has no configuration for that shape and GPU.
        """
        if not source.is_file():
            raise Error(f"{source}: there is no such kernel file")
        self.compiler: Compiler = compilation.choose(compiler)
        self._source, self._options, self._launches = source.resolve(), tuple(options), launches
        self._limits = limits or Limits()
        self._scratch = Scratch("tune")
        cores = len(os.sched_getaffinity(0))
        self._compilers = [Worker() for _ in range(processes or max(1, min(16, cores)))]
        self._gpu_worker = Worker(_gpu_environment())
        self._images: dict[tuple[tuple[str, str], ...], Compiled] = {}
        self._keep = keep_images
        self._plan = Plan(
            space=space.path.resolve(),
            shape={**space.shape, **(shape or {})},
            device=device,
            cache=self._scratch.path,
            compare=None,
            seed=seed,
        )
        try:
            gpu, self.uuid = self._begin("gpu", device)
            if source.suffix not in compilation.IMAGES and hook.is_simulated(hook.load_core().find_driver()):
                raise Error("the simulated driver runs no compiled kernel: tune on a GPU, or --replay a recorded space")
            self.problem: Problem = space.problem(gpu, shape)
            _ = self.problem.configurations  # a fault in the space shows before the arrays are made
            self._plan = replace(self._plan, compare=self._compare_image(gpu))
            self._open()
        except BaseException:
            self.close()
            raise

    def _compare_image(self, gpu: Gpu) -> bytes | None:
        try:
            return compilation.compile_source(_COMPARE, (), gpu.target, self.compiler).image
        except Error:  # then it is done on the host, which takes longer
            return None

    def _open(self) -> None:
        """The worker on the GPU has the problem's arrays."""
        self._begin("open", self._plan)

    def _begin(self, what: str, given: Any) -> Any:
        code = 0
        for _ in range(_OPEN_TRIES):
            self._gpu_worker.ask(what, given, self._limits.open_s, what)
            assert self._gpu_worker.connection is not None
            if not self._gpu_worker.connection.poll(self._limits.open_s):
                self._gpu_worker.kill()
                raise Error(f"the GPU did not become ready within {self._limits.open_s:g} s")
            kind, value = self._gpu_worker.answer()
            if kind == "done":
                return value
            if kind == "error":
                self._gpu_worker.kill()
                raise Error(f"nothing can be measured here: {value}")
            code = value
        raise Error(f"the process that measures on the GPU ended {_OPEN_TRIES} times as it began (exit code {code})")

    @property
    def fingerprint(self) -> str:
        """Which measurements belong together."""
        given, usual = (self._launches, self.compiler, self._options), (1, compilation.choose(), ())
        return self.problem.space.fingerprint(self._source, "" if given == usual else repr(given))

    def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        """Measures configurations; the compilers work ahead of the GPU. Results come as soon as ready.

        Raises:
            Error: The GPU is lost for good.
        """
        waiting = deque(requests)
        compiled: deque[tuple[Request, Compiled]] = deque()
        while waiting or compiled or self._gpu_worker.busy or any(one.busy for one in self._compilers):
            for worker in self._compilers:
                # Ahead by so many images and no more: they are held in memory.
                if waiting and not worker.busy and len(compiled) < 4 * len(self._compilers):
                    self._compile(worker, waiting.popleft(), compiled)
            if compiled and not self._gpu_worker.busy:
                self._run(*compiled.popleft())
            yield from self._collect(compiled)

    def _launch(self, request: Request) -> Launch:
        return self.problem.launch(self.problem.configurations[request.index])

    def _compile(self, worker: Worker, request: Request, compiled: deque[tuple[Request, Compiled]]) -> None:
        macros = self._launch(request).macros
        if macros in self._images:
            compiled.append((request, self._images[macros]))
            return
        given = {
            "source": self._source,
            "macros": macros,
            "target": self.problem.gpu.target,
            "compiler": self.compiler,
            "options": self._options,
        }
        worker.ask("compile", given, self._limits.compile_s, request)

    def _run(self, request: Request, made: Compiled) -> None:
        job = self._job(request, made)
        self._gpu_worker.ask("run", job, self._limits.run_s, (request, made))

    def _job(self, request: Request, made: Compiled) -> Job:
        return Job(
            image=made.image,
            configuration=self.problem.configurations[request.index],
            samples=request.samples,
            launches=self._launches,
            give_up_us=request.give_up_us,
            check=request.check,
            compile_s=made.seconds,
        )

    def _collect(self, compiled: deque[tuple[Request, Compiled]]) -> Iterator[tuple[Request, Measurement]]:
        """Waits for an answer or a deadline."""
        busy = {
            one.connection: one
            for one in [*self._compilers, self._gpu_worker]
            if one.busy and one.connection is not None
        }
        if not busy:
            return
        earliest = min(one.deadline for one in busy.values())
        ready = wait(list(busy), timeout=max(0.0, earliest - time.monotonic()))
        for connection in ready:
            worker = busy[connection]  # type: ignore[index]
            work = worker.work
            kind, value = worker.answer()
            if worker is self._gpu_worker:
                yield work[0], self._measured(work[1], kind, value)
            elif kind == "done":
                self._remember(self._launch(work).macros, value)
                compiled.append((work, value))
            else:
                said = value if kind != "gone" else f"the compiler's process ended with {value}"
                yield work, Measurement("compile_error" if kind != "gone" else "crashed", message=str(said))
        now = time.monotonic()
        for connection, worker in busy.items():
            # An answer that came meanwhile is in time: a new worker on the GPU may have taken minutes.
            if worker.busy and worker.deadline <= now and not connection.poll():
                work = worker.work
                worker.kill()
                if worker is self._gpu_worker:
                    hang = Measurement(
                        "hang",
                        message=f"it did not end within {self._limits.run_s:g} s",
                        compile_s=work[1].seconds,
                        run_s=self._limits.run_s,
                    )
                    self._open()
                    yield work[0], hang
                else:
                    text = f"compiling did not end within {self._limits.compile_s:g} s"
                    yield work, Measurement("compile_error", message=text, compile_s=self._limits.compile_s)

    def _measured(self, made: Compiled, kind: str, value: Any) -> Measurement:
        if kind == "done":
            assert isinstance(value, Measurement)
            if value.status == "fault":
                self._gpu_worker.kill()
                self._open()
            return value
        if kind == "gone":
            self._open()
            return Measurement("crashed", message=f"the process ended with {value}", compile_s=made.seconds)
        raise Error(f"nothing can be measured here: {value}")

    def _remember(self, macros: tuple[tuple[str, str], ...], made: Compiled) -> None:
        self._images[macros] = made
        while len(self._images) > self._keep:
            self._images.pop(next(iter(self._images)))

    def under(
        self, tool: Callable[[list[str]], list[str]], index: int, samples: int, seconds: float
    ) -> tuple[int, str]:
        """Runs one configuration in a process of its own under a tool.

        Args:
            tool: From the command to the command with the tool before it.
            index: The configuration.
            samples: How many.
            seconds: The run's time limit.

        Returns:
            The exit code (124: too long a run), and the whole output.

        Raises:
            CompileError: The source does not compile.
            OSError: The tool cannot be started.
        """
        request = Request(index, samples)
        macros = self._launch(request).macros
        made = self._images.get(macros)
        if made is None:
            made = compilation.compile_source(
                self._source, macros, self.problem.gpu.target, self.compiler, [*self._options, "-lineinfo"]
            )
        file = self._scratch.path / "job"
        file.write_bytes(pickle.dumps((replace(self._plan, compare=None), self._job(request, made))))
        command = tool([sys.executable, "-m", "cudasched.tune._worker", "--once", str(file)])
        environment = {**os.environ, **_gpu_environment()}
        theirs, ours = os.pipe()  # the process ends with this one, and when its tool took too long
        try:
            done = subprocess.run(
                command,
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
        finally:
            os.close(theirs)
            os.close(ours)
        return done.returncode, done.stdout

    def close(self) -> None:
        """Ends the workers."""
        for worker in [*self._compilers, self._gpu_worker]:
            worker.kill()
        self._scratch.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
