"""Training across several GPUs beside servers on one and on two of them."""
