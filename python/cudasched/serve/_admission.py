"""Kubernetes's mutating admission: a pod with the annotation ``cudasched.io/class`` runs under cudasched.

`answer` is a pure function of a request's body. The function never fails and never forbids: a pod that cannot be
changed is allowed unchanged, with a warning that says why. A changed pod copies cudasched from an image of
``containers/Dockerfile``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cudasched import mps
from cudasched._text import closest, one_line, shown
from cudasched.config import parse_class, parse_size
from cudasched.errors import ConfigError

__all__ = ["BODY_BYTES", "PATH", "answer", "application"]

PATH = "/admission"
BODY_BYTES = 1 << 20

_PREFIX = "cudasched.io/"
_CLASS, _LIMIT = f"{_PREFIX}class", f"{_PREFIX}memory-limit"
_HOME = "/opt/cudasched"  # in the image and in every container: the files hold absolute paths
_RUN = "/run/cudasched"
_SHIMS = [f"{_HOME}/lib/python3/dist-packages/cudasched/hook/{name}" for name in ("libcuda.so.1", "libcuda.so")]
_START = [f"{_HOME}/bin/busybox", "sh", f"{_HOME}/bin/start"]
_FILES, _TABLES = "cudasched-files", "cudasched-run"
_WARNING_CHARACTERS = 250  # Kubernetes cuts longer ones


class _Part(BaseModel):
    """The fields read of an object; all others stay unread."""

    model_config = ConfigDict(strict=True, alias_generator=to_camel)


class _Request(_Part):
    uid: str
    operation: str
    sub_resource: str = ""
    object: Any = None


class _Review(_Part):
    api_version: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: _Request


def _below(*path: str) -> Any:
    """A field of an inner object; None where it is missing."""
    return Field(default=None, validation_alias=AliasPath(*path))


class _Variable(_Part):
    name: str
    value: str = ""
    value_from: Any = None


class _Mount(_Part):
    mount_path: str


class _Container(_Part):
    name: str
    command: list[str] | None = None
    env: list[_Variable] | None = None
    volume_mounts: list[_Mount] | None = None
    limits: dict[str, Any] | None = _below("resources", "limits")
    claims: list[Any] | None = _below("resources", "claims")
    user: int | None = _below("securityContext", "runAsUser")

    @property
    def has_gpu(self) -> bool:
        """Whether the container asks for a GPU: a device plugin's, a share or an instance, or a claim of DRA."""
        return bool(self.claims) or any(name.startswith("nvidia.com/") for name in self.limits or ())


class _Volume(_Part):
    name: str


class _Spec(_Part):
    containers: list[_Container]
    init_containers: list[_Container] | None = None
    volumes: list[_Volume] | None = None
    user: int | None = _below("securityContext", "runAsUser")


class _Annotations(_Part):
    annotations: dict[str, str] | None = _below("metadata", "annotations")


class _Pod(_Part):
    kind: Literal["Pod"]
    spec: _Spec


class _UnchangedError(Exception):
    """The pod stays as it is; says why."""


