"""Models in ONNX: the trees as a TreeEnsembleRegressor of the domain ai.onnx.ml, and back.

A written model has one operator: BRANCH_LT at each split, missing values on the model's side, sums of float32. A model
that is read natively is the same with any of the four orders. (A row goes left where it is less, in float32; the other
three orders are converted exactly.) All else is a model of ONNX Runtime's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched.errors import Error, ModelError
from cudasched.predictor._numpy import numpy

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

__all__ = ["Session", "from_onnx", "to_onnx"]

ML = "ai.onnx.ml"
#: Of the written operators; in ONNX Runtime since 2021.
OPSET, ML_OPSET, IR_VERSION = 15, 3, 8
LEAF = "LEAF"
ORDERS = ("BRANCH_LT", "BRANCH_LEQ", "BRANCH_GT", "BRANCH_GTE")
_NAMES, _ARCHITECTURE, _GPU = "cudasched_feature_names", "cudasched_architecture", "cudasched_gpu"
_ROOT_PARENT = 2**31 - 1


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise Error(f"models in ONNX need the package onnx ({error}): pip install 'cudasched[onnx]'") from None
    return onnx


def to_onnx(trees: Any, names: tuple[str, ...]) -> bytes:
    """The content of an ONNX file of `_core.Trees`.

    Raises:
        Error: onnx is not installed.
        ModelError: There are no trees.
    """
    onnx = _onnx()
    np = numpy()
    if not trees.trees:
        raise ModelError("a model without trees has no form in ONNX: train it for a round at least")
    nodes = trees.nodes()
    tree, left, right = (nodes[name].astype(np.int64) for name in ("tree", "left", "right"))
    starts = np.searchsorted(tree, np.arange(trees.trees))
    place = np.arange(len(tree)) - starts[tree] if len(tree) else np.zeros(0, np.int64)
    is_leaf = left < 0
    made = onnx.helper.make_node(
        "TreeEnsembleRegressor",
        ["features"],
        ["margin"],
        domain=ML,
        aggregate_function="SUM",
        post_transform="NONE",
        n_targets=1,
        base_values=[trees.base_score],
        nodes_treeids=tree.tolist(),
        nodes_nodeids=place.tolist(),
        nodes_featureids=np.where(is_leaf, 0, nodes["feature"]).astype(np.int64).tolist(),
        nodes_modes=[LEAF if leaf else "BRANCH_LT" for leaf in is_leaf.tolist()],
        nodes_values=np.where(is_leaf, 0, nodes["value"]).astype(np.float32).tolist(),
        nodes_hitrates=nodes["cover"].tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, left).tolist(),
        nodes_falsenodeids=np.where(is_leaf, 0, right).tolist(),
        nodes_missing_value_tracks_true=np.where(is_leaf, 0, nodes["default_left"]).astype(np.int64).tolist(),
        target_treeids=tree[is_leaf].tolist(),
        target_nodeids=place[is_leaf].tolist(),
        target_ids=[0] * int(is_leaf.sum()),
        target_weights=nodes["value"][is_leaf].tolist(),
    )
    real = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [made],
        "cudasched",
        [onnx.helper.make_tensor_value_info("features", real, [None, trees.features])],
        [onnx.helper.make_tensor_value_info("margin", real, [None, 1])],
        doc_string="The natural logarithm of a kernel's duration in ns.",
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(ML, ML_OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="cudasched")
    about = {_NAMES: json.dumps(list(names)), _ARCHITECTURE: trees.architecture, _GPU: trees.gpu}
    onnx.helper.set_model_props(model, about)
    return bytes(model.SerializeToString())


def from_onnx(source: str | os.PathLike[str] | bytes) -> tuple[bytes | None, Session | None]:
    """The file's model: an XGBoost document of trees that are walked natively, or a session of ONNX Runtime.

    Raises:
        ModelError: The file is no ONNX model, is inconsistent, has no single output of a value a row, or has operators
            that nothing here runs. The message names these.
        Error: onnx is not installed.
        OSError: The file cannot be read.
    """
    onnx = _onnx()
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    name = "the model" if isinstance(source, bytes) else os.fspath(source)
    try:
        model = onnx.load_model_from_string(content)
        if not model.ByteSize() or not model.graph.node:
            raise ValueError("it holds no graph with an operator")
        onnx.checker.check_model(model)
    except Exception as error:  # errors of protobuf and the checker, and any from a damaged file
        raise ModelError(f"{name} is no ONNX model, or is damaged: {_first_line(error)}") from None
    about = {entry.key: entry.value for entry in model.metadata_props}
    why: str | None = None
    if [node.op_type for node in model.graph.node] == ["TreeEnsembleRegressor"]:
        try:
            return _document(model, about, name), None
        except _NotNativeError as error:
            why = str(error)
    else:
        # Domains are short words; those in the file need not be.
        operators = sorted({f"{node.domain}:{node.op_type}"[:60].lstrip(":") for node in model.graph.node})
        more = f" and {len(operators) - 8} more" if len(operators) > 8 else ""
        why = f"its operators are {', '.join(operators[:8])}{more}, and TreeEnsembleRegressor alone is walked natively"
    return None, Session(content, about, name, why)


class Session:
    """A model that ONNX Runtime runs: any graph with one input of float32 rows and one output of a value a row."""

    def __init__(self, content: bytes, about: dict[str, str], name: str, why: str) -> None:
        """Opens the session.

        Raises:
            ModelError: ONNX Runtime is not installed, refuses the model, or the model's input and output are of another
                form.
        """
        try:
            import onnxruntime
        except ImportError:
            raise ModelError(
                f"{name} cannot be run: {why}; with ONNX Runtime it could be (pip install onnxruntime), off the "
                "launch path"
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own classes, one a kind of refusal
            raise ModelError(f"{name} cannot be run: {why}; ONNX Runtime says: {_first_line(error)}") from None
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        shape = list(inputs[0].shape) if inputs else []
        if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(shape) != 2 or not isinstance(shape[1], int):
            found = ", ".join(f"{one.name}: {one.type} {one.shape}" for one in inputs)[:200]
            raise ModelError(
                f"{name} takes {found or 'nothing'}; one input of float32 rows, shape (n, features), is needed"
            )
        if not outputs or outputs[0].type != "tensor(float)":
            raise ModelError(f"{name} gives no float32 values: one a row is needed, the natural logarithm of ns")
        self._input, self._output = inputs[0].name, outputs[0].name
        self._name, self._why = name, why
        self.content = content
        self.features = int(shape[1])
        self.feature_names = _feature_names(about, self.features, name)
        self.architecture, self.gpu = about.get(_ARCHITECTURE, ""), about.get(_GPU, "")

    #: As `_core.Trees` has them; there are none to count.
    trees = 0
    depth = 0
    isa = "onnxruntime"

    def isas(self) -> list[str]:
        """The codes that can run the model."""
        return [self.isa]

    def contributions(self, rows: NDArray[float32]) -> NDArray[Any]:
        """Raises ModelError: only trees that are walked natively are explained."""
        raise ModelError(f"{self._name} is run by ONNX Runtime, and only trees are explained ({self._why})")

    def margins(self, rows: NDArray[float32]) -> NDArray[float32]:
        """The model's values, shape (n,).

        Raises:
            ModelError: Rows of another shape, or values that are not one a row.
        """
        if rows.ndim != 2 or rows.shape[1] != self.features:
            raise ModelError(f"rows have the shape {rows.shape}; the model takes (n, {self.features})")
        if not len(rows):
            return numpy().zeros(0, numpy().float32)  # type: ignore[no-any-return]
        try:
            (values,) = self._session.run([self._output], {self._input: rows})
        except Exception as error:  # as for an open session
            raise ModelError(f"{self._name} cannot be run: ONNX Runtime says: {_first_line(error)}") from None
        if values.size != len(rows):
            raise ModelError(f"{self._name} gives {values.shape} values for {len(rows)} rows; one a row is needed")
        found: NDArray[float32] = numpy().ascontiguousarray(values, numpy().float32).reshape(-1)
        return found


class _NotNativeError(Exception):
    """Trees that are not walked natively; the text says why."""


def _feature_names(about: dict[str, str], features: int, name: str) -> list[str]:
    text = about.get(_NAMES)
    if text is None:
        return []
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or len(names) != features or not all(isinstance(one, str) for one in names):
        raise ModelError(f"{name} is damaged: {_NAMES} is no list of {features} names")
    return names


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]


def _document(model: Any, about: dict[str, str], name: str) -> bytes:
    """XGBoost's JSON of a TreeEnsembleRegressor, which the native reader checks as it does any other."""
    np = numpy()
    onnx = _onnx()
    (node,) = model.graph.node
    told = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}

    def text(key: str, default: str) -> str:
        value = told.pop(key, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    if text("aggregate_function", "SUM") != "SUM" or text("post_transform", "NONE") != "NONE":
        raise _NotNativeError("its trees are not simply added up")
    if int(told.pop("n_targets", 1)) != 1:
        raise _NotNativeError("it has several targets")
    base = [float(value) for value in told.pop("base_values", [])]
    columns = {
        key: told.pop(key, None)
        for key in (
            *("nodes_treeids", "nodes_nodeids", "nodes_featureids", "nodes_modes", "nodes_values"),
            *("nodes_truenodeids", "nodes_falsenodeids", "target_treeids", "target_nodeids", "target_ids"),
            "target_weights",
        )
    }
    tracks = told.pop("nodes_missing_value_tracks_true", None)
    covers = told.pop("nodes_hitrates", None)
    if told:
        raise _NotNativeError(f"its attributes {', '.join(sorted(told))[:200]} are not walked natively")
    if missing := [key for key, value in columns.items() if value is None]:
        raise ModelError(f"{name} is damaged: TreeEnsembleRegressor lacks {', '.join(missing)}")
    count, targets = len(columns["nodes_treeids"]), len(columns["target_treeids"])
    for key, value in {**columns, "nodes_missing_value_tracks_true": tracks, "nodes_hitrates": covers}.items():
        wanted = targets if key.startswith("target") else count
        if value is not None and len(value) != wanted:
            raise ModelError(f"{name} is damaged: {key} has {len(value)} values for {wanted}")
    modes = [mode.decode(errors="replace") if isinstance(mode, bytes) else str(mode) for mode in columns["nodes_modes"]]
    if unknown := sorted(set(modes) - {LEAF, *ORDERS}):
        raise _NotNativeError(f"its splits {', '.join(unknown)[:100]} are not walked natively")
    if len(base) > 1 or any(one != 0 for one in columns["target_ids"]):
        raise _NotNativeError("it has several targets")
    features = _columns_of_input(model, name)

    trees: dict[int, list[int]] = {}
    place: dict[tuple[int, int], int] = {}
    for at, (tree, number) in enumerate(zip(columns["nodes_treeids"], columns["nodes_nodeids"], strict=True)):
        if (tree, number) in place:
            raise ModelError(f"{name} is damaged: tree {tree} has node {number} twice")
        mine = trees.setdefault(int(tree), [])
        place[int(tree), int(number)] = len(mine)
        mine.append(at)
    leaves: dict[int, float] = {}
    for tree, leaf, weight in zip(
        columns["target_treeids"], columns["target_nodeids"], columns["target_weights"], strict=True
    ):
        if (tree, leaf) not in place:
            raise ModelError(f"{name} is damaged: a weight of node {leaf} of tree {tree}, which is not there")
        at = trees[tree][place[tree, leaf]]
        if modes[at] != LEAF or at in leaves:
            raise _NotNativeError("a node has several weights, or one that is no leaf has one")
        leaves[at] = float(weight)

    def tree_of(number: int, tree: int, nodes: list[int]) -> dict[str, Any]:
        # The root first, then each node behind its parent; XGBoost's arrays count from the root.
        child = {
            (tree, columns[key][at])
            for at in nodes
            if modes[at] != LEAF
            for key in ("nodes_truenodeids", "nodes_falsenodeids")
        }
        roots = [at for at in nodes if (tree, columns["nodes_nodeids"][at]) not in child]
        if len(roots) != 1:
            raise ModelError(f"{name} is damaged: tree {tree} has {len(roots)} roots")
        order, parents = [roots[0]], [_ROOT_PARENT]
        left, right, index, condition, default_left = [], [], [], [], []
        for i in range(len(nodes)):
            if i >= len(order):
                raise ModelError(f"{name} is damaged: tree {tree} has nodes that its root does not lead to")
            at = order[i]
            mode = modes[at]
            if mode == LEAF:
                left.append(-1)
                right.append(-1)
                index.append(0)
                condition.append(leaves.get(at, 0.0))
                default_left.append(0)
                continue
            value = np.float32(columns["nodes_values"][at])
            missing_true = bool(tracks[at]) if tracks is not None else False
            less = mode in ("BRANCH_LT", "BRANCH_LEQ")
            if mode in ("BRANCH_LEQ", "BRANCH_GT"):  # x <= v is x < the next value
                value = np.nextafter(value, np.float32(np.inf))
            sides = ("nodes_truenodeids", "nodes_falsenodeids") if less else ("nodes_falsenodeids", "nodes_truenodeids")
            for key, ends in zip(sides, (left, right), strict=True):
                to = int(columns[key][at])
                if (tree, to) not in place:
                    raise ModelError(f"{name} is damaged: tree {tree} has no node {to}")
                if len(order) >= len(nodes):
                    raise ModelError(f"{name} is damaged: tree {tree} reaches a node twice")
                ends.append(len(order))
                order.append(nodes[place[tree, to]])
                parents.append(i)
            index.append(int(columns["nodes_featureids"][at]))
            condition.append(float(value))
            default_left.append(int(missing_true if less else not missing_true))
        size = len(nodes)
        zeros = [0.0] * size
        return {
            "base_weights": zeros,
            "categories": [],
            "categories_nodes": [],
            "categories_segments": [],
            "categories_sizes": [],
            "default_left": default_left,
            "id": number,
            "left_children": left,
            "loss_changes": zeros,
            "parents": parents,
            "right_children": right,
            "split_conditions": condition,
            "split_indices": index,
            "split_type": [0] * size,
            "sum_hessian": [1.0 if covers is None else float(covers[at]) for at in order],
            "tree_param": {
                "num_deleted": "0",
                "num_feature": str(features),
                "num_nodes": str(size),
                "size_leaf_vector": "1",
            },
        }

    made = [tree_of(number, tree, nodes) for number, (tree, nodes) in enumerate(trees.items())]
    numbers = [value for tree in made for value in (*tree["split_conditions"], *tree["sum_hessian"])]
    if not np.isfinite(np.asarray([*numbers, *base], np.float64)).all():
        raise _NotNativeError("it has values that are not finite")
    attributes = {key: about[key] for key in (_ARCHITECTURE, _GPU) if key in about}
    document = {
        "learner": {
            "attributes": attributes,
            "feature_names": _feature_names(about, features, name),
            "feature_types": [],
            "gradient_booster": {
                "model": {
                    "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(made))},
                    "iteration_indptr": list(range(len(made) + 1)),
                    "tree_info": [0] * len(made),
                    "trees": made,
                },
                "name": "gbtree",
            },
            "learner_model_param": {
                "base_score": repr(base[0] if base else 0.0),
                "boost_from_average": "1",
                "num_class": "0",
                "num_feature": str(features),
                "num_target": "1",
            },
            "objective": {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}},
        },
        "version": [3, 2, 0],
    }
    return json.dumps(document).encode()


def _columns_of_input(model: Any, name: str) -> int:
    """How many features the graph's only input has."""
    if len(model.graph.input) != 1:
        raise _NotNativeError("it has several inputs")
    kind = model.graph.input[0].type.tensor_type
    sizes = kind.shape.dim
    if kind.elem_type != _onnx().TensorProto.FLOAT or len(sizes) != 2 or sizes[1].dim_value < 1:
        raise _NotNativeError("its input is no float32 rows of a known number of features")
    if list(model.graph.node[0].input) != [model.graph.input[0].name]:
        raise _NotNativeError("its input is not the trees'")
    return int(sizes[1].dim_value)
