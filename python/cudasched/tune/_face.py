"""`cudasched.tune(kernel, space=...)`: from a kernel's file to its fastest configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cudasched.errors import ConfigError, Error
from cudasched.tune import profile as tools
from cudasched.tune.database import Database, default_path
from cudasched.tune.recording import Recording, Replay
from cudasched.tune.space import Space, read
from cudasched.tune.tuner import Progress, Settings, Tuned, run
from cudasched.tune.workers import Limits, Live

__all__ = ["tune"]

_PROFILED = 3


def tune(
    kernel: str | os.PathLike[str] | None = None,
    *,
    space: str | os.PathLike[str] | Space | None = None,
    shape: Mapping[str, int | float] | None = None,
    settings: Settings | None = None,
    database: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    device: int = 0,
    compiler: str = "auto",
    options: Sequence[str] = (),
    launches: int = 1,
    limits: Limits | None = None,
    sanitize: bool = False,
    profile: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Finds the fastest configuration of a kernel.

    Args:
        kernel: Its CUDA source; None: the one that the space names.
        space: The space file, or the result of `read`.
        shape: The differences from the shape in the space.
        settings: How is searched.
        database: Where measurements are kept; None: `database.default_path`.
        replay: A recorded space in place of a GPU and of the two files.
        device: The GPU's ordinal.
        compiler: "auto", "nvrtc" or "nvcc".
        options: More for the compiler.
        launches: In a row for each sample: 1 for the latency of a launch, more for throughput.
        limits: The times after which a compilation or a run is given up.
        sanitize: Whether the winner is run under compute-sanitizer, and passed over if it is wrong.
        profile: Whether the best ones are profiled by Nsight Compute.
        on_progress: Called after each configuration.

    Raises:
        ConfigError: A fault in the space or a setting.
        Error: There is no GPU, no compiler, or no configuration that runs; says why.
    """
    if replay is not None:
        passed_over = {
            "kernel": kernel,
            "space": space,
            "shape": shape,
            "device": device,
            "compiler": compiler != "auto",
            "options": options,
            "launches": launches != 1,
            "limits": limits,
            "sanitize": sanitize,
            "profile": profile,
        }
        if given := [name for name, value in passed_over.items() if value]:
            raise ConfigError(f"a replay takes no {', '.join(given)}: nothing is compiled or run")
        recording = Recording.load(Path(replay))
        seed = settings.seed if settings else 0
        if database is None:
            return run(Replay(recording, seed), settings, on_progress=on_progress)
        with Database(Path(database)) as kept:
            return run(Replay(recording, seed), settings, database=kept, on_progress=on_progress)
    if space is None:
        raise ConfigError("name a space: the file of the possible values (docs/tuning.md)")
    chosen = space if isinstance(space, Space) else read(Path(space))
    source = Path(kernel) if kernel is not None else chosen.source
    if source is None:
        raise ConfigError(f"{chosen.path}: it names no source; name the kernel's file")
    if launches < 1:
        raise ConfigError(f"launches is at least 1, not {launches}")
    for wanted, check in ((sanitize, "compute-sanitizer"), (profile, "ncu")):
        if wanted:
            tools.require(check)
    with (
        Database(Path(database) if database is not None else default_path()) as kept,
        Live(
            chosen,
            source,
            shape,
            device=device,
            compiler=compiler,
            options=options,
            launches=launches,
            limits=limits,
        ) as live,
    ):
        verify = (lambda index: tools.sanitize(live, index)) if sanitize else None
        tuned = run(live, settings, database=kept, on_progress=on_progress, verify=verify)
        return _profiled(live, tuned) if profile else tuned


def _profiled(live: Live, tuned: Tuned) -> Tuned:
    measurements = dict(tuned.measurements)
    for place, (index, made) in enumerate(tuned.best(_PROFILED)):
        try:
            measurements[index] = replace(made, profile=tools.profile(live, index))
        except Error:
            if place == 0:
                raise
    return replace(tuned, measurements=measurements)