def answer(body: bytes, image: str) -> dict[str, Any]:
    """The answer to an AdmissionReview of any content.

    Args:
        body: Of the request.
        image: The image that pods copy cudasched from.
    """
    warnings: list[str] = []
    operations: list[dict[str, Any]] = []
    uid = ""
    try:
        request = _Review.model_validate_json(body).request
        uid = request.uid
        if request.operation == "CREATE" and not request.sub_resource:
            operations = list(_operations(request.object, image, warnings))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        warnings.append(f"unchanged, because {where or 'the request'} has no meaning: {first['msg']}")
    except _UnchangedError as error:
        warnings.append(f"unchanged: {error}")
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if operations:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(operations).encode()).decode()
    if warnings:
        response["warnings"] = [one_line(f"cudasched: {said}")[:_WARNING_CHARACTERS] for said in warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _settings(annotations: dict[str, str]) -> dict[str, str]:
    """The environment variables that a pod's annotations ask for; none without the class."""
    ours = {name: value for name, value in annotations.items() if name.startswith(_PREFIX)}
    for name in sorted(ours.keys() - {_CLASS, _LIMIT}):
        raise _UnchangedError(f"there is no annotation {shown(name)}{closest(name, (_CLASS, _LIMIT))}")
    if _CLASS not in ours:
        if ours:
            raise _UnchangedError(f"{_LIMIT} needs {_CLASS} beside it")
        return {}
    try:
        settings = {"CUDASCHED_CLASS": str(parse_class(ours[_CLASS]))}
    except ConfigError as error:
        raise _UnchangedError(f"{_PREFIX}{error}") from None  # it begins with "class"
    if _LIMIT in ours:
        try:
            parse_size(ours[_LIMIT])
        except ValueError as error:
            raise _UnchangedError(f"{_LIMIT} = {shown(ours[_LIMIT])}: it {error}") from None
        settings["CUDASCHED_MEMORY_LIMIT"] = ours[_LIMIT]
    return settings


def _operations(pod: object, image: str, warnings: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON patch of a pod."""
    settings = _settings(_Annotations.model_validate(pod).annotations or {})
    if not settings:
        return
    spec = _Pod.model_validate(pod).spec
    _refuse_names_taken(spec)
    volumes = [
        {"name": _FILES, "emptyDir": {}},
        {"name": _TABLES, "hostPath": {"path": _RUN, "type": "DirectoryOrCreate"}},
    ]
    yield from _append("/spec/volumes", spec.volumes, volumes)
    yield from _append("/spec/initContainers", spec.init_containers, [_copying(image)])
    # Where a container asks for a GPU, the others are its helpers. Where none does, each may have been given one.
    some = any(container.has_gpu for container in spec.containers)
    for place, container in enumerate(spec.containers):
        if container.has_gpu or not some:
            user = container.user if container.user is not None else spec.user or 0
            yield from _managed(f"/spec/containers/{place}", container, settings, user, warnings)


def _managed(
    path: str, container: _Container, settings: dict[str, str], user: int, warnings: list[str]
) -> Iterator[dict[str, Any]]:
    given = {variable.name: (place, variable) for place, variable in enumerate(container.env or ())}
    wanted = dict(settings)
    preloaded = ":".join(_SHIMS)
    if container.command:
        yield {"op": "replace", "path": f"{path}/command", "value": [*_START, *container.command]}
    else:
        wanted |= mps.priority({}, settings["CUDASCHED_CLASS"])
        wanted["CUDASCHED_RUN_DIR"] = f"{_RUN}/{user}"
        warnings.append(
            f"container {shown(container.name)} names no command: cudasched is preloaded into all its programs, which "
            f"need glibc 2.34 or later, or musl, and user {user}"
        )
        if "LD_PRELOAD" not in given:
            wanted["LD_PRELOAD"] = preloaded
        elif given["LD_PRELOAD"][1].value_from is not None:
            warnings.append(f"container {shown(container.name)} has its LD_PRELOAD from elsewhere: it runs unmanaged")
        else:
            place, variable = given["LD_PRELOAD"]
            value = ":".join(filter(None, (variable.value, preloaded)))
            yield {"op": "add", "path": f"{path}/env/{place}/value", "value": value}
    added = [{"name": name, "value": value} for name, value in wanted.items() if name not in given]
    if added:  # the container's own values stay
        yield from _append(f"{path}/env", container.env, added)
    mounts = [{"name": _FILES, "mountPath": _HOME, "readOnly": True}, {"name": _TABLES, "mountPath": _RUN}]
    yield from _append(f"{path}/volumeMounts", container.volume_mounts, mounts)


def _append(path: str, there: Sequence[object] | None, items: Sequence[object]) -> Iterator[dict[str, Any]]:
    if there is None:
        yield {"op": "add", "path": path, "value": items}
        return
    for item in items:
        yield {"op": "add", "path": f"{path}/-", "value": item}


def _copying(image: str) -> dict[str, Any]:
    """The init container: copies cudasched, and lets each user make a directory below that of the tables."""
    resources = {"cpu": "500m", "memory": "128Mi"}  # limits like requests: the pod's class of service stays
    return {
        "name": "cudasched",
        "image": image,
        "command": [_START[0], "sh", "-c", f"cp -a {_HOME}/. /copy && chmod 1777 {_RUN}"],
        "resources": {"limits": resources, "requests": resources},
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": _FILES, "mountPath": "/copy"}, {"name": _TABLES, "mountPath": _RUN}],
    }


def _refuse_names_taken(spec: _Spec) -> None:
    containers = [*spec.containers, *(spec.init_containers or ())]
    for volume in spec.volumes or ():
        if volume.name in (_FILES, _TABLES):
            raise _UnchangedError(f"it has a volume {volume.name} already")
    for container in containers:
        if container.name == "cudasched":
            raise _UnchangedError("it has a container cudasched already")
        for mount in container.volume_mounts or ():
            if mount.mount_path.rstrip("/") in (_HOME, _RUN):
                raise _UnchangedError(f"container {shown(container.name)} mounts {mount.mount_path} itself")


def application(image: str) -> Any:
    """The webhook, without the guard.

    Args:
        image: As in `answer`.
    """

    async def review(request: Request) -> JSONResponse:
        return JSONResponse(answer(await request.body(), image))

    return Starlette(routes=[Route(PATH, review, methods=["POST"])])
