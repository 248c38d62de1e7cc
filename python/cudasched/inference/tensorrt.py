"""TensorRT engines for a batcher.

::

    from cudasched.inference import Batcher
    from cudasched.inference.tensorrt import Model

    model = Model("resnet50.plan", example=torch.zeros(3, 224, 224))
    batcher = Batcher(model, sizes=model.sizes, slo_ms=20)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cudasched._text import one_line, shown
from cudasched.errors import ConfigError

__all__ = ["Model"]

_MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_bindings", "tensorrt_rtx_bindings")
_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


class Model:
    """An engine as a batcher runs it: stacks inputs, enqueues the engine (`enqueueV3`), and takes outputs apart.

    It computes on PyTorch's current stream, which is the region's on a batcher's thread, in memory of PyTorch. Its
    execution context is made by the first call. One thread uses a model at a time, as a batcher does.

    Args:
        engine: A plan's file, its bytes, or an ``ICudaEngine``. The batch is the first dimension of each input and
            output. TensorRT and TensorRT-RTX are asked, where they are installed, which of them reads a plan.
        example: One input, without a batch dimension: a tensor, or a mapping of tensors by the names of the inputs.
        sizes: For the batcher; None: powers of two that the profile allows, and its largest batch.
        profile: The optimization profile.
        device: Where it computes; None: PyTorch's current GPU.

    Attributes:
        example: The batcher holds inputs against it.
        sizes: For the batcher. Smaller batches than the profile allows are filled up with copies of an input.

    Raises:
        ConfigError: TensorRT is not installed or reads no such plan, the engine has no such profile, or its inputs are
            not those of the example.
    """

    def __init__(
        self,
        engine: Any,
        example: Any,
        *,
        sizes: Sequence[int] | None = None,
        profile: int = 0,
        device: Any = None,
    ) -> None:
        self._engine = engine if hasattr(engine, "create_execution_context") else _read(engine)
        module = sys.modules[type(self._engine).__module__]
        known = {getattr(module.DataType, name): dtype for name, dtype in _DTYPES.items()}
        names = [self._engine.get_tensor_name(place) for place in range(self._engine.num_io_tensors)]
        self._dtypes = {name: known.get(self._engine.get_tensor_dtype(name)) for name in names}
        for name, dtype in self._dtypes.items():
            if dtype is None:
                raise ConfigError(f"{name} is of {self._engine.get_tensor_dtype(name)}, which PyTorch has no type for")
        self._inputs = [name for name in names if self._engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        if not 0 <= profile < self._engine.num_optimization_profiles:
            count = self._engine.num_optimization_profiles
            raise ConfigError(f"profile = {shown(profile)}: the engine has {count}, from 0 on")
        self._profile, self.example = profile, example
        self._least, most = self._batches(self._named(example))
        if sizes is None:
            powers = (1 << bit for bit in range(most.bit_length()))
            sizes = [*(size for size in powers if self._least <= size < most), most]
        if not sizes or not 0 < min(sizes) <= max(sizes) <= most:
            raise ConfigError(f"sizes = {shown(sizes)}: the engine's profile has batches of {self._least} to {most}")
        self.sizes = tuple(sorted(sizes))
        self._device = torch.device(device or "cuda")
        self._context: Any = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Outputs on the host, one for each input: a tensor, or a mapping of tensors where the engine has several.

        Raises:
            ValueError: The inputs are not the engine's, or the shape of an output is not known before it runs.
            RuntimeError: TensorRT refuses to run.
        """
        if self._context is None:
            self._context = self._made()
        context, count = self._context, len(inputs)
        rows = [self._named(x) for x in inputs]
        rows += rows[:1] * (self._least - count)
        tensors = {name: torch.stack([row[name] for row in rows]).to(self._device) for name in self._inputs}
        for name, tensor in tensors.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which the engine's profile does not hold")
        for name in self._outputs:
            shape = tuple(context.get_tensor_shape(name))
            if -1 in shape or shape[:1] != (len(rows),):
                raise ValueError(f"{name} has shape {shape}: one that is known, and begins with the batch, is needed")
            tensors[name] = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        for name, tensor in tensors.items():
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(self._stream()):
            raise RuntimeError("TensorRT does not run the engine: its log says why")
        outputs = {name: tensors[name][:count].to("cpu") for name in self._outputs}  # waits for the GPU
        if len(outputs) == 1:
            return list(outputs[self._outputs[0]])
        return [{name: output[row] for name, output in outputs.items()} for row in range(count)]

    def _made(self) -> Any:
        context = self._engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(self._profile, self._stream()):
            raise RuntimeError("TensorRT makes no execution context of this engine: its log says why")
        return context

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream) if self._device.type == "cuda" else 0

    def _named(self, x: Any) -> Mapping[str, Any]:
        """One input by the engine's names. Raises ConfigError, which is a ValueError."""
        row = x if isinstance(x, Mapping) else {self._inputs[0]: x}
        if set(row) != set(self._inputs):
            raise ConfigError(
                f"the engine's inputs are {', '.join(self._inputs)}; given are {', '.join(map(str, row))}"
            )
        return row

    def _batches(self, example: Mapping[str, Any]) -> tuple[int, int]:
        """The smallest and the largest batch of the profile. Raises ConfigError."""
        ends = []
        for name in self._inputs:
            if not torch.is_tensor(example[name]):
                raise ConfigError(f"the example of {name} is of type {type(example[name]).__name__}, not a tensor")
            least = most = tuple(self._engine.get_tensor_shape(name))
            if -1 in most:
                least, _, most = map(tuple, self._engine.get_tensor_profile_shape(name, self._profile))
            shape, wanted = tuple(example[name].shape), self._dtypes[name]
            sizes = zip(least[1:], shape, most[1:], strict=True)
            fits = len(shape) == len(most) - 1 and all(low <= size <= high for low, size, high in sizes)
            if not fits or example[name].dtype != wanted:
                needed = f"{wanted} of shapes {least[1:]} to {most[1:]}"
                raise ConfigError(f"the example of {name} is {example[name].dtype} of shape {shape}, not {needed}")
            ends.append((least[0], most[0]))
        return max(max(least, 1) for least, _ in ends), min(most for _, most in ends)


def _read(plan: str | Path | bytes) -> Any:
    """An engine, by the first library that reads the plan. Raises ConfigError."""
    modules = [import_module(name) for name in _MODULES if find_spec(name) is not None]
    if not modules:
        raise ConfigError("TensorRT is not installed: pip install tensorrt")
    if isinstance(plan, bytes):
        name, data = "a plan given as bytes", plan
    else:
        name = str(plan)
        try:
            data = Path(plan).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: the plan cannot be read: {error.strerror or error}") from None
    said = []
    for module in modules:
        log = _log(module)
        engine = module.Runtime(log).deserialize_cuda_engine(data)
        if engine is not None:
            return engine
        said.append(f"{module.__name__} {module.__version__}: {one_line(' '.join(log.errors))[:300]}")
    raise ConfigError(f"{name}: it is none for this TensorRT and this GPU ({'; '.join(said)})")


def _log(module: Any) -> Any:
    """A logger that keeps errors."""

    class Log(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.Severity.ERROR:
                self.errors.append(message)

    return Log()
