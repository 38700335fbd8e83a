"""What one process does on the same global batches, in a plain loop: every exact strategy must give the same."""

import numpy as np
import torch
from torch.nn import functional as F

from spark_dl.data.plan import Plan
from spark_dl.nn.moe import moe_layers
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import global_batches, write_dataset
from tests.builders.models import MLP, blobs, build_mlp


def reference(columns, config, group_rows, build=build_mlp, left_out=()):
    """Losses per step and weights of a plain loop over the same global batches, without the package's loop.

    left_out: steps without an update, from 1.
    """
    torch.manual_seed(config.train.seed)
    model = build()
    optimizer = getattr(torch.optim, config.train.optimizer)(
        model.parameters(), lr=config.train.lr, **config.train.optimizer_args
    )
    plan = Plan(
        group_rows=group_rows, global_batch_size=config.train.global_batch_size, num_streams=config.loader.num_streams,
        window_rows=config.loader.shuffle_window_rows, seed=config.train.seed,
    )  # fmt: skip
    features, label = torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"])
    losses, step = [], 0
    for epoch in range(config.train.epochs):
        for batch in global_batches(plan, epoch):
            step += 1
            if step in left_out:
                continue
            ids = torch.tensor(batch)
            loss = F.cross_entropy(model(features[ids]), label[ids])
            optimizer.zero_grad()
            auxiliary = [m.auxiliary_loss for m in moe_layers(model).values() if m.auxiliary_loss is not None]
            sum(auxiliary, loss).backward()
            if config.train.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
            optimizer.step()
            for layer in moe_layers(model).values():
                layer.update_bias(layer.take_counts()[:-1])
            losses.append(loss.item())
    return losses, model.state_dict()


def assert_same_training(train, tmp_path, config, rows, group_rows=40, spec=MLP):
    """`train(run)` trains and returns the result of a rank, or of the driver. Its run_dir is `tmp_path / "run"`."""
    columns = blobs(rows)
    shards = write_dataset(str(tmp_path / "data"), columns, group_rows=group_rows, shard_rows=3 * group_rows)
    losses, weights = reference(columns, config, tuple(n for s in shards.shards for n in s.row_groups), spec.build)
    run = Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / "run"))
    result = train(run)
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert result["rows"] == rows * config.train.epochs
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-5)
    trained = load_weights(checkpoint.find(run.run_dir))
    for name, expected in weights.items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-6)
