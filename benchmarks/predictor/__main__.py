"""Nanoseconds from a raw float32 row to the margin: cudasched's trees beside XGBoost, ONNX Runtime, treelite, tl2cgen.

    python -m benchmarks.predictor --out benchmarks/results/predictor.json

One model (100 trees of depth 6 on 24 features, trained here), one process, one thread, one distinct row a call, hot.
The engines take turns; a row's figure is the median over rounds of a batch's ns a row. Engines with a C interface are
called from compiled loops (speed.cpp); `xgboost-inplace` and `onnxruntime` are called from Python, as their users call
them. Before anything is timed, cudasched's margins must have the bits of XGBoost's.

`cudasched-cache` and `cudasched-cold` are the predictor as the launcher thread asks it, from a launch with 256 bytes of
parameters to the prediction and its bound: 512 launches that it knows, and as many that it never saw.

    python -m benchmarks.predictor --figures benchmarks/results/predictor_figures.json

does only this, of the shipped model: `miss_ns`, what its predictor takes for a launch that it never saw, `hit_ns`, for
one that it knows, and `four_predictions_ns`, for all that is said of a new launch. A figure is the least of many
batches' ns a launch, which a machine that does other work beside it disturbs least; `low` is the same, `high` their
median.

An engine that is not installed is left out with a word. Needs g++, numpy and xgboost (or xgboost-cpu); for the rivals
onnxruntime with onnxmltools, treelite and tl2cgen. Rows of other kinds in the results file (accuracy, coverage) stay.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import meta
from benchmarks.results.schema import FigureRow, Meta, PredictorEngine, PredictorSpeedRow, Results, load, merge

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
#: As enum Isa of csrc/predict/trees/evaluator.hpp.
WALKS = (0, 1, 2, 3)
FEATURES, TREES, DEPTH = 24, 100, 6
SHIPPED = HERE.parents[1] / "python" / "cudasched" / "predictor" / "models" / "sm_90.ubj"
#: What is promised, ns.
GOALS = {"miss_ns": 400.0, "hit_ns": 30.0, "four_predictions_ns": 1000.0}

#: Takes a batch's rows and returns ns a row.
Timer = Callable[[Any], float]
#: What it is, which instructions it uses, and its timer.
Engine = tuple[PredictorEngine, str, Timer]


class BenchmarkError(Exception):
    """The benchmark cannot be run; the text says why."""


def build(directory: Path, together: bool = False) -> ctypes.CDLL:
    """Compiles speed.cpp with the evaluator, for baseline x86-64 as the product is.

    Args:
        directory: Where the library is put.
        together: The evaluator's sources are compiled as one and optimised less, in a quarter of the time; for a
            rehearsal, because the product's are compiled by themselves.

    Raises:
        BenchmarkError: There is no compiler, or it failed.
    """
    sources = sorted((CSRC / "predict").rglob("*.cpp")) + sorted((CSRC / "base").glob("*.cpp"))
    if together:
        unit = directory / "together.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        sources = [unit]
    library = directory / "speed.so"
    options = ["-std=c++20", "-O1" if together else "-O2", f"-I{CSRC}"]
    compile_shared(os.environ.get("CXX", "g++"), [*options, HERE / "speed.cpp", *sources], library)
    loaded = ctypes.CDLL(str(library))
    loaded.open_evaluator.restype = ctypes.c_void_p
    loaded.evaluator_isa.restype = ctypes.c_char_p
    loaded.launch_features.restype = ctypes.c_size_t
    loaded.open_predictor.restype = ctypes.c_void_p
    for name in ("time_evaluator", "time_xgboost", "time_gtil", "time_compiled", "time_hit", "time_cold", "time_four"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def compile_shared(compiler: str, arguments: Sequence[str | Path], library: Path) -> None:
    """Makes a shared library.

    Raises:
        BenchmarkError: There is no compiler, or it failed.
    """
    if shutil.which(compiler) is None:
        raise BenchmarkError(f"no {compiler}: install it")
    command = [compiler, "-shared", "-fPIC", *map(str, arguments), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def rival(module: str) -> Any:
    """A module that need not be installed where types are checked."""
    return importlib.import_module(module)


def pointer(array: Any) -> ctypes.c_void_p:
    """Where a numpy array's values are."""
    return ctypes.c_void_p(array.ctypes.data)


