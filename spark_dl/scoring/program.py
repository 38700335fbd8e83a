"""Exported programs (`torch.export`) as files: written, checked, and loaded without running what the file says.

`torch.export.load` is not made for files of others. It unpickles what does not load with `weights_only=True`,
evaluates the text of shapes and guards, imports modules that a tree of outputs names, puts names into the source of a
function, and loads compiled libraries. Its reader of archives takes other members than Python's for names that are
there twice, or differ in their case. So the archive is read once, and torch gets another one, which has nothing but the
members that were checked.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.data.columns.batch import build_batch, cast_columns, two_rows_of_zeros
from spark_dl.data.columns.schema import Column
from spark_dl.spec import ModelSpec
from spark_dl.storage.owner import temporary_prefix

_GRAPH = "models/model.json"
_TENSORS = {"data/weights/model_weights_config.json": "weight", "data/constants/model_constants_config.json": "tensor"}
"""The lists of tensors, and the first word in the names of their files."""
_PLAIN = {
    "archive_format": r"pt2", "archive_version": r"\d{1,9}", "byteorder": r"little|big", ".data/version": r"\d{1,9}\n?",
    "version": r"\d{1,9}\n?",
}  # fmt: skip
"""Members with a word or a number."""
_INPUTS = "data/sample_inputs/model.pt"
"""The inputs of the export, which nothing needs. torch would unpickle them, so it gets an empty file."""
_IGNORED = (_INPUTS, ".data/serialization_id")
_MOST_DEPTH = 200

_NAME = re.compile(r"|[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"[\w .:/@+-]*")
"""Names of parameters and modules, which torch puts between quotes if they are no names in Python."""
_VERSION = re.compile(r"[\w.+<=-]*", re.ASCII)
_OPERATOR = re.compile(r"torch\.ops\.([A-Za-z]\w*)\.([A-Za-z_]\w*)\.(\w+)", re.ASCII)
_NOT_OPERATORS = frozenset({"from_file"})
"""Operators of aten that open files."""
_OWN_NAMESPACES = frozenset({
    "export", "inductor", "inductor_prims", "debugprims", "debug_mode_ops", "profiler", "symm_mem", "fsdp", "streams",
    "c10d", "c10d_functional", "_c10d_functional", "static_runtime",
})  # fmt: skip
"""Operators of torch that are not part of a model: some call Python, or read memory without limits."""
_HIGHER_ORDER = frozenset({
    "wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "map_impl", "scan", "associative_scan",
    "out_dtype", "strict_mode", "flex_attention", "wrap", "invoke_subgraph", "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
})  # fmt: skip
_FUNCTIONS = re.compile(
    r"(_?operator|math|torch)\.(getitem|add|mul|sub|truediv|ge|le|gt|lt|eq|ne|floordiv|mod|and_|or_|not_|pow|neg|abs"
    r"|lshift|rshift|ceil|floor|trunc|sym_[a-z]+)"
    r"|torch\.ops\.higher_order\.(?P<higher>\w+)"
    r"|torch\._C\._set_grad_enabled|torch\.amp\.autocast_mode\._(enter|exit)_autocast",
    re.ASCII,
)
_OF_SHAPES = frozenset({
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
    "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator",
    "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity", "Max", "Min", "Abs", "floor",
    "ceiling", "sqrt", "Eq", "Ne", "Ge", "Gt", "Le", "Lt", "And", "Or", "Not", "Add", "Mul", "Pow", "Integer",
    "Rational", "Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan",
})  # fmt: skip
"""Functions in the text of a shape."""
_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
_CHARACTERS = re.compile(r"[\w +\-*/%(),.<>=!&|~']{1,10000}", re.ASCII)
_ARITHMETIC = (
    ast.BinOp, ast.UnaryOp, ast.Compare, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub,
    ast.UAdd, ast.Invert, ast.BitAnd, ast.BitOr, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")


class Program(nn.Module):
    """An exported program, which is always in evaluation mode. Its outputs are the columns by name."""

    def __init__(self, program: nn.Module):
        super().__init__()
        self._program = program
        self.training = False

    def forward(self, *inputs: Tensor) -> Any:
        return self._program(*inputs)

    def train(self, mode: bool = True) -> Program:
        return self


def input_names(features: Sequence[str], columns: Sequence[Column]) -> list[str]:
    """Returns the tensors that a program is called with: the features, each ragged one with its mask after it."""
    ragged = {c.name for c in columns if c.is_ragged}
    names: list[str] = []
    for feature in features:
        names += [feature, f"{feature}_mask"] if feature in ragged else [feature]
    return names


def program_of(
    model: nn.Module, spec: ModelSpec, config: Config, columns: Sequence[Column]
) -> tuple[torch.export.ExportedProgram, list[str], list[str]]:
    """Returns the program of a model, from features to predictions, and the names of its inputs and outputs.

    The number of rows and the padded lengths of ragged features stay open. Raises ValueError if torch finds none.
    """
    is_ragged = any(c.is_ragged for c in columns)
    if is_ragged and config.loader.ragged != "pad":
        raise ValueError(
            f"format='export' supports ragged columns with loader.ragged: pad, found {config.loader.ragged!r}; use "
            "format='weights'"
        )
    example = zeros_for(config, columns, 3)
    whole = _Whole(model, spec, config, [*example])
    rows: Any = torch.export.Dim.DYNAMIC if is_ragged else torch.export.Dim("rows", min=1)
    ragged = {name for c in columns if c.is_ragged for name in input_names([c.name], columns)}
    open_axes = [{0: rows, **({1: torch.export.Dim.DYNAMIC} if name in ragged else {})} for name in example]
    try:
        program = torch.export.export(whole, (*example.values(),), dynamic_shapes=(tuple(open_axes),))
    except Exception as error:  # torch.export raises many types
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"torch.export cannot export the model: {type(error).__name__}: {cause}; save its weights instead"
        ) from error
    if is_ragged:
        try:
            check_other_lengths(program.module(), whole, [*zeros_for(config, columns, 5).values()])
        except ValueError as error:
            raise ValueError(
                f"format='export' does not support this model: {error}; save its weights instead"
            ) from error
    with torch.no_grad():
        outputs = [*whole(*example.values())]
    return program, [*example], outputs


def export_program(model: nn.Module, spec: ModelSpec, config: Config, columns: Sequence[Column]) -> bytes:
    """Returns the program of `program_of` as a file. Raises ValueError as it does."""
    program = program_of(model, spec, config, columns)[0]
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        torch.export.save(program, (path := Path(folder) / "model.pt2"))
        content = path.read_bytes()
    try:
        checked_archive(content)
    except _RefusedError as error:
        raise ValueError(f"format='export' does not support this model: {error}; save its weights instead") from None
    return content


def load_program(content: bytes, path: str) -> Program:
    """Returns the program of a file. Raises ValueError, and runs nothing, if it has more than a program's tensors and
    operators.

    Args:
        path: of the file, for errors.
    """
    try:
        checked = checked_archive(content)
    except _RefusedError as error:
        raise ValueError(f"{path}: {error}; it was not loaded; save the model again") from None
    try:
        return Program(torch.export.load(io.BytesIO(checked)).module())
    except Exception as error:  # torch raises many types
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: torch {torch.__version__} cannot load the program: {type(error).__name__}: {cause}; save the "
            "model again"
        ) from error


class _Whole(nn.Module):
    """From features to predictions, with the functions of the spec."""

    def __init__(self, model: nn.Module, spec: ModelSpec, config: Config, names: Sequence[str]):
        super().__init__()
        self.model, self._spec, self._names, self._inputs = model, spec, names, config.inputs

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        weight = torch.ones(inputs[0].shape[0], device=inputs[0].device)
        batch = self._spec.prepare({"weight": weight, **dict(zip(self._names, inputs, strict=True))})
        return self._spec.predictions(self._spec.output(self.model, batch, self._inputs))


def zeros_for(config: Config, columns: Sequence[Column], longest: int) -> dict[str, Tensor]:
    """Returns inputs of a program by name, in their order: two rows of zeros, with ragged features of this length."""
    cells = [two_rows_of_zeros(c, longest) for c in columns]
    batch = build_batch(cast_columns(columns, config.data.cast), cells, config.loader.ragged)
    return {name: batch[name] for name in input_names(config.data.features, columns)}


def check_other_lengths(program: nn.Module, model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raises ValueError if a program does not compute what its model does for rows of other lengths than its example.

    Python code that asks for a length is run once, for the example.
    """
    try:
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs), model(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).partition("\n")[0]
        raise ValueError(f"its program is made for rows of one length ({cause})") from error


