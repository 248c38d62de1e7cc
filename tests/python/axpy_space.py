"""y += a x on the simulated driver: the image, the space and the reference of a kernel to tune or to launch."""

from __future__ import annotations

IMAGE = "cudasched-sim 1\nkernel axpy params=8,8,4,4 regs=32 threads_max=256 block_us=2 effect=axpy\n"
ARGUMENTS = """
[[arguments]]
name = "y"
role = "inout"
size = "n"
[[arguments]]
name = "x"
role = "input"
size = "n"
[[arguments]]
name = "a"
role = "scalar"
type = "float32"
value = "2.5"
[[arguments]]
name = "count"
role = "scalar"
type = "uint32"
value = "n"
"""
CHECK = """
[check]
reference = "reference.py:axpy"
"""
SPACE = f"""
kernel = "axpy"
source = "axpy.cubin"
work = "12 * n"
[shape]
n = 512
[parameters]
THREADS = [64, 256, 512]
PER = [1, 2]
[launch]
block = "THREADS"
grid = "ceil_div(n, THREADS * PER)"
{ARGUMENTS}{CHECK}"""
REFERENCE = """
def axpy(inputs, shape):
    return {"y": inputs["y"] + 2.5 * inputs["x"]}
"""
