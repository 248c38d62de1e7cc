"""Tunes the kernels for the shapes that are measured, and takes the best into the file that cudasched ships."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cudasched.errors import Error
from cudasched.kernels import _catalog, _choose
from cudasched.kernels._plan import gpu_of
from cudasched.tune.database import Database, default_path
from cudasched.tune.space import Gpu, configuration_key

from benchmarks.kernels import layers
from benchmarks.kernels.parts import parts
from benchmarks.results.schema import replace

LEAST_S = 8.0


def shapes() -> list[tuple[str, str, dict[str, int]]]:
    """Kernels, types and shapes, those of figures first, each once."""
    found = [one.kernel for one in parts()]
    found += [one for name in layers.LAYERS for one in layers.tuned_shapes(name)]
    made: list[tuple[str, str, dict[str, int]]] = []
    for name, kind, shape in found:
        one = (_on_this_gpu(name), kind, shape)
        if one[0] in _catalog.KERNELS and one not in made:
            made.append(one)
    return made


def _on_this_gpu(name: str) -> str:
    """The kernel that a function takes on this GPU; without one, on Hopper."""
    from cudasched.kernels.operators import _attention, _conv2d, _matmul

    try:
        capability = gpu_of(0).capability
    except Error:
        capability = "9.0"
    if name == "gemm_bf16":
        return _matmul.kernel_for("bfloat16", False, 8192, 8192, 8192, capability)
    routed = {"flash_attention": _attention.kernel_for, "conv2d": _conv2d.kernel_for}
    return routed[name](capability) if name in routed else name


def tune(arguments: Sequence[str]) -> int:
    """Entry point of `tune`: the time is divided between the shapes that have not been tuned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels tune", description=tune.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a directory for notes of finished work")
    parser.add_argument("--database", type=Path, default=None, help="where measurements go; default: the user's")
    parser.add_argument("--limit-s", type=float, default=590)
    parser.add_argument("--only", default="", help="kernels, with commas between them")
    parser.add_argument("--matching", type=re.compile, default="", help="an expression that is in KERNEL/TYPE/SHAPE")
    parser.add_argument("--evaluations", type=int, default=150, help="of each shape at most")
    parser.add_argument("--strategy", choices=("bayesian", "random"), default="bayesian", help="random ends with all")
    parser.add_argument(
        "--batch",
        type=int,
        default=min(16, len(os.sched_getaffinity(0))),
        help="configurations that are proposed, and compiled, at once; default: one a core, up to 16",
    )
    options = parser.parse_args(arguments)
    from cudasched import kernels
    from cudasched.tune import Settings

    only = [name for name in options.only.split(",") if name]
    noted = options.out / "tuned.json"
    done: dict[str, Any] = json.loads(noted.read_text()) if noted.exists() else {}
    wanted = [
        one
        for one in shapes()
        if (not only or one[0] in only) and re.search(options.matching, _key(*one)) and _key(*one) not in done
    ]
    end = time.monotonic() + options.limit_s
    failed = False
    for place, (name, kind, shape) in enumerate(wanted):
        seconds = (end - time.monotonic()) / (len(wanted) - place)
        if seconds < LEAST_S:
            return 3
        try:
            settings = Settings(
                strategy=options.strategy, evaluations=options.evaluations, seconds=seconds, batch=options.batch
            )
            tuned = kernels.tune(name, kind, settings=settings, database=options.database, **shape)
        except Error as error:
            print(f"{_key(name, kind, shape)}: {error}", flush=True)
            failed = True
            continue
        done[_key(name, kind, shape)] = {"configuration": dict(tuned.configuration), "time_us": tuned.time_us}
        replace(noted, json.dumps(done, indent=1) + "\n")
        print(f"{_key(name, kind, shape)}: {tuned.time_us:.1f} us, {dict(tuned.configuration)}", flush=True)
    return 1 if failed else 0


def _key(name: str, kind: str, shape: dict[str, int]) -> str:
    return f"{name}/{kind}/" + ",".join(f"{size}={value}" for size, value in sorted(shape.items()))


def entries(database: Path, capability: str) -> Iterator[dict[str, Any]]:
    """The best configuration of each shape in a database, of the kernels as they are now."""
    with Database(database) as opened:
        for key in opened.keys():  # noqa: SIM118 - no dict
            for kernel, kind in ((one, kind) for one in _catalog.KERNELS.values() for kind in one.types):
                space = _catalog.variant(kernel.name, kind)
                if space.source is None or space.kernel != key.kernel:
                    continue
                if space.fingerprint(space.source) != key.fingerprint:
                    continue
                found = _choose.fastest(opened, key)
                if found is not None:
                    gpu = Gpu(key.gpu, capability, 0)
                    configuration, time_us = found
                    text = configuration_key(configuration)
                    yield _choose.shipped_entry(kernel.name, kind, gpu, key.shape, text, time_us)


def merged(before: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries with those in place of older ones of the same GPU, kernel, type and shape; in order."""

    def place(one: dict[str, Any]) -> str:
        return json.dumps([one["kernel"], one["type"], one["gpu"], one["shape"]], sort_keys=True)

    made = {place(one): one for one in (*before, *found)}
    return [made[key] for key in sorted(made)]


def main(arguments: Sequence[str]) -> int:
    """Entry point of `ship`: from databases to the file that cudasched ships; entries of other shapes stay."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels ship", description=main.__doc__)
    parser.add_argument("--database", type=Path, action="append", help="several are read in order; default: the user's")
    parser.add_argument("--capability", default="9.0", help="of the GPUs that were tuned")
    parser.add_argument("--out", type=Path, default=_catalog.sources() / _choose.SHIPPED)
    options = parser.parse_args(arguments)
    before = []
    with contextlib.suppress(OSError):
        before = json.loads(options.out.read_text())["best"]
    found = [one for path in options.database or [default_path()] for one in entries(path, options.capability)]
    made = merged(before, found)
    lines = ",\n".join(f"  {json.dumps(one)}" for one in made)
    text = f'{{"version": 1, "best": [\n{lines}\n]}}\n' if made else '{"version": 1, "best": []}\n'
    replace(options.out, text)
    print(f"{options.out}: {len(made)} configurations, {len(found)} of them new", file=sys.stderr)
    return 0
