"""Trainings placed beside servers by forecast: each goes to the GPU whose server it costs least.

    cudasched serve --models models.toml &
    python examples/place_with_ray.py --servers chat search --trainings bert resnet --seconds 10

Each server has a placement group of a whole GPU, half of which is left. `POST /api/v1/forecast` says what each training
and each server would cost one another; of all placements of one training a server, the cheapest is taken. Workers get
their class as in fractions_with_ray.py. models.toml names recordings of all programs (docs/advise.md); here, the
programs themselves are stand-ins.
"""

import argparse
import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TOKEN = Path("~/.local/state/cudasched/serve.token")
Costs = dict[str, dict[str, float]]  # by server, then by training


def costs(url: str, token: str, server: str, trainings: Sequence[str]) -> dict[str, float]:
    """P99 over alone for each part of its speed that a training keeps; infinite where memory does not fit both."""
    body = json.dumps({"server": server, "programs": trainings}).encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/forecast", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return {one["program"]: float("inf") if one["memory"]["fits"] is False else one["cost"] for one in found}


def placed(cost: Costs, trainings: Sequence[str]) -> dict[str, str]:
    """A server for each training, none twice, of the least cost in all."""
    choices = itertools.permutations(cost, len(trainings))
    best = min(choices, key=lambda servers: sum(cost[one][name] for one, name in zip(servers, trainings, strict=True)))
    return dict(zip(trainings, best, strict=True))


def half(group: PlacementGroup, client_class: str) -> dict[str, Any]:
    """Options of a worker on half of a group's GPU, with that class."""
    started = f"{sys.executable} -m cudasched run --class {client_class} -- {sys.executable}"
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return {"num_cpus": 1, "num_gpus": 0.5, "scheduling_strategy": strategy, "runtime_env": {"py_executable": started}}


def run(
    cost: Costs, trainings: Sequence[str], server: type, train: Callable[[str, float], Any], seconds: float
) -> dict[str, tuple[str, Any]]:
    """Starts servers and trainings. Returns each training's server and answer."""
    groups = {name: placement_group([{"GPU": 1, "CPU": 2}]) for name in cost}
    ray.get([group.ready() for group in groups.values()])
    servers = [ray.remote(server).options(**half(group, "latency")).remote() for group in groups.values()]
    ray.get([each.__ray_ready__.remote() for each in servers])
    places, work = placed(cost, trainings), ray.remote(train)
    started = {
        name: work.options(**half(groups[place], "best_effort")).remote(name, seconds) for name, place in places.items()
    }
    return {name: (places[name], ray.get(answer)) for name, answer in started.items()}


class Server:
    """A server's stand-in."""


def train(name: str, seconds: float) -> str:
    """A training's stand-in. Returns its GPU."""
    time.sleep(seconds)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def main() -> None:
    """Places all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:9465")
    parser.add_argument("--token-file", type=Path, default=TOKEN)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--trainings", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    if len(options.trainings) > len(options.servers):
        parser.error("a training needs a server of its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
    if ray.cluster_resources().get("GPU", 0) < len(options.servers):
        parser.error("the cluster has fewer GPUs than there are servers")
    token = options.token_file.expanduser().read_text().strip()
    cost = {server: costs(options.url, token, server, options.trainings) for server in options.servers}
    for name, (server, gpu) in run(cost, options.trainings, Server, train, options.seconds).items():
        print(f"{name} beside {server} on GPU {gpu}, cost {cost[server][name]:.2f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