class Bench:
    """The model, the rows, and the engines that are to be had."""

    def __init__(self, directory: Path, rows: int) -> None:
        try:
            np, xgboost = rival("numpy"), rival("xgboost")
        except ImportError as error:
            raise BenchmarkError(f"{error}: pip install numpy xgboost-cpu") from error
        self.directory = directory
        self.library = build(directory)
        self.numpy, self.xgboost = np, xgboost
        random = np.random.default_rng(1)
        x = random.normal(size=(20_000, FEATURES)).astype(np.float32)
        y = 10 + 2 * x[:, 0] + np.sin(3 * x[:, 1]) + x[:, 2] * x[:, 3] + 0.3 * np.abs(x[:, 4:]).sum(axis=1)
        self.booster = self._trained(x, y)
        self.path = directory / "model.ubj"
        self.booster.save_model(self.path)
        self.rows = random.normal(size=(rows, FEATURES)).astype(np.float32)
        self.out = np.zeros(rows, dtype=np.float32)
        self.margins = self.booster.inplace_predict(self.rows, predict_type="margin")

    def _trained(self, x: Any, y: Any) -> Any:
        parameters = {"max_depth": DEPTH, "eta": 0.1, "max_bin": 255, "nthread": 1}
        return self.xgboost.train(parameters, self.xgboost.DMatrix(x, y.astype("float32")), TREES)

    def engines(self) -> list[Engine]:
        """Those that are installed and that the processor can run."""
        found = [*self._cudasched(), *self._predictor()]
        makers: list[tuple[str, Callable[[], Engine]]] = [
            ("xgboost", self._xgboost_inplace),
            ("xgboost's C interface", self._xgboost_c),
            ("onnxruntime", self._onnxruntime),
            ("treelite", self._treelite),
            ("tl2cgen", self._tl2cgen),
        ]
        for name, make in makers:
            try:
                found.append(make())
            except Exception as error:  # whatever a rival's installation comes up with
                print(f"predictor: {name} left out: {error}", file=sys.stderr)
        return found

    def _cudasched(self) -> list[Engine]:
        found: list[Engine] = []
        for walk in WALKS:
            opened = self.library.open_evaluator(str(self.path).encode(), walk)
            if opened is None:
                continue
            evaluator = ctypes.c_void_p(opened)
            isa = self.library.evaluator_isa(evaluator).decode()
            found.append(("cudasched", isa, self._compiled_timer(self.library.time_evaluator, evaluator)))
            found[-1][2](self.rows)
            if self.out.tobytes() != self.margins.tobytes():
                raise BenchmarkError(f"{isa}: the margins are not XGBoost's")
        return found

    def _predictor(self) -> list[Engine]:
        features, count = self.library.launch_features(), 20 * 1024
        x = self.numpy.zeros((count, features), dtype="float32")
        self.library.launch_rows(ctypes.c_size_t(count), pointer(x))
        y = 8 + 0.3 * self.numpy.abs(x[:, ::3]).sum(axis=1) / 10 + self.numpy.sin(x[:, 0])
        path = self.directory / "launches.ubj"
        self._trained(x, y).save_model(path)
        walks = [self.library.open_evaluator(str(path).encode(), walk) for walk in WALKS]
        evaluator = ctypes.c_void_p([walk for walk in walks if walk is not None][-1])

        def timer(time_all: Any) -> Timer:
            asked = ctypes.c_void_p(self.library.open_predictor(evaluator))

            def run(rows: Any) -> float:
                took = float(time_all(asked))
                if took < 0:
                    raise BenchmarkError("the predictor found what it should not know, or did not find what it should")
                return took

            return run

        return [
            ("cudasched-cache", "scalar", timer(self.library.time_hit)),
            ("cudasched-cold", self.library.evaluator_isa(evaluator).decode(), timer(self.library.time_cold)),
        ]

    def _compiled_timer(self, timer: Any, *arguments: Any) -> Timer:
        def run(rows: Any) -> float:
            shape = ctypes.c_size_t(len(rows)), ctypes.c_size_t(FEATURES)
            return float(timer(*arguments, pointer(rows), *shape, pointer(self.out)))

        return run

    def _checked(self, engine: PredictorEngine, isa: str, timer: Timer) -> Engine:
        self.out[:] = 0
        timer(self.rows)
        if abs(self.out - self.margins).max() > 1e-3:
            raise BenchmarkError("its margins are not XGBoost's")
        return engine, isa, timer

    def _python_timer(self, call: Callable[[Any], Any]) -> Timer:
        def run(rows: Any) -> float:
            start = time.perf_counter_ns()
            for i in range(len(rows)):
                self.out[i] = call(rows[i : i + 1])
            return (time.perf_counter_ns() - start) / len(rows)

        return run

    def _xgboost_inplace(self) -> Engine:
        booster = self.booster
        timer = self._python_timer(lambda row: booster.inplace_predict(row, predict_type="margin")[0])
        return self._checked("xgboost-inplace", "python", timer)

    def _xgboost_c(self) -> Engine:
        library = ctypes.CDLL(self.xgboost.core._LIB._name)
        config = b'{"type":1,"training":false,"iteration_begin":0,"iteration_end":0,"missing":NaN,"strict_shape":false}'
        predict = ctypes.cast(library.XGBoosterPredictFromDense, ctypes.c_void_p)
        timer = self._compiled_timer(self.library.time_xgboost, predict, self.booster.handle, ctypes.c_char_p(config))
        return self._checked("xgboost-capi", "c", timer)

    def _onnxruntime(self) -> Engine:
        onnxruntime = rival("onnxruntime")
        tensor = rival("onnxmltools.convert.common.data_types").FloatTensorType([None, FEATURES])
        converted = rival("onnxmltools").convert_xgboost(self.booster, initial_types=[("x", tensor)])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        name = session.get_inputs()[0].name
        timer = self._python_timer(lambda row: session.run(None, {name: row})[0][0, 0])
        return self._checked("onnxruntime", "python", timer)

    def _treelite(self) -> Engine:
        treelite, gtil = rival("treelite"), rival("treelite.gtil.gtil")
        model = treelite.frontend.load_xgboost_model(self.path, format_choice="ubjson")
        config = gtil.GTILConfig(nthread=1, predict_type="raw")
        predict = ctypes.cast(rival("treelite.core")._LIB.TreeliteGTILPredict, ctypes.c_void_p)
        timer = self._compiled_timer(self.library.time_gtil, predict, model.handle, config.handle)
        self._alive = model, config
        return self._checked("treelite", "c", timer)

    def _tl2cgen(self) -> Engine:
        tl2cgen, treelite = rival("tl2cgen"), rival("treelite")
        model = treelite.frontend.load_xgboost_model(self.path, format_choice="ubjson")
        generated = self.directory / "generated"
        tl2cgen.generate_c_code(model, dirpath=generated, params={}, verbose=False)
        library = self.directory / "compiled.so"
        compile_shared(os.environ.get("CC", "gcc"), ["-O3", *sorted(generated.glob("*.c"))], library)
        predict = ctypes.cast(ctypes.CDLL(str(library)).predict, ctypes.c_void_p)
        return self._checked("tl2cgen", "c", self._compiled_timer(self.library.time_compiled, predict))


