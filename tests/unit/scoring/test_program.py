"""Exported programs: models of many kinds as files, and files that were changed so that torch would run their code."""

import io
import json
import os
import pickle
import random
import re
import sys
import zipfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import Config, Data, ModelSpec
from spark_dl.data.columns.schema import Column
from spark_dl.scoring import program
from spark_dl.scoring.program import export_program, load_program

COLUMNS = (Column("x", "float32", (6,), "list"), Column("token", "int64", (3,), "list"))
CONFIG = Config(data=Data(features=("x", "token"), label=None))
SPEC = ModelSpec(build=nn.Identity, forward=lambda model, batch: model(batch["x"], batch["token"]))
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 2)
        self.scale = torch.tensor([1.0, 2.0])

    def forward(self, x, token):
        return self.one(x) * self.scale + token.sum(1, keepdim=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, token):
        return self.layer(self.embed(token % 10)).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 4)

    def forward(self, x, token):
        state = None
        for part in x.split(2, dim=1):
            state = self.cell(part, state)
        return state


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"con v-1": nn.Conv1d(1, 4, 3, padding=1), "bn": nn.BatchNorm1d(4)})

    def forward(self, x, token):
        found = F.avg_pool1d(F.relu(self.parts["bn"](self.parts["con v-1"](x[:, None]))), 2).flatten(1)
        return F.interpolate(found[:, None], size=5, mode="linear")[:, 0]


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, mode="mean")

    def forward(self, x, token):
        offsets = torch.arange(token.shape[0]) * token.shape[1]
        return self.bag(token.reshape(-1) % 10, offsets)


