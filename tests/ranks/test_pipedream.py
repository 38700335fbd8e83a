"""PipeDream gives the bits of SGD with delayed gradients, as one process simulates it."""

import functools
import warnings

import pytest
import torch

from spark_dl import ModelSpec
from spark_dl.parallel.mesh.layers import build_chain, cut_chain
from spark_dl.parallel.mesh.pipedream import PipeDream
from tests.builders.models import same_bits
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.pipelines import CPU, Case, adam, data_ranks, joined, part_of, sum_gradients
from tests.ranks.test_pipeline import TWO_TOWERS, Tied, build_linears, forward_tokens, nothing_pickled

CUTS = {2: [4, 8], 4: [2, 2, 6, 2]}
"""Of the layers of `build_normed`."""


def learning_rate(step):
    return 0.1 / (1 + step)


def set_rate(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)


class Simulation:
    """SGD with delayed gradients in one process: every stage has all the weights that it has ever had."""

    def __init__(self, case, cut, vertical_sync):
        self.case, self.vertical_sync = case, vertical_sync
        self.model = case.spec.build_to_train()
        self.stages = [
            [p for layer in layers for p in layer.module.parameters()]
            for layers in cut_chain(build_chain(self.model, case.layers), cut)
        ]
        self.optimizers = [case.optimizer(parameters) for parameters in self.stages]
        self.history = [self.weights()]
        self.settled = 0

    def weights(self):
        return [[p.detach().clone() for p in parameters] for parameters in self.stages]

    def set_weights(self, weights):
        with torch.no_grad():
            for parameters, values in zip(self.stages, weights, strict=True):
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)

    def settle(self):
        self.settled = len(self.history) - 1

    def step(self, micro_batches, rows):
        """The loss of a mini-batch, computed with old weights. Its gradients change the newest ones."""
        done, last = len(self.history) - 1, len(self.stages) - 1
        delays = [last if self.vertical_sync else last - stage for stage in range(last + 1)]
        self.set_weights([self.history[max(self.settled, done - d)][s] for s, d in enumerate(delays)])
        total = torch.zeros(())
        for batch in micro_batches:
            output = self.case.spec.output(self.model, batch, self.case.config.data.features)
            label = self.case.config.data.label
            losses = self.case.spec.loss(output, batch if label is None else batch[label])
            loss = (losses * batch["weight"]).sum()
            (loss / rows).backward()
            total += loss.detach()
        self.set_weights(self.history[-1])
        for optimizer in self.optimizers:
            set_rate(optimizer, done)
            optimizer.step()
            optimizer.zero_grad()
        self.history.append(self.weights())
        return float(total)


def simulate(case, cut, vertical_sync, settled):
    simulation = Simulation(case, cut, vertical_sync)
    losses = []
    for step, (micro_batches, rows) in enumerate(case.steps()):
        if step == settled:
            simulation.settle()
        losses.append(simulation.step(micro_batches, rows))
    return losses, simulation.model.state_dict()


def build_pipedream(case, group, cut, vertical_sync=False):
    model = case.spec.build_to_train()
    chain = build_chain(model, case.layers)
    return PipeDream(
        case.spec, model, chain, cut, case.config, group=group, device=CPU, vertical_sync=vertical_sync
    )  # fmt: skip


def train_rank(case, cut, variants, settled, resumed):
    """What each variant gives: losses, the state of this rank, its output when settled, and versions in flight."""
    found = []
    with joined() as group, nothing_pickled():
        for vertical_sync in variants:
            pipeline = build_pipedream(case, group, cut, vertical_sync)
            optimizer = case.optimizer(pipeline.module.parameters())
            losses, versions, output = [], [], None
            for step, (micro_batches, rows) in enumerate(case.steps()):
                if step == settled:
                    pipeline.settle(optimizer)
                    output = case.output(pipeline.module, pipeline.forward)
                    pipeline.module.train()
                    if resumed:
                        versions.append(pipeline.most_versions)
                        states = pipeline.module.state_dict(), optimizer.state_dict()
                        pipeline = build_pipedream(case, group, cut, vertical_sync)
                        optimizer = case.optimizer(pipeline.module.parameters())
                        pipeline.module.load_state_dict(states[0])
                        optimizer.load_state_dict(states[1])
                losses.append(float(pipeline.forward_backward(micro_batches, rows)))
                set_rate(optimizer, step)
                pipeline.step(optimizer)
                optimizer.zero_grad()
            pipeline.settle(optimizer)
            versions.append(pipeline.most_versions)
            found.append((losses, pipeline.module.state_dict(), output, max(versions)))
    return found


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_weights_are_those_of_delayed_sgd(num_ranks, resumed):
    """Momentum, BatchNorm, learning rates that fall, a short last batch, and an evaluation or a restart in between."""
    case, cut, settled = Case(global_batch_size=24, micro_batches=1), CUTS[num_ranks], 7
    results = run_ranks(train_rank, num_ranks, case, cut, [False, True], settled, resumed)
    for vertical_sync, of_ranks in zip([False, True], zip(*results, strict=True), strict=True):
        losses, state = simulate(case, cut, vertical_sync, settled)
        assert [sum(each) for each in zip(*(r[0] for r in of_ranks), strict=True)] == losses
        assert same_bits({name: t for r in of_ranks for name, t in r[1].items()}, state)
        expected = [num_ranks] * num_ranks if vertical_sync else [num_ranks - rank for rank in range(num_ranks)]
        assert [r[3] for r in of_ranks] == expected
        assert [r[2] is None for r in of_ranks] == [True] * (num_ranks - 1) + [False]


