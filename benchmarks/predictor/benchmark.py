"""Nanoseconds from a raw float32 row to the margin: cudasched's trees beside XGBoost, ONNX Runtime, treelite, tl2cgen.

One model (100 trees of depth 6 on 24 features, trained here), one process, one thread, one distinct row a call, hot.
The engines take turns; a row's figure is the median over rounds of a batch's ns a row. Engines with a C interface are
called from compiled loops (speed.cpp); `xgboost-inplace` and `onnxruntime` are called from Python, as their users call
them. Before anything is timed, cudasched's margins must have the bits of XGBoost's.

`predictor_figures` is of the whole predictor with the shipped model, as the launcher thread asks it, from a launch with
256 bytes of parameters to the prediction and its bound. `miss_ns` is of launches that it never saw, `hit_ns` of those
that it knows, `four_predictions_ns` of all that is said of a new launch. A figure is the least of many batches' ns a
launch, which a machine that does other work beside it disturbs least; `low` is the same, `high` their median.

An engine that is not installed is left out with a word. Needs g++, numpy and xgboost (or xgboost-cpu); for the rivals
onnxruntime with onnxmltools, treelite and tl2cgen. Rows of other kinds in the results file (accuracy, coverage) stay.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HarnessError

from benchmarks.c_program import compile_c, compile_cpp
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session
from benchmarks.results.schema import PredictorEngine, PredictorSpeedRow, merge

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
#: As enum Isa of csrc/predict/trees/evaluator.hpp.
WALKS = (0, 1, 2, 3)
FEATURES, TREES, DEPTH = 24, 100, 6
SHIPPED = HERE.parents[1] / "python" / "cudasched" / "predictor" / "models" / "sm_90.ubj"
#: Takes a batch's rows and returns ns a row.
Timer = Callable[[Any], float]
#: What it is, which instructions it uses, and its timer.
Engine = tuple[PredictorEngine, str, Timer]


def build(session: Session) -> ctypes.CDLL:
    """Compiles speed.cpp with the evaluator, for baseline x86-64 as the product is; for a rehearsal quickly."""
    sources = sorted((CSRC / "predict").rglob("*.cpp")) + sorted((CSRC / "base").glob("*.cpp"))
    made, options = session.builds / "speed.so", ("-shared", "-fPIC")
    library = compile_cpp(made, HERE / "speed.cpp", *sources, options=options, quickly=session.rehearsal)
    loaded = ctypes.CDLL(str(library))
    loaded.open_evaluator.restype = ctypes.c_void_p
    loaded.evaluator_isa.restype = ctypes.c_char_p
    loaded.open_predictor.restype = ctypes.c_void_p
    for name in ("time_evaluator", "time_xgboost", "time_gtil", "time_compiled", "time_hit", "time_cold", "time_four"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def evaluators(library: ctypes.CDLL, model: Path) -> list[ctypes.c_void_p]:
    """Of a model, by all instructions that the processor has, the best ones last.

    Raises:
        HarnessError: The model cannot be read, or its features are not those of launches.
    """
    opened = [one for walk in WALKS if (one := library.open_evaluator(str(model).encode(), walk)) is not None]
    if not opened:
        raise HarnessError(f"{model} cannot be walked")
    return [ctypes.c_void_p(one) for one in opened]


def pointer(array: Any) -> ctypes.c_void_p:
    """Where a numpy array's values are."""
    return ctypes.c_void_p(array.ctypes.data)


