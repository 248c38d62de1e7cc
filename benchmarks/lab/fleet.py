"""Processes of programs and servers, from their imports to their end, by how they are scheduled."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudasched import mps
from cudasched._scratch import Scratch
from cudasched.demo.harness import CUDASCHED, Backend, Child, HarnessError

from benchmarks.lab.processes import ANSWER_S, BREADTH, START_TIMEOUT_S, mps_client

#: On the simulated driver, these stand for programs and servers.
SIMULATED_PROGRAMS = ("transformer", "resnet50", "elementwise", "bert_training")
SIMULATED_SERVERS = {
    **dict.fromkeys(("vit_graph", "tensor_parallel_graph", "tensor_parallel_eager"), "mlp"),
    "recommender": "resnet50_b4",
    "decode_short": "gpt_decode",
    "bert_onnx": "bert_eager",
}


@dataclass(frozen=True)
class Place:
    """One process: what it runs, and by whom it is scheduled.

    Attributes:
        role: `program` or `server`.
        name: Which.
        mode: A name in the modes of its fleet.
    """

    role: str
    name: str
    mode: str


@dataclass(frozen=True)
class Mode:
    """How processes run. Those of one mode meet in a table of cudasched's that no other mode has.

    Attributes:
        managed: Under `cudasched run`.
        mps: Clients of the fleet's MPS daemon.
        environment: Beside what all have.
        program: The same of programs alone, where they are bare clients of MPS.
        inside: A server that runs in the program's process, in regions; there is no process of a server then.
        regions: A server's requests are in regions, which a hint and a latency target need.
    """

    managed: bool = True
    mps: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""
    regions: bool = False


class Fleet:
    """The processes, from their imports to their end. Prepared ones wait for `build` and have not touched the GPU.

    Attributes:
        modes: How processes may run.
        script: What runs a program.
        options: What every program's script is told, beside its name.
        start_timeout_s: For a process's imports, and for the model that it builds.
        programs: All that there are, in the order in which loads of the simulated driver stand for them.
        simulated: Those that have a load of the simulated driver by their own name.
    """

    modes: Mapping[str, Mode]
    script: Path
    options: Sequence[str] = ()
    start_timeout_s = START_TIMEOUT_S
    programs: Sequence[str] = ()
    simulated: Sequence[str] = ()

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._prepared: dict[Place, Child] = {}
        self._running: dict[Place, Child] = {}
        self._leaving: list[threading.Thread] = []
        self._mps: dict[str, mps.Membership] = {}
        self._directory = Scratch("fleet", in_memory=True)
        self.scratch = self._directory.path

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._prepared.values(), *self._running.values()]:
            child.stop(grace_s=0.0)
        for thread in self._leaving:
            thread.join()
        for membership in self._mps.values():
            membership.leave()
        self._directory.close()

    def prepare(self, places: Iterable[Place]) -> None:
        """Starts processes that are missing, up to the end of their imports; returns at once.

        What cannot be started is an error when it is to be built.
        """
        for place in places:
            if place in self._prepared or place in self._running:
                continue
            with contextlib.suppress(HarnessError):
                self._prepared[place] = self._start(place)

    def _start(self, place: Place) -> Child:
        return Child(f"{place.name} {place.mode}", self._command(place), self._environment(place))

    def build(self, place: Place) -> Callable[[], dict[str, Any]]:
        """Tells a process to build; what it returns waits until that is done.

        Raises:
            HarnessError: It failed, here or there.
        """
        if place in self._running:
            return dict
        child = self._running[place] = self._prepared.pop(place, None) or self._start(place)

        def wait() -> dict[str, Any]:
            ready = child.answer(self.start_timeout_s, "ready")
            if (membership := self._membership(place)) and not membership.server_runs():
                raise HarnessError(f"worker [{child.name}] runs, but no MPS server does: MPS does not work here")
            return ready

        child.answer(self.start_timeout_s, "imported")
        child.tell("build")
        return wait

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stops all processes that only import their libraries, so that none of them disturbs what is measured."""
        waiting = list(self._prepared.values())
        for child in waiting:
            child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for child in waiting:
                child.signal(signal.SIGCONT)

    def __getitem__(self, place: Place) -> Child:
        return self._running[place]

    def __contains__(self, place: Place) -> bool:
        return place in self._running and self._running[place].alive

    def ask(self, place: Place, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; a process that gives none is ended: nothing waits for it again.

        Raises:
            HarnessError: It gave none.
        """
        try:
            self._running[place].tell(command, **arguments)
            return self._running[place].answer(ANSWER_S)
        except HarnessError:
            self.retire(place, grace_s=0.0)
            raise

    def retire(self, place: Place, grace_s: float = 5.0) -> None:
        """Ends a process in the background."""
        for children in (self._running, self._prepared):
            child = children.pop(place, None)
            if child:
                thread = threading.Thread(target=child.stop, args=(grace_s,))
                thread.start()
                self._leaving.append(thread)

    def retire_all(self) -> None:
        """Ends all that run, in the background."""
        for place in list(self._running):
            self.retire(place)

    def retire_servers(self, mode: str) -> None:
        """Ends the servers of a mode; they are gone when this returns."""
        for place in [place for place in self._running if (place.role, place.mode) == ("server", mode)]:
            self.retire(place)
        self.settle()

    def settle(self) -> None:
        """Waits until all that were retired are gone."""
        while self._leaving:
            self._leaving.pop().join()

    def _command(self, place: Place) -> list[str]:
        mode = self.modes[place.mode]
        command = [sys.executable, str(self.script if place.role == "program" else BREADTH / "server.py")]
        if self.backend.name == "simulated":
            if place.role == "program":
                command += [self._stand_in(place.name), "--simulate"]
            else:
                command += [SIMULATED_SERVERS.get(place.name, place.name), "--simulate"]
                command += ["--time-scale", f"{self.backend.scale:g}"]
        else:
            command.append(place.name)
        if place.role == "program":
            command += self.options
            if mode.inside:
                command += ["--beside", mode.inside, "--time-scale", f"{self.backend.scale:g}"]
        elif mode.regions:
            command.append("--regions")
        if not mode.managed:
            return command
        client_class = "latency" if place.role == "server" else "best-effort"
        return [*CUDASCHED, "run", *["--mps"] * mode.mps, "--class", client_class, "--", *command]

    def _stand_in(self, program: str) -> str:
        """The load of the simulated driver that stands for a program."""
        if program in self.simulated:
            return program
        return SIMULATED_PROGRAMS[self.programs.index(program) % len(SIMULATED_PROGRAMS)]

    def _membership(self, place: Place) -> mps.Membership | None:
        """Of the MPS that a process uses: its mode's, or that of all bare ones. Without MPS None.

        Held here, too, so that a daemon does not end and start again between two programs.
        """
        mode = self.modes[place.mode]
        if not mode.mps:
            return None
        name = place.mode if mode.managed else "bare"
        if name not in self._mps:
            self._mps[name] = mps_client(self.scratch / name)
        return self._mps[name]

    def _environment(self, place: Place) -> dict[str, str]:
        mode = self.modes[place.mode]
        environment = self.backend.environment(hooked=mode.managed)
        cache = self.scratch / "jax"
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        environment.update(mode.environment)
        table = self.scratch / place.mode
        membership = self._membership(place)
        if mode.managed:
            table.mkdir(mode=0o700, exist_ok=True)
            environment["CUDASCHED_RUN_DIR"] = str(table)
            environment["CUDASCHED_NAME"] = f"{place.name} {place.mode}"[:63]
        elif membership:
            environment.update(membership.environment)
            if place.role == "program":
                environment.update(mode.program)
        return environment
