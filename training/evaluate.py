"""How well the predictor does on launches that it has not seen, beside four baselines; figures, plots and results.

    python -m training.evaluate --data training/data/h200.parquet --programs training/data/h200_programs.parquet \
        --model model/ --out benchmarks/results/predictor.json --plots docs/images

Sweeps. `new_shape`: five folds over shape groups, tested on the launches of known kernels whose like training has not
seen. `unseen_kernel`: five folds over name families. `repeat`: launches of the second recording whose like is in the
first. For each fold the trees are trained anew, by the model's recipe, without what they are tested on. Plain rows are
trees alone. Corrected rows are what the predictor says as it runs (`training.production`), with those trees, a
predictor for each process and family of operations. Of new shapes and unseen kernels each key's first launch is tested,
by all models; what the predictor took for a launch that it knows is no first launch, and counts in no corrected row.

Programs are not in the training data at all: the shipped model answers. `repeat` are their launches that the predictor
knew, `new_shape` those that it did not, of kernels that training has, `unseen_kernel` those of other kernels, `program`
all. The bound's coverage is counted on their launches after the first 1,000 of each, pooled, by decile of the predicted
duration. All intervals are from resampling groups (`training.measures`).

What the scheduler measures of a launch is drawn from what events were measured to add (`training.production`). Programs
of other libraries (`--libraries`, recorded by CUPTI and by events at once) are learned from by their own events, too,
where a busy GPU had the launch in its queue: rows whose scope ends in "recorded events". Of launches that it waited for
nothing is learned there, since CUPTI's part of the launch call is between their events.

Parts of the GPU (`--sm-counts`, recorded by `training.record`) stand for smaller GPUs of its kind. Trees of the sweeps,
which ran on the whole GPU, and trees that have some counts of multiprocessors besides, are tested on the other counts,
alone and as they are corrected on line: rows whose scope is `sm_count:64`, the split `new_shape` where training had
other counts, else `program`. Trees over log(time / roofline) (`training.roofline`) stand beside them.

A recording without labels, or of one process, lacks some of the splits: they are left out, and that is said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from training.baselines import BASELINES
from training.command import InputError, carry_out, report_of
from training.data import Codes, Floats, Launches, Mask, demangle, launches_of, name_family_of, split, table_of
from training.measures import BINS, SPLITS, Errors, bins_of, errors_of, share_interval
from training.production import COVERAGE, events_of, recorded_events_of, replay, replay_parts
from training.roofline import roofline_ns
from training.shown import plot_coverage, plot_errors, plot_scatter, show, show_deciles
from training.train import Recipe, fit, fit_parts, percentage_errors, predict

FOLDS = 5
#: Launches of a program after which its coverage counts.
WARM_UP = 1000
#: Keys after which their second recording is shown to the predictor; it keeps 8192.
BLOCK_KEYS = 2000
#: Programs of libraries that the sweeps have nothing of.
OTHER_LIBRARIES = ("cupy_arrays", "numba_kernels", "triton_tutorials")
#: Counts of multiprocessors that are tested on, of those that `training.sm_counts` records.
TESTED_COUNTS = (32, 64, 112)
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

    def known(self, split_name: str, model: str, where: Mask | None = None) -> Mask:
        """Which launches have a prediction."""
        there = ~np.isnan(self.predicted[split_name, model])
        return there if where is None else there & where

    def errors(self, split_name: str, model: str, where: Mask | None = None) -> Floats:
        """Absolute percentage errors, as fractions, of what was predicted."""
        known = self.known(split_name, model, where)
        return percentage_errors(self.predicted[split_name, model][known], self.launches.duration_ns[known])

    def judged(self, split_name: str, model: str, where: Mask | None = None) -> Errors:
        """The same with all that is told of errors; groups are shapes, or name families where these are held out."""
        known = self.known(split_name, model, where)
        groups = self.launches.group if split_name == "unseen_kernel" else self.launches.shape_group
        return errors_of(self.predicted[split_name, model][known], self.launches.duration_ns[known], groups[known])


def first_of(keys: Codes) -> Mask:
    """The first launch of each key."""
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def alternating(launches: Launches) -> tuple[Codes, Codes]:
    """An order in which the second recording of some hundred shapes follows their first, and a part for each launch.

    The predictor keeps the keys that one program uses, not all that the sweeps have: each part is one program.
    """
    held = np.isin(launches.shape_group, launches.shape_group[launches.again])
    index = np.flatnonzero(held)
    keys_so_far = np.cumsum(first_of(launches.key[index]))
    block_of = np.zeros(int(launches.shape_group.max()) + 1, np.int64)
    block_of[launches.shape_group[index][::-1]] = (keys_so_far // BLOCK_KEYS)[::-1]
    order = index[np.lexsort((index, launches.again[index], block_of[launches.shape_group[index]]))]
    return order, block_of[launches.shape_group]


def hold_out(
    table: pa.Table,
    launches: Launches,
    names: Sequence[str],
    recipe: Recipe,
    threads: int,
    baselines: Sequence[str] = tuple(BASELINES),
    out: Callable[[str], None] = print,
) -> Tested:
    """Predictions for the three splits by trees, by the predictor on line, and by the baselines."""
    tested = Tested(launches)
    first = first_of(launches.key)
    for split_name, kind in SPLITS.items():
        for fold in range(1 if kind == "processes" else FOLDS):
            try:
                train_mask, test_mask = split(launches, kind, fold, FOLDS)
            except ValueError as error:
                out(f"{split_name} {fold + 1}: not judged: {error}")
                continue
            if kind == "processes":
                order, part = alternating(launches)
            else:
                test_mask &= first  # each new launch once, and before the predictor has learned from its like
                order = np.arange(len(launches))
                part = launches.process * (int(launches.family.max()) + 1) + launches.family
                # Parts without a tested launch say nothing.
                order = order[np.isin(part, part[test_mask])]
            train, test = launches.take(train_mask), launches.take(test_mask)
            booster = fit(train, names, recipe, threads)
            tested.put(split_name, "ours", test_mask, predict(booster, test))
            with tempfile.TemporaryDirectory() as directory:
                path = str(Path(directory) / "fold.ubj")
                booster.save_model(path)
                said = replay_parts(table, path, part, order)
            # Of repeats hits are judged, of all others misses: what the scheduler knew and what it did not.
            wanted = test_mask & (said["hit"] if kind == "processes" else ~said["hit"])
            tested.put(split_name, "ours corrected", wanted, said["predicted_ns"][wanted])
            for name in baselines:
                tested.put(split_name, name, test_mask, BASELINES[name](train, test))
            line = f"{split_name} {fold + 1}: {test_mask.sum()} launches, {wanted.sum()} judged on line"
            for model in ("ours", "ours corrected", *baselines):
                line += f", {model} {np.median(tested.errors(split_name, model, test_mask)):.1%}"
            out(line)
    return tested


def accuracy_rows(tested: Tested) -> list[dict[str, Any]]:
    """Rows of kind accuracy: all together, by operation family and by duration."""
    rows: list[dict[str, Any]] = []
    scopes: list[tuple[str, Mask | None]] = [("all", None)]
    scopes += [(name, tested.launches.family == i) for i, name in enumerate(tested.launches.families)]
    scopes += list(bins_of(tested.launches.duration_ns).items())
    for split_name, model in tested.predicted:
        for scope, where in scopes:
            n = int(tested.known(split_name, model, where).sum())
            if n == 0 or (where is not None and n < LEAST_ROWS):
                continue
            rows.append(
                tested.judged(split_name, model, where).row(
                    split=split_name,
                    model=model.split(" ")[0],
                    scope=scope,
                    corrected=model.endswith(" corrected"),
                )
            )
    return rows


def program_of(table: pa.Table) -> list[str]:
    """The program of each launch: what its process's labels say, also of the launches before the first."""
    labels, pids = table["label"].cast(pa.string()).to_pylist(), table["pid"].to_pylist()
    found = {pid: text.split("|")[0].removeprefix("program:") for text, pid in zip(labels, pids, strict=True)}
    return [found[pid] or str(pid) for pid in pids]


