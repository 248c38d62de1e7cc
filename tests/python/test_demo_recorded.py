"""What a server's host does in its requests, from a profiler's events."""

from __future__ import annotations

import random

import pytest
from cudasched.demo.recorded import DeviceWork, HostCall, requests_of, waits


def profiled(requests: int) -> tuple[list[HostCall], list[DeviceWork]]:
    """Requests of three launches, of which the third waits for the others; the driver's calls are in the runtime's."""
    calls, works, now = [], [], 1_000_000
    for request in range(requests):
        for launch in range(3):
            correlation = 10 * request + launch + 1
            if launch == 2:
                calls.append(HostCall(now, now + 7_000, "cudaStreamSynchronize", 5_000 + correlation))
                now += 7_000
            now += 20_000
            calls.append(HostCall(now, now + 3_000, "cudaLaunchKernel", correlation))
            calls.append(HostCall(now + 500, now + 2_500, "cuLaunchKernel", correlation))
            works.append(DeviceWork(now + 90_000, 4_000 + launch, correlation))
        now += 5_000
        calls.append(HostCall(now, now + 9_000, "cudaDeviceSynchronize", 9_000 + request))
        now += 9_000
        calls.append(HostCall(now, now + 100, "cudaGetLastError", 0))
    return calls, works


def test_launches_have_the_hosts_gaps_and_its_waits():
    calls, works = profiled(4)
    random.Random(1).shuffle(calls)
    # The first request is left out; a launch's gap is from where the launch before began, or from the wait's end.
    assert requests_of(calls, works, 4) == [[(20_000, 4_000, 0), (20_000, 4_001, 0), (20_000, 4_002, 1)]] * 3


def test_a_profiler_that_does_not_tell_what_launched_what_is_taken_at_its_order():
    calls, works = profiled(4)
    untold = [work._replace(correlation=-1 - i) for i, work in enumerate(works)]
    assert requests_of(calls, untold, 4) == requests_of(calls, works, 4)


def test_what_is_not_told_apart_is_refused():
    calls, works = profiled(4)
    with pytest.raises(ValueError, match="no call that launched"):
        requests_of(calls, [work._replace(correlation=-1 - i) for i, work in enumerate(works[1:])], 4)
    with pytest.raises(ValueError, match="do not all launch the same"):
        requests_of(calls, works[:-1], 4)


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "cuEventSynchronize", "cudaMemcpy", "cuMemcpyDtoH_v2"])
def test_calls_that_wait(name: str):
    assert waits(name)


@pytest.mark.parametrize("name", ["cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cudaLaunchKernel", "cudaStreamQuery"])
def test_calls_that_do_not(name: str):
    assert not waits(name)
