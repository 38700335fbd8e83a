"""How many operations of torch a step has that a loop of a few lines does not have. Each is a kernel on a GPU."""

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from spark_dl import ModelSpec, loop
from spark_dl.data.load.build import build_loader
from spark_dl.launch.rank.rendezvous import join
from spark_dl.parallel import ddp
from spark_dl.training import finite
from tests.builders.models import small_config
from tests.ranks.runs import make_run, on_ranks

FEW, MANY = 2, 10
ON_THE_HOST = {
    f"aten::{name}"
    for name in (
        "detach", "expand", "as_strided", "view", "reshape", "t", "transpose", "unsqueeze", "squeeze", "alias", "empty",
        "empty_strided", "empty_like", "select", "slice", "to", "item", "min",
    )
}  # fmt: skip
"""They make no kernel, copy what a loop without spark_dl copies, too, or look at labels while they are on the host."""


def build(num_layers):
    layers = [[nn.Linear(4 if i == 0 else 8, 8), nn.ReLU()] for i in range(num_layers)]
    return nn.Sequential(*(each for layer in layers for each in layer), nn.Linear(8, 3))


def operations(function):
    with profile(activities=[ProfilerActivity.CPU]) as done:
        function()
    inner = {id(c) for event in done.events() if event.name.startswith("aten::") for c in event.cpu_children}
    return Counter(
        event.name
        for event in done.events()
        if event.name.startswith("aten::") and event.name not in ON_THE_HOST and id(event) not in inner
    )


def bare(run, world, steps):
    loader = build_loader(run.train, run.config, rank=0, world_size=1)
    batches = [step.micro_batches[0] for step in loader.epoch(0)][:steps]
    model = DistributedDataParallel(run.spec.build(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = nn.CrossEntropyLoss()

    def steps_of_it():
        for batch in batches:
            loss = loss_of(model(batch["features"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return operations(steps_of_it)


def ours(run, world, steps):
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, max_steps=steps))
    run = dataclasses.replace(run, config=config, run_dir=f"{run.run_dir}-{steps}")
    return operations(lambda: loop.train(run, world, ddp.parallelize))


def counted(run):
    """The operations of a step of each loop: what `MANY` steps have more than `FEW`."""
    loop.StepCheck = functools.partial(finite.StepCheck, waits=False)  # as on a GPU, which must not be waited for
    try:
        found = []
        for function in (bare, ours):
            of_steps = []
            for steps in (FEW, MANY):
                with join(run.config.launch) as world:
                    of_steps.append(function(run, world, steps))
            found.append({name: (n - of_steps[0][name]) / (MANY - FEW) for name, n in of_steps[1].items()})
        return found
    finally:
        loop.StepCheck = finite.StepCheck


@pytest.mark.parametrize("num_layers", [1, 20])
def test_a_step_has_at_most_ten_operations_more_than_a_bare_loop(tmp_path, num_layers):
    config = small_config(1, {"lr": 0.1, "epochs": 1, "log_every": 1000, "global_batch_size": 24})
    spec = ModelSpec(build=functools.partial(build, num_layers), loss="CrossEntropyLoss")
    bare_loop, loop_of_ours = on_ranks(counted, make_run(tmp_path, config, spec=spec))[0]
    more = {n: loop_of_ours.get(n, 0) - bare_loop.get(n, 0) for n in {*loop_of_ours, *bare_loop}}
    assert sum(bare_loop.values()) > 5 * num_layers
    assert sum(more.values()) <= 10, sorted((name, count) for name, count in more.items() if count)
