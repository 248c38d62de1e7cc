"""Programs of other libraries that `training.record` records: what the predictor is judged by, not trained on.

Each module has `parts(tiny)`, which gives labels and what runs them, in the same order in every run. Nothing here uses
anything of the sweeps (`training.operations`, `training.models`, `training.triton_kernels`), and shapes are drawn
otherwise: a program does a few things over and over, and every now and then with other shapes.
"""
