"""Many programs on a simulated device: ``python -m tests.soak --minutes 30 --seed N --out FILE`` in the repository.

Best-effort and latency programs (life.py) launch, capture, fork, exec, reset and end at random, and are killed, stopped
and asked to end at random. Each checks that what it launched ran once and in order; this one checks that each goes on
or comes to its end, says nothing, and leaves no slot, process or descriptor behind. With ``--graphs``, most best-effort
programs live on graphs (graph_life.py): they update, switch off and destroy what cudasched may be cutting.

Exit code 0: nothing was lost, reordered or hung. The counts are a file of `benchmarks.results.schema`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cudasched
from cudasched import hook

from benchmarks.meta import describe
from benchmarks.results.schema import Results, SoakRow
from tests.python.support import but_for_long_kernels

ROOT = Path(__file__).resolve().parents[2]
LIFE = Path(__file__).with_name("life.py")
GRAPH_LIFE = Path(__file__).with_name("graph_life.py")

PROGRAMS = 6
"""That live at once."""

PATIENCE_S = 90
"""Against hangs only: a round takes less than a second on an idle machine."""

CLASSES = ("best_effort", "best_effort", "latency", "both")
GRAPH_CLASSES = ("graphs", "graphs", "graphs", "best_effort", "latency", "latency")


class Program:
    """A life, what it reported, and how it may end."""

    def __init__(self, chance: random.Random, errors: Path, classes: Sequence[str]) -> None:
        client_class = chance.choice(classes)
        life = [sys.executable, str(LIFE), str(chance.randrange(2**32)), client_class]
        if client_class == "graphs":
            life = [sys.executable, str(GRAPH_LIFE), life[2]]
        run = [sys.executable, "-m", "cudasched", "run", "--class", "best-effort", "--"]
        self.name = f"{client_class} {life[2]}"
        self.expected = {0}
        self.stopped = False
        self.did: Counter[str] = Counter()
        self._errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*run, *life] if client_class in ("best_effort", "graphs") else life,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **self._environment(chance, client_class)},
            )
        self.last_sign = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def _environment(chance: random.Random, client_class: str) -> dict[str, str]:
        environment = {}
        if client_class == "graphs":
            environment["CUDASCHED_GRAPH_SLICES"] = chance.choice(["auto", "auto", "always", "always", "off"])
            # A program may be stopped for longer than a build may take, which is no fault of the build.
            environment["CUDASCHED_GRAPH_BUILD_MS"] = "600000"
            environment["CUDASCHED_GRAPH_SLICE_US"] = str(chance.choice([50, 100, 200, 400]))
        if chance.random() < 0.2:
            environment["CUDASCHED_OFFLOAD"] = "0"
        if chance.random() < 0.2:
            environment["CUDASCHED_MAX_IDLE_HOLD_MS"] = "200"
        return environment

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last_sign = time.monotonic()
            if line.endswith("\n"):  # killed while it wrote
                self.did.update(json.loads(line))
                self.did["rounds"] += 1

    def signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.expected.add(-number)
        self.stopped = number == signal.SIGSTOP
        self.last_sign = time.monotonic()
        self.process.send_signal(number)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def hangs(self) -> bool:
        return not self.stopped and time.monotonic() - self.last_sign > PATIENCE_S

    def show_and_kill(self) -> None:
        """Its threads' stacks go to its standard error."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        assert self.process.stdin is not None
        if self.stopped:
            self.signal(signal.SIGCONT)
        self.process.stdin.close()

    def complaint(self) -> str:
        """What is wrong with how it ended; empty: nothing."""
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdout.close()
        self.process.stdin.close()
        said = but_for_long_kernels(self._errors.read_text())
        code = self.process.returncode
        wrong = said or code not in self.expected
        return f"{self.name} ended with {code} and said: {said}" if wrong else ""


