"""Records whole spaces on a GPU: every configuration once, the best twenty again. Bounded, and a rerun goes on.

    python -m benchmarks.tune record --out recorded --limit-s 540
    python -m benchmarks.tune record --out recorded --only gemm --limit-s 200
    python -m benchmarks.tune pack recorded benchmarks/tune/recorded

Everything is in one file under --out, recordings.sqlite, which each measurement goes into at once. `pack` needs no GPU:
it makes a compact recording of each space that is complete. The exit status is 0 when all is recorded, 3 when time ran
out first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudasched.errors import Error
from cudasched.tune.database import Database, Key
from cudasched.tune.measurement import Measurement
from cudasched.tune.recording import Recording
from cudasched.tune.space import Gpu, Problem, Space, configuration_key, read
from cudasched.tune.workers import Limits, Live, Request

from benchmarks import meta

KERNELS = Path(__file__).parents[2] / "csrc" / "kernels"
#: The first shape of each kernel is recorded before the second of any. What a shape does not say is the space's own.
SHAPES: dict[str, list[dict[str, int]]] = {
    "layernorm": [{"rows": 8192, "cols": 4096}, {"rows": 32768, "cols": 1024}, {"rows": 4096, "cols": 12288}],
    "softmax": [{"rows": 8192, "cols": 4096}, {"rows": 32768, "cols": 1024}, {"rows": 4096, "cols": 12288}],
    "gemm": [{"m": 2048, "n": 2048, "k": 2048}, {"m": 1024, "n": 4096, "k": 1024}, {"m": 512, "n": 512, "k": 8192}],
    "flash_attention_sm90": [{}],
    "conv2d_sm90": [{}],
}
SAMPLES = 7
AGAIN = 20
AGAIN_ROUNDS = 3
AGAIN_SAMPLES = 15
#: A configuration this much slower than the best so far gets one sample.
HOPELESS = 8.0
PIECE = 256
FILE = "recordings.sqlite"


@dataclass(frozen=True)
class Part:
    """One kernel and shape to record."""

    kernel: str
    shape: dict[str, int]

    @property
    def name(self) -> str:
        """Its file's."""
        return "-".join([self.kernel, *map(str, self.shape.values())])


def parts(only: Sequence[str], shapes: int) -> list[Part]:
    """What is recorded, in order."""
    chosen = {kernel: known for kernel, known in SHAPES.items() if not only or kernel in only}
    return [
        Part(kernel, known[place]) for place in range(shapes) for kernel, known in chosen.items() if place < len(known)
    ]


