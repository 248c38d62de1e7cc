"""The examples run to their end, in little, beside a PyTorch that may have no GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from support import PATIENCE_S, ROOT

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")


@pytest.mark.parametrize(
    ("command", "said", "needs"),
    [
        ("serve_and_finetune.py --seconds 1", "training steps", "torch"),
        ("decode_beside_training.py --requests 3 --tokens 4", "ms a token", "torch"),
        ("async_server.py", "twice the same", "torch"),
        ("batched_server.py --requests 50", "of 50 requests answered", "torch"),
        ("ray_serve.py --requests 20 --slo-ms 10000", "20 of 20 requests answered", "ray"),
        ("onnx_server.py --role serve --seconds 0.2", "served", "onnxruntime"),
        ("library_trainers.py transformers", "trained: 10 steps", "transformers"),
        ("library_trainers.py lightning", "trained: 10 steps", "lightning"),
    ],
    ids=lambda value: value.split(".")[0] if ".py" in value else None,
)
def test_it_runs(command: str, said: str, needs: str) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    assert "cudasched: warning: " not in done.stderr


@pytest.mark.parametrize("option", ["--requests", "--tokens"])
def test_decoding_nothing_is_refused(option: str) -> None:
    command = [sys.executable, str(EXAMPLES / "decode_beside_training.py"), option, "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "--requests and --tokens are at least 1" in done.stderr


def test_the_async_server_with_fastapi() -> None:
    for needs in ("fastapi", "httpx"):
        pytest.importorskip(needs)
    code = (
        "from fastapi.testclient import TestClient\n"
        "import async_server\n"
        "with TestClient(async_server.app) as client:\n"
        "    first, again = (client.get('/answer/3') for _ in range(2))\n"
        "    assert first.status_code == 200 and first.json() == again.json(), first.text\n"
        "    assert client.get('/answer/three').status_code == 422\n"
        "print('answered')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0 and "answered" in done.stdout, done.stdout + done.stderr


def test_the_two_programs_of_two_processes() -> None:
    for role, said in (("serve", "served"), ("train", "trained")):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "two_processes.py"), "--role", role, "--seconds", "0.2"],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["two_processes.py", "onnx_server.py"])
def test_a_program_that_was_killed_is_told_by_the_exit_code(script: str) -> None:
    code = (
        "import runpy, subprocess, sys, types; codes = [0, -9]\n"
        "subprocess.Popen = lambda _: types.SimpleNamespace(wait=codes.pop)\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(EXAMPLES / script)], timeout=PATIENCE_S).returncode == 9


def test_each_example_is_in_the_list() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}`" in text
    }