class _RefusedError(Exception):
    """What the file has, and where, that is not loaded."""


def checked_archive(content: bytes) -> bytes:
    """Returns an archive with what torch needs of a program, each member once and checked. Raises _RefusedError."""
    members = _members(content)
    checked = {_INPUTS: b""}
    for name, data in members.items():
        if name == _GRAPH:
            checked[name] = _checked_graph(_json(name, data))
        elif name in _TENSORS:
            checked[name] = _checked_tensors(name, _json(name, data), members)
        elif name in _PLAIN:
            if not re.fullmatch(_PLAIN[name].encode(), data):
                raise _RefusedError(f"{name} has an unknown content, {data[:20]!r}")
            checked[name] = data
        elif re.fullmatch(r"data/(weights/weight|constants/tensor)_\d{1,9}", name, re.ASCII):
            checked[name] = data
        elif name not in _IGNORED:
            raise _RefusedError(f"{_shown(name)} is not part of a program, and could have pickled objects or code")
    if missing := [name for name in (_GRAPH, *_TENSORS) if name not in checked]:
        raise _RefusedError(f"{missing[0]} is missing")
    with zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_STORED) as archive:
        for name, data in checked.items():
            archive.writestr(f"model/{name}", data)
    return out.getvalue()


def _members(content: bytes) -> dict[str, bytes]:
    """Returns the members of an archive, without its folder. No more bytes than the archive has are read."""
    members: dict[str, bytes] = {}
    known: set[str] = set()
    total = 0
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                folder, _, name = info.filename.partition("/")
                total += info.file_size
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~0x808 or total > len(content):
                    raise _RefusedError(f"{_shown(info.filename)} is compressed or encrypted, which torch never writes")
                if (folded := info.filename.casefold()) in known:
                    raise _RefusedError(f"{_shown(info.filename)} is there twice")
                if not name or (known and next(iter(known)).partition("/")[0] != folder.casefold()):
                    raise _RefusedError(f"{_shown(info.filename)} is not in the archive's folder")
                known.add(folded)
                members[name] = archive.read(info)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        raise _RefusedError(f"it is no archive of torch.export: {error}") from None
    return members


