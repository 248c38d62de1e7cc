#!/usr/bin/env bash
# uvicorn on a socket that its caller has bound: each answer on a kept connection comes 40 ms late.
#
# asyncio sets TCP_NODELAY on a connection only where the socket says that its protocol is TCP's (IPPROTO_TCP). A socket
# made as `socket.socket(AF_INET, SOCK_STREAM)` has protocol 0, which is TCP all the same, and its accepted connections
# have 0, too. uvicorn writes an answer's head and body apart, so the body waits for the client's delayed acknowledgement.
# With the protocol named, or where uvicorn binds by host and port, there is no delay.
#
# Seen with uvicorn 0.38.0, h11 0.16.0, CPython 3.11.7, Linux 6.18, 2026-11-27:
#     protocol 0: 44.0 ms an answer
#     IPPROTO_TCP: 0.1 ms an answer
# Exit code 1: it is so no more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check uvicorn==0.38.0 h11==0.16.0 click==8.3.1
"$folder/venv/bin/python" - <<'PYTHON'
import http.client
import platform
import socket
import statistics
import sys
import threading
import time

import uvicorn


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def answer_ms(protocol):
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    connection = http.client.HTTPConnection(*bound.getsockname())
    took = []
    for _ in range(20):
        begin = time.perf_counter()
        connection.request("GET", "/")
        connection.getresponse().read()
        took.append(1e3 * (time.perf_counter() - begin))
    connection.close()
    server.should_exit = True
    thread.join()
    return statistics.median(took)


late, prompt = answer_ms(0), answer_ms(socket.IPPROTO_TCP)
print(f"uvicorn {uvicorn.__version__}, Python {platform.python_version()}")
print(f"protocol 0: {late:.1f} ms an answer")
print(f"IPPROTO_TCP: {prompt:.1f} ms an answer")
sys.exit(0 if late > 20 and prompt < 20 else 1)
PYTHON
