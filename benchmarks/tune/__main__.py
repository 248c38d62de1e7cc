"""`python -m benchmarks.tune record` and `pack`: see record.py."""

import sys

from benchmarks.tune import record

if __name__ == "__main__":
    sys.exit({"record": record.main, "pack": record.pack}[sys.argv[1]](sys.argv[2:]))
