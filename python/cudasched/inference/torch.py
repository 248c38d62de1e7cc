"""PyTorch modules for a batcher.

::

    from cudasched.inference import Batcher
    from cudasched.inference.torch import Model

    model = Model(module.eval().cuda(), example=torch.zeros(3, 224, 224), sizes=(1, 2, 4, 8), graphs=True)
    batcher = Batcher(model, sizes=model.sizes, slo_ms=20)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cudasched import hook, region
from cudasched.errors import ConfigError

__all__ = ["Model"]

_WARM_UP = 3
"""Runs before a capture: libraries allocate and choose algorithms in the first, and neither may be captured."""


class Model:
    """A module as a batcher runs it: stacks inputs, and takes outputs apart.

    With `graphs`, each size is captured as a CUDA graph at its first batch. A batch is copied into the memory of the
    smallest graph that holds it. The rest of that memory has inputs of earlier batches, whose outputs are dropped.
    Graphs share one pool of memory: one thread uses a model at a time, as a batcher does.

    Args:
        module: Called without gradients, with one tensor, with the tensors of a tuple, or with those of a mapping by
            name, as the example has them; each has the batch as its first dimension, and so have its outputs. Put it
            into evaluation mode, where rows of a batch do not depend on each other.
        example: One input, without a batch dimension: a tensor, a tuple or a mapping of tensors.
        sizes: Of graphs.
        graphs: One CUDA graph a size.
        device: Where the module computes; None: where its first parameter is, else the host.

    Attributes:
        example: The batcher holds inputs against it.
        sizes: For the batcher.

    Raises:
        ConfigError: There are no sizes, or graphs are asked for and PyTorch finds no GPU.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        example: Any,
        *,
        sizes: Sequence[int] = (1, 2, 4, 8, 16),
        graphs: bool = False,
        device: Any = None,
    ) -> None:
        if graphs and not torch.cuda.is_available():
            raise ConfigError("graphs = True: PyTorch finds no GPU (torch.cuda.is_available() is False)")
        if not sizes:
            raise ConfigError("sizes = (): at least one size of batches is needed")
        if device is None:
            parameters = module.parameters() if isinstance(module, torch.nn.Module) else iter(())
            device = next((parameter.device for parameter in parameters), "cpu")
        self.example, self.sizes = example, tuple(sorted(sizes))
        self._module, self._device = module, torch.device(device)
        self._graphs: dict[int, tuple[Any, Any, Any]] | None = {} if graphs else None
        self._pool: Any = None
        self._host: Any = None  # inputs on their way to a graph

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Outputs on the host, one for each input: views of one tensor a batch.

        Raises:
            ValueError: There are more inputs than the largest graph holds, or an output's first dimension is not the
                batch's.
        """
        with torch.no_grad():
            return self._outputs(inputs)

    def predict(self, size: int) -> float:
        """The predicted time of a batch before one has run, ms: by the kernels of its graph, for ``Batcher(predict=)``.

        Captures the graphs of all sizes at its first call.

        Args:
            size: Of a graph.

        Raises:
            ConfigError: The model has no graph of that size, or cudasched does not know its time: it was not in front
                of the driver when the graph was made.
        """
        if self._graphs is None or size not in self.sizes:
            raise ConfigError(f"predict({size}): a model with graphs = True has times, of the sizes {self.sizes}")
        with torch.no_grad(), region("latency"):
            for each in reversed(self.sizes):  # graphs of smaller sizes share the memory of the largest
                if each not in self._graphs:
                    self._graphs[each] = self._capture(each)
            predicted_ns = hook.load_core().graph_ns(self._graphs[size][0].raw_cuda_graph_exec())
        if predicted_ns <= 0:
            raise ConfigError(f"predict({size}): the graph's time is not known (cudasched.state() says why)")
        return float(predicted_ns / 1e6)

    def _outputs(self, inputs: list[Any]) -> list[Any]:
        count = len(inputs)
        if self._graphs is None:
            size = count
            outputs = self._forward(_map(lambda *rows: torch.stack(rows).to(self._device), *inputs))
        else:
            place = bisect_left(self.sizes, count)
            if place == len(self.sizes):
                raise ValueError(f"{count} inputs; the largest graph holds {self.sizes[-1]}: give the batcher `sizes`")
            size = self.sizes[place]
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)
            graph, memory, outputs = self._graphs[size]
            _map(_load, memory, self._host, *inputs)
            graph.replay()
        own = self._graphs is not None  # the next replay writes to the same memory
        outputs = _map(lambda output: _rows(output, size)[:count].to("cpu", copy=own), outputs)  # waits for the GPU
        if isinstance(outputs, torch.Tensor):
            return list(outputs.unbind())  # one call: each lets go of the interpreter's lock
        return [_map(lambda output, row=row: output[row], outputs) for row in range(count)]

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self._module(**batch)
        return self._module(*batch) if isinstance(batch, (tuple, list)) else self._module(batch)

    def _pinned(self, one: torch.Tensor) -> torch.Tensor:
        shape = self.sizes[-1], *one.shape
        return torch.empty(shape, dtype=one.dtype, pin_memory=self._device.type == "cuda")

    def _capture(self, size: int) -> tuple[Any, Any, Any]:
        """A graph with the memory of its inputs and outputs."""
        memory = _map(lambda one: torch.stack([one] * size).to(self._device), self.example)
        cuda: Any = torch.cuda
        stream = cuda.Stream(self._device)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._forward(memory)
        graph = cuda.CUDAGraph()
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
            self._host = _map(self._pinned, self.example)
        # Other threads of the program may allocate meanwhile.
        with cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = self._forward(memory)
        cuda.current_stream(self._device).wait_stream(stream)
        return graph, memory, outputs


def _load(memory: torch.Tensor, host: torch.Tensor, *rows: torch.Tensor) -> None:
    """Copies rows into a graph's memory, by way of `host`, on this thread; PyTorch would start one a core."""
    count = len(rows)
    if not rows[0].is_cpu:
        memory[:count].copy_(torch.stack(rows))
        return
    dtype, shape = host.dtype, host.shape[1:]
    for row in rows:
        if row.dtype != dtype or row.shape != shape or not row.is_cpu:
            needed = f"{dtype} of shape {tuple(shape)} on cpu is needed"
            raise ValueError(f"an input is {row.dtype} of shape {tuple(row.shape)} on {row.device}: {needed}")
    whole = [row if _is_plain(row) else row.resolve_conj().resolve_neg().contiguous() for row in rows]
    if shape.numel():
        addresses = [row.data_ptr() for row in whole]
        hook.load_core().gather(addresses, shape.numel() * host.element_size(), host.data_ptr())
    memory[:count].copy_(host[:count], non_blocking=True)


def _is_plain(row: torch.Tensor) -> bool:
    return row.is_contiguous() and not (row.is_conj() or row.is_neg())


def _map(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Of the tensors that have one place in each of several structures."""
    if isinstance(first, torch.Tensor):
        return function(first, *others)
    if isinstance(first, Mapping):
        return {key: _map(function, first[key], *(other[key] for other in others)) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_map(function, *parts) for parts in zip(first, *others, strict=True))
    return function(first, *others)


def _rows(output: torch.Tensor, size: int) -> torch.Tensor:
    if not output.shape or output.shape[0] != size:
        raise ValueError(f"an output has shape {tuple(output.shape)}: its first dimension is not the batch's, {size}")
    return output
