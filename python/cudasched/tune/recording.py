"""A space that was measured whole, in a compact file, and its replay in place of a GPU.

The file is numpy's .npz without pickled objects: a header in JSON with the space's text, and arrays with a row for each
configuration. `Replay` has `Live`'s interface and returns recorded measurements; its clock counts the recorded seconds
of compiling and running.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudasched.errors import Error
from cudasched.tune._need import need
from cudasched.tune.measurement import STATUSES, Measurement, robust
from cudasched.tune.space import Gpu, Problem, Space, configuration_key
from cudasched.tune.workers import Request

__all__ = ["Recording", "Replay"]

_VERSION = 1
_NUMBERS: Mapping[str, str] = {
    "registers": "uint16",
    "local_bytes": "uint32",
    "static_shared_bytes": "uint32",
    "occupancy": "float32",
    "workspace_bytes": "uint64",
    "sm_clock_mhz": "uint16",
    "compile_s": "float32",
    "run_s": "float32",
}


@dataclass(frozen=True)
class Recording:
    """A recorded space.

    Attributes:
        problem: Space, shape and GPU.
        measurements: One for each of the problem's configurations.
        retimed: More samples of the best ones, us, by place.
        fingerprint: Of the source when it was recorded.
        about: Where and when: driver, commit, date; free text by name.
    """

    problem: Problem
    measurements: tuple[Measurement, ...]
    retimed: Mapping[int, tuple[float, ...]]
    fingerprint: str
    about: Mapping[str, str]

    @property
    def is_synthetic(self) -> bool:
        """Made by a model, for tests: no figure may come from it."""
        return self.about.get("origin") == "synthetic"

    def time_us(self, index: int) -> float:
        """A configuration's best-known real time, us; infinite without a time."""
        if index in self.retimed:
            return robust(self.retimed[index])
        time = self.measurements[index].time_us
        return math.inf if time is None else time

    def best(self) -> tuple[int, float]:
        """The place of the best configuration and its time, us."""
        # Those that were timed again only, so that no lucky sample of another one is taken for the best.
        places = list(self.retimed) or range(len(self.measurements))
        index = min(places, key=self.time_us)
        return index, self.time_us(index)

    def share_within(self, fraction: float) -> float:
        """Which share of the configurations is at most that much slower than the best."""
        limit = self.best()[1] * (1 + fraction)
        return sum(self.time_us(i) <= limit for i in range(len(self.measurements))) / len(self.measurements)

    def save(self, path: Path) -> None:
        """Writes the recording."""
        np = need("numpy", "a recording")
        most = max((len(one.samples_us) for one in self.measurements), default=0)
        samples = np.full((len(self.measurements), max(most, 1)), np.nan, np.float32)
        for row, one in zip(samples, self.measurements, strict=True):
            row[: len(one.samples_us)] = one.samples_us
        space = self.problem.space
        values = np.array(
            [
                [space.parameters[name].index(one[name]) for name in space.parameters]
                for one in self.problem.configurations
            ],
            dtype=np.uint16,
        )
        gpu = self.problem.gpu
        header = {
            "version": _VERSION,
            "space": space.text,
            "shape": dict(self.problem.shape),
            "gpu": [gpu.name, gpu.capability, gpu.sms, gpu.l2_bytes],
            "fingerprint": self.fingerprint,
            "about": dict(self.about),
            "messages": sorted({one.message for one in self.measurements if one.message})[:20],
        }
        arrays = {
            name: np.array([getattr(one, name) for one in self.measurements], dtype=kind)
            for name, kind in _NUMBERS.items()
        }
        again = np.full((len(self.retimed), max(map(len, self.retimed.values()), default=1)), np.nan, np.float32)
        for row, more in zip(again, self.retimed.values(), strict=True):
            row[: len(more)] = more
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
                values=values,
                status=np.array([STATUSES.index(one.status) for one in self.measurements], np.uint8),
                samples=samples,
                retimed=np.array(list(self.retimed), np.uint32),
                retimed_samples=again,
                **arrays,
            )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads one.

        Raises:
            Error: It is no recording of this version.
        """
        np = need("numpy", "a recording")
        try:
            with np.load(path, allow_pickle=False) as data:
                header = json.loads(bytes(data["header"]))
                if header["version"] != _VERSION:
                    raise Error(f"{path}: a recording of version {header['version']}; this reads version {_VERSION}")
                space = Space(header["space"], path)
                problem = space.problem(Gpu(*header["gpu"]), header["shape"])
                return cls._of(problem, header, {name: data[name] for name in data.files})
        except Error as error:
            raise error if str(path) in str(error) else Error(f"{path}: {error}") from None
        except OSError as error:
            raise Error(f"{path}: the recording cannot be read: {error.strerror or error}") from None
        except Exception:  # numpy and zipfile have no common class for the errors of a damaged file
            raise Error(f"{path}: it is no recording of a space, or is damaged") from None

    @classmethod
    def _of(cls, problem: Problem, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Recording:
        names = list(problem.space.parameters)
        place = {configuration_key(one): i for i, one in enumerate(problem.configurations)}
        found: list[Measurement | None] = [None] * len(place)
        order: list[int] = []
        for row, values in enumerate(arrays["values"]):
            configuration = {name: problem.space.parameters[name][i] for name, i in zip(names, values, strict=True)}
            index = place[configuration_key(configuration)]
            order.append(index)
            samples = arrays["samples"][row]
            found[index] = made = Measurement.from_file(
                status=STATUSES[int(arrays["status"][row])],
                samples_us=_times(samples),
                **{name: arrays[name][row].item() for name in _NUMBERS},
            )
            if made.status == "ok" and not made.samples_us:
                raise ValueError(f"configuration {row} has no time")
        if None in found or len(order) != len(found):
            raise ValueError(f"it has {len(order)} rows for {len(found)} configurations")
        retimed = {
            order[int(index)]: _times(row)
            for index, row in zip(arrays["retimed"], arrays["retimed_samples"], strict=True)
        }
        for samples_us in retimed.values():
            if not Measurement.from_file(status="ok", samples_us=samples_us).samples_us:
                raise ValueError("a configuration that was timed again has no time")
        measurements = tuple(one for one in found if one is not None)
        about = {str(name): str(value) for name, value in dict(header["about"]).items()}
        return cls(problem, measurements, retimed, str(header["fingerprint"]), about)


def _times(samples: Any) -> tuple[float, ...]:
    """Of a row that is filled up with NaN."""
    return tuple(float(one) for one in samples if one == one)


class Replay:
    """Stands in for a GPU: gives recorded measurements, and counts their recorded time.

    Attributes:
        problem: The recording's.
        clock_s: Seconds of compiling and running so far, one after another.
        evaluations: Configurations tried so far; one that is measured again does not count again.
    """

    _FLUSH_US = 60.0  # a sample's time beside the launch

    def __init__(self, recording: Recording, seed: int = 0) -> None:
        """A replay.

        Args:
            recording: The recording to replay.
            seed: Of the order in which a configuration's samples come.
        """
        self.problem = recording.problem
        self.recording = recording
        self.fingerprint = recording.fingerprint
        self.clock_s = 0.0
        self._given: dict[int, int] = {}
        self._random = need("numpy", "a replay").random.default_rng(seed)

    @property
    def evaluations(self) -> int:
        """Configurations tried so far."""
        return len(self._given)

    def measure(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Measurement]]:
        """As `Live.measure`."""
        for request in requests:
            yield request, self._one(request)

    def _one(self, request: Request) -> Measurement:
        recorded = self.recording.measurements[request.index]
        first = request.index not in self._given
        self.clock_s += recorded.compile_s if first else 0.0
        self._given.setdefault(request.index, 0)
        if recorded.status != "ok":
            self.clock_s += recorded.run_s if first else 0.0
            return recorded
        samples = recorded.samples_us
        wanted = 1 if samples[0] > request.give_up_us else request.samples
        chosen = tuple(float(one) for one in self._random.choice(samples, wanted, replace=wanted > len(samples)))
        # The time of loading and checking, without the samples; and then the requested samples' time.
        apart = max(0.0, recorded.run_s - sum(one + self._FLUSH_US for one in samples) * 1e-6)
        self.clock_s += (apart if first else 0.0) + sum(one + self._FLUSH_US for one in chosen) * 1e-6
        self._given[request.index] += wanted
        return replace(recorded, samples_us=chosen)

    def close(self) -> None:
        """Nothing is held."""
