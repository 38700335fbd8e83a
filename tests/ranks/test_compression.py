"""Compressed gradients on real ranks: exact to what was left out, the same on all ranks, and back after a restart."""

import dataclasses
import functools
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spark_dl import Launch, ModelSpec, loop
from spark_dl.launch.rank import rendezvous
from spark_dl.parallel import ddp
from spark_dl.parallel.exchange.compression import Bucket, PowerSgd, all_gather, average_largest, average_thresholded
from spark_dl.parallel.exchange.exchange import ErrorFeedback, check_can_sum
from spark_dl.parallel.exchange.serial import SerialCollectives
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import DROPOUT_MLP, MLP, build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, rank_states, resume, train

LAUNCH = Launch(device="cpu", collective_timeout_s=20, start_timeout_s=20)
SMALL_BUCKETS = 0.0001  # MiB: one for each parameter
ERROR_FEEDBACK = {
    "powersgd": {"compression": "powersgd", "powersgd_rank": 1},
    "threshold": {"compression": "threshold", "threshold": 0.02},
    "topk": {"compression": "topk", "topk_ratio": 0.1},
}
ALL = {"fp16": {"compression": "fp16"}, "bf16": {"compression": "bf16"}, **ERROR_FEEDBACK}


def compressed(settings, *, start=0, bucket_mib=SMALL_BUCKETS, **more):
    begin = {"compression_start_step": start} if settings["compression"] in ERROR_FEEDBACK else {}
    return parallel(**settings, **begin, bucket_mib=bucket_mib, **more)


