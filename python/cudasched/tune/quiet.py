"""Timing on a GPU that others use: best-effort work of other programs pauses, and samples beside requests are repeated.

::

    with cudasched.tune.quiet() as quiet:
        tuned = triton.autotune(configs, key=["n"], do_bench=quiet.do_bench)(kernel)
        tuned[grid](x, y, n)
        torch.compile(model, mode="max-autotune")(inputs)
        kernel_tuner.tune_kernel(..., observers=[quiet.observer()])

Others pause for at most 50 ms at a time, and have as much time in between. A program that is not under cudasched does
not pause, and samples beside its requests are not repeated.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cudasched import hook
from cudasched._region import region
from cudasched.errors import ConfigError, Error
from cudasched.tune._need import need

__all__ = ["LONGEST_PAUSE_MS", "Pauses", "Quiet", "quiet"]

LONGEST_PAUSE_MS = 50.0
_ANNOUNCED_S = 0.05
"""From the announcement of pauses, others take so long to keep little work in flight, which they do for a second."""
_LOOK_S = 0.0005
_GROUP_MS = 2.0
"""GPU time of the samples between two looks at other programs."""
_LIMIT_S = 10.0
"""Then samples beside other work are taken, too."""
_TRIES = 5
"""Pauses, in none of which others come to an end, or of Inductor's measurements beside requests."""


class Pauses:
    """Pauses of other programs' best-effort work on the current device. For one thread; without the hook, none."""

    def __init__(self) -> None:
        self._engine = hook.engine()
        self._told_s = -1.0
        self._until_s = 0.0

    @property
    def is_client(self) -> bool:
        """Others pause, and are seen."""
        return self._engine is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Waits until others' best-effort work has ended. The pause may end before the block: see `is_quiet`."""
        self._begin()
        try:
            yield
        finally:
            self._measure(0.0)
            self._until_s = 0.0

    def left_s(self) -> float:
        """How long the pause still lasts."""
        return self._until_s - time.monotonic()

    def is_quiet(self) -> bool:
        """The pause lasts, and no other best-effort work is on the GPU."""
        return self.left_s() > 0 and self._measure(-1.0)[1] <= 0

    def latency(self) -> tuple[bool, int]:
        """Whether latency work is under way, and when such work last began (ns): the same twice, there was none."""
        _, _, since_ns, active = self._measure(-1.0)
        return active, since_ns

    def met_latency(self, before: tuple[bool, int]) -> bool:
        """Whether latency work was under way at some time since `latency()` gave this."""
        return before[0] or self.latency() != before

    def _measure(self, pause_ms: float) -> tuple[int, int, int, bool]:
        if self._engine is None:
            return 0, 0, 0, False
        if pause_ms >= 0:
            self._told_s = time.monotonic()
        try:
            return self._engine.measure(pause_ms)
        except Error:  # the program is no client, as its region has said
            self._engine = None
            return 0, 0, 0, False

    def _begin(self) -> None:
        if self._engine is not None and not 0 <= time.monotonic() - self._told_s < 0.5:
            self._measure(0.0)
            time.sleep(_ANNOUNCED_S)
        for _ in range(_TRIES):
            while (found := self._measure(LONGEST_PAUSE_MS))[0] > 0:
                time.sleep(found[0] / 1e9)
            self._until_s = time.monotonic() + LONGEST_PAUSE_MS / 1e3
            while found[1] > 0 and self.left_s() > 0:
                time.sleep(min(found[1] / 1e9, _LOOK_S))
                found = self._measure(-1.0)
            if found[1] <= 0:
                return
            self._measure(0.0)


