"""Runs notebooks/ and keeps what they print and draw, without times of the run and paths of the machine.

    run_notebooks.py [NOTEBOOK...]            writes the outputs into the notebooks
    run_notebooks.py --check [NOTEBOOK...]    fails where a notebook prints or draws something else than it has; figures
                                              may differ

Run it where there is no GPU and PyTorch is installed: the outputs are those of such a machine.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 600
_FIGURE = re.compile(r"\d[\d,.]*")


def executed(path: Path) -> nbformat.NotebookNode:
    """A notebook with its outputs, run by this Python with the packages that it finds."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "IPYTHONDIR": directory,
            "TMPDIR": directory,
            "CUDASCHED_RUN_DIR": directory,
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        try:
            NotebookClient(notebook, timeout=_TIMEOUT_S, resources=resources, record_timing=False).execute()
        finally:
            os.environ.clear()
            os.environ.update(before)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    """What the cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if "text" in output)


def differences(kept: nbformat.NotebookNode, now: nbformat.NotebookNode) -> list[str]:
    """The cells that print or draw something else now, but for figures."""

    def shape(cell: nbformat.NotebookNode) -> list[str]:
        outputs = cell.get("outputs", [])
        text = "".join(output["text"] for output in outputs if "text" in output)
        drawn = (sorted(output["data"])[0] for output in outputs if "data" in output)
        return [" ".join(_FIGURE.sub("#", text).split()), *drawn]

    pairs = [(before.id, shape(before), shape(after)) for before, after in zip(kept.cells, now.cells, strict=True)]
    return [f"{cell}: {before}, now {after}" for cell, before, after in pairs if before != after]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    check = "--check" in arguments
    names = [Path(name) for name in arguments if name != "--check"]
    stale = False
    for path in names or sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = executed(path)
        if not check:
            nbformat.write(notebook, path)
        for difference in differences(nbformat.read(path, as_version=4), notebook):
            stale = True
            print(f"{path}: {difference}; scripts/run_notebooks.py writes it")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
