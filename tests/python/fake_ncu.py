#!/usr/bin/env python3
"""Stands in for Nsight Compute: runs the program, and writes what ``ncu --csv --page raw`` would.

``FAKE_NCU`` says how it behaves: ``counts`` (the default), ``no_permission``, ``no_kernels``, ``other_form``, ``cut``,
``silent``, ``unknown_metric``. ``FAKE_NCU_CALLS``: a file that gets its arguments and environment, a line a call.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

VALUED = {  # options that take a value
    *(
        "--clock-control",
        "--target-processes",
        "--kernel-name-base",
        "--kernel-name",
        "--filter-mode",
        "--launch-count",
    ),
    *("--section", "--metrics", "--page", "--print-units", "--print-kernel-base", "--log-file"),
}
COLUMNS = {
    "gpu__time_duration.sum": ("ns", ["52,352", "51,648"]),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", ["21.5", "20.5"]),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", ["81.25", "82.75"]),
    "dram__bytes.sum": ("byte", ["134,217,728", "134,217,728"]),
    "l1tex__t_sector_hit_rate.pct": ("%", ["0", "0"]),
    "lts__t_sector_hit_rate.pct": ("%", ["33.31", "33.59"]),
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio": ("sector/request", ["31.5", "31.5"]),
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio": ("sector/request", ["4", "4"]),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", ["n/a", "n/a"]),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", ["0", "0"]),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", ["70", "72"]),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", ["24.1", "23.9"]),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", ["1.5", "1.5"]),
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio": ("inst", ["nan", "nan"]),
}


def csv_text(names: list[str]) -> str:
    fixed = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
    fixed += ["Grid Size", "Device", "CC", "Section Name"]
    lines = [[*fixed, *COLUMNS], ["" for _ in fixed] + [unit for unit, _ in COLUMNS.values()]]
    for number, name in enumerate(name for name in names for _ in range(2)):
        row = [
            str(number),
            "4711",
            "python3.11",
            "127.0.0.1",
            name,
            "1",
            "7",
            "(32, 1, 1)",
            "(1, 1, 1)",
            "0",
            "9.0",
            "",
        ]
        lines.append([*row, *(values[number % 2] for _, values in COLUMNS.values())])
    return "".join(",".join('"' + cell.replace('"', '""') + '"' for cell in line) + "\n" for line in lines)


def main() -> int:
    options: dict[str, str] = {}
    words = sys.argv[1:]
    while words and words[0].startswith("--"):
        name = words.pop(0)
        options[name] = words.pop(0) if name in VALUED else ""
    if "FAKE_NCU_CALLS" in os.environ:
        hooked = {name: os.environ.get(name, "") for name in ("LD_PRELOAD", "CUDASCHED_OFF", "CUDASCHED_COLLECT_DIR")}
        with open(os.environ["FAKE_NCU_CALLS"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"arguments": sys.argv[1:], "environment": hooked}) + "\n")
    behaviour = os.environ.get("FAKE_NCU", "counts")
    # Without the hook the loader finds the driver, which here is the simulated one.
    driver = Path(os.environ.get("CUDASCHED_DRIVER", "/")).parent
    done = subprocess.run(words, env={**os.environ, "LD_LIBRARY_PATH": str(driver)})
    log = f"==PROF== Connected to process 4711 ({words[0]})\n"
    names = [
        re.sub(r"\\(.)", r"\1", name) for name in options["--kernel-name"][len("regex:^(") : -len(")$")].split("|")
    ]
    code = done.returncode
    if behaviour == "no_permission":
        log += (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
            "on the target device 0. For instructions on enabling permissions and to get more information see "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
        )
        code = 1
    elif behaviour == "unknown_metric" and "sm__pipe_tensor_cycles_active" in options["--metrics"]:
        log += "==ERROR== Failed to find metric sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active\n"
        code = 9
    elif behaviour == "no_kernels":
        log += "==PROF== Disconnected from process 4711\n==WARNING== No kernels were profiled.\n"
    elif behaviour == "other_form":
        log += '"ID","Kernel","Thing"\n"0","work","1"\n'
    elif behaviour != "silent":
        text = csv_text(names)
        if behaviour == "cut":
            text = text[: text.rindex("\n", 0, -1) + 40]
        log += "==PROF== Profiling: 0%....50%....100% - 9 passes\n==PROF== Disconnected from process 4711\n" + text
    Path(options["--log-file"]).write_text(log, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