class Quiet:
    """Timers for tuners, of the ``with`` block of `quiet`. For one thread.

    Attributes:
        discarded: Samples that met work of another program, and were taken again.
    """

    def __init__(self) -> None:
        self.discarded = 0
        self._pauses = Pauses()
        self._warned = False

    def do_bench(
        self,
        fn: Callable[[], Any],
        warmup: float = 25,
        rep: float = 100,
        grad_to_none: Sequence[Any] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> float | list[float]:
        """As `triton.testing.do_bench`, which see for the arguments: ms of the GPU, of PyTorch's current stream.

        Raises:
            ConfigError: `return_mode` is none of min, max, mean, median and all.
        """
        kinds: dict[str, Callable[[list[float]], Any]] = {
            **{"min": min, "max": max, "mean": statistics.fmean},
            **{"median": statistics.median, "all": list},
        }
        if return_mode not in kinds:
            raise ConfigError(f"return_mode = {return_mode!r}: one of {', '.join(kinds)}")
        samples = self.samples_ms(fn, warmup, rep, grad_to_none)
        if quantiles is None:
            return kinds[return_mode](samples)  # type: ignore[no-any-return]
        found = [_quantile(samples, each) for each in quantiles]
        return found[0] if len(found) == 1 else found

    def samples_ms(
        self, fn: Callable[[], Any], warmup: float = 25, rep: float = 100, grad_to_none: Sequence[Any] | None = None
    ) -> list[float]:
        """GPU times of calls of `fn`, each behind a fill that flushes the L2 cache.

        Args:
            fn: Launches work on PyTorch's current stream.
            warmup: About so many ms of calls come first.
            rep: About so many ms of calls are timed.
            grad_to_none: Tensors whose gradients are dropped before each call.
        """
        torch = need("torch", "quiet timing", "torch")
        fill = torch.empty(max(256 << 20, 2 * _l2_bytes(torch)) // 4, dtype=torch.int, device="cuda")

        def timed(count: int) -> list[float]:
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for begin, end in events:
                for one in grad_to_none or ():
                    one.grad = None
                fill.zero_()
                begin.record()
                fn()
                end.record()
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in events]

        with self._pauses.pause():
            fn()
            timed(1)
            began = time.monotonic()
            timed(3)
            each_s = (time.monotonic() - began) / 3
            timed(max(1, int(warmup / (1e3 * each_s))))
        return self._kept(timed, max(1, int(rep / (1e3 * each_s))), max(1, int(_GROUP_MS / (1e3 * each_s))), each_s)

    def _kept(self, timed: Callable[[int], list[float]], wanted: int, group: int, each_s: float) -> list[float]:
        kept: list[float] = []
        met: list[float] = []
        until = time.monotonic() + _LIMIT_S
        fits = each_s < 0.8 * LONGEST_PAUSE_MS / 1e3
        while len(kept) < wanted and not (kept + met and time.monotonic() > until):
            with self._pauses.pause():
                while len(kept) < wanted:
                    before = self._pauses.latency()
                    samples = timed(min(group, wanted - len(kept)))
                    if not self._pauses.met_latency(before) and (self._pauses.is_quiet() or not fits):
                        kept += samples
                    else:
                        met = samples
                        self.discarded += len(samples)
                    if self._pauses.left_s() < group * each_s:
                        break
        if not kept and not self._warned:
            self._warned = True
            warnings.warn(
                f"for {_LIMIT_S:.0f} s each sample met work of another program: times are beside it",
                RuntimeWarning,
                stacklevel=4,
            )
        return kept or met

    def _repeated(self, timer: Callable[..., Any]) -> Callable[..., Any]:
        """Inductor's timer in pauses, again where it met latency work: its 25 ms fit into one."""

        def repeated(*arguments: Any, **options: Any) -> Any:
            options |= {name: min(options[name], 25) for name in ("rep", "warmup") if name in options}
            for _ in range(_TRIES):
                with self._pauses.pause():
                    before = self._pauses.latency()
                    found = timer(*arguments, **options)
                    if not self._pauses.met_latency(before):
                        break
                self.discarded += 1
            return found

        return repeated

    def observer(self) -> Any:
        """For Kernel Tuner (``observers=[...]``): each iteration begins in a pause.

        Kernel Tuner's times are those of iterations that met no latency work, unless all did; ``times_met_latency``
        counts the others.
        """
        return _observer(self)


def _quantile(samples: list[float], part: float) -> float:
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _l2_bytes(torch: Any) -> int:
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))


def _observer(quiet_: Quiet) -> Any:
    base = need("kernel_tuner.observers", "the observer", "kernel-tuner").BenchmarkObserver

    class Observer(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self._pause = ExitStack()
            self._before = (False, 0)
            self._met: list[bool] = []

        def before_start(self) -> None:
            self._pause.enter_context(quiet_._pauses.pause())
            self._before = quiet_._pauses.latency()

        def after_finish(self) -> None:
            met = quiet_._pauses.met_latency(self._before)
            self._met.append(met)
            quiet_.discarded += met
            self._pause.close()

        def get_results(self) -> dict[str, Any]:
            """Before those of the observers that take times, which are appended to a backend's list."""
            met, self._met = self._met, []
            for one in self.dev.observers:
                times = getattr(one, "times", [])
                if len(times) == len(met) and not all(met):
                    times[:] = [taken for taken, each in zip(times, met, strict=True) if not each]
            return {"times_met_latency": sum(met)}

    return Observer()


@contextmanager
def quiet() -> Iterator[Quiet]:
    """Times kernels although other programs use the GPU: see the module's beginning.

    The block is a best-effort region. ``torch.compile`` times kernels by the block's timer where PyTorch was imported
    before, except in processes of its own (``autotune_in_subproc``). Without the hook nobody pauses.
    """
    with region("best_effort"), ExitStack() as stack:
        made = Quiet()
        if "torch" in sys.modules:
            stack.enter_context(_inductor(made))
        yield made


@contextmanager
def _inductor(made: Quiet) -> Iterator[None]:
    try:
        from torch._inductor.runtime.benchmarking import benchmarker
    except ImportError:
        yield
        return
    timer: Any = benchmarker
    if "benchmark_gpu" in vars(timer):  # a block around this one
        yield
        return
    timer.benchmark_gpu = made._repeated(timer.benchmark_gpu)
    try:
        yield
    finally:
        del timer.benchmark_gpu
