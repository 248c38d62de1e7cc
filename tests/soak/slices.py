"""Time slices on a real GPU under kills: ``python -m tests.soak.slices --minutes 8 --out FILE``, for each GPU.

In each round two best-effort programs train for 200 steps (tests/gpu/programs/checksums.py) beside a server and a third
best-effort program. Servers and the third are killed at random times, and started again. Each checksum has to be that
of a run that nothing disturbs, and no client may be left in the table. FILE has the counts; a rerun goes on there.

Exit code 0: nothing was lost or changed, nothing hung. ``python -m benchmarks merge preempt`` makes figures of it, by
``--with FILE...``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs"
KINDS = (
    "attention",
    "convolution",
    "attention_graph",
    "convolution_graph",
    "compiled",
    "side_streams",
    "lstm",
    "triton_attention",
    "fp8",
)
STEPS, PATIENCE_S = 200, 240
LENGTHS_US = ("auto", "1", "300")


@dataclass
class Done:
    """Of all runs: what FILE holds. `failures` says what went wrong, by a line each."""

    seconds: float = 0.0
    rounds: int = 0
    killed: int = 0
    bare: dict[str, str] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Soak:
    """Rounds of programs on one GPU, in a run directory of their own."""

    def __init__(self, chance: random.Random, directory: Path, done: Done) -> None:
        self._chance, self._directory, self.done = chance, directory, done
        self._environment = {**os.environ, "CUDASCHED_RUN_DIR": str(directory / "run"), "CUDASCHED_LOG": "error"}

    @contextlib.contextmanager
    def _started(self, *command: str, client_class: str = "") -> Iterator[list[subprocess.Popen[bytes]]]:
        """The program in a list of one, where another may take its place; what is there is killed at the end."""
        running = [self._start(*command, client_class=client_class)]
        try:
            yield running
        finally:
            running[0].kill()
            running[0].wait()

    def _start(self, *command: str, client_class: str = "") -> subprocess.Popen[bytes]:
        program, *arguments = command
        run = [sys.executable, "-m", "cudasched", "run", "--class", client_class]
        if client_class == "best-effort":
            run += ["--time-slice-us", self._chance.choice(LENGTHS_US)]
        with open(os.devnull if program != "checksums.py" else self._directory / arguments[-1], "wb") as said:
            return subprocess.Popen(
                [*([*run, "--"] if client_class else []), sys.executable, str(PROGRAMS / program), *arguments],
                env=self._environment,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def undisturbed(self) -> None:
        """Finds the checksums of what runs by itself, as far as they are not known."""
        for kind in KINDS:
            if kind not in self.done.bare:
                program = self._start("checksums.py", "--steps", str(STEPS), kind)
                if program.wait(PATIENCE_S) != 0:
                    raise SystemExit(f"{kind} ends with {program.returncode} by itself: {self._said(kind)[-2000:]}")
                self.done.bare[kind] = self._checksum(kind)

    def round(self) -> None:
        """Two programs of checksums, from their start to their end, among kills."""
        kinds = self._chance.sample(KINDS, 2)
        server, trainer = ("server.py", "100000"), ("trainer.py",)
        served = self._chance.choice(["", "latency"])
        with (
            self._started(*server, client_class=served) as servers,
            self._started(*trainer, client_class="best-effort") as trainers,
        ):
            checked = [
                self._start("checksums.py", "--steps", str(STEPS), kind, client_class="best-effort") for kind in kinds
            ]
            end = time.monotonic() + PATIENCE_S
            while any(program.poll() is None for program in checked) and time.monotonic() < end:
                time.sleep(self._chance.uniform(0.1, 3.0))
                running, command, client_class = self._chance.choice(
                    [(servers, server, served), (trainers, trainer, "best-effort")]
                )
                if running[0].poll() is not None:
                    self.done.failures.append(f"{command[0]} ({client_class}) ended with {running[0].returncode}")
                running[0].kill()
                running[0].wait()
                self.done.killed += 1
                running[0] = self._start(*command, client_class=client_class)
            for program, kind in zip(checked, kinds, strict=True):
                self._check(program, kind)
        self.done.rounds += 1
        status = [sys.executable, "-m", "cudasched", "status", "--json"]
        said = subprocess.run(status, env=self._environment, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
        left = [client for device in json.loads(said.stdout)["data"] for client in device["clients"]]
        if left:
            self.done.failures.append(f"clients left: {left}")

    def _check(self, program: subprocess.Popen[bytes], kind: str) -> None:
        if program.poll() is None:
            program.kill()
            program.wait()
            self.done.failures.append(f"{program.args} hung: {self._said(kind)[-500:]}")
        elif program.returncode != 0:
            self.done.failures.append(f"{kind} ended with {program.returncode}: {self._said(kind)[-500:]}")
        else:
            self.done.checked[kind] = self.done.checked.get(kind, 0) + 1
            if self._checksum(kind) != self.done.bare[kind]:
                self.done.changed[kind] = self.done.changed.get(kind, 0) + 1

    def _said(self, kind: str) -> str:
        return (self._directory / kind).read_text(errors="replace")

    def _checksum(self, kind: str) -> str:
        (found,) = (line for line in self._said(kind).splitlines() if line.startswith(f"{kind} "))
        return found.removeprefix(f"{kind} ")


def main() -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.slices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="of this run")
    parser.add_argument("--out", type=Path, required=True, help="what was done, in this run and those before")
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    done = Done(**json.loads(options.out.read_text())) if options.out.exists() else Done()
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(random.Random(options.seed), Path(directory), done)
        soak.undisturbed()
        while (began := time.monotonic()) < end:
            soak.round()
            done.seconds += time.monotonic() - began
            options.out.write_text(json.dumps(asdict(done), indent=1) + "\n")
            print(f"{done.seconds:.0f} s, {done.rounds} rounds, {done.killed} killed, {done.checked}", flush=True)
    for failure in (*done.failures, *(f"{kind} has other bits {count} times" for kind, count in done.changed.items())):
        print(failure, file=sys.stderr)
    return 1 if done.failures or done.changed else 0


if __name__ == "__main__":
    sys.exit(main())
