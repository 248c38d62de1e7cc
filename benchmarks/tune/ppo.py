"""Reinforcement learning (PPO of stable-baselines3) as a tuner of recorded spaces, beside ours and chance.

The policy sees the last configuration and how fast it was, and names the next one, a value for each parameter: the
allowed configuration that is nearest runs. The reward is the logarithm of its speed. `ppo` knows nothing at first;
`ppo_trained` has searched the kernel's other shapes before, which costs it nothing here. What they are told of a
configuration is what Kernel Tuner is told (rivals.py). The settings of PPO are the best of six on seeds of their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cudasched.tune.recording import Recording

from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session, median_of
from benchmarks.tune import evaluate, rivals
from benchmarks.tune.evaluate import EVALUATIONS, RECORDED, TITLES, Task, gap, median
from benchmarks.tune.rivals import Course

#: Of an update, and of PPO otherwise; what is not named is as stable-baselines3 has it.
STEPS = 16
SETTINGS = {"n_steps": STEPS, "batch_size": STEPS, "learning_rate": 1e-3, "ent_coef": 0.01}
TRAINING_STEPS = 512
#: Of a reward: what fails, and what is so much slower than the first.
LEAST = -3.0
TUNERS = (*TITLES, "ppo", "ppo_trained")


def space_of(recordings: Sequence[Recording]) -> Any:
    """The recorded spaces of one kernel as an environment of Gymnasium, each episode in the next one.

    Its `tried` are the places of the configurations that were named, in order.
    """
    import gymnasium
    import numpy as np

    parameters = recordings[0].problem.space.parameters
    sizes = np.array([len(values) for values in parameters.values()])
    allowed = [
        np.array(
            [[values.index(one[name]) for name, values in parameters.items()] for one in each.problem.configurations]
        )
        for each in recordings
    ]

    class Space(gymnasium.Env):  # type: ignore[misc]
        action_space = gymnasium.spaces.MultiDiscrete(sizes)
        observation_space = gymnasium.spaces.Box(-4.0, 4.0, (len(sizes) + 1,), np.float32)

        def __init__(self) -> None:
            self.tried: list[int] = []
            self._episodes = self._steps = 0
            self._first_us = [math.nan] * len(recordings)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._at, self._steps = self._episodes % len(recordings), 0
            self._episodes += 1
            return np.zeros(self.observation_space.shape, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            away = np.abs(allowed[self._at] - action)
            index = int(np.argmin((away > 0).sum(1) + away.sum(1) / (1 + sizes.sum())))
            self.tried.append(index)
            self._steps += 1
            time_us = recordings[self._at].measurements[index].time_us
            if time_us is None:
                reward = LEAST
            else:
                if math.isnan(self._first_us[self._at]):
                    self._first_us[self._at] = time_us
                reward = min(max(math.log2(self._first_us[self._at] / time_us), LEAST), -LEAST)
            seen = np.append(allowed[self._at][index] / np.maximum(sizes - 1, 1), reward)
            return seen.astype(np.float32), reward, False, self._steps == STEPS, {}

    return Space()


def search(recording: Recording, seed: int, evaluations: int, others: Sequence[Recording] = ()) -> Course:
    """PPO's course; with `others` it has searched these before."""
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    space = space_of([recording])
    begun = PPO("MlpPolicy", space_of(others) if others else space, seed=seed, device="cpu", **SETTINGS)
    if others:
        begun.learn(TRAINING_STEPS)
        begun.set_env(space)
    # One that names the same few again and again ends, too.
    begun.learn(10 * evaluations, callback=lambda *_: len(set(space.tried)) < evaluations)
    return rivals.course(recording, ((index, 0.0) for index in space.tried))


def do(task: Task) -> float:
    """The gap of one search; with other shapes, of PPO that was trained on them."""
    recording = evaluate.loaded(task.path)
    if task.tuner in TITLES:
        return gap(recording, evaluate.do(task))
    return gap(recording, search(recording, task.seed, task.evaluations, list(map(evaluate.loaded, task.others))))


def measure(session: Session) -> Found:
    """All searches. Raises ValueError."""
    recordings = evaluate.spaces(session)
    gaps: dict[str, list[float]] = {tuner: [] for tuner in TUNERS}
    with ProcessPoolExecutor(session.options.processes) as pool:
        for path in recordings:
            others = evaluate.others_of(path, recordings)
            for tuner in TUNERS if others else TUNERS[:-1]:
                known = others if tuner == "ppo_trained" else ()
                wanted = [Task(path, tuner, seed, EVALUATIONS, known) for seed in range(session.options.seeds)]
                found = list(pool.map(do, wanted))
                session.say(f"{path.stem}, {tuner}: gap {median(found):.4g}, worst {max(found):.4g}")
                gaps[tuner] += found
    evaluate.told_by(session, next(iter(recordings.values())))
    return {f"tuner_gap_{tuner}": median_of(each) for tuner, each in gaps.items() if each}


BENCHMARK = Benchmark(
    about="PPO as a tuner of recorded spaces, beside ours and chance",
    groups={"ppo": measure},
    goals={f"tuner_gap_{tuner}": (0.0, "more") for tuner in TUNERS},
    results="kernels",
    settings={"recorded": RECORDED, "seeds": (30, 1), "processes": max(1, len(os.sched_getaffinity(0)))},
    gpu=False,
    torch=False,
)
