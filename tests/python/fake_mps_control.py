"""Stands in for nvidia-cuda-mps-control, and for the server that it starts: as far as cudasched uses them.

With -f it is the daemon; as nvidia-cuda-mps-server it is a server, which outlives a daemon that is killed; otherwise it
gives the daemon a command from its standard input. FAKE_MPS names a directory: ``starts`` and ``commands`` in there
have a line for each, ``clients`` the process ids that the server says it has, ``slow`` makes the daemon take its time
to end, ``broken`` makes it end at once.
"""

import os
import signal
import socket
import subprocess
import sys
import time

pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
notes = os.environ["FAKE_MPS"]


def note(name: str, line: str) -> None:
    with open(f"{notes}/{name}", "a") as file:
        file.write(line + "\n")


def contents(name: str) -> str:
    try:
        with open(f"{notes}/{name}") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def daemon() -> None:
    with open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w") as log:
        log.write("Start\n" + ("The GPU said no\n\n" if contents("broken") else ""))
    if contents("broken"):
        sys.exit(1)
    note("starts", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{pipe}/control")
    listener.listen()
    with open(f"{pipe}/nvidia-cuda-mps-control.pid", "w") as file:
        file.write(str(os.getpid()))
    server = subprocess.Popen([os.path.join(os.path.dirname(sys.argv[0]), "nvidia-cuda-mps-server")])
    while True:
        connection, _ = listener.accept()
        with connection:
            command = connection.recv(1000).decode().split()
            note("commands", " ".join(command))
            answers = {
                "get_default_active_thread_percentage": "100.0\n",
                "get_server_list": f"{server.pid}\n",
                "get_client_list": contents("clients"),
            }
            if command[0] == "quit":
                time.sleep(float(contents("slow") or 0))
                server.kill()
                server.wait()
                sys.exit(0)
            connection.sendall(answers[command[0]].encode())


def ask() -> None:
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{pipe}/control")
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    connection.sendall(sys.stdin.read().encode())
    while answer := connection.recv(1000):
        sys.stdout.write(answer.decode())


if sys.argv[0].endswith("server"):
    signal.pause()
elif sys.argv[1:] == ["-f"]:
    daemon()
else:
    ask()
