"""cudasched, then torch: regions, bound streams, autograd's threads, a graph captured in a thread, the profiler."""

import threading

import cudasched
import torch


def launches(kind: str) -> int:
    return int(getattr(cudasched.state(), kind))


x = torch.randn(256, 256, device="cuda", requires_grad=True)
state = cudasched.state()
assert state.attached and state.scheduling, state

before = launches("latency_launches")
with cudasched.region("latency", slo_ms=5):
    (x @ x).relu().sum().backward()
    torch.cuda.synchronize()
forward_only = launches("latency_launches") - before
assert forward_only >= 2, forward_only

# A stream's class reaches backward kernels, which autograd launches from its own threads on the forward stream.
stream = torch.cuda.Stream()
cudasched.bind_stream(stream, "best_effort")
before = launches("best_effort_launches")
with torch.cuda.stream(stream):
    loss = (x @ x).relu().sum()
forward = launches("best_effort_launches") - before
loss.backward()
stream.synchronize()
total = launches("best_effort_launches") - before
assert total > forward > 0, (forward, total)
cudasched.unbind_stream(stream)

# A graph captured in a thread while the main thread serves.
failures: list[BaseException] = []


def capture() -> None:
    try:
        with cudasched.region("best_effort"):
            y = torch.randn(128, 128, device="cuda")
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.relu(y @ y)  # cuBLAS allocates on a thread's first use, which a capture forbids
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                z = torch.relu(y @ y)
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.isfinite(z).all()
    except BaseException as error:
        failures.append(error)


worker = threading.Thread(target=capture)
worker.start()
while worker.is_alive():
    with cudasched.region("latency"):
        with torch.no_grad():
            (x @ x).sum()
        torch.cuda.current_stream().synchronize()
worker.join()
assert not failures, failures

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    for _ in range(10):
        torch.relu(x)
    torch.cuda.synchronize()
kernels = sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
assert kernels >= 10, kernels
print("done", cudasched.state().off_reason)
