"""Runs what people run on a GPU and records every launch: the predictor's training data.

    python -m training.workloads --out DIR --seconds 240                # sweeps over single operations and small models
    python -m training.workloads --out DIR --programs all               # the whole programs that evaluation is held to

Sweeps take log-uniform shapes from families of operations (`training.operations`), in turns of equal time, so that any
number of seconds gives a balanced set. Families run in a few processes; the first part of each is recorded again in
another process (`again`), which is what "repeats by process" is split by. Whole programs (`training.programs`)
run for themselves, a process each. Labels are `operation|shape|dtype|pass`, and `program:NAME|...`.

What runs out of memory or is not supported is counted and left out; a process that dies is started again behind the
case that killed it. Per process: `NAME.parquet`, and `NAME.json` with what was run and what was not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.command import duration

#: Families that share a process. Any split would do; a crash costs one of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "matrix": ("gemm", "attention", "recurrent", "fft"),
    "image": ("convolution", "pooling", "normalisation"),
    "pointwise": ("elementwise", "reduction", "softmax", "memory", "random"),
    "mixed": ("model", "triton", "optimizer", "indexing", "sorting"),
}
#: Turns that a family gets for each turn of another; many shapes and kernels want more.
WEIGHTS = dict(
    gemm=3.5,
    attention=3.5,
    convolution=4.5,
    pooling=1.0,
    model=3.5,
    recurrent=0.4,
    fft=0.5,
    memory=0.6,
    random=0.6,
    sorting=0.7,
    indexing=0.7,
)
#: Part of the time that goes into recording the first part of each group again.
AGAIN_SHARE = 0.25
#: A case runs this often after its warm-up.
REPEATS = 4
SEED = 20_240_601
WARM_UP = "warm-up"
SETUP = "setup"


class Recorder:
    """Labels and records where cudasched and a GPU are there; else nothing, for rehearsals on the CPU."""

    def __init__(self, path: Path | None, timing: str = "cupti") -> None:
        self.path, self.timing = path, timing
        self._label: Callable[[str], Any] = lambda text: None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is launched inside it into `path`."""
        if self.path is None:
            yield
            return
        import cudasched.collect

        self._label = cudasched.collect.label
        with cudasched.collect.recording(str(self.path), timing=self.timing, capacity_mb=512):
            yield

    def label(self, operation: str, shape: str = "", dtype: str = "", what: str = "") -> None:
        """Says what the launches from here on belong to."""
        self._label(f"{operation}|{shape}|{dtype}|{what}")


