"""The admission webhook of `cudasched serve`: the patches of annotated pods, and all others as they were."""

from __future__ import annotations

import base64
import copy
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import ROOT, Run

pytest.importorskip("fastapi")
pytest.importorskip("grpc")

from cudasched.serve._admission import BODY_BYTES, PATH, answer
from test_serve import serving

IMAGE = "registry.example/cudasched:1"
FILES = "/opt/cudasched"
HOOK = f"{FILES}/lib/python3/dist-packages/cudasched/hook"
PRELOADED = f"{HOOK}/libcuda.so.1:{HOOK}/libcuda.so"
GPU = {"limits": {"nvidia.com/gpu": "1"}}


def container(name: str = "serve", **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "registry.example/serve:1", **more}


def pod(*containers: dict[str, Any], annotations: Any = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p"} if annotations is None else {"name": "p", "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers), **spec}}


def review(of: object, **request: Any) -> bytes:
    """As the API server sends it."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    asked = {"uid": "705ab4f5", "kind": kind, "operation": "CREATE", "object": of, "oldObject": None, **request}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}).encode()


def patched(of: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902, of which `add` and `replace` are used; a target that is not there is an error."""
    made = copy.deepcopy(of)
    for operation in operations:
        assert set(operation) == {"op", "path", "value"}
        *parents, last = operation["path"].removeprefix("/").split("/")
        target = made
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target[name]
        if isinstance(target, list):
            assert (operation["op"], last) == ("add", "-")
            target.append(operation["value"])
        else:
            assert operation["op"] == "add" or (operation["op"] == "replace" and last in target)
            target[last] = operation["value"]
    return made


