"""Models cut over tensor ranks give the weights of a single process; what they send and hold."""

import collections
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from spark_dl.parallel.mesh.tensor.parallelize import parallelize_tensors
from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan
from spark_dl.parallel.mesh.tensor.words import take
from tests.builders.tensor_models import LENGTH, MODELS, VOCABULARY, WIDTH, OwnBlock, batches
from tests.ranks.test_collectives import run_in_group, same_on_all_ranks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


def mesh():
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tensor",))


def build(name, *, cut, sequence=False):
    torch.manual_seed(5)
    model, plan = MODELS[name]()
    model.train()
    if not cut:
        return model, {}
    words = resolve_tensor_plan(model, plan, dist.get_world_size(), sequence=sequence)
    return model, parallelize_tensors(model, words, mesh(), sequence=sequence)


def train(name, optimizer="sgd", *, cut, sequence=False, steps=4):
    model, slices = build(name, cut=cut, sequence=sequence)
    step = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(7)  # of dropout, the same on all ranks
    losses = []
    for features, label in batches(name, steps):
        loss = F.cross_entropy(model(features).flatten(0, -2), label.flatten())
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(float(loss.detach()))
    return model, slices, losses


def without_bias_of_keys(name, parameter):
    """It has no effect, as it adds the same to all scores of a query: its gradient is noise, which Adam magnifies."""
    if name.endswith(("in_proj_bias", "c_attn.bias")):
        q, _, v = parameter.chunk(3)
        return torch.cat([q, v])
    return parameter[:0] if name.endswith((".k.bias", ".key.bias")) else parameter


def check_parity(name, optimizer, sequence):
    expected, _, expected_losses = train(name, optimizer, cut=False)
    model, slices, losses = train(name, optimizer, cut=True, sequence=sequence)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    whole = dict(expected.named_parameters(remove_duplicate=False))
    own = dict(model.named_parameters(remove_duplicate=False))
    assert own.keys() == whole.keys() == slices.keys()
    for key, parameter in own.items():
        wanted = take(whole[key].detach(), slices[key].boxes)
        found = parameter.detach()
        if optimizer == "adam":
            found, wanted = without_bias_of_keys(key, found), without_bias_of_keys(key, wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
        if slices[key].is_replicated:
            assert same_on_all_ranks(own[key].detach()), key
    # Random numbers are in step, and evaluation, without dropout, gives the same.
    assert same_on_all_ranks(torch.rand(3))
    features, _ = batches(name, 1)[0]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(features), expected.eval()(features), rtol=1e-4, atol=1e-5)


def check_all(cases):
    for case in cases:
        try:
            check_parity(*case)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


OURS = ("chain", "encoder", "tied", "cross", "own")
OF_HUGGING_FACE = ("bert", "gpt2", "llama", "neox", "qwen3", "checkpointed")


def cases(names, optimizer="sgd"):
    """Each model whole, and with slices of sequences if it has layers for them."""
    return [(name, optimizer, s) for name in names for s in ((False,) if name in ("chain", "cross") else (False, True))]


def test_same_weights_as_a_single_process():
    run_in_group(check_all, 2, cases(OURS))


@pytest.mark.slow
def test_same_weights_on_four_ranks():
    """Some ranks have no position of the shortest slices."""
    run_in_group(check_all, 4, cases([name for name in OURS if name != "own"]))


def test_same_weights_with_adam():
    run_in_group(check_all, 2, cases(["encoder", "tied", "own"], "adam"))


@pytest.mark.long
@pytest.mark.slow
def test_same_weights_of_models_of_hugging_face():
    run_in_group(check_all, 2, [*cases(OF_HUGGING_FACE), *cases(["bert", "gpt2"], "adam")])


def test_bert_and_gpt2():
    run_in_group(check_all, 2, [("bert", "sgd", False), ("gpt2", "sgd", True)])


def counting(collective, index, found):
    def call(*args, **kwargs):
        found.append(args[index].numel())
        return collective(*args, **kwargs)

    return call


def count_elements(sequence):
    """The numbers of elements that each collective of a step gets, by its name, and those of whole parameters."""
    model, slices = build("encoder", cut=True, sequence=sequence)
    features, label = batches("encoder", 1)[0]
    found = collections.defaultdict(list)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, index in (("all_reduce", 0), ("all_gather", 1), ("all_to_all_single", 1)):
            monkeypatch.setattr(dist, name, counting(getattr(dist, name), index, found[name]))
        F.cross_entropy(model(features).flatten(0, 1), label.flatten()).backward()
    return {name: sizes for name, sizes in found.items() if sizes}, sum(
        math.prod(s.shape) for s in slices.values() if s.is_replicated
    )


def test_elements_sent():
    """In each layer four all-reduces of the activations, or as many gathers and sums of slices. Once the gradients of
    whole parameters."""
    layers, activations, slices = 2, 5 * LENGTH * WIDTH, 5 * 4 * WIDTH  # of seven positions the first rank has four
    for found, whole in run_in_group(count_elements, 2, False):
        assert found.keys() == {"all_reduce"}
        assert found["all_reduce"].count(activations) == 4 * layers
        assert sum(found["all_reduce"]) == 4 * layers * activations + whole
    for found, whole in run_in_group(count_elements, 2, True):
        assert found["all_gather"] == [slices] * (4 * layers + 2)  # and at both ends of the layers
        assert found["all_to_all_single"] == [2 * slices] * (4 * layers)
        assert sum(found["all_reduce"]) == whole


