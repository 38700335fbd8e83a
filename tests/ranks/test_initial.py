"""`train.init_from` on ranks, without a driver, as under torchrun."""

import dataclasses

import numpy as np
import torch

from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import MLP, blobs, small_config
from tests.builders.reference import reference
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train


def test_a_run_goes_on_from_the_weights_of_another_as_one_process_does_and_is_resumed_from_its_own(tmp_path):
    first = make_run(tmp_path, small_config(2), name="first")
    saved = train(first)
    config = small_config(2, train={"init_from": first.run_dir, "epochs": 1, "optimizer_args": {"momentum": 0.9}})
    whole = make_run(tmp_path, config, name="whole")
    trained = train(whole)
    assert trained.step == 6  # the steps begin anew

    group_rows = tuple(n for s in whole.train.shards for n in s.row_groups)
    expected, weights = reference(blobs(245), config, group_rows, lambda: load_model(MLP, saved.url).train())
    losses = [line["loss"] for line in read_metrics(whole.run_dir) if line["kind"] == "step"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, tensor in checkpoint.load(trained, "model.pt")["0"].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)

    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(config, 3))
    assert_same_to_the_bit(trained, resume(cut, train(cut), config))
