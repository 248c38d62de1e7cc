"""A tuner in quiet windows: prints when others were to pause, [from, until] in ns of the monotonic clock."""

import json
import time

import cudasched.tune
import torch

x = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
pauses = []
with cudasched.tune.quiet() as quiet:
    assert 0 < quiet.do_bench(lambda: x @ x, return_mode="median") < 1
    for _ in range(10):
        with quiet._pauses.pause():
            begin = time.monotonic_ns()
            while quiet._pauses.left_s() > 0.005:
                x @ x
                torch.cuda.synchronize()
            pauses.append([begin, time.monotonic_ns()])
print(json.dumps(pauses))