def cpu_name() -> str:
    """The processor's name, family and model, as the system tells them."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return f"{found.get('model name', 'unknown')}, family {found.get('cpu family')} model {found.get('model')}"


def measure(bench: Bench, rounds: int, batch: int) -> list[PredictorSpeedRow]:
    """A row an engine; slow engines get fewer rows a turn, so that no turn lasts long."""
    engines = bench.engines()
    values: list[list[float]] = [[] for _ in engines]
    for number in range(-1, rounds):  # the first warms up
        start = (number + 1) * batch % max(len(bench.rows) - batch, 1)
        for index, (_, isa, timer) in enumerate(engines):
            count = max(batch // 16, 1) if isa == "python" else batch
            timer(bench.rows[-count:])  # the engine before has left the caches to itself
            took = timer(bench.rows[start : start + count])
            if number >= 0:
                values[index].append(took)
    cpu = cpu_name()
    return [
        PredictorSpeedRow(engine=engine, ns_per_row_median=round(statistics.median(took), 1), isa=isa, cpu=cpu)
        for (engine, isa, _), took in zip(engines, values, strict=True)
    ]


def figures(library: ctypes.CDLL, model: Path, rounds: int) -> list[FigureRow]:
    """What a prediction of a model costs (`GOALS`), over so many batches of 512 launches.

    Raises:
        BenchmarkError: The model cannot be read, or its features are not those of launches.
    """
    opened = [library.open_evaluator(str(model).encode(), walk) for walk in WALKS]
    if not any(opened):
        raise BenchmarkError(f"{model} cannot be walked")
    evaluator = ctypes.c_void_p([walk for walk in opened if walk is not None][-1])
    isa = library.evaluator_isa(evaluator).decode()
    asked = ctypes.c_void_p(library.open_predictor(evaluator))
    found = []
    # Hits first: misses fill the cache.
    timers = {"hit_ns": library.time_hit, "miss_ns": library.time_cold, "four_predictions_ns": library.time_four}
    for name, timer in timers.items():
        took = sorted(float(timer(asked)) for _ in range(rounds))
        if took[0] < 0:
            raise BenchmarkError(f"{name}: a launch that should be known was not, or the other way round")
        busy = f"; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        print(f"{name}: {took[0]:.1f} ns, median {statistics.median(took):.1f} ({isa}, {cpu_name()}{busy})")
        goal, least = GOALS[name], round(took[0], 1)
        found.append(
            FigureRow(
                figure=name,
                value=least,
                goal=goal,
                better="less",
                low=least,
                high=round(statistics.median(took), 1),
                n=rounds * 512,
                limited_by="" if least <= goal else f"{cpu_name()}, {isa}, beside other work{busy}",
            )
        )
    return found


def describe(commit: str | None) -> Meta:
    """Where this ran; no GPU has a part in it."""
    return Meta(
        gpu="none",
        driver=None,
        cuda=None,
        torch=None,
        python=platform.python_version(),
        commit=commit or os.environ.get("CUDASCHED_COMMIT") or meta.current_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        sm_clock_mhz=None,
        command=meta.command_line(),
    )


def write_figures(options: argparse.Namespace) -> int:
    """Measures what predictions cost and puts them beside the figures that the file has."""
    with tempfile.TemporaryDirectory(prefix="cudasched-predictor-") as scratch:
        try:
            rows = figures(build(Path(scratch)), options.model, 10 * options.rounds)
        except BenchmarkError as error:
            print(f"predictor: {error}", file=sys.stderr)
            return 1
    path: Path = options.figures
    before = load(path) if path.exists() else None
    kept = [row for row in before.rows if isinstance(row, FigureRow)] if before else []
    kept = [row for row in kept if row.figure not in GOALS]
    about = before.meta if before and kept else describe(options.commit)
    Results(meta=about, meta_by_kind=before.meta_by_kind if before else {}, rows=[*kept, *rows]).write(path)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the results; kinds that are there stay")
    parser.add_argument(
        "--figures", type=Path, help="only what a prediction costs, into this file; its other figures stay"
    )
    parser.add_argument("--model", type=Path, default=SHIPPED, help="of the figures; the one that ships")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each engine (200)")
    parser.add_argument("--batch", type=int, default=512, help="rows of each turn (512)")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(arguments)
    if options.out is None and options.figures is None:
        parser.error("--out or --figures")
    if options.figures is not None:
        return write_figures(options)
    with tempfile.TemporaryDirectory(prefix="cudasched-predictor-") as scratch:
        try:
            rows = measure(Bench(Path(scratch), 16 * options.batch), options.rounds, options.batch)
        except BenchmarkError as error:
            print(f"predictor: {error}", file=sys.stderr)
            return 1
    merge(options.out, describe(options.commit), rows)
    print(rows[0].cpu)
    for row in rows:
        print(f"{row.engine:16} {row.isa:12} {row.ns_per_row_median:10.1f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
