"""Weights in formats of other programs, on each kind of storage, and back."""

import pytest

from spark_dl import export, storage
from spark_dl.rundir import foreign
from tests.builders.models import build_mlp, same_bits
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save


@pytest.mark.parametrize("options", [
    {"format": "safetensors"}, {"format": "hf", "max_shard_bytes": 100}, {"format": "dcp"},
])  # fmt: skip
def test_weights_are_written_and_read_again(folder, group, options):
    state = build_mlp().state_dict()
    run_dir, url = storage.join(folder, "run"), storage.join(folder, "größe #1", "out.safetensors")
    save(run_dir, model={"0": state})
    written = export(run_dir, url, **options)
    assert written == storage.absolute(url)
    assert same_bits(foreign.find(url).read(), state)
    with pytest.raises(ValueError, match=r"export: .*out.safetensors.* exists, and nothing is overwritten"):
        export(run_dir, url, **options)
