"""A driver-API program that does what it is told, and the handle that tells it.

As a script (`program.py [import]`, with `import`: cudasched is imported first) it evaluates Python from its standard
input, a JSON string a line, in a namespace that has what this module has, and answers each with a line of JSON.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudasched import Client

PATIENCE_S = 60
"""Against hangs only."""

FOREVER_US = 2_000_000_000
"""A kernel that outlives the test."""

PATIENT = {"CUDASCHED_STALE_HEARTBEAT_MS": "60000"}
"""On a busy machine a heartbeat may come late: with this, nothing but its owner opens the gate."""

HOLDING = {"CUDASCHED_MAX_IDLE_HOLD_MS": "3600000"}
"""A latency region then holds the gate closed until it is left, whether or not there is work."""

ENTER = "held = cudasched.region('latency'); held.__enter__()"
LEAVE = "held.__exit__(None, None, None)"

IMAGE = b"cudasched-sim 1\nkernel work params=4 block_us=param:0\n"
CAPTURE_THREAD_LOCAL = 1


class Gpu:
    """A device, its primary context and a kernel that takes as long as its launch says. For any number of threads."""

    def __init__(self, ordinal: int = 0) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._with_gil = ctypes.PyDLL("libcuda.so.1")
        self._context, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        device, module = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.use()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(IMAGE))
        self.call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"work"))

    def call(self, name: str, *arguments: object, keep_gil: bool = False) -> None:
        status = getattr(self._with_gil if keep_gil else self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")

    def use(self) -> None:
        """Makes the context the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    def stream(self, flags: int = 1) -> int:
        """Non-blocking, or with 0 blocking."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), flags)
        assert stream.value
        return stream.value

    def launch(self, count: int = 1, *, us: int = 20, stream: int = 0, keep_gil: bool = False) -> float:
        """Launches kernels of `us` simulated microseconds. Returns when the last launch came back (monotonic, s)."""
        duration = ctypes.c_uint32(us)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        where = (1, 1, 1, 32, 1, 1, 0, ctypes.c_void_p(stream))
        for _ in range(count):
            self.call("cuLaunchKernel", self._function, *where, arguments, None, keep_gil=keep_gil)
        return time.monotonic()

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def capture(self, launches: int, stream: int) -> int:
        """An executable graph of as many launches."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), CAPTURE_THREAD_LOCAL)
        self.launch(launches, stream=stream)
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        assert executable.value
        return executable.value

    def replay(self, executable: int, stream: int) -> None:
        self.call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))


class Worker(threading.Thread):
    """A thread that has the context, and does one thing; `join` raises what that raised."""

    def __init__(self, gpu: Gpu, action: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._gpu, self._action = gpu, action
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._gpu.use()
            self._action()
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = PATIENCE_S) -> None:
        super().join(timeout)
        if self.is_alive():
            raise TimeoutError("the thread hangs")
        if self._error is not None:
            raise self._error


class Feeder(Worker):
    """A thread that launches and launches, as a training loop does, until it is stopped.

    With `requests`, as a server does: it waits for each launch, and pauses.
    """

    def __init__(self, gpu: Gpu, *, us: int = 20, requests: bool = False) -> None:
        self.count = 0
        self._us = us
        self._requests = requests
        self._enough = threading.Event()
        super().__init__(gpu, self._feed)

    def _feed(self) -> None:
        while not self._enough.is_set():
            self._gpu.launch(us=self._us)
            self.count += 1
            if self._requests:
                self._gpu.synchronize()
                time.sleep(0.002)  # longer than the gate lingers after latency work

    def stop(self) -> int:
        self._enough.set()
        self.join()
        return self.count


def state() -> dict[str, object]:
    import cudasched

    return asdict(cudasched.state())


def close_descriptors() -> None:
    """Closes every descriptor but the standard ones, and those of the simulated devices, which need theirs."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if int(name) > 2 and os.path.islink(path) and "/device-" not in os.readlink(path):
            os.close(int(name))


def main() -> None:
    sys.setswitchinterval(1e-4)  # as a program of both classes should
    names: dict[str, object] = dict(globals())
    if sys.argv[1:] == ["import"]:
        import cudasched

        names["cudasched"] = cudasched
    # Without a buffer, so that nothing is lost when another program takes this one's place.
    lines = io.FileIO(0, closefd=False)
    while line := lines.readline():
        source = json.loads(line)
        answer: dict[str, object] = {}
        try:
            try:
                code = compile(source, "<told>", "eval")
            except SyntaxError:
                exec(source, names)
            else:
                value = eval(code, names)
                answer["value"] = value if isinstance(value, (bool, int, float, str, list, dict)) else None
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


class Program:
    """The handle: a process that runs this module."""

    def __init__(self, command: list[str], errors: Path, environment: dict[str, str]) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
            )
        self.pid = self.process.pid
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def send(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answered(self) -> bool:
        return not self._answers.empty()

    def answer(self) -> object:
        try:
            line = self._answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"no answer: the program hangs; it said {self.stderr!r}") from None
        assert line, f"the program ended, with {self.process.wait(PATIENCE_S)}; it said {self.stderr!r}"
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}; it said {self.stderr!r}"
        return answer.get("value")

    def call(self, code: str) -> object:
        self.send(code)
        return self.answer()

    def count(self, name: str) -> int:
        """One of the counters of `cudasched.state()`."""
        value = self.call(f"state()[{name!r}]")
        assert isinstance(value, int)
        return value

    def number(self, code: str) -> int:
        value = self.call(code)
        assert isinstance(value, int)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> int:
        """Lets the program come to its end. Returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


class Stage:
    """Starts programs, each a process, and ends all that are left."""

    def __init__(self, command: str, directory: Path) -> None:
        self._command, self._directory = command, directory
        self._programs: list[Program] = []

    def run(self, client_class: str, **environment: str) -> Program:
        """Under `cudasched run`, as an unmodified program."""
        return self._start([self._command, "run", "--class", client_class, "--", sys.executable, __file__], environment)

    def importing(self, **environment: str) -> Program:
        """Without it: the program imports cudasched."""
        return self._start([sys.executable, __file__, "import"], environment)

    def _start(self, command: list[str], environment: dict[str, str]) -> Program:
        errors = self._directory / f"stderr-{len(self._programs)}"
        self._programs.append(Program(command, errors, environment))
        return self._programs[-1]

    def close(self) -> None:
        """And what they wrote is a failed test's, too."""
        for program in self._programs:
            program.kill()
            sys.stderr.write(program.stderr)


def eventually(happens: Callable[[], object], what: str) -> None:
    until = monotonic() + PATIENCE_S
    while not happens():
        assert monotonic() < until, f"never: {what}"
        time.sleep(0.005)


def clients() -> dict[int, Client]:
    """Who is on the devices, by pid; for programs of one class and device each."""
    import cudasched

    return {client.pid: client for device in cudasched.status() for client in device.clients}


def wait_at_the_gate(*programs: Program) -> None:
    """Asserts that each comes to the gate, and stays there."""
    import cudasched

    def waiting() -> set[int]:
        return {client.pid for device in cudasched.status() for client in device.clients if client.waiting}

    eventually(lambda: waiting() >= {program.pid for program in programs}, "they wait at the gate")
    time.sleep(0.2)
    assert not any(program.answered() for program in programs)


if __name__ == "__main__":
    main()
