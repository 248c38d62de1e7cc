"""What the package offers is documented and typed, and the stub says what `_core` has."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import cudasched
from cudasched import config, errors, hook
from support import ROOT

PACKAGE = Path(inspect.getfile(cudasched)).parent


def _stub() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    tree = ast.parse((PACKAGE / "_core.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_public_name_exists_and_is_documented() -> None:
    for name in cudasched.__all__:
        assert hasattr(cudasched, name), name
        if name != "__version__":
            assert inspect.getdoc(getattr(cudasched, name)), name


def test_modules_that_documents_use_by_their_package_are_loaded() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    modules = set(re.findall(r"\bcudasched\.([a-z]+)\.[a-z]+\(", text))
    code = "import cudasched\nfor name in " + repr(sorted(modules)) + ": getattr(cudasched, name)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"mps", "control", "torch"} <= modules


def test_public_functions_are_typed_and_say_what_they_raise() -> None:
    for name in ("install", "bind_stream", "unbind_stream", "set_class", "status", "expect", "get_cmake_dir"):
        function = getattr(cudasched, name)
        assert "Raises:" in (inspect.getdoc(function) or ""), name
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, (name, parameter.name)


def test_every_field_is_documented() -> None:
    for kind in (cudasched.Client, cudasched.Device, cudasched.State, config.Resolved, hook.Files):
        text = "\n".join(inspect.getdoc(of) or "" for of in kind.__mro__)
        documented = set(re.findall(r"^    (\w+):", text, re.MULTILINE))
        fields = set(getattr(kind, "model_fields", None) or kind.__dataclass_fields__)
        assert documented == fields, kind.__name__


def test_one_exception_tree() -> None:
    for name in ("HookError", "ConfigError", "ArbiterError", "DriverError", "ModelError", "StateError"):
        assert issubclass(getattr(errors, name), errors.Error)
        assert getattr(cudasched, name) is getattr(errors, name)
    assert issubclass(errors.HookWarning, RuntimeWarning)
    assert issubclass(errors.ConfigWarning, RuntimeWarning)


def test_versions_agree() -> None:
    assert cudasched.__version__ == hook.load_core().version() == metadata.version("cudasched")


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_stub_has_the_cores_names_and_parameters() -> None:
    core, stub = hook.load_core(), _stub()
    assert {name for name in dir(core) if not name.startswith("_")} == set(stub)
    for name, node in stub.items():
        if isinstance(node, ast.FunctionDef):
            # pybind11 writes the signature into the first line.
            signature = (getattr(core, name).__doc__ or "").splitlines()[0]
            told = re.findall(r"(\w+): ", signature.split("->")[0])
            assert told == [argument.arg for argument in node.args.args], name


def test_the_stub_has_the_attributes_of_the_cores_classes() -> None:
    core = hook.load_core()
    for name, node in _stub().items():
        if isinstance(node, ast.ClassDef):
            functions = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            values = [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
            properties = {item for item in functions + values if not item.startswith("_")}
            kind = getattr(core, name)
            bases = {base.__name__: dir(base) for base in kind.__bases__ if base.__module__ == kind.__module__}
            assert list(bases) == [ast.unparse(base) for base in node.bases], name
            own = set(dir(kind)).difference(*bases.values())
            assert properties == {item for item in own if not item.startswith("_")}, name
    # And the values have the types that the stub promises.
    for name, value in (("State", core.state()), ("Counts", core.counts())):
        for item in _stub()[name].body:
            if isinstance(item, ast.AnnAssign):
                promised = ast.unparse(item.annotation).removeprefix("Final[").removesuffix("]").partition("[")[0]
                assert type(getattr(value, ast.unparse(item.target))).__name__ == promised, ast.unparse(item)


def test_the_protocol_of_the_core_is_the_stub() -> None:
    functions = {name for name, node in _stub().items() if isinstance(node, ast.FunctionDef)}
    assert {name for name in vars(hook._Core) if not name.startswith("_")} == functions
