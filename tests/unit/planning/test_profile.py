import json

import pytest

from spark_dl.parallel.mesh.planner.records import LayerProfile, Seconds
from spark_dl.planning.plan import read_profile

LAYER = {
    "name": "embed", "forward_s": {"per_row": 0.25}, "backward_s": {"fixed": 1, "per_row": 0.5},
    "parameter_bytes": 400, "output_bytes": 16, "kept_bytes": 24.5, "tensor": ["colwise"],
}  # fmt: skip


def test_a_profile_is_the_same_as_a_file_and_as_its_content(tmp_path):
    content = {"name": "gpt", "layers": [LAYER, {**LAYER, "name": "block", "repeat": 2, "tensor": ["block"]}]}
    path = tmp_path / "times.json"
    path.write_text(json.dumps(content))
    name, layers = read_profile(path)
    times = Seconds(0.0, 0.25), Seconds(1, 0.5)
    assert name == "gpt"
    assert layers == (
        LayerProfile("embed", *times, 400, 16, 24.5, ("colwise",)),
        LayerProfile("block.0", *times, 400, 16, 24.5, ("block",)),
        LayerProfile("block.1", *times, 400, 16, 24.5, ("block",)),
    )
    assert read_profile(content) == (name, layers)
    path.write_text(json.dumps({"layers": [LAYER]}))
    assert read_profile(str(path))[0] == "times"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"forward": 1}, "layers[0]: unknown key 'forward'; did you mean 'forward_s'?"),
        ({"forward_s": 0.1}, "layers[0].forward_s: expected an object with fixed, per_row, found 0.1"),
        ({"backward_s": {"per_row": "fast"}}, "layers[0].backward_s.per_row: expected a number >= 0, found 'fast'"),
        ({"backward_s": {"per_row": -1}}, "layers[0].backward_s.per_row: expected a number >= 0, found -1"),
        ({"kept_bytes": float("nan")}, "layers[0].kept_bytes: expected a number >= 0, found nan"),
        ({"parameter_bytes": True}, "layers[0].parameter_bytes: expected a number >= 0, found True"),
        ({"tensor": "colwise"}, "layers[0].tensor: expected a list of colwise, rowwise, sequence, split, block"),
        ({"tensor": ["columns"]}, "colwise, rowwise, sequence, split, block, found 'columns'"),
        ({"repeat": 0}, "layers[0].repeat: expected a whole number >= 1, found 0"),
        ({"name": ""}, "layers[0].name: expected a string, found ''"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_error_names_the_key_and_what_was_expected(change, fact):
    with pytest.raises(ValueError, match="profile: ") as error:
        read_profile({"layers": [{**LAYER, **change}]})
    assert fact in str(error.value)


def test_what_is_no_profile_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*nowhere.json; expected a JSON file"):
        read_profile(tmp_path / "nowhere.json")
    path = tmp_path / "times.json"
    for text, fact in [
        ("layers:", "is not JSON"), ("[]", "times.json: expected an object with name, layers, found []"),
        ("{}", "layers: expected a list with at least one layer, found None"),
        ('{"layers": [], "rows": 1}', "unknown key 'rows'"), ('{"layers": [{"name": "a"}]}', "missing: forward_s, "),
        ('{"layers": [1], "name": 3}', "layers[0]: expected an object"),
        (json.dumps({"layers": [LAYER], "name": 3}), "times.json: name: expected a string, found 3"),
    ]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match="times") as error:
            read_profile(path)
        assert fact in str(error.value)