def main(arguments: Sequence[str]) -> int:
    """Entry point of `record`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune record", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--only", default="", help="kernels, with commas between them")
    parser.add_argument("--shapes", type=int, default=3, help="how many of each kernel")
    parser.add_argument("--limit-s", type=float, default=540, help="time in all, s")
    parser.add_argument("--kernel-limit-s", type=float, default=180, help="time for one kernel and shape, s")
    parser.add_argument("--processes", type=int, default=None, help="that compile at once")
    parser.add_argument("--spaces", type=Path, default=KERNELS, help="where NAME.toml is")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    only = [name for name in options.only.split(",") if name]
    unknown = sorted(set(only) - set(SHAPES))
    if unknown:
        parser.error(f"no such kernel: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    end = time.monotonic() + options.limit_s
    complete = True
    with Database(options.out / FILE) as database:
        for part in parts(only, options.shapes):
            left = end - time.monotonic()
            if left < 15:
                print(f"{part.name}: no time is left", flush=True)
                complete = False
                continue
            try:
                complete &= record(part, database, options, min(left, options.kernel_limit_s))
            except Error as error:
                print(f"{part.name}: {error}", flush=True)
                complete = False
    return 0 if complete else 3


def record(part: Part, database: Database, options: argparse.Namespace, seconds: float) -> bool:
    """Records what is missing of one space. Returns whether it is complete."""
    begin = time.monotonic()
    space = read(options.spaces / f"{part.kernel}.toml")
    assert space.source is not None
    limits = Limits(run_s=10.0)
    with Live(space, space.source, part.shape, processes=options.processes, limits=limits, keep_images=4096) as live:
        key = Key.of(live.problem, live.fingerprint)
        _describe(options, key)
        known = database.get(key)
        wanted = [i for i, one in enumerate(live.problem.configurations) if configuration_key(one) not in known]
        random.Random(0).shuffle(wanted)  # a part of a space is a fair sample of it
        best = min((one.time_us or 1e30 for one in known.values()), default=1e30)
        ready = time.monotonic()
        count = len(live.problem.configurations)
        print(
            f"{part.name}: {count} configurations, {len(wanted)} to measure; ready in {ready - begin:.1f} s", flush=True
        )
        done = 0
        statuses: dict[str, int] = {}
        stopped = False
        for first in range(0, len(wanted), PIECE):
            if stopped:
                break
            # In pieces, so that time is looked at and hopeless configurations are known by the best so far.
            chosen = wanted[first : first + PIECE]
            piece = [Request(index, SAMPLES, give_up_us=best * HOPELESS) for index in chosen]
            for request, made in live.measure(piece):
                database.put(key, live.problem.configurations[request.index], made)
                statuses[made.status] = statuses.get(made.status, 0) + 1
                best = min(best, made.time_us or best)
                done += 1
                if made.status not in ("ok", "does_not_fit") and statuses[made.status] <= 2:
                    print(
                        f"  {made.status}: {dict(live.problem.configurations[request.index])}: {made.message[:300]}",
                        flush=True,
                    )
            stopped = time.monotonic() - begin > seconds - 5
        rate = done / max(time.monotonic() - ready, 1e-9)
        print(f"{part.name}: {done} measured, {rate:.0f} a second, {statuses}; best {best:.2f} us", flush=True)
        if done < len(wanted):
            return False
        return _again(part, live, database, key, begin + seconds)


def _again(part: Part, live: Live, database: Database, key: Key, end: float) -> bool:
    """Times the best ones again, in turns, so that a drift of the machine meets all of them."""
    known = database.get(key)
    configurations = live.problem.configurations
    timed = {i: known[configuration_key(one)].time_us for i, one in enumerate(configurations)}
    best = sorted((time_us, i) for i, time_us in timed.items() if time_us is not None)[:AGAIN]
    collected: dict[int, list[float]] = {i: [] for _, i in best}
    for turn in range(AGAIN_ROUNDS):
        if time.monotonic() > end and turn:
            break
        for request, made in live.measure([Request(i, AGAIN_SAMPLES, check=turn == 0) for _, i in best]):
            if made.status == "ok":
                collected[request.index] += made.samples_us
    for index, samples in collected.items():
        if samples:
            database.put(_again_key(key), configurations[index], Measurement("ok", samples_us=tuple(samples)))
    made = recording_of(live.problem, database, live.fingerprint, {})
    if made is None:
        return False
    index, time_us = made.best()
    work = live.problem.work / time_us / 1e3
    print(
        f"{part.name}: best {time_us:.2f} us ({work:.0f} G/s of work): {dict(configurations[index])}; "
        f"{made.share_within(0.02):.2%} of {len(configurations)} within 2%, {made.share_within(0.1):.2%} within 10%",
        flush=True,
    )
    return True


def _again_key(key: Key) -> Key:
    return Key(key.gpu, key.kernel, f"{key.fingerprint}-again", key.shape)


def _describe(options: argparse.Namespace, key: Key) -> None:
    about = {
        "driver": meta.nvidia_smi("driver_version") or "",
        "commit": options.commit or meta.current_commit() or "",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    lines = [f"{name}: {value}" for name, value in about.items()]
    (options.out / "about.txt").write_text("\n".join([f"gpu: {key.gpu}", *lines]) + "\n")


def recording_of(problem: Problem, database: Database, fingerprint: str, about: dict[str, str]) -> Recording | None:
    """The recording of a space; None where configurations are missing."""
    key = Key.of(problem, fingerprint)
    known, again = database.get(key), database.get(_again_key(key))
    keys = [configuration_key(one) for one in problem.configurations]
    if any(one not in known for one in keys):
        return None
    return Recording(
        problem,
        tuple(known[one] for one in keys),
        {i: again[one].samples_us for i, one in enumerate(keys) if one in again},
        fingerprint,
        about,
    )


def pack(arguments: Sequence[str]) -> int:
    """Entry point of `pack`: a compact file of each complete space."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune pack", description=pack.__doc__)
    parser.add_argument("directory", type=Path, help="where recordings.sqlite is")
    parser.add_argument("to", type=Path)
    parser.add_argument("--spaces", type=Path, default=KERNELS)
    parser.add_argument("--sms", type=int, default=132, help="multiprocessors of the GPU")
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--l2-mib", type=int, default=60)
    options = parser.parse_args(arguments)
    about = dict(
        line.split(": ", 1) for line in (options.directory / "about.txt").read_text().splitlines() if ": " in line
    )
    about["origin"] = "recorded"
    with Database(options.directory / FILE) as database:
        for part in parts([], 99):
            file = options.spaces / f"{part.kernel}.toml"
            if not file.exists():
                continue
            space: Space = read(file)
            gpu = Gpu(about["gpu"], options.capability, options.sms, options.l2_mib << 20)
            problem = space.problem(gpu, part.shape)
            keys = [one for one in database.keys(space.kernel) if one.shape == problem.key()]
            prints = sorted({one.fingerprint for one in keys if not one.fingerprint.endswith("-again")})
            for fingerprint in prints:
                made = recording_of(problem, database, fingerprint, about)
                if made is None:
                    print(f"{part.name}: configurations are missing: record again", file=sys.stderr)
                    continue
                path = options.to / f"{Part(part.kernel, dict(problem.shape)).name}.npz"  # type: ignore[arg-type]
                made.save(path)
                print(f"{path}: {path.stat().st_size / 1024:.0f} KiB, {made.share_within(0.02):.2%} within 2%")
    return 0