def train_and_look(run):
    """The weights of this rank itself, and the threads that are left."""
    weights = {}

    def build(spec, world, config):
        trainable = ddp.parallelize(spec, world, config)
        weights.update(trainable.modules[0].state_dict())  # the tensors that are trained
        return trainable

    with rendezvous.join(run.config.launch) as world:
        loop.train(run, world, parallelize=build)
    for thread in threading.enumerate():
        if thread.name.startswith("spark_dl exchange"):
            thread.join(timeout=10)
    left = [t.name for t in threading.enumerate() if t.name.startswith("spark_dl exchange")]
    return {name: value.numpy() for name, value in weights.items()}, left


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "num_ranks"), [*((name, 3) for name in ALL), ("fp16", 1), ("powersgd", 2), ("topk", 2)]
)
def test_all_ranks_have_the_same_weights_to_the_bit_and_learn(tmp_path, name, num_ranks):
    config = small_config(num_ranks, train={"epochs": 4}, parallel=compressed(ALL[name], start=2))
    run = make_run(tmp_path, config)
    found = run_ranks(train_and_look, num_ranks, run)
    for weights, threads in found:
        assert threads == []
        assert all(np.array_equal(weights[k], found[0][0][k]) for k in weights)
    losses = [line["train_loss"] for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(("name", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_is_exact_to_its_rounding(tmp_path, name, tolerance):
    exact = train(make_run(tmp_path, small_config(3), name="exact"))
    half = train(make_run(tmp_path, small_config(3, parallel=compressed(ALL[name])), name="half"))
    expected = checkpoint.load(exact, "model.pt")["0"]
    differ = False
    for key, value in checkpoint.load(half, "model.pt")["0"].items():
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)
        differ |= not torch.equal(value, expected[key])
    assert differ


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_the_first_steps_send_whole_gradients(tmp_path, name):
    exact = train(make_run(tmp_path, cut_at(small_config(2), 5), name="exact"))
    config = cut_at(small_config(2, parallel=compressed(ERROR_FEEDBACK[name], start=5)), 5)
    begun = train(make_run(tmp_path, config, name="compressed"))
    weights = checkpoint.load(begun, "model.pt")["0"]
    for key, expected in checkpoint.load(exact, "model.pt")["0"].items():
        torch.testing.assert_close(weights[key], expected, rtol=1e-6, atol=1e-7)
    config = dataclasses.replace(config, parallel=compressed(ERROR_FEEDBACK[name], start=4))
    other = checkpoint.load(train(make_run(tmp_path, config, name="earlier")), "model.pt")["0"]
    assert any(not torch.equal(other[key], weights[key]) for key in weights)


# After a restart


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "start", "stop_at"), [(2, 0, 1), (2, 3, 2), (3, 3, 7)])
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, name, num_ranks, start, stop_at):
    train_settings = {"optimizer_args": {"momentum": 0.9}, "clip_grad_norm": 1.0, "accumulation_steps": 2}
    config = small_config(num_ranks, train=train_settings, parallel=compressed(ERROR_FEEDBACK[name], start=start))
    whole = make_run(tmp_path, config, spec=DROPOUT_MLP, name="whole")
    uninterrupted = train(whole)
    cut = make_run(tmp_path, cut_at(config, stop_at), spec=DROPOUT_MLP, name="cut")
    saved = train(cut)
    assert saved.step == stop_at
    assert_same_to_the_bit(uninterrupted, resume(cut, saved, config))
    residuals = [state["error_feedback"]["residuals"] for state in rank_states(uninterrupted)]
    assert any(not torch.equal(residuals[0][key], residuals[1][key]) for key in residuals[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_a_resumed_run_with_a_static_graph_equals_an_uninterrupted_one(tmp_path, name):
    parallel = compressed(ERROR_FEEDBACK[name], bucket_mib=25, static_graph=True)  # all parameters in one bucket
    config = small_config(2, parallel=parallel)
    whole = make_run(tmp_path, config, name="whole")
    uninterrupted = train(whole)
    cut = make_run(tmp_path, cut_at(config, 4), name="cut")
    assert_same_to_the_bit(uninterrupted, resume(cut, train(cut), config))


def residual_after(tmp_path, name, num_ranks, bucket_mib, stop_at, **more):
    """Nothing is ever sent, so the weights stay, and the residual is the sum of the gradients."""
    settings = {"compression": "threshold", "threshold": 1e9}
    config = cut_at(small_config(num_ranks, parallel=compressed(settings, bucket_mib=bucket_mib, **more)), stop_at)
    return make_run(tmp_path, config, name=name)


def test_residuals_are_those_of_parameters_in_whatever_buckets_they_lie(tmp_path):
    expected = train(residual_after(tmp_path, "whole", 2, 25, 8))
    run = residual_after(tmp_path, "cut", 2, SMALL_BUCKETS, 5)
    saved = resume(run, train(run), residual_after(tmp_path, "cut", 2, 25, 8).config)
    for state, again in zip(rank_states(expected), rank_states(saved), strict=True):
        residuals, found = state["error_feedback"]["residuals"], again["error_feedback"]["residuals"]
        assert residuals.keys() == found.keys() == dict(build_mlp().named_parameters()).keys()
        for key, value in residuals.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bucket_mib", [25, SMALL_BUCKETS])
def test_residuals_are_those_of_parameters_also_with_a_static_graph(tmp_path, bucket_mib):
    expected = train(residual_after(tmp_path, "whole", 2, 25, 5))
    saved = train(residual_after(tmp_path, "static", 2, bucket_mib, 5, static_graph=True))
    for state, again in zip(rank_states(expected), rank_states(saved), strict=True):
        for key, value in state["error_feedback"]["residuals"].items():
            found = again["error_feedback"]["residuals"][key]
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3)], ids=str)
def test_on_another_number_of_ranks_what_is_still_to_be_sent_is_the_same(tmp_path, ranks):
    """Each step adds the mean over the ranks, so what all have together counts divided by their number."""
    run = residual_after(tmp_path, "cut", ranks[0], SMALL_BUCKETS, 5)
    saved = train(run)
    more = resume(run, saved, residual_after(tmp_path, "cut", ranks[1], SMALL_BUCKETS, 8).config)
    whole = train(residual_after(tmp_path, "whole", ranks[0], SMALL_BUCKETS, 8))
    means = []
    for found in (more, whole):
        states = [state["error_feedback"]["residuals"] for state in rank_states(found)]
        means.append({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    assert len(rank_states(more)) == ranks[1]
    for key, expected in means[1].items():
        torch.testing.assert_close(means[0][key], expected, rtol=1e-5, atol=1e-7)


def averages_over_steps(name, steps, residuals, seed):
    """Sums over the steps of the mean gradients and of what was made of them, and the residuals at the end."""
    shapes = {"weight": torch.Size([40, 30]), "bias": torch.Size([30])}
    size = sum(shape.numel() for shape in shapes.values())
    with rendezvous.join(LAUNCH) as world:
        average = {
            "threshold": functools.partial(average_thresholded, threshold=0.8),
            "topk": functools.partial(average_largest, ratio=0.05),
            "powersgd": PowerSgd(2).average,
        }[name]
        draw = np.random.default_rng((seed, world.rank))
        residual = torch.zeros(size, dtype=torch.float64) if residuals is None else torch.from_numpy(residuals)
        sent, own = torch.zeros_like(residual), torch.zeros_like(residual)
        for _ in range(steps):
            bucket = Bucket(torch.from_numpy(draw.normal(size=size)), residual, shapes)
            own += bucket.gradient
            average(bucket, dist.group.WORLD)
            sent += bucket.gradient
        return own.numpy(), sent.numpy(), residual.numpy()


@pytest.mark.parametrize("ranks", [(1, 2), (3, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_what_was_sent_and_what_is_left_are_the_sum_of_the_gradients(name, ranks):
    """Also when a run goes on with other ranks, each of which gets the mean of what is left."""
    gradients = sent = 0
    left = None
    for i, num_ranks in enumerate(ranks):
        found = run_ranks(averages_over_steps, num_ranks, name, 7, left, i)
        gradients = gradients + np.mean([own for own, _, _ in found], axis=0)
        assert all(np.array_equal(part, found[0][1]) for _, part, _ in found)
        sent = sent + found[0][1]
        left = np.mean([residual for _, _, residual in found], axis=0)
        np.testing.assert_allclose(sent + left, gradients, rtol=0, atol=1e-9)
    assert np.abs(left).max() > 0.1
    assert np.abs(sent).max() > 0.1


# The exchange


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_where_nothing_is_above_the_threshold_nothing_changes_and_no_rank_waits(tmp_path, num_ranks):
    run = residual_after(tmp_path, "run", num_ranks, SMALL_BUCKETS, 6)
    weights = checkpoint.load(train(run), "model.pt")["0"]
    torch.manual_seed(run.config.train.seed)
    for key, expected in build_mlp().state_dict().items():
        assert torch.equal(weights[key], expected)


def gather_parts(lengths):
    with rendezvous.join(LAUNCH) as world:
        part = torch.arange(lengths[world.rank], dtype=torch.int32) + 100 * world.rank
        return [received.tolist() for received in all_gather(part, dist.group.WORLD)]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 0, 0), (5, 0, 2), (1, 1), (0, 1000), (3,)], ids=str)
def test_parts_of_any_length_come_to_all_ranks(lengths):
    expected = [list(range(100 * rank, 100 * rank + length)) for rank, length in enumerate(lengths)]
    assert run_ranks(gather_parts, len(lengths), lengths) == [expected] * len(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_synchronized_batchnorm_and_many_buckets_do_not_get_into_each_other_s_way(tmp_path, name):
    parallel = compressed(ERROR_FEEDBACK[name], start=2, sync_batchnorm=True)
    run = make_run(tmp_path, small_config(3, train={"epochs": 3}, parallel=parallel), spec=DROPOUT_MLP, rows=480)
    train(run)
    losses = [line["train_loss"] for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]
    assert losses[-1] < losses[0]


def try_to_sum(dtype):
    with rendezvous.join(LAUNCH) as world:
        try:
            check_can_sum(getattr(torch, dtype), world.device)
        except ValueError as error:
            return str(error)
        return "yes"


def test_a_backend_that_cannot_sum_a_dtype_is_an_error_on_every_rank():
    assert run_ranks(try_to_sum, 2, "float32") == ["yes", "yes"]
    for message in run_ranks(try_to_sum, 2, "int16"):  # Gloo has no sum of these
        assert message.startswith("parallel.compression: gloo of torch ")
        assert "cannot sum torch.int16; use fp16" in message


def _loss_without_a_gradient(output, label):
    return nn.functional.cross_entropy(output, label, reduction="none") + 0 * torch.sqrt(output[:, 0] * 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold", "topk"])
def test_a_gradient_that_is_not_finite_is_an_error_that_names_its_parameter(tmp_path, name):
    config = small_config(2, parallel=compressed(ERROR_FEEDBACK[name]))
    spec = ModelSpec(build=MLP.build, loss=_loss_without_a_gradient)
    with pytest.raises(
        RankFailed, match=r"the gradient of '0.weight' is not finite .* on rank 0 in step 1 .* train\.lr"
    ):
        train(make_run(tmp_path, config, spec=spec))


class _FailingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = build_mlp(), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4 and dist.get_rank() == 1:
            raise RuntimeError("this rank fails")
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ERROR_FEEDBACK)
def test_a_rank_that_fails_ends_the_others(tmp_path, name):
    config = small_config(3, parallel=compressed(ERROR_FEEDBACK[name]), launch={"collective_timeout_s": 50})
    with pytest.raises(RankFailed, match="this rank fails|Connection closed|Connection reset"):
        run_ranks(train_and_look, 3, make_run(tmp_path, config, spec=ModelSpec(build=_FailingModel)), timeout_s=40)


_IN_ORDER_TIMEOUT_S = 40


def do_pieces(failing_rank):
    """What became of four pieces of work, of which one rank fails in the third; and the pieces that were done."""
    done, found = [], []
    with rendezvous.join(LAUNCH) as world:
        in_order = SerialCollectives(_IN_ORDER_TIMEOUT_S)
        tensors = [torch.full((3,), float(i)) for i in range(4)]

        def work(number, group):
            if number == 2 and world.rank == failing_rank:
                raise RuntimeError("the disk is full")
            dist.all_reduce(tensors[number], group=group)
            done.append(number)

        futures = [in_order.run(functools.partial(work, i), tensor) for i, tensor in enumerate(tensors)]
        for future in futures:
            try:
                found.append(future.wait().tolist())
            except RuntimeError as error:
                found.append(str(error))
        in_order.close()
    return done, found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_pieces_of_work_are_done_in_their_order(num_ranks):
    expected = [[float(num_ranks * i)] * 3 for i in range(4)]
    assert run_ranks(do_pieces, num_ranks, None) == [([0, 1, 2, 3], expected)] * num_ranks


def test_an_error_is_that_of_all_after_it_and_ends_the_wait_of_the_other_ranks():
    start = time.monotonic()
    found = run_ranks(do_pieces, 3, 1)
    assert time.monotonic() - start < _IN_ORDER_TIMEOUT_S
    for rank, (done, results) in enumerate(found):
        assert done == [0, 1]
        assert results[:2] == [[0.0] * 3, [3.0] * 3]
        assert all(isinstance(r, str) for r in results[2:])
        assert rank != 1 or all("the disk is full" in r for r in results[2:])


def products_by_torch_and_by_us(rank):
    """Gradients of the same steps by torch's hook and by ours, from the same start, over one bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    with rendezvous.join(LAUNCH) as world:
        torch.manual_seed(0)
        models = [nn.Linear(24, 32) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        theirs, ours = (DistributedDataParallel(model) for model in models)
        state = PowerSGDState(None, rank, start_powerSGD_iter=2)
        theirs.register_comm_hook(state, powerSGD_hook)
        powersgd, in_order = PowerSgd(rank), SerialCollectives(20)
        feedback = ErrorFeedback(powersgd.average, models[1], in_order, start_step=2)
        ours.register_comm_hook(None, lambda _, bucket: feedback.hook(bucket))
        first = powersgd.start("weight", models[1].weight)
        state.q_memory_dict[0], state.p_memory_dict[0] = first.flatten().clone(), torch.empty(32 * rank)
        torch.manual_seed(world.rank)
        found = []
        for _ in range(8):
            x, y = torch.randn(16, 24), torch.randn(16, 32)
            for module in (theirs, ours):
                module.zero_grad()
                (module(x) - y).square().mean().backward()
            found.append([[p.grad.numpy().copy() for p in model.parameters()] for model in models])
        in_order.close()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_gives_what_torch_s_hook_gives_where_that_runs(rank):
    for found in run_ranks(products_by_torch_and_by_us, 2, rank):
        for step, (theirs, ours) in enumerate(found):
            for a, b in zip(theirs, ours, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6, err_msg=f"step {step}")
