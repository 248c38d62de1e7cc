"""The kernels against cuBLAS, cuDNN, PyTorch's attention and copies, and in layers of BERT and Llama."""
