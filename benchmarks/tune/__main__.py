"""The tuner: recording spaces on a GPU, the tuner against others over recorded spaces, and beside a server.

    python -m benchmarks.tune record --out recorded --limit-s 540
    python -m benchmarks.tune pack recorded benchmarks/tune/recorded
    python -m benchmarks.tune evaluate --out benchmarks/results/kernels.json
    python -m benchmarks.tune beside --out benchmarks/results/kernels.json

Each has a --help; docs/tuning.md says what the figures are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["record"]:
        from benchmarks.tune import record

        return record.main(given[1:])
    if given[:1] == ["pack"]:
        from benchmarks.tune import record

        return record.pack(given[1:])
    if given[:1] == ["evaluate"]:
        from benchmarks.tune import evaluate

        return evaluate.main(given[1:])
    if given[:1] == ["beside"]:
        from benchmarks.tune import beside

        return beside.main(given[1:])
    print(__doc__)
    return 0 if given in ([], ["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main())