class Modes(nn.Module):
    """Blocks without gradients, and in bfloat16: operators of higher order."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 2)

    def forward(self, x, token):
        with torch.no_grad():
            mean = x.mean(0, keepdim=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = self.one(x - mean)
        return found.float(), torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


MODELS = [Plain, Attention, Recurrent, Images, Bags, Modes]


def exported(build):
    torch.manual_seed(1)
    model = build().eval()
    return model, export_program(model, SPEC, CONFIG, COLUMNS)


@pytest.mark.parametrize("build", MODELS)
def test_a_program_computes_what_its_model_does(build):
    model, content = exported(build)
    loaded = load_program(content, "f")
    for rows in (1, 2, 7):
        x, token = torch.randn(rows, 6), torch.randint(0, 100, (rows, 3))
        expected = model(x, token)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = loaded(x, token)
        assert len(found) == len(expected)
        for a, b in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert loaded.train().training is False


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bomb(tmp_path, monkeypatch):
    """The path of a folder, which exists when code of the file has run. The module `evil_module` makes it, too."""
    path = tmp_path / "exploded"
    (tmp_path / "evil_module.py").write_text(f"import os; os.mkdir({str(path)!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("evil_module", None)
    return path


@pytest.fixture(scope="module")
def good():
    with zipfile.ZipFile(io.BytesIO(exported(Plain)[1])) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def packed(members, *more, folder="model", compression=zipfile.ZIP_STORED):
    """members: by name. more: pairs of a name and its content, which can repeat names."""
    with zipfile.ZipFile(out := io.BytesIO(), "w", compression) as archive:
        for name, data in [*members.items(), *more]:
            archive.writestr(f"{folder}/{name}", data)
    return out.getvalue()


def pickled(path):
    torch.save(Bomb(str(path)), out := io.BytesIO())
    return out.getvalue()


def with_json(good, name, change):
    found = json.loads(good[name])
    change(found)
    return {**good, name: json.dumps(found).encode()}


def strings(value, path=()):
    """Yields the path of each string and each key of plain data."""
    if isinstance(value, str):
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(value, dict):
            yield (*path, ("key", key))
        yield from strings(part, (*path, ("value", key)))


def replaced(value, path, text):
    for _, key in path[:-1]:
        value = value[key]
    kind, key = path[-1]
    if kind == "key":
        value[text] = value.pop(key)
    else:
        value[key] = text


def inputs_of(graph):
    return [i for i in graph["graph_module"]["signature"]["input_specs"] if "user_input" in i]


def spec_of(graph):
    return graph["graph_module"]["module_call_graph"][0]["signature"]


def as_tree(graph, key, **change):
    tree = json.loads(spec_of(graph)[key])
    tree[1].update(change)
    spec_of(graph)[key] = json.dumps(tree)


def attacks(good, bomb):
    """Programs that make the folder, each in another way."""
    call, pickle_ = f"__import__('os').mkdir({str(bomb)!r})", pickled(bomb)

    def guards(g):
        g["guards_code"] = [f"{call} or True"]

    def shapes(g):
        for path in strings(g):
            if path[-1] == ("value", "expr_str"):
                replaced(g, path, call)

    def names(g):
        (name,) = {i["user_input"]["arg"]["as_tensor"]["name"] for i in inputs_of(g)[:1]}
        text = json.dumps(g).replace(json.dumps(name), json.dumps(f"{name}={call}"))
        g.clear()
        g.update(json.loads(text))

    def enum(g):
        as_tree(g, "out_spec", context=json.dumps([{"__enum__": True, "fqn": "evil_module:X", "name": "a"}]))

    def factory(g):
        of = {"default_factory_module": "evil_module", "default_factory_name": "x", "dict_context": ["prediction"]}
        as_tree(g, "out_spec", type="collections.defaultdict", context=json.dumps(of))

    def function(g):
        g["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.os.mkdir"

    def file(g):
        g["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.aten.from_file.default"

    def by_class(g):
        target = "torch.export.custom_ops._call_custom_autograd_function_in_pre_dispatch"
        node = g["graph_module"]["graph"]["nodes"][-1]
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": {"as_string": "evil_module.X"}, "kind": 1}, *node["inputs"]]

    def with_pickle(config):
        for entry in config["config"].values():
            entry["use_pickle"] = True

    def named(name):
        return lambda config: config["config"]["model.scale"].update(path_name=name)

    graph, inputs = "models/model.json", "data/sample_inputs/model.pt"
    weights = {f"data/weights/weight_{i}": pickle_ for i in range(2)}
    bad = {**with_json(good, WEIGHTS, with_pickle), **weights}
    found = {
        "guards": packed(with_json(good, graph, guards)),
        "shapes": packed(with_json(good, graph, shapes)),
        "names": packed(with_json(good, graph, names)),
        "enum": packed(with_json(good, graph, enum)),
        "pickled weights": packed(bad),
        "inputs": packed({**good, inputs: pickle_}),
        "inputs, other case": packed({n: d for n, d in good.items() if n != inputs}, (inputs[:-2] + "PT", pickle_)),
        "factory": packed(with_json(good, graph, factory)),
        "function": packed(with_json(good, graph, function)),
        "file": packed(with_json(good, graph, file)),
        "class": packed(with_json(good, graph, by_class)),
        "weights twice": packed(bad, (WEIGHTS, good[WEIGHTS])),
        "weights twice, good ones first": packed(good, *bad.items()),
        "old weights": packed(good, ("data/weights/model.pt", pickle_)),
        "old weights, other case": packed(good, ("data/weights/MODEL.pt", pickle_)),
        "old constants": packed(good, ("data/constants/model.pt", pickle_)),
        "library": packed(good, ("data/aotinductor/model/a.so", b"\x7fELF")),
    }
    for name in ("custom_obj_0", "opaque_obj_0"):
        content = pickle.dumps(Bomb(str(bomb)))
        found[name] = packed({**with_json(good, CONSTANTS, named(name)), f"data/constants/{name}": content})
        found[f"{name}, other case"] = packed(
            {**with_json(good, CONSTANTS, named(name)), f"data/constants/{name.upper()}": content}
        )
    return found


RUN_BY_TORCH = ("guards", "shapes", "names", "enum", "pickled weights", "inputs", "inputs, other case")
ATTACKS = (
    *RUN_BY_TORCH, "factory", "function", "file", "class", "weights twice", "weights twice, good ones first",
    "old weights", "old weights, other case", "old constants", "library", "custom_obj_0", "custom_obj_0, other case",
    "opaque_obj_0", "opaque_obj_0, other case",
)  # fmt: skip


def runs(call, bomb):
    """Whether the code of the file runs, and the error, if any."""
    error = None
    try:
        call()
    except Exception as found:
        error = found
    has_run = bomb.exists()
    if has_run:
        bomb.rmdir()
    return has_run, error


def program_of(content):
    return load_program(content, "m/model.pt2")(torch.ones(2, 6), torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("name", ATTACKS)
def test_S03_a_program_with_code_in_it_is_not_loaded(good, bomb, name):
    found = attacks(good, bomb)
    assert found.keys() == set(ATTACKS)
    has_run, error = runs(lambda: program_of(found[name]), bomb)
    assert not has_run
    if name in ("guards", "inputs"):  # nothing needs them, so that they are not read
        assert error is None
    else:
        assert isinstance(error, ValueError)
        assert re.fullmatch("m/model.pt2: .*; it was not loaded; save the model again", str(error), re.DOTALL)


def test_S03_the_same_programs_run_code_in_torch(good, bomb):
    """Else the test above proves nothing."""

    def by_torch(content):
        torch.export.load(io.BytesIO(content)).module()(torch.ones(2, 6), torch.ones(2, 3, dtype=torch.int64))

    found = attacks(good, bomb)
    of_torch = [name for name in RUN_BY_TORCH if runs(lambda name=name: by_torch(found[name]), bomb)[0]]
    assert len(of_torch) >= 2, of_torch  # all 7 in torch 2.13


def member_changes(good, name, pickle_):
    """Archives in which one member is another one for some reader."""
    rest = {n: d for n, d in good.items() if n != name}
    yield packed(rest)
    yield packed({name: good[name], **rest})
    yield packed({**good, name: pickle_})
    yield packed(good, (name, pickle_))
    yield packed({**rest, name: pickle_}, (name, good[name]))
    for other in (
        name.upper(),
        name.title(),
        f"./{name}",
        f"/{name}",
        f"{name}/",
        name.replace("/", "\\"),
        f"{name}\0",
    ):
        yield packed(good, (other, pickle_))
        yield packed(rest, (other, pickle_))
        yield packed(rest, (other, good[name]))
    with zipfile.ZipFile(out := io.BytesIO(packed(good)), "a") as archive:
        archive.writestr(f"MODEL/{name}", pickle_)
        archive.writestr(f"other/{name}", pickle_)
    yield out.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_S03_no_change_of_a_member_runs_code(good, bomb):
    expected, pickle_, loaded = program_of(packed(good)), pickled(bomb), 0
    for name in good:
        for content in member_changes(good, name, pickle_):
            values = []
            has_run, error = runs(lambda c=content, v=values: v.append(program_of(c)), bomb)
            assert not has_run, name
            assert error is None or isinstance(error, ValueError), (name, error)
            loaded += error is None
            # The bytes of a weight are numbers, whatever they are; all others are as they were, or refused.
            if error is None and not name.startswith(("data/weights/weight", "data/constants/tensor")):
                torch.testing.assert_close(values[0], expected)
    assert loaded >= len(good)  # another order


@pytest.mark.parametrize("change", ["deflated", "encrypted", "cut", "text", "empty", "overlapping", "before", "behind"])
def test_S03_an_archive_that_torch_does_not_write_is_refused(good, bomb, change):
    content = packed(good)
    if change == "encrypted":
        at = content.index(b"PK\x01\x02") + 8
        content = content[:at] + bytes([content[at] | 1]) + content[at + 1 :]
    elif change == "overlapping":  # all entries of the list are the largest member
        where = [i for i in range(len(content)) if content[i : i + 4] == b"PK\x01\x02"]
        entry = content[where[0] : where[1]]
        end = content.index(b"PK\x05\x06")
        content = content[: where[0]] + entry * len(where) + content[end:]
    else:
        content = {
            "deflated": packed(good, compression=zipfile.ZIP_DEFLATED), "cut": content[:-40], "text": b"a" * 100,
            "empty": b"", "before": pickled(bomb) + content, "behind": content + pickled(bomb),
        }[change]  # fmt: skip
    has_run, error = runs(lambda: program_of(content), bomb)
    assert not has_run
    assert isinstance(error, ValueError) or change in ("before", "behind")


def test_a_member_that_is_no_object_or_nested_for_ever_is_refused(good, bomb):
    deep = []
    for _ in range(200):
        deep = [deep]

    def nested(graph):
        graph["graph_module"]["deep"] = deep

    for members, message in (
        ({**good, "models/model.json": b"[1]"}, "models/model.json is no JSON object"),
        (with_json(good, "models/model.json", nested), "is nested more than"),
        ({**good, WEIGHTS: b'{"config": []}'}, "has no list of tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            program_of(packed(members))
    assert not bomb.exists()
    with pytest.raises(ValueError, match="is not in the archive's folder"):
        program_of(_two_folders(good))


def _two_folders(good):
    with zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_STORED) as archive:
        for number, (name, data) in enumerate(good.items()):
            archive.writestr(f"{'model' if number else 'other'}/{name}", data)
    return out.getvalue()


@pytest.mark.parametrize("most", [200, pytest.param(None, marks=pytest.mark.slow)])
def test_S03_no_text_of_a_graph_runs_code(good, bomb, most):
    call = f"__import__('os').mkdir({str(bomb)!r})"
    texts = (
        call,
        f"x={call}",
        f"x):\n    {call}\ndef g(x",
        f"'+{call}+'",
        "evil_module",
        "evil_module.X",
        "torch.os.mkdir",
    )
    graph, loaded = "models/model.json", 0
    changes = [(path, text) for path in strings(json.loads(good[graph])) for text in texts]
    assert len(changes) > 1000
    for path, text in random.Random(0).sample(changes, most or len(changes)):
        content = packed(with_json(good, graph, lambda g, p=path, t=text: replaced(g, p, t)))
        has_run, error = runs(lambda c=content: load_program(c, "f"), bomb)
        assert not has_run, (path, text)
        loaded += error is None
    assert loaded  # metadata, which are dropped


@pytest.mark.parametrize("text", [
    "s0", "s0 + 1", "2*s0", "FloorDiv(s0, 2)", "Symbol('s21', positive=True, integer=True)", "Max(1, s0)", "-s0",
    "s0**2", "Mul(Integer(2), Symbol('s0', integer=True))", "Pow(Symbol('s0'), Integer(-1))", "Eq(s0, 1)", "eval",
    "Float('0.5', precision=53)",
    "Pow(Symbol('s0'), Rational(1, 2))", "s0 // 2 + (s0 % 3)", f"s0 + {2**64 - 1}", "s0**16",
])  # fmt: skip
def test_shapes_are_arithmetic(text):
    program._check_expression("f", text)


@pytest.mark.parametrize("text", [
    "__import__('os')", "print(1)", "s0.__class__", "s0.is_Integer", "[s0]", "(lambda: 1)()", "Symbol(name='s0')",
    "Symbol('s0', assume=print(1))", "Symbol('__import__(1)')", "Add('print(1)', 1)", "Integer('print(1)')",
    "9**9**9", "Pow(9, Pow(9, 9))", "Pow(9, 99)", "LShift(1, 99)", "1 if s0 else 2", "f'{s0}'", "_s0", "", "s0 s1",
    f"s0 + {2**64}", "s0**17", "1; 2", "s0\n+1", "sympify('s0')", "Max(*s0)", "(s0 for s0 in s1)", "a := 1",
])  # fmt: skip
def test_S03_other_text_as_a_shape_is_refused(text):
    with pytest.raises(program._RefusedError, match="which is not arithmetic"):
        program._check_expression("f", text)


@pytest.mark.parametrize("text", ["[1, []]", '[1, {"type": null}]', "3", '[1, {"children_spec": [3], "type": null}]'])
def test_a_tree_of_outputs_that_is_damaged_is_refused(text):
    with pytest.raises(program._RefusedError, match="the outputs has inputs or outputs that are damaged"):
        program._check_tree("the outputs", text)
    good = '[1, {"type": null, "context": null, "children_spec": []}]'
    program._check_tree("the outputs", good)
    program._check_tree("the outputs", good.ljust((1 << 20) - 1))
    with pytest.raises(program._RefusedError, match="the outputs has inputs or outputs that are damaged"):
        program._check_tree("the outputs", good.ljust(1 << 20))


def test_a_graph_with_classes_of_its_own_is_refused():
    with pytest.raises(program._RefusedError, match="the graph has classes of its own"):
        program._check("the graph", {"treespec_namedtuple_fields": {"Point": ["x"]}})