class Programs:
    """What the shipped model and the predictor on line say of whole programs, each run by a predictor of its own."""

    def __init__(
        self, path: Path, model: str, events: Callable[[pa.Table], dict[str, NDArray[np.int64]]] = events_of
    ) -> None:
        """Replays the recording.

        Args:
            path: A recording of programs.
            model: The trees.
            events: What events give of launches.
        """
        from cudasched.predictor import Model

        trees = Model(model)
        table = table_of(path)
        names = np.asarray(program_of(table))
        self.names = [str(name) for name in dict.fromkeys(names.tolist())]
        self.labels: list[str] = []
        self.functions: list[str] = []
        parts = []
        for name in self.names:
            part = table.filter(pa.array(names == name))
            took = part["duration_ns"].to_numpy().astype(np.float64)
            said = replay(part, model, events=events(part))
            self.labels += part["label"].cast(pa.string()).to_pylist()
            self.functions += part["function"].cast(pa.string()).to_pylist()
            parts.append(
                {
                    "program": np.full(len(part), self.names.index(name)),
                    "position": np.arange(len(part)),
                    "duration": took,
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
        """Rows of kind coverage, by decile of predicted duration; `low` and `high` are a 95% interval.

        None where fewer than ten launches are left after each program's first ones.
        """
        chosen = self.columns["position"] >= WARM_UP
        if chosen.sum() < 10:
            return []
        predicted = self.columns["predicted"][chosen]
        inside = self.columns["duration"][chosen] <= self.columns["bound"][chosen]
        keys = np.unique(self.columns["key"][chosen], return_inverse=True)[1]
        # Ties of the predicted duration go to deciles in launch order, so that all are of one size.
        decile = np.empty(len(predicted), np.int64)
        decile[np.argsort(predicted, kind="stable")] = np.arange(len(predicted)) * 10 // len(predicted)
        rows = []
        for number in range(10):
            mine = decile == number
            low, high = share_interval(inside[mine], keys[mine])
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

    def splits(self, known: set[int]) -> dict[str, Mask]:
        """The launches of each split; `known` are the identities of the kernels that training has."""
        seen = np.isin(self.columns["identity"], np.fromiter(known, np.uint64, len(known)))
        hit = self.columns["hit"]
        return {
            "program": np.ones(len(hit), bool),
            "repeat": hit,
            "new_shape": ~hit & seen,
            "unseen_kernel": ~hit & ~seen,
        }

    def judged(self, where: Mask, of: str = "predicted") -> Errors:
        """Errors of some launches; groups are programs, or keys where there is one program."""
        program = self.columns["program"][where]
        groups = (
            program if len(np.unique(program)) > 1 else np.unique(self.columns["key"][where], return_inverse=True)[1]
        )
        return errors_of(self.columns[of][where], self.columns["duration"][where], groups)

    def accuracy(self, known: set[int]) -> list[dict[str, Any]]:
        """Rows of kind accuracy, whose scopes are programs, all programs, and of these the ranges of durations."""
        rows = []
        scopes = {f"program:{name}": self.columns["program"] == i for i, name in enumerate(self.names)}
        scopes["program:all"] = np.ones(len(self.columns["program"]), bool)
        scopes |= {f"program:all {name}": mask for name, mask in bins_of(self.columns["duration"]).items()}
        for split_name, mine in self.splits(known).items():
            for scope, there in scopes.items():
                where = mine & there
                if not where.any():
                    continue
                for of in ("predicted", "plain"):
                    about = {"split": split_name, "model": "ours", "scope": scope, "corrected": of == "predicted"}
                    rows.append(self.judged(where, of).row(**about))
        return rows

    def judged_by_kernel(self, where: Mask) -> Errors:
        """Errors of some launches; groups are kernels, since first launches of one are alike."""
        return errors_of(
            self.columns["predicted"][where],
            self.columns["duration"][where],
            np.unique(self.columns["identity"][where], return_inverse=True)[1],
        )

    def hits_of_step(self, prefix: str) -> float | None:
        """Share of launches under labels that begin so which the cache knew; None where there are none."""
        mine = np.array([label.startswith(prefix) for label in self.labels])
        return float(self.columns["hit"][mine].mean()) if mine.any() else None

    def first_launches(self, names: Sequence[str]) -> Mask:
        """What the predictor did not know of these programs."""
        wanted = [number for number, name in enumerate(self.names) if name in names]
        return ~self.columns["hit"] & np.isin(self.columns["program"], wanted)

    def unseen_families(self, known: set[str]) -> int:
        """How many name families the programs have that training has not."""
        return len({name_family_of(demangle(name)) for name in set(self.functions)} - known)


# ---- the promised figures -------------------------------------------------------------------------------------------

#: What keeps a figure from its goal, where it misses it.
LIMITED_BY = {
    "repeat": "what two events add to a launch varies by 0.15 us, in the GPU's queue by 0.4",
    "repeat_under_2us": "what two events add to a launch varies by a tenth and more of such a launch",
    "new_shape_misses": "128 trees of depth 7, which is what a launch has time for, and few shapes of convolution, "
    "attention and pooling in the recording",
    "unseen_family": "few name families in the recording: what a kernel of another source does is not in its launch",
    "program_time_weighted": "first launches of new shapes: 7% of the time, predicted at a fifth off",
    "program_bias": "first launches over 100 us",
    "over_100us": "few recorded launches over 100 us, and kernels whose work depends on data or on loops that their "
    "parameters do not show",
    "other_libraries_first": "kernels whose work is in their code, of which nothing is known before the first launch",
    "other_libraries_first_recorded": "half of these launches and more the GPU had to wait for: nothing is learned of "
    "them",
    "coverage_least": "what events vary by is taken off the scores by a share that was chosen on the sweeps",
    "coverage_most": "in the shorter deciles launches spread by less than events vary by (0.15 us), and the one cannot "
    "be told from the other",
}


def figure(name: str, goal: float, value: float, low: float | None, high: float | None, n: int) -> dict[str, Any]:
    """A row of kind figures; less is better, but for the least coverage."""
    better = "more" if name == "coverage_least" else "less"
    met = value >= goal if better == "more" else value <= goal
    return {
        "kind": "figures",
        "figure": name,
        "value": value,
        "goal": goal,
        "better": better,
        "low": low,
        "high": high,
        "n": n,
        "limited_by": "" if met else LIMITED_BY[name],
    }


def figures_of(
    tested: Tested, programs: Programs | None, known: set[int], libraries: dict[str, Programs] | None = None
) -> list[dict[str, Any]]:
    """The promised figures that these recordings can show. The bias has no sign.

    Args:
        tested: The sweeps.
        programs: Whole programs.
        known: Identities of the kernels that training has.
        libraries: Programs of other libraries by drawn events (""), and by their "recorded events".
    """
    rows = []
    libraries = libraries or {}

    def put(name: str, goal: float, errors: Errors) -> None:
        median = errors.median
        rows.append(figure(name, goal, median.value, median.low, median.high, errors.n))

    corrected = "ours corrected"
    long = tested.launches.duration_ns >= BINS["over 100 us"][0]
    for split_name, name, goal in (("new_shape", "new_shape_misses", 0.09), ("unseen_kernel", "unseen_family", 0.30)):
        if (split_name, corrected) in tested.predicted:
            put(name, goal, tested.judged(split_name, corrected))
    if ("new_shape", corrected) in tested.predicted and tested.known("new_shape", corrected, long).any():
        put("over_100us", 0.20, tested.judged("new_shape", corrected, long))
    for events, name in (("", "other_libraries_first"), ("recorded events", "other_libraries_first_recorded")):
        if events in libraries and (first := libraries[events].first_launches(OTHER_LIBRARIES)).any():
            put(name, 0.40, libraries[events].judged_by_kernel(first))
    if programs is None:
        return rows
    hits = programs.splits(known)["repeat"]
    if hits.any():
        put("repeat", 0.03, programs.judged(hits))
    if (short := hits & (programs.columns["duration"] < BINS["under 2 us"][1])).any():
        put("repeat_under_2us", 0.10, programs.judged(short))
    whole = programs.judged(np.ones(len(hits), bool))
    weighted, bias = whole.time_weighted, whole.bias
    rows.append(figure("program_time_weighted", 0.04, weighted.value, weighted.low, weighted.high, whole.n))
    signs = sorted((abs(bias.low), abs(bias.high)))
    least = 0.0 if bias.low <= 0 <= bias.high else signs[0]
    rows.append(figure("program_bias", 0.02, abs(bias.value), least, signs[1], whole.n))
    if coverage := programs.coverage():
        low = min(coverage, key=lambda row: float(row["coverage"]))
        most = max(coverage, key=lambda row: float(row["coverage"]))
        rows.append(figure("coverage_least", 0.88, low["coverage"], low["low"], low["high"], low["n"]))
        rows.append(figure("coverage_most", 0.92, most["coverage"], most["low"], most["high"], most["n"]))
    return rows


def evaluate(
    data: Path,
    programs: Path | None,
    model: Path,
    plots: Path | None,
    threads: int = 2,
    baselines: Sequence[str] = tuple(BASELINES),
    libraries: Path | None = None,
    sm_counts: Path | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluates, prints, plots; returns rows for the results file, and the promised figures."""
    from cudasched.predictor._recording import feature_names

    report = report_of(model)
    if libraries and "elapsed_ns" not in table_of(libraries).column_names:
        raise InputError(f"{libraries} has no times by events: record it with --timing both")
    table = table_of(data)
    launches = launches_of(table)
    tested = hold_out(table, launches, feature_names(), Recipe(**report["recipe"]), threads, baselines)
    rows = accuracy_rows(tested)
    show(rows)
    show_deciles(tested)
    found: Programs | None = None
    coverage: list[dict[str, Any]] = []
    known = set(pc.unique(table["identity"]).to_pylist())
    if programs:
        found = Programs(programs, str(model / "model.ubj"))
        coverage = found.coverage()
        by_program = found.accuracy(known)
        print(f"\nbound of {COVERAGE:.0%}: launches within it, by decile of predicted duration")
        for row in coverage:
            print(f"{row['decile']:>3}{row['coverage']:>8.1%}  [{row['low']:.1%}, {row['high']:.1%}]{row['n']:>8}")
        print("\nprograms, the shipped model on line: median error with its interval, by time, bias")
        for row in by_program:
            if row["corrected"]:
                print(
                    f"{row['scope']:32}{row['split']:16}{row['n']:>8}{row['mdape']:>8.1%}"
                    f"  [{row['low']:.1%}, {row['high']:.1%}]{row['time_weighted']:>8.1%}{row['bias']:>+8.1%}"
                )
        families = {name_family_of(function) for function in launches.functions}
        print(f"name families of programs that training has not: {found.unseen_families(families)}")
        hits = found.hits_of_step("program:resnet50_train|b64 step1|")
        print(f"cache hits of the second iteration of ResNet-50: {hits}")
        rows += by_program
    others = {}
    if libraries:
        trees = str(model / "model.ubj")
        others = {"": Programs(libraries, trees), "recorded events": Programs(libraries, trees, recorded_events_of)}
    for events, those in others.items():
        rows += library_rows(those, known, events)
    if sm_counts:
        rows += sm_count_rows(sm_counts, launches, feature_names(), Recipe(**report["recipe"]), threads)
    figures = figures_of(tested, found, known, others)
    print("\nfigures")
    for row in figures:
        print(f"{row['figure']:24}{row['value']:>8.2%}  [{row['low']:.1%}, {row['high']:.1%}] goal {row['goal']:.0%}")
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
    parser.add_argument("--libraries", type=Path, help="what training.record recorded of other libraries")
    parser.add_argument("--sm-counts", type=Path, help="what training.record recorded on parts of the GPU")
    parser.add_argument("--model", type=Path, required=True, help="what training.train wrote")
    parser.add_argument("--out", type=Path, help="a results file; its rows of other kinds stay")
    parser.add_argument("--figures", type=Path, help="a file for the promised figures; others that it has stay")
    parser.add_argument("--plots", type=Path, help="a directory for plots")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--baselines", nargs="*", choices=list(BASELINES), default=list(BASELINES), help="all, unless some are named"
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="xgboost")
    return carry_out(lambda: judge(options), "not evaluated")


def judge(options: argparse.Namespace) -> None:
    """Evaluates what the options name, and writes what they want."""
    from benchmarks.results.schema import load

    programs: Path | None = options.programs
    for results in filter(None, (options.out, options.figures)):  # before the evaluation, which takes long
        try:
            if results.exists():
                load(results)
        except ValueError as error:
            raise InputError(str(error).splitlines()[0]) from None
    rows, figures = evaluate(
        *(options.data, programs, options.model, options.plots, options.threads, options.baselines),
        *(options.libraries, options.sm_counts),
    )
    (options.model / "evaluation.json").write_text(json.dumps({"rows": rows, "figures": figures}, indent=1) + "\n")
    command = f"python -m training.evaluate --data {options.data.name} --model model/"
    command += f" --programs {programs.name}" if programs else ""
    command += f" --libraries {options.libraries.name}" if options.libraries else ""
    command += f" --sm-counts {options.sm_counts.name}" if options.sm_counts else ""
    if not options.out and not options.figures:
        return
    meta = meta_of(options.data, command)  # before anything is written: a written file is an uncommitted change
    if options.out:
        write_results(options.out, rows, replace_command(meta, f"{command} --out {options.out.name}"))
    if options.figures:
        write_figures(options.figures, figures, replace_command(meta, f"{command} --figures {options.figures.name}"))


def library_rows(programs: Programs, known: set[int], events: str = "") -> list[dict[str, Any]]:
    """Rows of kind accuracy of programs that share no code with the sweeps.

    Args:
        programs: What was said of them.
        known: Identities of the kernels that training has.
        events: By which, where they are not drawn; scopes end in it, and only corrected rows are given.
    """
    rows = []
    for row in programs.accuracy(known):
        scope = row["scope"].replace("program:all", "libraries:all") + (f", {events}" if events else "")
        if row["corrected"] or not events:
            rows.append({**row, "scope": scope})
    print(f"\nprograms of other libraries, by {events or 'drawn events'}")
    for row in rows:
        how = "corrected" if row["corrected"] else "trees"
        print(
            f"{row['scope']:54}{row['split']:14}{how:10}{row['n']:>8}{row['mdape']:>8.1%}"
            f"  [{row['low']:.1%}, {row['high']:.1%}]{row['mape']:>9.1%}{row['time_weighted']:>8.1%}"
            f"{row['bias']:>+8.1%}"
        )
    if coverage := programs.coverage():
        print("within the bound, by decile: " + " ".join(f"{row['coverage']:.1%}" for row in coverage))
    return rows


def by_sm_count(path: Path) -> dict[int, pa.Table]:
    """What was recorded on each count of multiprocessors, each a table as of a GPU that has so many.

    Launches before the first label, which made the data that is worked on, ran on the whole GPU and are left out.

    Raises:
        InputError: A label says nothing of a count.
    """
    table = table_of(path)
    table = table.filter(pc.not_equal(table["label"].cast(pa.string()), ""))
    labels = table["label"].cast(pa.string()).to_pylist()
    if not labels:
        raise InputError(f"{path}: its launches have no labels, which say on how many multiprocessors they ran")
    try:
        counts = np.array([int(text.split("|")[1]) for text in labels])
    except (IndexError, ValueError):
        raise InputError(f"{path}: its labels do not say on how many multiprocessors it ran") from None
    found = {}
    for count in np.unique(counts).tolist():
        part = table.filter(pa.array(counts == count))
        metadata = {**(table.schema.metadata or {}), b"cudasched.sm_count": str(count).encode()}
        found[int(count)] = part.replace_schema_metadata(metadata)
    return found


def sm_count_rows(
    path: Path, sweeps: Launches, names: Sequence[str], recipe: Recipe, threads: int
) -> list[dict[str, Any]]:
    """Rows of kind accuracy of trees on counts of multiprocessors that they were not trained on, printed too."""
    tables = by_sm_count(path)
    trained = [launches_of(table) for count, table in tables.items() if count not in TESTED_COUNTS]
    rows = []
    for split_name, more in (("program", []), ("new_shape", trained)):
        booster = fit_parts([sweeps, *more], names, recipe, threads)
        shares = [
            replace(part, duration_ns=part.duration_ns / roofline_ns(part.rows, names)) for part in (sweeps, *more)
        ]
        over_roofline = fit_parts(shares, names, recipe, threads)
        with tempfile.TemporaryDirectory() as directory:
            model = str(Path(directory) / "parts.ubj")
            booster.save_model(model)
            for count in TESTED_COUNTS:
                if count not in tables:
                    continue
                launches = launches_of(tables[count])
                said = replay(tables[count], model)
                over = predict(over_roofline, launches) * roofline_ns(launches.rows, names)
                first = first_of(launches.key)
                for name, corrected, values in (
                    ("ours", False, predict(booster, launches)),
                    ("ours", True, said["predicted_ns"]),
                    ("over roofline", False, over),
                ):
                    errors = errors_of(values[first], launches.duration_ns[first], launches.key[first])
                    about = {"split": split_name, "model": name, "scope": f"sm_count:{count}", "corrected": corrected}
                    rows.append(errors.row(**about))
    print("\nparts of the GPU: first launches, trees of the whole GPU (program) and of other parts too (new_shape)")
    for row in rows:
        how = "corrected" if row["corrected"] else "trees" if row["model"] == "ours" else row["model"]
        print(
            f"{row['scope']:16}{row['split']:16}{how:16}{row['n']:>8}{row['mdape']:>8.1%}"
            f"{row['time_weighted']:>8.1%}{row['bias']:>+8.1%}"
        )
    return rows


def meta_of(data: Path, command: str) -> Any:
    """Where the recording comes from, in the common form of results."""
    from benchmarks.meta import current_commit
    from benchmarks.results.schema import Meta

    table = table_of(data)
    recorded = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    clock = pc.approximate_median(table.filter(pc.greater(table["sm_clock_mhz"], 0))["sm_clock_mhz"]).as_py()
    version = int(recorded.get("cudasched.driver_version") or 0)
    return Meta(
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


def replace_command(meta: Any, command: str) -> Any:
    """The same, of another command."""
    return meta.model_copy(update={"command": command})


def write_results(path: Path, rows: Sequence[dict[str, Any]], meta: Any) -> None:
    """Puts the rows into a results file in the common form; rows of the same kinds that it has are replaced."""
    from pydantic import TypeAdapter

    from benchmarks.results.schema import PredictorRow, merge

    merge(path, meta, TypeAdapter(list[PredictorRow]).validate_python(rows))


def write_figures(path: Path, figures: Sequence[dict[str, Any]], meta: Any) -> None:
    """Puts figures into a file of kind figures; those of other names that it has stay."""
    from benchmarks.results.schema import FigureRow, Results, load

    rows = {row.figure: row for row in (FigureRow(**one) for one in figures)}
    before = load(path).rows if path.exists() else []
    kept = [row for row in before if isinstance(row, FigureRow) and row.figure not in rows]
    Results(meta=meta, rows=[*rows.values(), *kept]).write(path)


if __name__ == "__main__":
    sys.exit(main())