class Bench:
    """The model, the rows, and the engines that are to be had."""

    def __init__(self, session: Session) -> None:
        try:
            np, xgboost = import_module("numpy"), import_module("xgboost")
        except ImportError as error:
            raise HarnessError(f"{error}: pip install numpy xgboost-cpu") from error
        rows = 16 * session.options.batch
        self.directory = directory = session.builds
        self.library = build(session)
        self.xgboost = xgboost
        random = np.random.default_rng(1)
        x = random.normal(size=(20_000, FEATURES)).astype(np.float32)
        y = 10 + 2 * x[:, 0] + np.sin(3 * x[:, 1]) + x[:, 2] * x[:, 3] + 0.3 * np.abs(x[:, 4:]).sum(axis=1)
        parameters = {"max_depth": DEPTH, "eta": 0.1, "max_bin": 255, "nthread": 1}
        self.booster = xgboost.train(parameters, xgboost.DMatrix(x, y.astype("float32")), TREES)
        self.path = directory / "model.ubj"
        self.booster.save_model(self.path)
        self.rows = random.normal(size=(rows, FEATURES)).astype(np.float32)
        self.out = np.zeros(rows, dtype=np.float32)
        self.margins = self.booster.inplace_predict(self.rows, predict_type="margin")

    def engines(self) -> list[Engine]:
        """Those that are installed and that the processor can run."""
        found = self._cudasched()
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
        for evaluator in evaluators(self.library, self.path):
            isa = self.library.evaluator_isa(evaluator).decode()
            found.append(("cudasched", isa, self._compiled_timer(self.library.time_evaluator, evaluator)))
            found[-1][2](self.rows)
            if self.out.tobytes() != self.margins.tobytes():
                raise HarnessError(f"{isa}: the margins are not XGBoost's")
        return found

    def _compiled_timer(self, timer: Any, *arguments: Any) -> Timer:
        def run(rows: Any) -> float:
            shape = ctypes.c_size_t(len(rows)), ctypes.c_size_t(FEATURES)
            return float(timer(*arguments, pointer(rows), *shape, pointer(self.out)))

        return run

    def _checked(self, engine: PredictorEngine, isa: str, timer: Timer) -> Engine:
        self.out[:] = 0
        timer(self.rows)
        if abs(self.out - self.margins).max() > 1e-3:
            raise HarnessError("its margins are not XGBoost's")
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
        onnxruntime = import_module("onnxruntime")
        tensor = import_module("onnxmltools.convert.common.data_types").FloatTensorType([None, FEATURES])
        converted = import_module("onnxmltools").convert_xgboost(self.booster, initial_types=[("x", tensor)])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        name = session.get_inputs()[0].name
        timer = self._python_timer(lambda row: session.run(None, {name: row})[0][0, 0])
        return self._checked("onnxruntime", "python", timer)

    def _treelite(self) -> Engine:
        treelite, gtil = import_module("treelite"), import_module("treelite.gtil.gtil")
        model = treelite.frontend.load_xgboost_model(self.path, format_choice="ubjson")
        config = gtil.GTILConfig(nthread=1, predict_type="raw")
        predict = ctypes.cast(import_module("treelite.core")._LIB.TreeliteGTILPredict, ctypes.c_void_p)
        timer = self._compiled_timer(self.library.time_gtil, predict, model.handle, config.handle)
        self._alive = model, config
        return self._checked("treelite", "c", timer)

    def _tl2cgen(self) -> Engine:
        tl2cgen, treelite = import_module("tl2cgen"), import_module("treelite")
        model = treelite.frontend.load_xgboost_model(self.path, format_choice="ubjson")
        generated = self.directory / "generated"
        tl2cgen.generate_c_code(model, dirpath=generated, params={}, verbose=False)
        library = self.directory / "compiled.so"
        compile_c(library, *sorted(generated.glob("*.c")), options=("-shared", "-fPIC", "-O3"))
        predict = ctypes.cast(ctypes.CDLL(str(library)).predict, ctypes.c_void_p)
        return self._checked("tl2cgen", "c", self._compiled_timer(self.library.time_compiled, predict))


def cpu_name() -> str:
    """The processor's name, family and model, as the system tells them."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return f"{found.get('model name', 'unknown')}, family {found.get('cpu family')} model {found.get('model')}"


def measure(session: Session) -> None:
    """A row an engine; slow engines get fewer rows a turn, so that no turn lasts long."""
    bench, rounds, batch = Bench(session), session.options.rounds, session.options.batch
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
    rows: list[PredictorSpeedRow] = [
        PredictorSpeedRow(engine=engine, ns_per_row_median=round(statistics.median(took), 1), isa=isa, cpu=cpu)
        for (engine, isa, _), took in zip(engines, values, strict=True)
    ]
    merge(session.out, session.meta, rows)
    print(cpu)
    for row in rows:
        print(f"{row.engine:16} {row.isa:12} {row.ns_per_row_median:10.1f} ns")


def costs(session: Session) -> Found:
    """What a prediction of a model costs, over so many batches of 512 launches.

    Raises:
        HarnessError: The model cannot be read, or its features are not those of launches.
    """
    library, model, rounds = build(session), session.options.model, session.options.rounds
    evaluator = evaluators(library, model)[-1]
    isa = library.evaluator_isa(evaluator).decode()
    asked = ctypes.c_void_p(library.open_predictor(evaluator))
    found: Found = {}
    # Hits first: misses fill the cache.
    timers = {"hit_ns": library.time_hit, "miss_ns": library.time_cold, "four_predictions_ns": library.time_four}
    for name, timer in timers.items():
        took = sorted(float(timer(asked)) for _ in range(rounds))
        if took[0] < 0:
            raise HarnessError(f"{name}: a launch that should be known was not, or the other way round")
        session.say(f"{name}: {took[0]:.1f} ns, median {statistics.median(took):.1f} ({isa}, {cpu_name()})")
        session.limits[name] = f"{cpu_name()}, {isa}"
        least = round(took[0], 1)
        found[name] = least, least, round(statistics.median(took), 1), rounds * 512
    return found


SPEED = Benchmark(
    about="ns of a prediction, beside other evaluators of the same trees",
    groups={"speed": measure},
    results="predictor",
    settings={"rounds": (200, 1), "batch": (512, 32)},
    gpu=False,
)
COSTS = Benchmark(
    about="the cost of a prediction of the shipped model",
    groups={"costs": costs},
    goals={"miss_ns": (400.0, "less"), "hit_ns": (30.0, "less"), "four_predictions_ns": (1000.0, "less")},
    settings={"rounds": (2000, 10), "model": SHIPPED},
    gpu=False,
)
