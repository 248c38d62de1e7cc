"""ONNX Runtime's CUDA provider as a server under `cudasched run`, beside the training of `two_processes.py`.

    python examples/onnx_server.py --seconds 10

Neither has a line of cudasched in it. Without `onnxruntime-gpu` or a GPU the model computes on the CPU.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path


def made(width: int = 1024, layers: int = 8) -> bytes:
    """A model of some layers; a program of yours has a file."""
    import numpy
    from onnx import TensorProto, helper, numpy_helper

    draw = numpy.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        weight = draw.standard_normal((width, width), numpy.float32) / width**0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]),
            helper.make_node("Tanh", [f"m{layer}"], [f"y{layer}"]),
        ]
        last = f"y{layer}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def serve(seconds: float) -> None:
    """An ordinary server: a session, and a request each 15 ms."""
    import numpy
    import onnxruntime

    there = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]
    session = onnxruntime.InferenceSession(made(), providers=providers)
    x = numpy.ones((1, 1024), numpy.float32)
    latencies, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        session.run(None, {"x": x})
        latencies.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.015)
    latencies.sort()
    middle = latencies[len(latencies) // 2]
    print(f"{session.get_providers()[0]}: served {len(latencies)}, median {middle:.2f} ms", flush=True)


def main() -> None:
    """Starts both and waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--role", choices=["serve"])
    options = parser.parse_args()
    if options.role:
        serve(options.seconds)
        return
    programs = []
    for client_class, script, role in (
        ("latency", Path(__file__), "serve"),
        ("best_effort", Path(__file__).with_name("two_processes.py"), "train"),
    ):
        program = [sys.executable, str(script), "--role", role, "--seconds", str(options.seconds)]
        command = [sys.executable, "-m", "cudasched", "run", "--class", client_class, "--", *program]
        programs.append(subprocess.Popen(command))
    sys.exit(max(abs(program.wait()) for program in programs))  # minus the signal, of one that was killed


if __name__ == "__main__":
    main()
