"""Runs one version of a case (cases.py), for `cudasched advise` to look at; with --time both, timed by events.

python -m benchmarks.advise.program --case tail --version before
python -m benchmarks.advise.program --case tail --time 7
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from cudasched.tune import compile as compiling
from cudasched.tune._driver import Arguments, Device
from cudasched.tune.space import Launch

from benchmarks.advise.cases import SOURCE, Case, Version, cases


class Loaded:
    """A version's kernel on the GPU, with its arguments."""

    def __init__(self, device: Device, case: Case, version: Version) -> None:
        target = f"sm_{device.gpu.capability.replace('.', '')}"
        made = compiling.compile_source(SOURCE, version.macros, target, compiling.choose())
        self.device, self.version = device, version
        self.kernel = device.load(made.image, case.kernel)
        self.buffer = device.allocate(4 * version.count)
        device.fill(self.buffer, 0)
        device.allow_shared(self.kernel, version.shared_bytes)
        self.launch = Launch((version.blocks, 1, 1), (version.threads, 1, 1), version.shared_bytes, 0, ())
        self.arguments = Arguments(
            [("pointer", self.buffer.address), ("int32", version.count), ("int32", version.rounds)]
        )

    def run(self) -> None:
        """All its launches, waited for."""
        for _ in range(self.version.launches):
            self.device.launch(self.kernel, self.launch, self.arguments)
        self.device.wait()

    def milliseconds(self) -> float:
        """What all its launches take, between two events."""
        return self.device.time(self.kernel, self.launch, self.arguments, self.version.launches) * (
            self.version.launches / 1e3
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", required=True, help="one of cases.py")
    parser.add_argument("--version", choices=("before", "after"), default="before")
    parser.add_argument("--time", type=int, default=0, metavar="TIMES", help="time both versions so often")
    options = parser.parse_args(arguments)
    device = Device()
    case = next(case for case in cases(device.gpu.sms) if case.rule == options.case)
    if not options.time:
        loaded = Loaded(device, case, getattr(case, options.version))
        loaded.run()
        loaded.run()
        return 0
    versions = {name: Loaded(device, case, getattr(case, name)) for name in ("before", "after")}
    for loaded in versions.values():
        loaded.run()
    # In turn, so that clocks and heat are the same for both.
    each = [{name: loaded.milliseconds() for name, loaded in versions.items()} for _ in range(options.time)]
    print(json.dumps({name: [round(one[name], 5) for one in each] for name in versions}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