def held_bytes():
    """The bytes of a rank's parameters, the numbers of those cut and whole, and which cut ones still exist whole."""
    model, plan = MODELS["encoder"]()
    before = {name: (p.numel(), weakref.ref(p)) for name, p in model.named_parameters()}
    slices = parallelize_tensors(model, resolve_tensor_plan(model, plan, dist.get_world_size()), mesh())
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    cut = [name for name, found in slices.items() if not found.is_replicated]
    sizes = [sum(before[name][0] for name in names) for names in (cut, before.keys() - {*cut})]
    return held, *sizes, [name for name in cut if before[name][1]() is not None]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_its_part_of_what_is_cut(num_ranks):
    for held, cut, whole, left in run_in_group(held_bytes, num_ranks):
        assert cut > whole
        assert held == 4 * (cut / num_ranks + whole)
        assert left == []


class Residual(nn.Module):
    """Adds what it gets, which is whole, to a slice of a sequence."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x))


class Unpaired(Residual):
    """Its forward pass leaves out the layer that would take the slices, or the one that makes them."""

    def forward(self, x):
        return self.up(x) if x.shape[-1] == WIDTH else self.down(x)


class Crossed(nn.Module):
    """Attention of a sequence to another one."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return x + self.attention(x, x.flip(1), x.flip(1), need_weights=False)[0]


def build_residual():
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), Residual()) for _ in range(2)))


def error_of(name, plan, sequence, features):
    torch.manual_seed(5)
    own = {
        "unpaired": Unpaired, "residual": build_residual, "crossed": lambda: nn.Sequential(Crossed(), Crossed()),
    }  # fmt: skip
    model = own[name]() if name in own else MODELS[name]()[0]
    words = resolve_tensor_plan(model, plan, 2, sequence=sequence)
    parallelize_tensors(model, words, mesh(), sequence=sequence)
    with pytest.raises((ValueError, IndexError)) as raised:
        model(features)
    return str(raised.value)


PAIR = {"layers.layers.*.linear1": "colwise", "layers.layers.*.linear2": "rowwise"}


@pytest.mark.parametrize(("name", "plan", "features", "expected"), [
    ("unpaired", {"up": "colwise", "down": "rowwise"}, torch.zeros(5, WIDTH),
     "spec.tensor_plan: expected a layer that is cut by rows after 'up'"),
    ("unpaired", {"up": "colwise", "down": "rowwise"}, torch.zeros(5, 8),
     "spec.tensor_plan: expected 4 inputs for 'down', this rank's slice of what a layer before has cut, found 8"),
    ("residual", {"*.1.up": "colwise", "*.1.down": "rowwise"}, torch.zeros(2, 2, WIDTH),
     "parallel.sequence: expected 1 of 2 positions in the input of '1.0', along axis 1, found the shape (2, 2, 16)"),
    ("residual", {"*.1.up": "colwise", "*.1.down": "rowwise"}, torch.zeros(2, WIDTH),
     "parallel.sequence: expected [rows, positions, features] in '0', found the shape (2, 16)"),
    ("crossed", {"*.attention": "heads", "*.norm": "sequence"}, torch.zeros(2, 4, WIDTH),
     "parallel.sequence: expected attention of a sequence to itself, found a key or a value that is another tensor"),
    ("tied", {"embed": "vocab", **PAIR}, torch.full((5, LENGTH), VOCABULARY), "expected indices in [0, 21), found 21"),
])  # fmt: skip
def test_errors_of_ranks(name, plan, features, expected):
    assert all(
        expected in error for error in run_in_group(error_of, 2, name, plan, name in ("residual", "crossed"), features)
    )


def largest_difference_with_shards(name, sequence):
    """Of the weights of a model whose slices are cut by `fully_shard`, two shards of two slices."""
    expected, _, _ = train(name, cut=False)
    rank = dist.get_rank()
    tensor, data = ([dist.new_group(ranks) for ranks in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    shards = DeviceMesh.from_group(data[rank % 2], "cpu", mesh_dim_names=("shards",))
    over = DeviceMesh.from_group(tensor[rank // 2], "cpu", mesh_dim_names=("tensor",))
    torch.manual_seed(5)
    model, plan = MODELS[name]()
    slices = parallelize_tensors(model, resolve_tensor_plan(model, plan, 2, sequence=sequence), over, sequence=sequence)
    layers = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer | OwnBlock)]
    for module in (*layers, model):
        fully_shard(module, mesh=shards)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    step = OPTIMIZERS["sgd"](model.parameters())
    torch.manual_seed(7)
    for features, label in batches(name, 4):
        step.zero_grad()
        (F.cross_entropy(model(features).flatten(0, -2), label.flatten()) / 2).backward()
        step.step()
    own, whole = dict(model.named_parameters()), dict(expected.named_parameters())
    return max(float((p.full_tensor() - take(whole[n], slices[n].boxes)).abs().max()) for n, p in own.items())


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["encoder", "own"])
def test_slices_can_be_cut_into_shards(name, sequence):
    assert max(run_in_group(largest_difference_with_shards, 4, name, sequence)) < 1e-6