class Tally:
    """What was run and what was not, kept on disk so that a crash loses none of it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cases: collections.Counter[str] = collections.Counter()
        self.skipped: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.started: dict[str, int] = {}
        self.complete = False

    def write(self) -> None:
        """Writes what is known so far."""
        if self.path:
            fields = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
            self.path.write_text(json.dumps({**fields, "path": None}, indent=1, sort_keys=True) + "\n")


def run_case(case: Any, inputs: Any, recorder: Recorder) -> None:
    """Runs one case, forward and, where there are gradients, backward: once to warm up, then `REPEATS` times."""
    import torch

    from training.operations import precision

    recorder.label(SETUP)
    inputs.fresh()
    with precision(case.dtype):
        forward = case.prepare(inputs)
        gradient = None
        for repeat in range(1 + REPEATS):
            warm_up = repeat == 0
            recorder.label(case.operation, case.shape, case.dtype, WARM_UP if warm_up else case.what)
            output = forward()
            if not inputs.leaves or not isinstance(output, torch.Tensor) or not output.requires_grad:
                continue
            if gradient is None and output.dim():
                recorder.label(SETUP)
                gradient = inputs(*output.shape, dtype=output.dtype)
            recorder.label(case.operation, case.shape, case.dtype, WARM_UP if warm_up else "backward")
            torch.autograd.grad(output, inputs.leaves, gradient, allow_unused=True)
    inputs.synchronize()


def sweep(
    families: Sequence[str],
    seconds: float,
    recorder: Recorder,
    tally: Tally,
    device: str = "cuda",
    largest: int | None = None,
    skip: dict[str, int] | None = None,
) -> None:
    """Takes cases from `families` in turns of equal time (times `WEIGHTS`), until `seconds` have passed.

    Args:
        families: Names in `training.operations.FAMILIES`.
        seconds: How long, in wall-clock time.
        recorder: Where labels go.
        tally: Counts what is run.
        device: "cuda" or "cpu".
        largest: A bound on every size, for rehearsals.
        skip: How many cases of a family to pass over: those up to the one that killed an earlier process.
    """
    import torch

    from training.operations import FAMILIES, Draw, Inputs, UnsupportedError

    inputs = Inputs(torch.device(device), elements=1 << 17 if largest else 1 << 28)
    cases = {name: FAMILIES[name](Draw(f"{SEED} {name}", largest)) for name in families}
    for name, count in (skip or {}).items():
        for _ in range(count if name in cases else 0):
            next(cases[name])
        tally.started[name] = count
    start = time.perf_counter()
    ends = start + seconds
    saved = start
    spent = dict.fromkeys(families, 0.0)
    while (now := time.perf_counter()) < ends:
        if now - saved > 1:
            tally.write()
            saved = now
        name = min(families, key=lambda family: spent[family] / WEIGHTS.get(family, 1.0))
        case = next(cases[name])
        tally.started[name] = tally.started.get(name, 0) + 1
        try:
            run_case(case, inputs, recorder)
            tally.cases[case.operation] += 1
        except (torch.OutOfMemoryError, UnsupportedError) as error:
            tally.skipped[f"{case.operation}: {type(error).__name__}"] += 1
            inputs.release()
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            tally.skipped[f"{case.operation} {case.dtype}: {str(error).splitlines()[0][:120]}"] += 1
            if "illegal" in str(error) or "device-side" in str(error) or "unspecified launch" in str(error):
                tally.write()
                raise  # the context is gone; a new process goes on behind this case
        took = time.perf_counter() - now
        spent[name] += took
        tally.seconds[name] += took
    recorder.label(SETUP)


def child(options: argparse.Namespace) -> None:
    """What a process of the recording does."""
    on_gpu = options.device == "cuda"
    name = options.child
    if on_gpu:
        import cudasched  # noqa: F401  before torch, which maps the driver

    recorder = Recorder(options.out / f"{name}.parquet" if on_gpu else None, options.timing)
    tally = Tally(options.out / f"{name}.json")
    import torch

    warnings.filterwarnings("ignore")  # of attention's backends, about each thing that one cannot do
    torch.manual_seed(SEED)
    if on_gpu:
        torch.cuda.init()
    else:
        torch.set_num_threads(1)
    with recorder.recording():
        if options.programs:
            from training.programs import PROGRAMS

            recorder.label(SETUP)
            for program in options.programs:
                began = time.perf_counter()

                def label(what: str, program: str = program) -> None:
                    recorder.label(f"program:{program}", what)

                steps = PROGRAMS[program](torch.device(options.device), label, bool(options.largest))
                for _ in steps:
                    tally.cases[program] += 1
                    if time.perf_counter() - began > options.seconds:
                        break
                tally.seconds[program] += time.perf_counter() - began
                if on_gpu:
                    torch.cuda.synchronize()
        else:
            skip = json.loads(options.skip)
            sweep(options.only, options.seconds, recorder, tally, options.device, options.largest, skip)
    tally.complete = True
    tally.write()


def run_child(options: argparse.Namespace, name: str, arguments: list[str], seconds: float) -> bool:
    """Runs one process; True if it ended well. One that hangs is stopped."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "training.workloads",
        "--child",
        name,
        "--out",
        str(options.out),
    ]
    command += ["--device", options.device, "--timing", options.timing, "--seconds", f"{seconds:.1f}", *arguments]
    if options.largest:
        command += ["--largest", str(options.largest)]
    # What an earlier try under this name left unfinished would be in the way of the recording.
    shutil.rmtree(options.out / f"{name}.parquet.journals", ignore_errors=True)
    with open(options.out / f"{name}.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[1], env=os.environ)
        try:
            code = process.wait(seconds + 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -9
    end = "done" if code == 0 else f"ended with {code} (see {options.out / name}.log)"
    print(f"{name}: {end} in {time.monotonic() - began:.1f} s", flush=True)
    return code == 0


def is_complete(path: Path) -> bool:
    """Whether a process has said that it did all it should."""
    try:
        return bool(json.loads(path.read_text())["complete"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def record_group(options: argparse.Namespace, name: str, families: Sequence[str], seconds: float) -> bool:
    """Records families for `seconds`, starting again behind the case that a process died of.

    Returns:
        Whether the last process ended well.
    """
    ends = time.monotonic() + seconds + 15  # what a process needs to start and to close its file
    skip: dict[str, int] = {}
    for part in range(8):
        part_name = name if part == 0 else f"{name}-part{part + 1}"
        left = min(seconds, ends - time.monotonic())
        if options.resume and is_complete(options.out / f"{part_name}.json"):
            return True
        if part and left < 3:
            return False
        arguments = ["--only", ",".join(families), "--skip", json.dumps(skip)]
        if run_child(options, part_name, arguments, left):
            return True
        with contextlib.suppress(OSError, ValueError):
            skip = json.loads((options.out / f"{part_name}.json").read_text())["started"]
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(prog="python -m training.workloads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory that files are put in")
    parser.add_argument("--seconds", type=duration, default=240, help="of all sweeps; of each program at most")
    parser.add_argument("--only", type=names, default=[], help="these families or groups alone, separated by commas")
    parser.add_argument("--programs", type=names, default=[], help="these whole programs, or all, instead of sweeps")
    parser.add_argument("--resume", action="store_true", help="leave out what is complete in --out")
    parser.add_argument("--timing", default="cupti", choices=("cupti", "events"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal, nothing recorded")
    parser.add_argument("--largest", type=int, help="a bound on every size, for rehearsals")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        child(options)
        return 0
    if options.programs:
        from training.programs import PROGRAMS

        wanted = list(PROGRAMS) if options.programs == ["all"] else options.programs
        if unknown := set(wanted) - set(PROGRAMS):
            parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
        well = True
        for program in wanted:
            if not (options.resume and is_complete(options.out / f"program-{program}.json")):
                well &= run_child(options, f"program-{program}", ["--programs", program], options.seconds)
        return 0 if well else 1
    known = {family for families in GROUPS.values() for family in families}
    if unknown := set(options.only) - known - set(GROUPS):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    groups = {
        group: [family for family in families if not options.only or {family, group} & set(options.only)]
        for group, families in GROUPS.items()
    }
    groups = {group: families for group, families in groups.items() if families}
    total = sum(WEIGHTS.get(family, 1.0) for families in groups.values() for family in families)
    well = True
    for group, families in groups.items():
        weight = sum(WEIGHTS.get(family, 1.0) for family in families)
        well &= record_group(options, f"sweep-{group}", families, options.seconds * (1 - AGAIN_SHARE) * weight / total)
    everything = [family for families in groups.values() for family in families]
    well &= record_group(options, "again", everything, options.seconds * AGAIN_SHARE)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
