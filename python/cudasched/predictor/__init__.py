"""How long a launch takes, said before it runs: trees trained on recorded launches, and why they say so.

::

    import cudasched.predictor

    durations_ns = cudasched.predictor.predict("data.parquet")  # what `cudasched collect` wrote
    reasons = cudasched.predictor.explain("data.parquet")
    reasons.top(0)  # what made the first launch as long as it was predicted

    cudasched.predictor.outlook("data.parquet")  # time, occupancy, use of the SMs, bytes/s and FLOP/s of each launch

    model = cudasched.predictor.Model.from_xgboost(booster)  # your own
    model.save("model.ubj")

    cudasched.predictor.train("data.parquet")  # and into use; see `cudasched train`

Rows of features are float32 of shape (launches, features), NaN where a value is missing; durations are ns. The trees
are those that the scheduler asks, walked by the same code: a prediction here is the one of the launch path before what
the scheduler learns while it runs corrects it. Needs numpy, and pyarrow for recordings:
``pip install 'cudasched[predictor]'``.
"""

from __future__ import annotations

from cudasched.predictor._contributions import Contributions
from cudasched.predictor._model import Model
from cudasched.predictor._outlook import Outlook, outlook
from cudasched.predictor._shipped import explain, load, predict
from cudasched.predictor._train import Trained, train

__all__ = ["Contributions", "Model", "Outlook", "Trained", "explain", "load", "outlook", "predict", "train"]
