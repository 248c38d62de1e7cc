"""Launches by every road that programs take: ATen, cuBLAS, cuDNN, CUDA graphs, threads, Triton, CuPy."""

import sys
import threading

import torch


def aten_cublas_cudnn() -> None:
    x = torch.randn(512, 512, device="cuda", dtype=torch.float16)
    for _ in range(5):
        x = torch.relu(x @ x) * 0.01
    conv = torch.nn.Conv2d(8, 16, 3, device="cuda")
    conv(torch.randn(4, 8, 32, 32, device="cuda")).square().sum().backward()
    torch.sort(torch.randn(10_000, device="cuda"))


def graphs() -> None:
    x = torch.randn(256, 256, device="cuda")

    def work() -> torch.Tensor:
        return torch.relu(x @ x)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()


def triton_kernel() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(target + at, 2 * tl.load(source + at, mask=at < count), mask=at < count)

    x = torch.arange(5000, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    for _ in range(7):
        double[(5,)](x, y, 5000, block=1024)
    assert torch.equal(y, 2 * x)


def cupy_kernels() -> None:
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void f(float* x) { x[threadIdx.x] += 1; }', "f")
    x = cupy.zeros(32, dtype=cupy.float32)
    for _ in range(6):
        kernel((1,), (32,), (x,))
    assert float(x.sum()) == 32 * 6
    assert int((cupy.arange(1000) ** 2).sum()) == 332_833_500


def threads() -> None:
    failures: list[BaseException] = []

    def body() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                x = torch.randn(128, 128, device="cuda")
                for _ in range(20):
                    x = torch.tanh(x @ x)
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=body) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


if __name__ == "__main__":
    parts = {
        "aten": aten_cublas_cudnn,
        "graphs": graphs,
        "triton": triton_kernel,
        "cupy": cupy_kernels,
        "threads": threads,
    }
    for name in sys.argv[1:] or parts:
        parts[name]()
    torch.cuda.synchronize()
    print("done")
