#!/usr/bin/env bash
# tritonclient's HTTP client writes into the headers that its caller passes, and a later request sends them again.
#
# `infer(..., headers=headers)` adds "Inference-Header-Content-Length" to the caller's dictionary where an input is
# binary. A program that keeps one dictionary, for its token, then sends that length with a request whose inputs are JSON
# alone. The server looks for the end of the JSON there, and refuses the request. With a copy
# for each request (`headers=dict(headers)`) it does not.
#
# Seen with tritonclient 2.73.0, geventhttpclient 2.6.1, NumPy 2.4.6, CPython 3.11.7, Linux 6.18, 2026-11-27:
#     after a binary request: authorization, Inference-Header-Content-Length
#     of a JSON request of 134 bytes with the same dictionary: 153
#     with a copy for each request: None
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  tritonclient==2.73.0 geventhttpclient==2.6.1 numpy==2.4.6 urllib3==2.6.0
"$folder/venv/bin/python" - <<'PYTHON'
import http.server
import importlib.metadata
import platform
import sys
import threading

import numpy
import tritonclient.http

seen = []


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        size = int(self.headers["content-length"])
        self.rfile.read(size)
        seen.append((self.headers["inference-header-content-length"], size))
        body = b'{"model_name": "m", "outputs": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
array = numpy.zeros((1, 2), numpy.float32)
binary, as_json = (
    tritonclient.http.InferInput("x", [1, 2], "FP32").set_data_from_numpy(array, binary_data=kind)
    for kind in (True, False)
)
wanted = [tritonclient.http.InferRequestedOutput("y", binary_data=False)]
client = tritonclient.http.InferenceServerClient("127.0.0.1:%d" % server.server_port)
headers = {"authorization": "Bearer token"}
client.infer("m", [binary], outputs=wanted, headers=headers)
added = ", ".join(headers)
client.infer("m", [as_json], outputs=wanted, headers=headers)
kept = {"authorization": "Bearer token"}
client.infer("m", [binary], outputs=wanted, headers=dict(kept))
client.infer("m", [as_json], outputs=wanted, headers=dict(kept))
client.close()
(_, _), (stale, size), (_, _), (copied, _) = seen
print(f"tritonclient {importlib.metadata.version('tritonclient')}, Python {platform.python_version()}")
print(f"after a binary request: {added}")
print(f"of a JSON request of {size} bytes with the same dictionary: {stale}")
print(f"with a copy for each request: {copied}")
sys.exit(0 if stale is not None and copied is None else 1)
PYTHON
