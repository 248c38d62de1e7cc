"""How well the predictor does on launches that it has not seen, beside four baselines; figures, plots and results.

    python -m training.evaluate --data training/data/h200.parquet --programs training/data/h200_programs.parquet \
        --model model/ --out benchmarks/results/predictor.json --plots docs/images

Sweeps. `new_shape`: five folds over shape groups, tested on the launches of known kernels whose like training has not
seen. `unseen_kernel`: five folds over kernel groups. `repeat`: launches of the second recording whose like is in the
first. For each fold the trees are trained anew, by the model's recipe, without what they are tested on. Plain rows are
trees alone. Corrected rows are what the predictor says on line (`_core.Replay`, with those trees): it has seen the
launches before, in launch order, and learned from those that it would have timed, also of the same kernel. Of new
shapes and unseen kernels each key's first launch is tested, by all models.

Programs are not in the training data at all: the shipped model answers. The bound's coverage is counted on their
launches after the first 1,000 of each, pooled, by decile of the predicted duration; intervals are from resampling keys.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.baselines import BASELINES
from training.data import Codes, Floats, Launches, Mask, launches_of, replay_columns, sm_count_of, split, table_of
from training.train import Recipe, fit, percentage_errors, predict

SPLITS = {"repeat": "processes", "new_shape": "shapes", "unseen_kernel": "kernels"}
TARGETS = {"repeat": 0.03, "new_shape": 0.08, "unseen_kernel": 0.30}
FOLDS = 5
#: Launches of a program after which its coverage counts.
WARM_UP = 1000
COVERAGE = 0.9
RESAMPLES = 200
#: Keys after which their second recording is shown to the predictor; it keeps 8192.
BLOCK_KEYS = 2000
#: A family with fewer tested launches gets no row of its own.
LEAST_ROWS = 200


class Tested:
    """What was predicted for launches that were held out."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.predicted: dict[tuple[str, str], Floats] = {}

    def put(self, split_name: str, model: str, where: Mask, values: Floats) -> None:
        """Sets predictions of the launches at `where`; NaN stays where nothing was held out."""
        target = self.predicted.setdefault((split_name, model), np.full(len(self.launches), np.nan))
        target[where] = values

    def errors(self, split_name: str, model: str, where: Mask | None = None) -> Floats:
        """Absolute percentage errors, as fractions, of what was predicted."""
        values = self.predicted[split_name, model]
        known = ~np.isnan(values) if where is None else ~np.isnan(values) & where
        return percentage_errors(values[known], self.launches.duration_ns[known])


def replay(table: pa.Table, model: str, coverage: float = COVERAGE) -> dict[str, Any]:
    """What the predictor says of each launch, on line, in the table's order."""
    from cudasched import hook

    core = hook.load_core()
    found: dict[str, Any] = core.Replay(model, coverage).run(replay_columns(table), sm_count_of(table))
    return found


