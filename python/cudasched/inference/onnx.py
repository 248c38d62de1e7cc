"""ONNX models for a batcher, by ONNX Runtime.

::

    from cudasched.inference import Batcher
    from cudasched.inference.onnx import Model

    model = Model("resnet50.onnx", example=np.zeros((3, 224, 224), np.float32))
    batcher = Batcher(model, sizes=model.sizes, slo_ms=20)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched._text import shown
from cudasched.errors import ConfigError

__all__ = ["Model"]

_CUDA = "CUDAExecutionProvider"


class Model:
    """A model as a batcher runs it: stacks inputs, runs the session, and takes outputs apart.

    The session is made by the first call, on the thread that makes it: a batcher's, in its region. There, the CUDA
    provider computes on PyTorch's current stream, which is the region's, where the program has PyTorch on CUDA, and
    else on a stream of the provider's own.

    Args:
        model: A file, or its bytes. The batch is the first dimension of each input and output, and has a name there.
        example: One input, without a batch dimension: an array, or a mapping of arrays by the names of the inputs.
        sizes: For the batcher.
        providers: ONNX Runtime's, first choice first; None: CUDA's where it is there, then the CPU's.
        options: ONNX Runtime's ``SessionOptions``; None: its defaults.

    Attributes:
        example: The batcher holds inputs against it.
        sizes: For the batcher.

    Raises:
        ConfigError: ONNX Runtime is not installed or lacks a provider, there is no such file, or there are no sizes.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        example: Any,
        *,
        sizes: Sequence[int] = (1, 2, 4, 8, 16),
        providers: Sequence[str] | None = None,
        options: Any = None,
    ) -> None:
        try:
            import numpy
            import onnxruntime
        except ImportError as error:
            raise ConfigError(f"{error.name} is not installed: pip install onnxruntime, or onnxruntime-gpu") from None
        there = onnxruntime.get_available_providers()
        if providers is None:
            providers = [*([_CUDA] if _CUDA in there else []), "CPUExecutionProvider"]
        for provider in providers:
            if provider not in there:
                raise ConfigError(f"this ONNX Runtime has no provider {shown(provider)}; it has {', '.join(there)}")
        if not isinstance(model, bytes) and not Path(model).is_file():
            raise ConfigError(f"{model} is no file")
        if not sizes:
            raise ConfigError("sizes = (): at least one size of batches is needed")
        self.example, self.sizes = example, tuple(sorted(sizes))
        self._numpy, self._runtime = numpy, onnxruntime
        self._model = model if isinstance(model, bytes) else str(model)
        self._providers, self._options = list(providers), options
        self._session: Any = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Outputs on the host, one for each input: an array, or a mapping of arrays where the model has several.

        Raises:
            ValueError: The inputs are not the model's, or an output's first dimension is not the batch.
            Exception: ONNX Runtime's, where it refuses the model or the inputs.
        """
        if self._session is None:
            self._session = self._made()
        session, stack = self._session, self._numpy.stack
        names = [one.name for one in session.get_inputs()]
        rows = inputs if isinstance(inputs[0], Mapping) else [{names[0]: x} for x in inputs]
        if set(rows[0]) != set(names):
            raise ValueError(f"the model's inputs are {', '.join(names)}; given are {', '.join(map(str, rows[0]))}")
        outputs = [one.name for one in session.get_outputs()]
        found = session.run(outputs, {name: self._texts(stack([row[name] for row in rows])) for name in names})
        arrays = dict(zip(outputs, found, strict=True))
        for name, array in arrays.items():
            if array.shape[:1] != (len(inputs),):
                raise ValueError(f"{name} has shape {array.shape}: its first dimension is not the batch, {len(inputs)}")
        if len(outputs) == 1:
            return list(arrays[outputs[0]])
        return [{name: array[row] for name, array in arrays.items()} for row in range(len(inputs))]

    def _texts(self, array: Any) -> Any:
        """The array, its bytes as str: ONNX Runtime takes those of an array of bytes for something else."""
        if array.dtype.kind not in "OS":
            return array
        texts = [each.decode() if isinstance(each, bytes) else each for each in array.ravel()]
        return self._numpy.array(texts, object).reshape(array.shape)

    def _made(self) -> Any:
        settings: list[dict[str, str]] = [{} for _ in self._providers]
        torch = sys.modules.get("torch")
        if _CUDA in self._providers and torch is not None and torch.cuda.is_initialized():
            settings[self._providers.index(_CUDA)] = {
                "device_id": str(torch.cuda.current_device()),
                "user_compute_stream": str(torch.cuda.current_stream().cuda_stream),
            }
        return self._runtime.InferenceSession(
            self._model, self._options, providers=self._providers, provider_options=settings
        )
