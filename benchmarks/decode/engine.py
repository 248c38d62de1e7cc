"""vLLM's engine with dummy weights, driven by commands: a server that streams tokens, without its HTTP front.

Run by path, so that nothing of cudasched is imported: under `cudasched run` it is an unmodified program. Commands come
as JSON lines on stdin, answers go as JSON lines to stdout:

                                       <- {"event": "imported"}     nothing has touched the GPU
    -> {"command": "build"}            <- {"event": "ready"}
    -> {"command": "run", "seconds": ..., "rate_hz": ..., "seed": ..., "profile": false}
                                       <- {"event": "result", "token_ms": [...], "first_ms": [...], "steps": ..., ...}
    -> {"command": "sleep"}            <- {"event": "result", "used_mib": [before, after, awake], "same": true}
    -> {"command": "quit"}

`token_ms` has each request's time per output token: from its first token to its last, over the tokens behind the first.
`steps` counts the engine's; `gpu_s` is the time of their kernels, where they are profiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "python" / "cudasched" / "demo"
PROMPT, TOKENS = 128, 16
#: Llama 3 of 8 billion parameters, of which vLLM takes the kind of layers and their sizes.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
Step = list[tuple[int, int, bool]]
"""Of each request with tokens: its number, how many tokens it has, and whether it is done."""


class _Vllm:
    """The engine in this process, its decoding steps in CUDA graphs."""

    def __init__(self, memory: float) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._directory = tempfile.TemporaryDirectory(prefix="vllm-")
        Path(self._directory.name, "config.json").write_text(json.dumps(MODEL))
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=self._directory.name,
                load_format="dummy",
                skip_tokenizer_init=True,
                gpu_memory_utilization=memory,
                max_model_len=2048,
                max_num_seqs=64,
                enable_sleep_mode=True,
                disable_log_stats=True,
                compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            )
        )
        self._parameters = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)

    def add(self, number: int) -> None:
        prompt = [5 + (number + 31 * place) % 1000 for place in range(PROMPT)]
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, self._parameters)

    def step(self) -> Step:
        return [(int(one.request_id), len(one.outputs[0].token_ids), one.finished) for one in self._engine.step()]

    def tokens(self) -> list[int]:
        """Those of one request."""
        self.add(0)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        return list(outputs[0].outputs[0].token_ids)

    def sleep(self) -> dict[str, Any]:
        import torch

        def used_mib() -> int:
            free, everything = torch.cuda.mem_get_info()
            return (everything - free) >> 20

        before, used = self.tokens(), [used_mib()]
        self._engine.sleep(level=1)
        used.append(used_mib())
        self._engine.wake_up()
        return {"used_mib": [*used, used_mib()], "same": before == self.tokens()}

    @staticmethod
    def profiled(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            found = run()
        us = sum(one.device_time for one in profiler.events() if one.device_type.name == "CUDA")
        return {**found, "gpu_s": us / 1e6}


class _Simulated:
    """A step is one kernel of 0.5 ms."""

    def __init__(self) -> None:
        from simulated import Driver

        self._driver = Driver()
        self._driver.make_current()
        self._kernel = self._driver.functions([500], blocks=1)[500]
        self._stream = self._driver.stream(priority=0)
        self._made: dict[int, int] = {}
        self._steps = 0

    def add(self, number: int) -> None:
        self._made[number] = 0

    def step(self) -> Step:
        self._driver.launch(self._kernel, 1, self._stream)
        self._driver.synchronize(self._stream)
        self._steps += 1
        self._made = {number: made + 1 for number, made in self._made.items()}
        found = [(number, made, made == 4) for number, made in self._made.items()]
        self._made = {number: made for number, made, done in found if not done}
        return found

    def sleep(self) -> dict[str, Any]:
        return {"used_mib": [0, 0, 0], "same": True}

    def profiled(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        before = self._steps
        return {**run(), "gpu_s": 0.0005 * (self._steps - before)}


def serve(engine: _Vllm | _Simulated, due_s: Sequence[float]) -> dict[str, Any]:
    """Requests that come then, counted from now; all of them are answered."""
    began = time.perf_counter()
    due = [began + each for each in due_s]
    first: dict[int, float] = {}
    token_ms, first_ms = [], []
    came = done = steps = 0
    while done < len(due):
        while came < len(due) and due[came] <= time.perf_counter():
            engine.add(came)
            came += 1
        if came == done:
            time.sleep(max(0.0, due[came] - time.perf_counter()))
            continue
        steps += 1
        for number, made, ended in engine.step():
            now = time.perf_counter()
            if made and number not in first:
                first[number] = now
                first_ms.append(1e3 * (now - due[number]))
            if ended:
                done += 1
                token_ms.append(1e3 * (now - first[number]) / max(made - 1, 1))
    return {"token_ms": token_ms, "first_ms": first_ms, "steps": steps, "seconds": time.perf_counter() - began}


def main() -> None:
    """Answers commands until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=float, default=0.3, help="of the GPU, for weights and the KV cache")
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def answer(event: str, **found: Any) -> None:
        answers.write(json.dumps({"event": event, **found}) + "\n")

    if not options.simulate:
        import vllm  # noqa: F401
    sys.path.append(str(DEMO))  # behind what vLLM imports
    from arrivals import schedule

    answer("imported", pid=os.getpid())
    engine: _Vllm | _Simulated | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        command = asked.pop("command")
        if command == "quit":
            break
        if command == "build":
            engine = _Simulated() if options.simulate else _Vllm(options.memory)
            serve(engine, [0.0])
            answer("ready")
            continue
        assert engine is not None, "it is told to build first"
        if command == "sleep":
            answer("result", **engine.sleep())
            continue
        served = partial(serve, engine, schedule("poisson", asked["rate_hz"], asked["seconds"], asked["seed"]))
        answer("result", **(engine.profiled(served) if asked.get("profile") else served()))


if __name__ == "__main__":
    main()