def first_of(keys: Codes) -> Mask:
    """The first launch of each key."""
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def alternating(launches: Launches) -> Codes:
    """An order in which the second recording of some hundred shapes follows their first.

    The predictor keeps the keys that one program uses, not all that the sweeps have.
    """
    held = np.isin(launches.shape_group, launches.shape_group[launches.again])
    index = np.flatnonzero(held)
    keys_so_far = np.cumsum(first_of(launches.key[index]))
    block_of = np.zeros(int(launches.shape_group.max()) + 1, np.int64)
    block_of[launches.shape_group[index][::-1]] = (keys_so_far // BLOCK_KEYS)[::-1]
    return index[np.lexsort((index, launches.again[index], block_of[launches.shape_group[index]]))]


def hold_out(table: pa.Table, launches: Launches, names: Sequence[str], recipe: Recipe, threads: int) -> Tested:
    """Predictions for the three splits by trees, by the predictor on line, and by the baselines."""
    tested = Tested(launches)
    first = first_of(launches.key)
    for split_name, kind in SPLITS.items():
        for fold in range(1 if kind == "processes" else FOLDS):
            train_mask, test_mask = split(launches, kind, fold, FOLDS)
            if kind != "processes":
                test_mask &= first  # each new launch once, and before the predictor has learned from its like
            train, test = launches.take(train_mask), launches.take(test_mask)
            booster = fit(train, names, recipe, threads)
            tested.put(split_name, "ours", test_mask, predict(booster, test))
            order = alternating(launches) if kind == "processes" else np.arange(len(launches))
            with tempfile.TemporaryDirectory() as directory:
                path = str(Path(directory) / "fold.ubj")
                booster.save_model(path)
                said = replay(table if kind != "processes" else table.take(pa.array(order)), path)
            online = np.full(len(launches), np.nan)
            online[order] = said["predicted_ns"]
            tested.put(split_name, "ours corrected", test_mask, online[test_mask])
            for name, baseline in BASELINES.items():
                tested.put(split_name, name, test_mask, baseline(train, test))
            line = f"{split_name} {fold + 1}: {test_mask.sum()} launches"
            for model in ("ours", "ours corrected", *BASELINES):
                line += f", {model} {np.median(tested.errors(split_name, model, test_mask)):.1%}"
            print(line, flush=True)
    return tested


def accuracy_rows(tested: Tested) -> list[dict[str, Any]]:
    """Rows of kind accuracy: all together, and by operation family."""
    rows: list[dict[str, Any]] = []
    scopes: list[tuple[str, Mask | None]] = [("all", None)]
    scopes += [(name, tested.launches.family == i) for i, name in enumerate(tested.launches.families)]
    for split_name, model in tested.predicted:
        for scope, where in scopes:
            errors = tested.errors(split_name, model, where)
            if len(errors) == 0 or (where is not None and len(errors) < LEAST_ROWS):
                continue
            rows.append(
                {
                    "kind": "accuracy",
                    "split": split_name,
                    "model": model.split(" ")[0],
                    "mdape": float(np.median(errors)),
                    "mape": float(np.mean(errors)),
                    "scope": scope,
                    "corrected": model.endswith(" corrected"),
                    "n": len(errors),
                }
            )
    return rows


def program_of(table: pa.Table) -> list[str]:
    """The program of each launch: what its process's labels say, also of the launches before the first."""
    labels, pids = table["label"].cast(pa.string()).to_pylist(), table["pid"].to_pylist()
    found = {pid: text.split("|")[0].removeprefix("program:") for text, pid in zip(labels, pids, strict=True)}
    return [found[pid] for pid in pids]


class Programs:
    """What the shipped model and the predictor on line say of whole programs, each run by a predictor of its own."""

    def __init__(self, path: Path, model: str) -> None:
        from cudasched.predictor import Model

        trees = Model(model)
        table = table_of(path)
        names = np.asarray(program_of(table))
        self.names = [str(name) for name in dict.fromkeys(names.tolist())]
        self.labels: list[str] = []
        parts = []
        for name in self.names:
            part = table.filter(pa.array(names == name))
            said = replay(part, model)
            self.labels += part["label"].cast(pa.string()).to_pylist()
            parts.append(
                {
                    "program": np.full(len(part), self.names.index(name)),
                    "position": np.arange(len(part)),
                    "duration": part["duration_ns"].to_numpy().astype(np.float64),
                    "predicted": said["predicted_ns"].astype(np.float64),
                    "bound": said["bound_ns"].astype(np.float64),
                    "plain": trees.predict(part),
                    "key": said["key"] ^ np.uint64(len(parts)),
                    "hit": said["hit"],
                    "cold": said["cold"],
                    "identity": part["identity"].to_numpy(),
                }
            )
        self.columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def coverage(self) -> list[dict[str, Any]]:
        """Rows of kind coverage, by decile of predicted duration; `low` and `high` are a 95% interval."""
        chosen = self.columns["position"] >= WARM_UP
        predicted = self.columns["predicted"][chosen]
        inside = self.columns["duration"][chosen] <= self.columns["bound"][chosen]
        keys = np.unique(self.columns["key"][chosen], return_inverse=True)[1]
        # Ties of the predicted duration go to deciles in launch order, so that all are of one size.
        decile = np.empty(len(predicted), np.int64)
        decile[np.argsort(predicted, kind="stable")] = np.arange(len(predicted)) * 10 // len(predicted)
        rows = []
        for number in range(10):
            mine = decile == number
            low, high = interval(inside[mine], keys[mine])
            rows.append(
                {
                    "kind": "coverage",
                    "decile": number + 1,
                    "coverage": float(inside[mine].mean()),
                    "n": int(mine.sum()),
                    "low": low,
                    "high": high,
                }
            )
        return rows

    def accuracy(self, known: set[int]) -> list[dict[str, Any]]:
        """By program: errors on repeats, new shapes of kernels in `known` (identities), and unseen kernels."""
        errors = percentage_errors(self.columns["predicted"], self.columns["duration"])
        plain = percentage_errors(self.columns["plain"], self.columns["duration"])
        seen = np.isin(self.columns["identity"], np.fromiter(known, np.uint64, len(known)))
        first = first_of(np.unique(self.columns["key"], return_inverse=True)[1])
        rows = []
        for number, name in enumerate(self.names):
            mine = self.columns["program"] == number
            for split_name, where in (
                ("repeat", ~first),
                ("new_shape", first & seen),
                ("unseen_kernel", first & ~seen),
            ):
                chosen = mine & where
                if chosen.any():
                    rows.append(
                        {
                            "program": name,
                            "split": split_name,
                            "corrected": float(np.median(errors[chosen])),
                            "trees": float(np.median(plain[chosen])),
                            "n": int(chosen.sum()),
                        }
                    )
        return rows

    def hits_of_step(self, prefix: str) -> float | None:
        """Share of launches under labels that begin so which the cache knew; None where there are none."""
        mine = np.array([label.startswith(prefix) for label in self.labels])
        return float(self.columns["hit"][mine].mean()) if mine.any() else None


def interval(inside: Mask, keys: Codes) -> tuple[float, float]:
    """95% interval of a share, from resampling keys, whose launches go together."""
    random = np.random.default_rng(1)
    numbers = np.unique(keys, return_inverse=True)[1]
    counts = np.bincount(numbers).astype(np.float64)
    hits = np.bincount(numbers, inside).astype(np.float64)
    shares = []
    for _ in range(RESAMPLES):
        drawn = random.integers(len(counts), size=len(counts))
        shares.append(hits[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(shares, (0.025, 0.975))
    return float(low), float(high)


# ---- what is shown --------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]], out: Callable[[str], None] = print) -> None:
    """The tables, as text."""
    models = list(dict.fromkeys((row["model"], row["corrected"]) for row in rows))
    titles = [f"{model}{' +' if corrected else ''}" for model, corrected in models]
    for split_name in SPLITS:
        mine = [row for row in rows if row["split"] == split_name]
        if not mine:
            continue
        out(f"\n{split_name}: median absolute percentage error (target {TARGETS[split_name]:.0%}); ours + is corrected")
        out(f"{'':16}{'launches':>10}" + "".join(f"{title:>10}" for title in titles))
        for scope in dict.fromkeys(row["scope"] for row in mine):
            here = {(row["model"], row["corrected"]): row for row in mine if row["scope"] == scope}
            cells = [f"{here[model]['mdape']:>10.1%}" if model in here else f"{'':>10}" for model in models]
            out(f"{scope:16}{max(row['n'] for row in here.values()):>10}" + "".join(cells))


def show_deciles(tested: Tested, out: Callable[[str], None] = print) -> None:
    """Errors by decile of the measured duration."""
    edges = np.quantile(tested.launches.duration_ns, np.linspace(0, 1, 11)[1:-1])
    decile = np.searchsorted(edges, tested.launches.duration_ns)
    for split_name in SPLITS:
        out(f"\n{split_name}: median absolute percentage error by decile of the duration, trees alone and corrected")
        for model in ("ours", "ours corrected"):
            if (split_name, model) in tested.predicted:
                errors = [tested.errors(split_name, model, decile == i) for i in range(10)]
                out(f"{model:16}" + "".join(f"{np.median(e):>8.1%}" if len(e) else f"{'':>8}" for e in errors))


def plot_scatter(tested: Tested, path: Path) -> None:
    """Predicted against measured, a panel a split."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True)
    for axis, split_name in zip(axes, SPLITS, strict=True):
        model = "ours corrected" if split_name == "repeat" else "ours"
        values = tested.predicted[split_name, model]
        known = ~np.isnan(values)
        measured = tested.launches.duration_ns[known] / 1e3
        axis.hexbin(measured, values[known] / 1e3, gridsize=60, xscale="log", yscale="log", bins="log", mincnt=1)
        ends = [float(measured.min()), float(measured.max())]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        median = np.median(tested.errors(split_name, model))
        axis.set_title(
            f"{split_name.replace('_', ' ')}: {median:.1%}" + (" (corrected)" if " " in model else " (trees)")
        )
        axis.set_xlabel("measured, us")
    axes[0].set_ylabel("predicted, us")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plot_errors(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Errors of ours and of the baselines, by split."""
    plt = pyplot()
    models = list(dict.fromkeys((row["model"], row["corrected"]) for row in rows))
    figure, axis = plt.subplots(figsize=(8, 4))
    for place, (model, corrected) in enumerate(models):
        bars = []
        for split_name in SPLITS:
            found = [
                row["mdape"]
                for row in rows
                if (row["model"], row["corrected"], row["scope"], row["split"]) == (model, corrected, "all", split_name)
            ]
            bars.append(100 * found[0] if found else np.nan)
        where = np.arange(len(SPLITS)) + 0.8 * (place / len(models) - 0.5)
        axis.bar(where, bars, 0.8 / len(models), label=f"{model}{', corrected' if corrected else ''}", align="edge")
    for number, target in enumerate(TARGETS.values()):
        axis.hlines(100 * target, number - 0.4, number + 0.4, color="black", linewidth=1)
    axis.set_xticks(range(len(SPLITS)), [name.replace("_", " ") for name in SPLITS])
    axis.set_ylabel("median absolute error, %")
    axis.set_yscale("log")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plot_coverage(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Coverage of the bound by decile, with intervals."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.5))
    shares = np.array([100 * row["coverage"] for row in rows])
    spread = np.array([[100 * (row["coverage"] - row["low"]), 100 * (row["high"] - row["coverage"])] for row in rows]).T
    axis.axhspan(88, 92, color="lightgrey")
    axis.errorbar([row["decile"] for row in rows], shares, np.maximum(spread, 0), fmt="o", capsize=3)
    axis.set_xlabel("decile of predicted duration")
    axis.set_ylabel("launches within the bound, %")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def evaluate(
    data: Path, programs: Path | None, model: Path, plots: Path | None, threads: int = 2
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Evaluates, prints, plots; returns rows for the results file, and the rest of the figures."""
    from cudasched.predictor._recording import feature_names

    report = json.loads((model / "report.json").read_text())
    table = table_of(data)
    launches = launches_of(table)
    tested = hold_out(table, launches, feature_names(), Recipe(**report["recipe"]), threads)
    rows = accuracy_rows(tested)
    show(rows)
    show_deciles(tested)
    figures: dict[str, Any] = {}
    coverage: list[dict[str, Any]] = []
    if programs:
        found = Programs(programs, str(model / "model.ubj"))
        coverage = found.coverage()
        figures["programs"] = found.accuracy(set(pc.unique(table["identity"]).to_pylist()))
        figures["second_iteration_hits"] = found.hits_of_step("program:resnet50_train|b64 step1|")
        print(f"\nbound of {COVERAGE:.0%}: launches within it, by decile of predicted duration")
        for row in coverage:
            print(f"{row['decile']:>3}{row['coverage']:>8.1%}  [{row['low']:.1%}, {row['high']:.1%}]{row['n']:>8}")
        print("\nprograms, the shipped model: median absolute percentage error")
        for row in figures["programs"]:
            errors = f"{row['trees']:>9.1%} trees{row['corrected']:>9.1%} corrected"
            print(f"{row['program']:20}{row['split']:16}{row['n']:>8}{errors}")
        print(f"cache hits of the second iteration of ResNet-50: {figures['second_iteration_hits']}")
    if plots:
        plots.mkdir(parents=True, exist_ok=True)
        plot_scatter(tested, plots / "predictor_scatter.png")
        plot_errors(rows, plots / "predictor_errors.png")
        if coverage:
            plot_coverage(coverage, plots / "predictor_coverage.png")
    return rows + coverage, figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the sweeps")
    parser.add_argument("--programs", type=Path, help="the programs that training never saw")
    parser.add_argument("--model", type=Path, required=True, help="what training.train wrote")
    parser.add_argument("--out", type=Path, help="a results file; its rows of other kinds stay")
    parser.add_argument("--plots", type=Path, help="a directory for plots")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="xgboost")
    programs: Path | None = options.programs
    rows, figures = evaluate(options.data, programs, options.model, options.plots, options.threads)
    (options.model / "evaluation.json").write_text(json.dumps({"rows": rows, **figures}, indent=1) + "\n")
    if options.out:
        command = f"python -m training.evaluate --data {options.data.name} --model model/ --out {options.out.name}"
        write_results(options.out, rows, options.data, command + (f" --programs {programs.name}" if programs else ""))
    return 0


def write_results(path: Path, rows: Sequence[dict[str, Any]], data: Path, command: str) -> None:
    """Puts the rows into a results file in the common form; rows of the same kinds that it has are replaced."""
    from pydantic import TypeAdapter

    from benchmarks.meta import current_commit
    from benchmarks.results.schema import Meta, PredictorRow, merge

    table = table_of(data)
    recorded = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    clock = pc.approximate_median(table.filter(pc.greater(table["sm_clock_mhz"], 0))["sm_clock_mhz"]).as_py()
    version = int(recorded.get("cudasched.driver_version") or 0)
    meta = Meta(
        gpu=recorded["cudasched.gpu"],
        driver=None,
        cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        torch=recorded.get("training.torch"),
        python=recorded.get("training.python", sys.version.split()[0]),
        commit=current_commit(),
        date=recorded.get("training.date", ""),
        sm_clock_mhz=int(clock) if clock else None,
        command=command,
    )
    merge(path, meta, TypeAdapter(list[PredictorRow]).validate_python(rows))


if __name__ == "__main__":
    sys.exit(main())