def admitted(of: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The pod as it starts, and the warnings."""
    response = answer(review(of), IMAGE)["response"]
    assert response["allowed"] is True and response["uid"] == "705ab4f5"
    operations = json.loads(base64.b64decode(response.get("patch", "W10=")))
    assert ("patchType" in response) == ("patch" in response) == bool(operations)
    return patched(of, operations), response.get("warnings", [])


def environment(of: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in of["env"]}


def test_a_command_starts_through_run() -> None:
    annotations = {"cudasched.io/class": "best-effort", "cudasched.io/memory-limit": "20GiB", "other": "x"}
    before = pod(
        container(command=["python", "$(SCRIPT)"], args=["--x"], env=[{"name": "SCRIPT", "value": "t.py"}]),
        annotations=annotations,
    )
    after, warnings = admitted(before)
    assert warnings == []
    (started,) = after["spec"]["containers"]
    assert started["command"] == [f"{FILES}/bin/busybox", "sh", f"{FILES}/bin/start", "python", "$(SCRIPT)"]
    assert started["args"] == ["--x"]
    assert environment(started) == {
        "SCRIPT": "t.py",
        "CUDASCHED_CLASS": "best_effort",
        "CUDASCHED_MEMORY_LIMIT": "20GiB",
    }
    (copying,) = after["spec"]["initContainers"]
    assert copying["image"] == IMAGE
    volumes = {volume["name"]: volume for volume in after["spec"]["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in started["volumeMounts"]}
    assert "emptyDir" in mounted[FILES] and mounted["/run/cudasched"]["hostPath"]["path"] == "/run/cudasched"
    copied = {mount["mountPath"]: volumes[mount["name"]] for mount in copying["volumeMounts"]}
    assert copied["/copy"] is mounted[FILES] and copied["/run/cudasched"] is mounted["/run/cudasched"]


FULL = pod(
    container(
        "a", command=["serve"], env=[{"name": "A", "value": "1"}], volumeMounts=[{"name": "v", "mountPath": "/v"}]
    ),
    container("b", securityContext={"runAsUser": 7}, env=[{"name": "LD_PRELOAD", "value": "/lib/own.so"}]),
    annotations={"cudasched.io/class": "latency"},
    volumes=[{"name": "v", "emptyDir": {}}],
    initContainers=[container("first")],
)


@pytest.mark.parametrize("version", ["1.28", "1.34"])
@pytest.mark.parametrize("before", [FULL, pod(container(), annotations={"cudasched.io/class": "normal"})])
def test_a_patched_pod_meets_the_schema_of_kubernetes(before: dict[str, Any], version: str) -> None:
    schema = pytest.importorskip("kubernetes_validate")
    schema.validate(before, version, strict=True)
    after, _ = admitted(before)
    assert after != before
    schema.validate(after, version, strict=True)


def test_a_container_without_a_command_is_preloaded_with_a_warning() -> None:
    after, warnings = admitted(FULL)
    first, second = after["spec"]["containers"]
    assert "LD_PRELOAD" not in environment(first) and "command" not in second
    assert environment(second) == {
        "LD_PRELOAD": f"/lib/own.so:{PRELOADED}",
        "CUDASCHED_CLASS": "latency",
        "CUDASCHED_RUN_DIR": "/run/cudasched/7",
        "CUDA_MPS_CLIENT_PRIORITY": "0",
    }
    (warning,) = warnings
    assert "'b' names no command" in warning and "glibc 2.34" in warning and "user 7" in warning


def test_a_preload_from_elsewhere_stays() -> None:
    source = {"name": "LD_PRELOAD", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}
    after, warnings = admitted(pod(container(env=[source]), annotations={"cudasched.io/class": "latency"}))
    assert after["spec"]["containers"][0]["env"][0] == source
    assert [variable["name"] for variable in after["spec"]["containers"][0]["env"]].count("LD_PRELOAD") == 1
    assert "it runs unmanaged" in warnings[-1]


def test_a_container_keeps_its_own_values() -> None:
    own = {"name": "CUDASCHED_CLASS", "value": "latency"}
    after, _ = admitted(pod(container(command=["x"], env=[own]), annotations={"cudasched.io/class": "normal"}))
    assert after["spec"]["containers"][0]["env"] == [own]


@pytest.mark.parametrize(
    "gpu", [GPU, {"limits": {"nvidia.com/mig-1g.10gb": "1"}}, {"claims": [{"name": "share"}]}], ids=str
)
def test_helpers_beside_a_container_with_a_gpu_stay_as_they_are(gpu: dict[str, Any]) -> None:
    helper = container("helper", command=["log"], resources={"limits": {"cpu": "1"}})
    before = pod(container(command=["serve"], resources=gpu), helper, annotations={"cudasched.io/class": "latency"})
    after, _ = admitted(before)
    assert after["spec"]["containers"][0] != before["spec"]["containers"][0]
    assert after["spec"]["containers"][1] == helper


UNCHANGED = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}


@pytest.mark.parametrize("annotations", [None, {}, {"cudasched.example/class": "latency"}])
def test_a_pod_without_the_annotation_stays_byte_for_byte(annotations: Any) -> None:
    expected = {**UNCHANGED, "response": {"uid": "705ab4f5", "allowed": True}}
    assert answer(review(pod(container(command=["x"]), annotations=annotations)), IMAGE) == expected


@pytest.mark.parametrize("request_", [{"operation": "UPDATE"}, {"subResource": "ephemeralcontainers"}])
def test_pods_that_exist_stay(request_: dict[str, str]) -> None:
    response = answer(review(FULL, **request_), IMAGE)["response"]
    assert response == {"uid": "705ab4f5", "allowed": True}


def test_a_limit_may_be_written_as_kubernetes_writes_sizes() -> None:
    annotations = {"cudasched.io/class": "normal", "cudasched.io/memory-limit": "20Gi"}
    after, warnings = admitted(pod(container(command=["x"]), annotations=annotations))
    assert environment(after["spec"]["containers"][0])["CUDASCHED_MEMORY_LIMIT"] == "20Gi" and not warnings


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"cudasched.io/class": "latncy"}, "cudasched.io/class = 'latncy': unknown class"),
        ({"cudasched.io/class": ""}, "unknown class"),
        ({"cudasched.io/class": "normal", "cudasched.io/memory-limit": "20Gb"}, "'20Gb': it must be a size"),
        ({"cudasched.io/memory-limit": "20GiB"}, "needs cudasched.io/class"),
        ({"cudasched.io/clas": "normal"}, "did you mean 'cudasched.io/class'"),
        ({"cudasched.io/class": 1}, "metadata.annotations.cudasched.io/class has no meaning"),
    ],
)
def test_a_wrong_annotation_is_allowed_with_a_warning(annotations: dict[str, Any], said: str) -> None:
    before = pod(container(command=["x"]), annotations=annotations)
    after, (warning,) = admitted(before)
    assert after == before and said in warning and warning.startswith("cudasched: unchanged")


@pytest.mark.parametrize(
    ("containers", "spec", "said"),
    [
        ([container("cudasched")], {}, "a container cudasched already"),
        ([container()], {"volumes": [{"name": "cudasched-run", "emptyDir": {}}]}, "a volume cudasched-run already"),
        (
            [container(volumeMounts=[{"name": "v", "mountPath": "/run/cudasched/"}])],
            {},
            "mounts /run/cudasched/ itself",
        ),
    ],
)
def test_names_that_are_taken_would_make_the_pod_invalid(
    containers: list[dict[str, Any]], spec: dict[str, Any], said: str
) -> None:
    before = pod(*containers, annotations={"cudasched.io/class": "normal"}, **spec)
    after, (warning,) = admitted(before)
    assert after == before and said in warning


TEXT = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
# Mostly as the schema has it, and something else in any place.
CONTAINERS = st.fixed_dictionaries(
    {"name": TEXT | JSON},
    optional={
        "command": st.lists(TEXT, max_size=2) | JSON,
        "env": st.lists(st.fixed_dictionaries({"name": st.just("LD_PRELOAD") | TEXT}, optional={"value": TEXT})) | JSON,
        "volumeMounts": st.lists(st.fixed_dictionaries({"mountPath": TEXT})) | JSON,
        "resources": st.just(GPU) | JSON,
        "securityContext": st.fixed_dictionaries({"runAsUser": st.integers()}) | JSON,
    },
)
PODS = st.builds(
    pod,
    CONTAINERS,
    CONTAINERS,
    annotations=st.dictionaries(
        st.sampled_from(["cudasched.io/class", "cudasched.io/memory-limit"]) | TEXT,
        st.sampled_from(["latency", "best-effort", "1GiB"]) | JSON,
    ),
    volumes=st.none() | st.lists(st.fixed_dictionaries({"name": TEXT})) | JSON,
)


def is_valid(found: dict[str, Any], of: object) -> None:
    json.dumps(found).encode()
    response = found["response"]
    assert found == {**UNCHANGED, "response": response}
    assert response["allowed"] is True and isinstance(response["uid"], str)
    assert set(response) <= {"uid", "allowed", "patch", "patchType", "warnings"}
    for warning in response.get("warnings", []):
        assert warning.isprintable() and 0 < len(warning) <= 250
    if "patch" in response:
        after = patched(of, json.loads(base64.b64decode(response["patch"])))
        assert after != of and after["metadata"] == of["metadata"]  # type: ignore[index]


@given(PODS | JSON)
@example(FULL)
def test_any_pod_gets_a_valid_answer(of: object) -> None:
    is_valid(answer(review(of), IMAGE), json.loads(json.dumps(of)))


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"kind": ' + b"9" * 5000 + b"}")
@example(review({}, uid="\ud800"))
@example(review({}, uid=None))
def test_any_body_gets_a_valid_answer(body: bytes) -> None:
    is_valid(answer(body, IMAGE), None)


def test_the_api_server_needs_no_token(command: str, private_home: Path, simulated: Path) -> None:
    with serving(command, private_home, "--admission-image", IMAGE) as server:
        large = pod(container(command=["x", "y" * 200_000]), annotations={"cudasched.io/class": "latency"})
        status, found, _ = server.ask("admission?timeout=5s", "POST", review(large), authorization=None)
        assert status == 200 and "patch" in found["response"]
        assert server.ask("admission", "GET", authorization=None)[0] == 405
        assert server.ask("admission", "POST", b"x" * (BODY_BYTES + 1), authorization=None)[0] == 413
        assert server.ask("admission", "POST", review(large), host="elsewhere")[0] == 421
        assert server.ask("api/v1/clients", authorization=None)[0] == 401
        # Many pods at once, of one address.
        assert {server.ask("admission", "POST", review(FULL), authorization=None)[0] for _ in range(100)} == {200}


def test_without_the_option_there_is_no_webhook(command: str, private_home: Path, simulated: Path) -> None:
    with serving(command, private_home) as server:
        assert server.ask("admission", "POST", review(FULL))[0] == 404


def manifests() -> dict[str, dict[str, Any]]:
    """Those of containers/kubernetes by kind."""
    yaml = pytest.importorskip("yaml")
    files = [ROOT / "containers/kubernetes" / name for name in ("server.yaml", "webhook.yaml")]
    return {found["kind"]: found for file in files for found in yaml.safe_load_all(file.read_text())}


def test_the_image_has_the_paths_of_the_patch() -> None:
    text = (ROOT / "containers/Dockerfile").read_text()
    assert f"--target {HOOK.removesuffix('/cudasched/hook')} " in text
    assert f"/start {FILES}/bin/" in text and "cp /bin/busybox " in text and f" {FILES}/bin/ " in text


@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_the_manifests_meet_the_schema_of_kubernetes(version: str) -> None:
    schema = pytest.importorskip("kubernetes_validate")
    found = manifests()
    assert set(found) == {"Namespace", "Service", "Deployment", "MutatingWebhookConfiguration"}
    for manifest in found.values():
        schema.validate(manifest, version, strict=True)


@pytest.mark.skipif(not (shutil.which("kubectl") and shutil.which("openssl")), reason="no kubectl or openssl here")
def test_kustomize_builds_after_the_commands_that_its_file_names(tmp_path: Path) -> None:
    schema, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    directory = shutil.copytree(ROOT / "containers/kubernetes", tmp_path / "kubernetes")
    lines = (directory / "kustomization.yaml").read_text().splitlines()
    commands = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
    subprocess.run(["bash", "-ec", commands], cwd=directory, check=True, capture_output=True)
    built = subprocess.run(["kubectl", "kustomize", directory], check=True, capture_output=True, text=True).stdout
    found = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(built)}
    assert found.keys() == manifests().keys() | {"Secret"}
    for manifest in found.values():
        schema.validate(manifest, "1.34", strict=True)
    certificate = found["Secret"]["data"]["tls.crt"]
    (webhook,) = found["MutatingWebhookConfiguration"]["webhooks"]
    assert base64.b64decode(webhook["clientConfig"]["caBundle"]) == base64.b64decode(certificate)
    (tls,) = [one for one in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if one["name"] == "tls"]
    assert tls["secret"]["secretName"] == found["Secret"]["metadata"]["name"]


def test_the_webhook_reaches_the_server(cudasched: Run) -> None:
    found = manifests()
    (webhook,) = found["MutatingWebhookConfiguration"]["webhooks"]
    service = webhook["clientConfig"]["service"]
    assert (webhook["failurePolicy"], service["path"]) == ("Ignore", PATH)
    metadata = found["Service"]["metadata"]
    assert (service["name"], service["namespace"]) == (metadata["name"], metadata["namespace"])
    template = found["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"] == found["Service"]["spec"]["selector"]
    (server,) = template["spec"]["containers"]
    (port,) = found["Service"]["spec"]["ports"]
    (probe,) = server["readinessProbe"]["httpGet"]["httpHeaders"]
    assert server["livenessProbe"] == server["readinessProbe"], "a server that hangs starts again"
    host = f"{service['name']}.{service['namespace']}.svc"
    # The server refuses all names but its own, among them that of the API server's requests.
    assert host in server["args"] and probe["value"] == f"{host}:{service['port']}"
    assert port["port"] == service["port"] == server["ports"][0]["containerPort"]
    assert f"[default: {port['port']}]" in " ".join(cudasched("serve", "--help").stdout.split())
    assert server["image"] == server["args"][server["args"].index("--admission-image") + 1]
    assert cudasched(*server["args"], "--help").returncode == 0


def test_the_unit_starts_the_server(cudasched: Run) -> None:
    lines = (ROOT / "containers/cudasched-serve.service").read_text().splitlines()
    (start,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    program, *arguments = shlex.split(start)
    assert program == "%h/.local/bin/cudasched" and arguments[0] == "serve"
    assert cudasched(*arguments, "--help").returncode == 0
