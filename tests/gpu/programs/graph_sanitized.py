"""A small program of graphs for compute-sanitizer: kernels, fills, copies and a child graph, launched and changed.

    graph_sanitized.py [--simulate]

Needs neither PyTorch nor a compiler, so that it starts at once: its kernel is PTX. Launches until some launches went in
slices, and prints `done`, how many did, and whether the memory holds what it should. Under the simulated driver nothing
is computed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from ctypes import byref, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.graphs.driver import Graphs, KernelParams

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry mix(.param .u64 data, .param .u32 count, .param .u32 rounds, .param .u32 addend)
{
  .reg .pred %p<3>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [data];
  ld.param.u32 %r1, [count];
  ld.param.u32 %r2, [rounds];
  ld.param.u32 %r8, [addend];
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r6, %r3, %r4, %r5;
  setp.ge.u32 %p1, %r6, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r6, 4;
  add.u64 %rd4, %rd2, %rd3;
  ld.global.u32 %r7, [%rd4];
LOOP:
  mad.lo.u32 %r7, %r7, 1664525, %r8;
  sub.u32 %r2, %r2, 1;
  setp.ne.u32 %p2, %r2, 0;
  @%p2 bra LOOP;
  st.global.u32 [%rd4], %r7;
DONE:
  ret;
}
"""
SIMULATED = b"cudasched-sim 1\nkernel mix params=8,4,4,4 block_us=20 blocks_per_sm=4 effect=none\n"
COUNT, BLOCK, ROUNDS = 1 << 14, 256, 64
KERNELS = 12  # ahead of the child graph, in it, and behind it
WANTED = 10  # launches in slices
PATIENCE_S = 40.0


class Parameters(ctypes.Structure):
    """Of one kernel node, with the list that CUDA wants."""

    _fields_ = (
        ("data", c_uint64),
        ("count", c_uint32),
        ("rounds", c_uint32),
        ("addend", c_uint32),
        ("list", c_void_p * 4),
    )

    def node(self, function: int) -> KernelParams:
        """What a node is given."""
        fields = (type(self).data, type(self).count, type(self).rounds, type(self).addend)
        self.list = (c_void_p * 4)(*(ctypes.addressof(self) + field.offset for field in fields))
        made = KernelParams(function=function, shared=0, parameters=ctypes.addressof(self.list))
        made.grid[:] = [COUNT // BLOCK, 1, 1]
        made.block[:] = [BLOCK, 1, 1]
        return made


class Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("to", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def main() -> None:
    driver = Graphs()
    context, module, function, stream, data = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_uint64()
    simulate = "--simulate" in sys.argv
    driver.call("cuInit", 0)
    driver.call("cuDevicePrimaryCtxRetain", byref(context), 0)
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuModuleLoadData", byref(module), SIMULATED if simulate else PTX)
    driver.call("cuModuleGetFunction", byref(function), module, b"mix")
    driver.call("cuStreamCreate", byref(stream), 1)
    driver.call("cuMemAlloc_v2", byref(data), c_size_t(4 * COUNT))
    kept: list[Parameters] = []
    values: list[int] = []

    def chain(graph: c_void_p, after: list[c_void_p]) -> list[c_void_p]:
        """Kernels one behind another."""
        nodes = after[-1:]
        for _ in range(KERNELS):
            parameters = Parameters(data=data.value, count=COUNT, rounds=ROUNDS, addend=len(values) + 1)
            kept.append(parameters)
            values.append(len(values) + 1)
            node, before = c_void_p(), (c_void_p * 1)(*nodes[-1:])
            given = parameters.node(function.value or 0)
            driver.call("cuGraphAddKernelNode_v2", byref(node), graph, before, c_size_t(len(nodes[-1:])), byref(given))
            nodes.append(node)
        return nodes[len(after[-1:]) :]

    graph, child, fill_node, child_node = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    driver.call("cuGraphCreate", byref(graph), 0)
    fill = Fill(data.value, 0, 7, 4, COUNT, 1)
    driver.call("cuGraphAddMemsetNode", byref(fill_node), graph, None, c_size_t(0), byref(fill), context)
    first = chain(graph, [fill_node])
    driver.call("cuGraphCreate", byref(child), 0)
    chain(child, [])
    driver.call("cuGraphAddChildGraphNode", byref(child_node), graph, byref(first[-1]), c_size_t(1), child)
    chain(graph, [child_node])
    executable = driver.instantiate(graph.value or 0)

    def expected() -> int:
        value = 7
        for addend in values:
            for _ in range(ROUNDS):
                value = (value * 1664525 + addend) % 2**32
        return value

    def sliced() -> int:
        import cudasched

        return cudasched.state().sliced_launches

    def synchronize() -> None:
        driver.call("cuStreamSynchronize", stream)

    wrong = turn = 0
    until = time.monotonic() + PATIENCE_S
    while sliced() < WANTED and time.monotonic() < until:
        for _ in range(4):
            place = turn % KERNELS
            values[place] = kept[place].addend = 1000 + turn
            given = kept[place].node(function.value or 0)
            driver.set_kernel(executable, first[place].value or 0, given)
            driver.launch(executable, stream.value or 0)
            turn += 1
        synchronize()
        time.sleep(0.005)
        found = c_uint32()
        driver.call("cuMemcpyDtoH_v2", byref(found), data, c_size_t(4))
        wrong += not simulate and found.value != expected()
    driver.destroy(executable)
    driver.call("cuGraphDestroy", graph)
    driver.call("cuGraphDestroy", child)
    driver.call("cuMemFree_v2", data)
    print(f"done: {turn} launches, {sliced()} in slices, {wrong} wrong", flush=True)
    sys.exit(1 if wrong or sliced() < WANTED else 0)


if __name__ == "__main__":
    main()
