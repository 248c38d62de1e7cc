"""`python -m benchmarks.kernels tune` and `ship`: see ship.py."""

import sys

from benchmarks.kernels import ship

if __name__ == "__main__":
    sys.exit({"tune": ship.tune, "ship": ship.main}[sys.argv[1]](sys.argv[2:]))
