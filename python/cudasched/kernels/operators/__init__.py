"""The kernels as PyTorch operators, ``torch.ops.cudasched.NAME``: for torch.compile and autograd.

Each has an implementation for CUDA, which launches the kernel on the current stream. One for the host, by PyTorch's own
operators in the kernel's precision, is the tests' reference. One without data is for tracing. Importing this package
imports PyTorch.
"""

from __future__ import annotations

from cudasched.kernels.operators._attention import attention_cuda
from cudasched.kernels.operators._conv2d import conv2d_cuda
from cudasched.kernels.operators._matmul import matmul_cuda
from cudasched.kernels.operators._rows import layer_norm_cuda, rms_norm_cuda, softmax_cuda

__all__ = ["attention_cuda", "conv2d_cuda", "layer_norm_cuda", "matmul_cuda", "rms_norm_cuda", "softmax_cuda"]