class Soak:
    """Starts and disturbs programs, and counts."""

    def __init__(self, chance: random.Random, directory: Path, classes: Sequence[str] = CLASSES) -> None:
        self._chance, self._directory, self._classes = chance, directory, classes
        self._programs: list[Program] = []
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []

    def _start(self) -> None:
        self.counts["programs"] += 1
        errors = self._directory / f"stderr-{self.counts['programs']}"
        self._programs.append(Program(self._chance, errors, self._classes))

    def _disturb(self) -> None:
        program = self._chance.choice(self._programs)
        if program.stopped:
            program.signal(signal.SIGCONT)
            return
        what = self._chance.choices([None, signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM], weights=[10, 3, 3, 1])[0]
        if what is not None:
            program.signal(what)
            self.counts[{"SIGSTOP": "stopped", "SIGKILL": "killed", "SIGTERM": "terminated"}[what.name]] += 1

    def _look(self) -> None:
        for program in list(self._programs):
            if not program.ended() and program.hangs():
                self.counts["hung"] += 1
                self.complaints.append(f"{program.name} hangs")
                program.show_and_kill()
                program.process.wait()
            if not program.ended():
                continue
            self._programs.remove(program)
            if complaint := program.complaint():
                self.counts["failed"] += 1
                self.complaints.append(complaint)
            self.counts["ended"] += program.process.returncode == 0
            self.counts.update(program.did)

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while len(self._programs) < PROGRAMS:
                self._start()
            time.sleep(self._chance.expovariate(1 / 0.15))
            self._disturb()
            self._look()
        for program in self._programs:
            program.end()
        while self._programs:
            time.sleep(0.05)
            self._look()

    def look_for_what_is_left(self) -> None:
        clients = [client for device in cudasched.status() for client in device.clients]
        processes = [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if self._is_ours(path)]
        self.counts["slots_left"], self.counts["processes_left"] = len(clients), len(processes)
        if clients or processes:
            self.complaints.append(f"left behind: clients {clients}, processes {processes}")

    def _is_ours(self, environ: Path) -> bool:
        try:
            mine = f"CUDASCHED_RUN_DIR={self._directory}".encode() in environ.read_bytes()
        except OSError:
            return False
        return mine and environ.parent.name != str(os.getpid())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--graphs", action="store_true", help="most best-effort programs live on graphs")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON; by default: standard output")
    options = parser.parse_args()
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="cudasched-soak-") as name:
        directory = Path(name)
        (directory / "device").mkdir(mode=0o700)
        (directory / "home").mkdir()
        os.environ.update(
            CUDASCHED_RUN_DIR=str(directory / "run"),
            CUDASCHED_DRIVER=str(hook.locate().simulated_driver),
            CUDASCHED_SIM_DIR=str(directory / "device"),
            CUDASCHED_SIM_SCALE="2",
            HOME=str(directory / "home"),
            PYTHONPATH=os.pathsep.join([str(ROOT / "tests" / "python"), str(ROOT)]),
            PYTHONWARNINGS="ignore:This process:DeprecationWarning",
        )
        meta = describe(simulated=True)  # of what is run, not of what the tree is by the end
        soak = Soak(random.Random(options.seed), directory, GRAPH_CLASSES if options.graphs else CLASSES)
        soak.run(60 * options.minutes)
        soak.look_for_what_is_left()
    left = len(os.listdir("/proc/self/fd")) - before
    if left > 1:  # the table that status() read stays open
        soak.complaints.append(f"{left} descriptors are left open here")
    for complaint in soak.complaints:
        print(complaint, file=sys.stderr)
    counts = {name: soak.counts[name] for name in SoakRow.model_fields if name not in ("minutes", "seed")}
    row = SoakRow(minutes=options.minutes, seed=options.seed, **counts)
    result = Results(meta=meta.model_copy(update={"command": command(options)}), rows=[row]).model_dump_json(indent=1)
    if options.out is None:
        print(result)
    else:
        options.out.write_text(result + "\n")
    return 1 if soak.complaints else 0


def command(options: argparse.Namespace) -> str:
    graphs = " --graphs" if options.graphs else ""
    return f"python -m tests.soak{graphs} --minutes {options.minutes:g} --seed {options.seed}"


if __name__ == "__main__":
    sys.exit(main())