def test_the_delay_matters():
    """The simulation is not that of a single process, and not the same with vertical sync."""
    case = Case(global_batch_size=24, micro_batches=1)
    states = [case.train_alone()[1], *(simulate(case, CUTS[4], sync, None)[1] for sync in (False, True))]
    assert not any(same_bits(states[i], states[j]) for i, j in [(0, 1), (0, 2), (1, 2)])


@pytest.mark.parametrize(
    ("case", "cut"),
    [(Case(optimizer=adam, micro_batches=2), [4, 8]), (TWO_TOWERS, [1, 3]), (TWO_TOWERS, [1, 1, 1, 1])],
    ids=["adam, micro-batches", "tuples and dicts on 2", "tuples and dicts on 4"],
)
def test_other_optimizers_and_models(case, cut):
    losses, state = simulate(case, cut, False, None)
    results = run_ranks(train_rank, len(cut), case, cut, [False], None, False)
    of_ranks = [r[0] for r in results]
    assert [sum(each) for each in zip(*(r[0] for r in of_ranks), strict=True)] == losses
    assert same_bits({name: t for r in of_ranks for name, t in r[1].items()}, state)


def train_data_rank(case, cut):
    with joined() as world:
        group, same_stage, data_rank = data_ranks(world)
        pipeline = build_pipedream(case, group, cut)
        optimizer = case.optimizer(pipeline.module.parameters())

        def reduce():
            if any(p.grad is not None for p in pipeline.module.parameters()):
                sum_gradients(pipeline.module, same_stage)

        for step, (micro_batches, rows) in enumerate(case.steps()):
            pipeline.forward_backward(part_of(micro_batches, data_rank), rows)
            reduce()
            set_rate(optimizer, step)
            pipeline.step(optimizer)
            optimizer.zero_grad()
        pipeline.settle(optimizer, reduce)
        return pipeline.module.state_dict()


def test_two_pipelines_that_share_the_rows():
    case, cut = (
        Case(ModelSpec(build=functools.partial(build_linears, 4)), global_batch_size=24, micro_batches=1),
        [2, 2],
    )
    _, state = simulate(case, cut, False, None)
    for trained in run_ranks(train_data_rank, 4, case, cut):
        assert trained
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def schedule_rank(case, cut):
    with joined() as group, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = build_pipedream(case, group, cut)
        optimizer = case.optimizer(pipeline.module.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for micro_batches, rows in case.steps():
            pipeline.forward_backward(micro_batches, rows)
            pipeline.step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
        pipeline.settle(optimizer)


def test_a_scheduler_that_is_called_before_the_first_update_does_not_warn():
    run_ranks(schedule_rank, 2, Case(rows=100, micro_batches=1), CUTS[2])


def build_rank(case, cut):
    with joined() as group:
        build_pipedream(case, group, cut)


def test_shared_parameters_are_an_error():
    case = Case(ModelSpec(build=Tied, forward=forward_tokens), ("embed", "layers.*", "norm", "head"))
    with pytest.raises(RankFailed) as caught:
        run_ranks(build_rank, 2, case, [3, 4])
    message = "parallel.schedule: 'pipedream' does not support parameters that several stages share, found embed.weight"
    assert str(caught.value).count(f"ValueError: {message} and head.weight") == 2
