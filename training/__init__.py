"""From recorded launches to the model that the package ships; see docs/training.md."""

import importlib
import sys

# Run as a program (`python -m training.train`), where what is missing is one line; imported, it is an ImportError.
# What only records needs nothing of it: the machine with the GPU need not be the one that trains.
if sys.argv[:1] == ["-m"] and not {"training.record", "training.workloads"} & set(sys.orig_argv):
    for _name in ("numpy", "pyarrow", "xgboost"):
        try:
            importlib.import_module(_name)
        except ImportError as _error:
            sys.exit(f"training needs {_name} ({_error}): pip install '.[training]' in the clone")
