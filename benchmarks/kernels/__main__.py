"""Measures the kernels' figures and the layers; a rerun does what is missing.

    python -m benchmarks.kernels tune --out results --limit-s 590     # best configurations, into the tuner's database
    python -m benchmarks.kernels ship --out csrc/kernels/best.json    # from there to what cudasched ships
    python -m benchmarks.kernels --out results --limit-s 590
    python -m benchmarks.kernels --out results --only softmax_of_copy,llama
    python -m benchmarks.kernels --rehearse --out /tmp/results           # tiny shapes on the CPU; figures say nothing

Under --out: kernels.json has the figures, beside other rows that are there; layers.json has layers of BERT and Llama
against PyTorch, eager and compiled, and each of their kernels; layer-NAME.json is what `cudasched dashboard` opens.
What is measured is kept in kernels.cells after each part, and each part is checked before it is timed.

A figure is its worst shape's; its least and most are of single rounds. `NAME_of_compiled` and
`flash_attention_of_cudnn` come of the same shapes and calls as the other figure of their kernel. One that misses its
goal says what limits it: `--limited-by FIGURE=TEXT` tells; without that it is `not explained yet`. The exit status is 0
when all asked for is measured, 3 when time ran out first, 1 when a kernel is wrong or a measurement failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cudasched.demo.harness import HarnessError
from cudasched.errors import Error

from benchmarks import meta, tables
from benchmarks.kernels import layers, ship
from benchmarks.kernels.figures import FIGURES, figures, for_dashboard, of_layers
from benchmarks.kernels.parts import Part, Scene, parts
from benchmarks.kernels.timing import Arms, GpuTimer, HostTimer, Timer, in_turns
from benchmarks.results.schema import Results, merge_figures, replace
from benchmarks.store import Store

TIME_RAN_OUT = 3
CLOSING_S = 5.0
PART_S = 20.0


class WrongError(Exception):
    """A kernel does not compute what it should."""


class Bench:
    """One run: what is measured goes into the store."""

    def __init__(self, options: argparse.Namespace, scene: Scene, timer: Timer, store: Store) -> None:
        self.options, self.scene, self.timer, self.store = options, scene, timer, store
        self.began = time.monotonic()
        self.late = False
        self.failed: list[str] = []

    def part(self, key: str, build: Callable[[], tuple[Arms, Callable[[], float]]]) -> None:
        """Measures a part, unless that is done or there is no time left."""
        if key in self.store.done:
            return
        if self.options.limit_s - CLOSING_S - (time.monotonic() - self.began) < self.need_s:
            self.late = True
            return
        try:
            arms, error = build()
            wrong = error()
            if not wrong <= 1:
                raise WrongError(f"{wrong:.3g} times the error that is allowed")
            options = self.options
            times = in_turns(self.timer, arms, rounds=options.rounds, samples=options.samples)
        except (Error, WrongError, RuntimeError, AttributeError) as problem:
            self.failed.append(key)
            self.say(f"{key}: {type(problem).__name__}: {str(problem)[:500]}")
            return
        finally:
            gc.collect()
        self.store.keep(key, {"arms": times, "samples": options.rounds * options.samples, "error": wrong})
        brief = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in times.items())
        self.say(f"{key}: {brief} us; {wrong:.2f} of the error allowed")

    @property
    def need_s(self) -> float:
        """What a part takes at most."""
        return 0.0 if self.scene.small else PART_S

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def figure(self, part: Part) -> None:
        """Measures one shape of a figure."""

        def build() -> tuple[Arms, Callable[[], float]]:
            made = part.build(self.scene)
            return made.arms, made.error

        self.part(part.key, build)

    def layer(self, name: str) -> None:
        """Measures a layer, kernel by kernel and as a whole."""
        made: list[layers.Layer] = []

        def the_layer() -> layers.Layer:
            if not made:
                made.append(layers.build(name, self.scene))
            return made[0]

        scene = self.scene
        pytorch, ours = layers.PyTorch(scene), layers.Ours(scene)

        def kernel(what: str) -> tuple[Arms, Callable[[], float]]:
            call = the_layer().kernels[what]
            arms = {"ours": lambda: call(ours), "pytorch": lambda: call(pytorch)}
            return arms, lambda: layers.error(scene, call(ours), call(pytorch))

        def whole() -> tuple[Arms, Callable[[], float]]:
            layer = the_layer()
            x, run = layer.x, layer.run
            compiled = scene.compiled(lambda x: run(pytorch, x))
            ours_compiled = scene.compiled(lambda x: run(ours, x))
            arms = {
                "ours": lambda: run(ours, x),
                "ours_compiled": lambda: ours_compiled(x),
                "eager": lambda: run(pytorch, x),
                "compiled": lambda: compiled(x),
            }
            worst = lambda: max(  # noqa: E731
                layers.error(scene, one, run(pytorch, x)) for one in (run(ours, x), ours_compiled(x))
            )
            return arms, worst

        for what in layers.KERNELS[name]:
            self.part(f"{name}/{what}", lambda what=what: kernel(what))  # type: ignore[misc]
        self.part(f"{name}/whole", whole)


def write(options: argparse.Namespace, store: Store, sm_clock_mhz: int | None) -> None:
    """The result files, of what is measured so far."""
    described = store.meta.model_copy(update={"sm_clock_mhz": sm_clock_mhz})
    limited_by = dict(one.split("=", 1) for one in options.limited_by)
    of_figures = {key: part for key, part in store.done.items() if key.partition("/")[0] in FIGURES}
    of_layer = {key: part for key, part in store.done.items() if key.partition("/")[0] in layers.LAYERS}
    made = figures(of_figures, limited_by)
    if made:
        tables.plot_figures(merge_figures(options.out / "kernels.json", described, made), options.out)
    if of_layer:
        Results(meta=described, rows=of_layers(of_layer, limited_by)).write(options.out / "layers.json")
    for name in layers.LAYERS:
        told = for_dashboard(of_layer, name)
        if told["kernels"]:
            replace(options.out / f"layer-{name}.json", json.dumps(told, indent=1) + "\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--limit-s", type=float, default=590, help="time in all, s")
    parser.add_argument("--only", default="", help="figures, FIGURE/PART or layers, with commas between them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=5, help="of each arm in a round")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    known = {*FIGURES, *layers.LAYERS, *(one.key for one in parts())}
    unknown = sorted(set(options.only) - known)
    if unknown:
        parser.error(
            f"no such figure or layer: {', '.join(unknown)}; there are {', '.join([*FIGURES, *layers.LAYERS])}"
        )
    for one in options.limited_by:
        if "=" not in one:
            parser.error(f"--limited-by {one}: it is FIGURE=TEXT")
    return options


def chosen(options: argparse.Namespace) -> tuple[list[Part], list[str]]:
    """Parts and layers that are asked for."""
    only = {FIGURES[name].parts or name if name in FIGURES else name for name in options.only}
    wanted = [one for one in parts() if not only or one.key in only or one.figure in only]
    return wanted, [name for name in layers.LAYERS if not only or name in only]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["tune"]:
        return ship.tune(given[1:])
    if given[:1] == ["ship"]:
        return ship.main(given[1:])
    options = parse(given)
    try:
        described = meta.describe(options.rehearse, options.commit)
        store = Store(options.out / "kernels.cells", described)
    except (HarnessError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    import cudasched.kernels
    import torch

    device = "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        torch.set_num_threads(1)
    scene = Scene(torch, cudasched.kernels, device, options.rehearse)
    bench = Bench(options, scene, HostTimer() if options.rehearse else GpuTimer(torch), store)
    wanted, wanted_layers = chosen(options)
    with torch.no_grad():
        for part in wanted:
            bench.figure(part)
        clock = None if options.rehearse else meta.sm_clock_mhz()
        for name in wanted_layers:
            bench.layer(name)
    write(options, store, clock)
    if bench.failed:
        print(f"failed: {', '.join(bench.failed)}", file=sys.stderr)
        return 1
    return TIME_RAN_OUT if bench.late else 0


if __name__ == "__main__":
    sys.exit(main())
