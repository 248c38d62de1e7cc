"""A model and tuned kernels from a Ray cluster: what is measured has a whole GPU, and what computes has none.

    python examples/measure_with_ray.py --model model.ubj --tune softmax.toml -- "python train.py" "python serve.py"

Each program is recorded (`cudasched collect`) and each space tuned (`cudasched tune`) by a task with a whole GPU. When
the last recording is there, one task trains the predictor on all of them (`cudasched train`). Recordings and the model
go through Ray; programs, spaces and their kernels lie at one path everywhere. A model is for one kind of GPU: where
a cluster has several, name it (`--gpu H100`).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray


def cudasched(*arguments: str | Path) -> str:
    """What a command prints. Raises RuntimeError with what it says, where it fails."""
    command = [sys.executable, "-m", "cudasched", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[2:])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def recorded(program: str, timing: str) -> bytes:
    """A recording of a program, as a Parquet file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "recording.parquet")
        cudasched("collect", "--output", path, "--timing", timing, "--quiet", "--", *shlex.split(program))
        return path.read_bytes()


def tuned(space: str, evaluations: int) -> Any:
    """The report of a tuned space."""
    return json.loads(cudasched("tune", "--space", space, "--evaluations", str(evaluations), "--json"))["data"]


def trained(*recordings: bytes) -> bytes:
    """A model of all recordings."""
    with tempfile.TemporaryDirectory() as directory:
        data, model = Path(directory, "all.parquet"), Path(directory, "model.ubj")
        tables = [pq.read_table(pa.BufferReader(each)) for each in recordings]
        pq.write_table(pa.concat_tables(tables, promote_options="default"), data)
        cudasched("train", "--data", data, "--output", model)
        return model.read_bytes()


def run(programs: list[str], spaces: list[str], timing: str, evaluations: int, gpu: str) -> tuple[bytes, list[Any]]:
    """The model, and the reports of the spaces."""
    whole: dict[str, Any] = {"num_gpus": 1, "max_retries": 0}
    if gpu:
        whole["accelerator_type"] = gpu
    recordings = [ray.remote(recorded).options(**whole).remote(program, timing) for program in programs]
    reports = [ray.remote(tuned).options(**whole).remote(space, evaluations) for space in spaces]
    model = ray.remote(trained).options(num_cpus=2, max_retries=0).remote(*recordings)
    return ray.get(model), ray.get(reports)


def main() -> None:
    """Measures all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="with its arguments, as one word")
    parser.add_argument("--model", type=Path, required=True, help="the model's file")
    parser.add_argument("--tune", nargs="*", default=[], metavar="SPACE.toml")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--timing", default="cupti", help="of `cudasched collect`")
    parser.add_argument("--gpu", default="", help="Ray's name of a kind of GPU")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
    if ray.cluster_resources().get("GPU", 0) < 1:
        parser.error("the cluster has no GPU, for which the programs would wait")
    model, reports = run(options.programs, options.tune, options.timing, options.evaluations, options.gpu)
    options.model.write_bytes(model)
    print(f"{options.model}: a model of {len(options.programs)} programs")
    for space, report in zip(options.tune, reports, strict=True):
        print(f"{space}: {report['time_us']:.1f} us with {report['best']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
