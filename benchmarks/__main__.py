"""`python -m benchmarks`: see lab/run.py."""

import sys

from benchmarks.lab.run import main

if __name__ == "__main__":
    sys.exit(main())
