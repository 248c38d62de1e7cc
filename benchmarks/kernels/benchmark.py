"""The kernels' figures, and layers of BERT and Llama against PyTorch, eager and compiled.

    python -m benchmarks.kernels tune --out DIR --limit-s 590         # best configurations, into the tuner's database
    python -m benchmarks.kernels ship --out csrc/kernels/best.json    # from there to what cudasched ships
    python -m benchmarks run kernels
    python -m benchmarks run layers

Each part is checked before it is timed. A figure is its worst shape's; its least and most are of single rounds.
`NAME_of_compiled` and `flash_attention_of_cudnn` come of the same shapes and calls as the other figure of their kernel.
Beside layers.json, layer-NAME.json is what `cudasched dashboard` opens. A rehearsal has tiny shapes on the CPU.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from functools import cache, partial

from cudasched.errors import Error

from benchmarks.kernels import layers
from benchmarks.kernels.figures import FIGURES, LAYER_GOALS, find, find_layers, for_dashboard
from benchmarks.kernels.parts import Built, Scene, parts
from benchmarks.kernels.timing import GpuTimer, host_time_us, in_turns
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Session
from benchmarks.results.schema import replace
from benchmarks.tables import plot_beside

PART_S = 20.0
SETTINGS = {"rounds": (7, 2), "samples": (5, 1)}


@cache
def scene_of(small: bool) -> Scene:
    """Where parts are built."""
    import cudasched.kernels
    import torch

    if small:
        torch.set_num_threads(1)
    return Scene(torch, cudasched.kernels, "cpu" if small else "cuda", small)


def timed(session: Session, key: str, build: Callable[[Scene], Built]) -> None:
    """Checks a part and times its arms, unless that is done.

    Raises:
        ValueError: The kernel is wrong, or it failed.
    """
    if key in session.store.done:
        return
    session.need(0.0 if session.rehearsal else PART_S)
    scene, options = scene_of(session.rehearsal), session.options
    timer = host_time_us if session.rehearsal else GpuTimer(scene.torch)
    try:
        with scene.torch.no_grad():
            made = build(scene)
            wrong = made.error()
            if not wrong <= 1:
                raise ValueError(f"{key} is wrong: {wrong:.3g} times the error that is allowed")
            times = in_turns(timer, made.arms, rounds=options.rounds, samples=options.samples)
    except (Error, RuntimeError, AttributeError) as problem:
        raise ValueError(f"{type(problem).__name__}: {str(problem)[:500]}") from problem
    finally:
        gc.collect()
    session.store.keep(key, {"arms": times, "samples": options.rounds * options.samples, "error": wrong})
    brief = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in times.items())
    session.say(f"{key}: {brief} us; {wrong:.2f} of the error allowed")


@cache
def layer_of(name: str, small: bool) -> layers.Layer:
    """A layer, built once."""
    return layers.build(name, scene_of(small))


def kernel_of_layer(session: Session, name: str, what: str) -> None:
    """One kernel of a layer, by ours and by PyTorch."""

    def build(scene: Scene) -> Built:
        call = layer_of(name, scene.small).kernels[what]
        pytorch, ours = layers.PyTorch(scene), layers.Ours(scene)
        arms = {"ours": lambda: call(ours), "pytorch": lambda: call(pytorch)}
        return Built(arms, lambda: layers.error(scene, call(ours), call(pytorch)))

    timed(session, f"{name}/{what}", build)


def whole_layer(session: Session, name: str) -> None:
    """A layer as a whole, with our kernels and without, eager and compiled."""

    def build(scene: Scene) -> Built:
        layer = layer_of(name, scene.small)
        x, run, pytorch, ours = layer.x, layer.run, layers.PyTorch(scene), layers.Ours(scene)
        compiled, ours_compiled = scene.compiled(lambda x: run(pytorch, x)), scene.compiled(lambda x: run(ours, x))
        arms = {
            "ours": lambda: run(ours, x),
            "ours_compiled": lambda: ours_compiled(x),
            "eager": lambda: run(pytorch, x),
            "compiled": lambda: compiled(x),
        }
        made = run(ours, x), ours_compiled(x)
        return Built(arms, lambda: max(layers.error(scene, one, run(pytorch, x)) for one in made))

    timed(session, f"{name}/whole", build)


def dashboards(session: Session) -> None:
    """The files of the dashboard, beside the figures."""
    for name in layers.LAYERS:
        told = for_dashboard(session.store.done, name)
        if told["kernels"]:
            replace(session.out.with_name(f"layer-{name}.json"), json.dumps(told, indent=1) + "\n")


KERNELS = Benchmark(
    about="kernels against cuBLAS, cuDNN, copies and PyTorch",
    groups={part.key: partial(timed, key=part.key, build=part.build) for part in parts()},
    goals={name: (figure.goal, "more") for name, figure in FIGURES.items()},
    find=find,
    finish=lambda session: plot_beside(session.out),
    settings=SETTINGS,
)
LAYERS = Benchmark(
    about="layers of BERT and Llama, kernel by kernel and as a whole",
    groups={
        f"{name}/{what}": partial(whole_layer, name=name)
        if what == "whole"
        else partial(kernel_of_layer, name=name, what=what)
        for name in layers.LAYERS
        for what in (*layers.KERNELS[name], "whole")
    },
    goals=LAYER_GOALS,
    find=find_layers,
    finish=dashboards,
    settings=SETTINGS,
)
