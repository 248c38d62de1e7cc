#!/usr/bin/env bash
# MLServer's adaptive batching gives a request the data type and the parameters of another one in its batch.
#
# It joins the inputs of the requests that wait, and keeps the datatype of the first. A request of FP64 behind one of
# INT64 has its values cut to whole numbers before the model sees them, and is answered without an error. Both are right
# where they come alone, and MLServer does not check an input's type against the model's metadata. Clients that choose
# the type by the values do it, as those that encode data frames: a column of whole numbers is INT64. Of a request's
# parameters those of the last one hold for all (the manual tells of an input's parameters, which become lists). Send one
# type always, have what changes from request to request as an input, or leave max_batch_size at its default of 0.
#
# Seen with mlserver 1.7.1, NumPy 2.4.6, CPython 3.11.7, 2026-11-30, of a model that answers 10 times the input:
#     alone: INT64 2 is answered 20.0, FP64 0.9 9.0
#     FP64 behind INT64: 20.0, 0.0
#     FP64 before INT64: 20.0, 9.0
#     alone: FP64 0.9 with the parameter 1 is answered 0.9, with 2 1.8
#     in a batch: 1.8, 1.8
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  mlserver==1.7.1 numpy==2.4.6 fastapi==0.115.14 pydantic==2.14.4 grpcio==1.85.3
cat > "$folder/model-settings.json" <<'JSON'
{"name": "scaled", "implementation": "scaled.Scaled", "max_batch_size": 2, "max_batch_time": 2}
JSON
cat > "$folder/scaled.py" <<'PYTHON'
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Scaled(MLModel):
    async def predict(self, payload):
        inputs = NumpyCodec.decode_input(payload.inputs[0])
        by = getattr(payload.parameters, "by", 10)
        outputs = [NumpyCodec.encode_output("y", inputs * float(by))]
        return InferenceResponse(model_name=self.name, outputs=outputs)
PYTHON
cat > "$folder/ask.py" <<'PYTHON'
import concurrent.futures
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request

folder = sys.argv[1]
names = "mlserver", "numpy"
print(", ".join([*(f"{one} {importlib.metadata.version(one)}" for one in names), f"Python {platform.python_version()}"]))
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
ports = [one.getsockname()[1] for one in sockets]
settings = dict(zip(("http_port", "grpc_port", "metrics_port"), ports), host="127.0.0.1", parallel_workers=0)
with open(os.path.join(folder, "settings.json"), "w") as file:
    json.dump(settings, file)
for one in sockets:
    one.close()
url = f"http://127.0.0.1:{ports[0]}/v2/"


def ask(datatype, value, **parameters):
    tensor = {"name": "x", "shape": [1, 1], "datatype": datatype, "data": [value]}
    body = {"inputs": [tensor]} | ({"parameters": parameters} if parameters else {})
    request = urllib.request.Request(url + "models/scaled/infer", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return round(json.load(response)["outputs"][0]["data"][0], 2)


def together(*requests):
    """The answers of requests that come one soon after the other, and make one batch."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        futures = []
        for datatype, value, parameters in requests:
            futures.append(threads.submit(ask, datatype, value, **parameters))
            time.sleep(0.3)
        return [one.result() for one in futures]


with open(os.path.join(folder, "log"), "w") as log:
    command = [os.path.join(folder, "venv", "bin", "mlserver"), "start", folder]
    server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
try:
    for _ in range(300):
        try:
            urllib.request.urlopen(url + "health/ready", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    whole, part = ("INT64", 2, {}), ("FP64", 0.9, {})
    alone = [ask(*one[:2]) for one in (whole, part)]
    print(f"alone: INT64 2 is answered {alone[0]}, FP64 0.9 {alone[1]}")
    behind = together(whole, part)
    print(f"FP64 behind INT64: {behind[0]}, {behind[1]}")
    before = together(part, whole)
    print(f"FP64 before INT64: {before[1]}, {before[0]}")
    once, twice = ("FP64", 0.9, {"by": 1}), ("FP64", 0.9, {"by": 2})
    apart = [ask(*one[:2], **one[2]) for one in (once, twice)]
    print(f"alone: FP64 0.9 with the parameter 1 is answered {apart[0]}, with 2 {apart[1]}")
    mixed = together(once, twice)
    print(f"in a batch: {mixed[0]}, {mixed[1]}")
finally:
    server.terminate()
    server.wait()
right = alone == before[::-1] == [20, 9] and apart == [0.9, 1.8]
sys.exit(0 if right and behind == [20, 0] and mixed == [1.8, 1.8] else 1)
PYTHON
"$folder/venv/bin/python" "$folder/ask.py" "$folder"