def _json(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _RefusedError(f"{name} is no JSON object")
    return value


def _checked_tensors(name: str, found: dict[str, Any], members: Mapping[str, bytes]) -> bytes:
    entries, folder = found.get("config"), name.rpartition("/")[0]
    if not isinstance(entries, dict):
        raise _RefusedError(f"{name} has no list of tensors")
    for key, entry in entries.items():
        where = f"{name}: {_shown(key)}"
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise _RefusedError(f"{where} has pickled objects")
        file = str(entry.get("path_name"))
        if not re.fullmatch(rf"{_TENSORS[name]}_\d{{1,9}}", file, re.ASCII) or f"{folder}/{file}" not in members:
            raise _RefusedError(f"{where} is no tensor of the archive, but {_shown(file)}")
        # Keys are names of parameters, which can have other characters, as those of a ModuleDict.
        _check(where, {k: v for k, v in entry.items() if k != "path_name"})
    return json.dumps({"config": entries}).encode()


def _checked_graph(found: dict[str, Any]) -> bytes:
    # Source code that checks the shapes of inputs. The columns have been checked, and torch's limits of ranges remain.
    found = {**found, "guards_code": []}
    _check(_GRAPH, found)
    return json.dumps(found).encode()


def _check(where: str, value: Any, key: str = "", depth: int = 0) -> None:
    """Raises _RefusedError for text that torch would run, or put into source code. Removes what is for debugging.

    Args:
        key: under which the value is found.
    """
    if depth > _MOST_DEPTH:
        raise _RefusedError(f"{where} is nested more than {_MOST_DEPTH} deep")
    if isinstance(value, dict):
        if key == "treespec_namedtuple_fields" and value:
            raise _RefusedError(f"{where} has classes of its own ({_shown(next(iter(value)))})")
        for name in list(value):
            if name == "metadata":  # stacks and modules of the export
                value[name] = {}
            elif not (_is_text(key) or _NAME.fullmatch(name)):
                raise _RefusedError(f"{where} has the name {_shown(name)}, which could be code")
            _check(where, value[name], name, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check(where, part, key, depth + 1)
    elif isinstance(value, str):
        _check_text(where, value, key)


def _is_text(key: str) -> bool:
    """Whether the strings under a key are values of arguments, which torch writes as Python's `repr`."""
    return key in ("as_string", "as_strings", "as_string_to_argument", "torch_version", "verifiers", "opset_version")


def _check_text(where: str, text: str, key: str) -> None:
    if key == "expr_str":
        _check_expression(where, text)
    elif key in ("target", "as_operator"):
        _check_operator(where, text)
    elif key in ("in_spec", "out_spec"):
        _check_tree(where, text)
    elif key in ("as_string", "as_strings"):
        pass
    elif key in ("torch_version", "verifiers"):
        if not _VERSION.fullmatch(text):
            raise _RefusedError(f"{where} has the version {_shown(text)}")
    elif not (_PATH if key == "fqn" or (key.endswith("_name") and key != "as_name") else _NAME).fullmatch(text):
        raise _RefusedError(f"{where} has the name {_shown(text)}, which could be code")


def _check_operator(where: str, text: str) -> None:
    if match := _OPERATOR.fullmatch(text):
        namespace, name, overload = match.groups()
        is_known = not any("__" in part for part in (namespace, overload)) and name not in _NOT_OPERATORS
        if is_known and namespace not in _OWN_NAMESPACES and namespace != "higher_order":
            return
    elif (match := _FUNCTIONS.fullmatch(text)) and match["higher"] in (None, *_HIGHER_ORDER):
        return
    raise _RefusedError(f"{where} calls {_shown(text)}, which is no operator of a model")


def _check_expression(where: str, text: str) -> None:
    """Raises _RefusedError if the text of a shape is not arithmetic of symbols: torch evaluates it."""
    tree: ast.AST | None = None
    if _CHARACTERS.fullmatch(text):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(text, mode="eval").body
    if tree is None or not _is_arithmetic(tree):
        raise _RefusedError(f"{where} has the shape {_shown(text)}, which is not arithmetic")


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float)) and abs(node.value) < 2**64
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and _is_known_call(node.func.id, node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_arithmetic(node.left) and _is_small(node.right)
    return isinstance(node, _ARITHMETIC) and all(map(_is_arithmetic, ast.iter_child_nodes(node)))


def _is_known_call(name: str, call: ast.Call) -> bool:
    arguments = call.args
    if name in ("Symbol", "Float"):  # the only ones with text, which they do not evaluate
        first = arguments[0].value if len(arguments) == 1 and isinstance(arguments[0], ast.Constant) else None
        is_known = isinstance(first, str) and bool(re.fullmatch(r"[\w.+-]+", first, re.ASCII))
        return is_known and all(isinstance(keyword.value, ast.Constant) for keyword in call.keywords)
    if name in _POWERS and not (len(arguments) == 2 and _is_small(arguments[1])):
        return False
    return name in _OF_SHAPES and not call.keywords and all(map(_is_arithmetic, arguments))


def _is_small(node: ast.AST) -> bool:
    """Whether a node is a number up to 16, also as `Integer(-1)` or `Rational(1, 2)`: an exponent that ends soon."""
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    known = (ast.Constant, ast.UnaryOp, ast.USub, ast.Call, ast.Name, ast.Load)
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    is_plain = names <= {"Integer", "Rational"} and all(isinstance(n, known) for n in ast.walk(node))
    return is_plain and bool(numbers) and all(isinstance(n, (int, float)) and n <= 16 for n in numbers)


def _check_tree(where: str, text: str) -> None:
    """Raises _RefusedError if the tree of inputs or outputs names other classes than containers: they are imported."""
    plain = json.loads(text) if len(text) < 1 << 20 else None
    trees = [plain[1]] if isinstance(plain, list) and len(plain) == 2 and isinstance(plain[1], dict) else [None]
    while trees:
        tree = trees.pop()
        if not isinstance(tree, dict) or not isinstance(tree.get("children_spec"), list):
            raise _RefusedError(f"{where} has inputs or outputs that are damaged")
        kind, context = tree.get("type"), tree.get("context")
        names = json.loads(context) if isinstance(context, str) else None
        is_plain = names is None or (isinstance(names, list) and all(isinstance(n, (str, int)) for n in names))
        if kind not in (None, *_CONTAINERS) or not is_plain:
            raise _RefusedError(f"{where} has inputs or outputs of {_shown(str(kind))}")
        trees += tree["children_spec"]


def _shown(text: str) -> str:
    return f"{text[:80]!r}"
