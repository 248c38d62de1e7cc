"""Predictions of a launch's time before the run: trees trained on recorded launches, and explanations.

::

    import cudasched.predictor

    durations_ns = cudasched.predictor.predict("data.parquet")  # of `cudasched collect`
    reasons = cudasched.predictor.explain("data.parquet")
    reasons.top(0)  # the reasons for the first launch's predicted time

    cudasched.predictor.outlook("data.parquet")  # time, occupancy, use of the SMs, bytes/s and FLOP/s of each launch

    model = cudasched.predictor.Model.from_xgboost(booster)  # your own
    model.save("model.ubj")

    cudasched.predictor.train("data.parquet")  # and into use; see `cudasched train`

Rows of features are float32 of shape (launches, features), NaN where a value is missing; durations are ns. The trees
are the scheduler's, walked by the same code. A prediction here is that of the launch path, without the corrections that
the scheduler learns as it runs. Needs numpy, and pyarrow for recordings: ``pip install 'cudasched[predictor]'``.
"""

from __future__ import annotations

from cudasched.predictor._contributions import Contributions
from cudasched.predictor._model import Model
from cudasched.predictor._outlook import Outlook, outlook
from cudasched.predictor._shipped import explain, load, predict
from cudasched.predictor._train import Trained, train

__all__ = ["Contributions", "Model", "Outlook", "Trained", "explain", "load", "outlook", "predict", "train"]
