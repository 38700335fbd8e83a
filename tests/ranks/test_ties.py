"""What users tie to their model, under each strategy: the weights of a plain loop, or an error; no third outcome."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.utils.checkpoint import checkpoint

from spark_dl import ModelSpec, Optimization
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import small_config
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import distance, make_run, train

STEPS = 6
MESHES = {
    "ddp": None,
    "zero 1": Mesh(zero_stage=1),
    "zero 2": Mesh(zero_stage=2),
    "zero 3": Mesh(zero_stage=3),
    "tensor": Mesh(tensor=2),
    "pipeline": Mesh(pipeline=2, stages=(4, 3)),
    "pipedream": Mesh(pipeline=2, stages=(4, 3), schedule="pipedream"),
}


def chain(linear=nn.Linear, middle=nn.Tanh):
    return nn.Sequential(
        nn.Linear(4, 8), middle(), linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )  # fmt: skip


def sgd(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


# Marks


def build_marked():
    model = chain()
    for layer in (model[0], model[4]):
        layer.weight._no_weight_decay = True
    return model


def by_marks(model):
    marked = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
    others = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
    return SGD([{"params": marked, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.3}], lr=0.1)


# Place


def by_place(model):
    """A rate for each layer, by its place."""
    layers = [layer for layer in model if next(layer.parameters(), None) is not None]
    return SGD([{"params": [*layer.parameters()], "lr": 0.2 * 0.5**i} for i, layer in enumerate(layers)], lr=0.1)


class Factor(nn.Module):
    factor = 1.0

    def forward(self, x):
        return torch.tanh(x * self.factor)


def build_factors():
    model = chain()
    model[1], model[5] = Factor(), Factor()
    return model


def set_factors(model, position):
    model[1].factor = 1 / (1 + position.global_step)
    model[5].factor = 1 + position.global_step / 4


# Parameters that are frozen, trained later, or never used


def decayed(model):
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.3)


def freeze(model, position):
    model[2].requires_grad_(position.global_step < 2)


def thaw(model, position):
    model[2].requires_grad_(position.global_step >= 2)


class Spare(nn.Module):
    """Has a parameter that nothing uses, as layers that were switched off have."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(x)


# Hooks


def build_hooked():
    model = chain()
    model[2].weight.register_hook(lambda gradient: gradient * 0.25)
    return model


# Shared memory


def build_shared():
    model = chain()
    model[4].weight.data = model[2].weight.data
    return model


# Subclasses of Linear


class LoRA(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) / 4), nn.Parameter(torch.randn(outputs, 2) / 4)

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 1.7, self.bias)


class Named(nn.Linear):
    """A subclass that computes what Linear does."""


def weight_normed(inputs, outputs):
    return nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs))


# Whole parameters between slices


PRELU_PLAN = {"0": "colwise", "2": "rowwise"}


# Modules that are called several times, and odd parameters


class Repeated(nn.Module):
    """ALBERT's blocks share their weights."""

    def __init__(self, *, is_reentrant):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.is_reentrant = is_reentrant

    def forward(self, features):
        x = torch.tanh(self.first(features))
        for _ in range(3):
            x = checkpoint(lambda x: torch.tanh(self.block(x)), x, use_reentrant=self.is_reentrant)
        return self.head(x)


class WithParameter(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layers, self.extra = chain(), nn.Parameter(value)

    def forward(self, features):
        return self.layers(features) + self.extra.sum()


# Derivatives by the input


class Energy(nn.Module):
    """An energy of each row, and the force, its derivative by the features."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, features):
        features = features.detach().requires_grad_()
        out = self.layers(features)
        (force,) = torch.autograd.grad(out.sum(), features, create_graph=True)
        return out + force[:, :3]


# What no check knows, and the first step shows


def with_norm(model, batch):
    out = model(batch["features"])
    return {"out": out, "norm": sum(p.pow(2).sum() for p in model.parameters()).expand(len(out))}


def plus_norm(output, label):
    return F.cross_entropy(output["out"], label, reduction="none") + 0.01 * output["norm"]


class Outside(nn.Module):
    """Its words are used as a linear layer, too, after which each rank has other columns."""

    def __init__(self):
        super().__init__()
        self.first, self.words, self.head = nn.Linear(4, 8), nn.Embedding(6, 8), nn.Linear(8, 3)

    def forward(self, features):
        ids = (features[:, 0] > 0).long()
        x = torch.tanh(self.first(features)) + self.words(ids)
        return self.head(x + F.linear(x, self.words.weight).logsumexp(1, keepdim=True))


# Optimizers


class OwnSgd(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class SignByNorm(SGD):
    """Needs whole tensors, as LAMB does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1e-3 + parameter.grad.norm()), alpha=group["lr"])


def own_with_flag(model):
    return Optimization(optimizer=OwnSgd(model.parameters(), lr=0.1), elementwise=True)


def of_matrices(model):
    return Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


UNEQUAL = r"parallel\.check_first_step_mib: the gradient of '[\w.]+' in the first step differs"
UNEQUAL_LOSS = r"parallel\.check_first_step_mib: the loss in the first step differs"
MIXED = "mixed torch.Tensor and DTensor"  # torch's own text, in the first forward pass
CUT = ("zero 1", "zero 2", "zero 3", "tensor")
WHOLE = r"spec\.optimizer: expected one of SGD, .*, found \w+; if it updates each element by itself"
HOOK = r"spec\.build: the parameter '2\.weight' has a hook"
SHARED = r"spec\.build: the parameters '2\.weight' and '4\.weight' share memory"
SUBCLASS = r"'rowwise' expects a linear layer with the forward and the weight of nn\.Linear .*found LoRA for '2'"
CHANGED = r"requires_grad has changed before step \d: '2\.weight'"
UNUSED = r"the loss of a step does not depend on the parameters .*spare"
FREED = r"parallel\.zero_stage: with 3, the weights of a layer are freed"
SLICES = r"spec\.tensor_plan: '1' has whole parameters and gets a slice, the outputs of '0'"
# What a user ties: (spec, what is not right with which strategy)
TIES = {
    "mark": (ModelSpec(build=build_marked, optimizer=by_marks), {}),
    "place": (ModelSpec(build=chain, optimizer=by_place), {}),
    "place in set_position": (ModelSpec(build=build_factors, optimizer=sgd, set_position=set_factors), {}),
    "frozen later": (
        ModelSpec(build=chain, optimizer=decayed, set_position=freeze),
        dict.fromkeys(MESHES, CHANGED),
    ),
    "trained later": (
        ModelSpec(build=chain, optimizer=decayed, set_position=thaw),
        dict.fromkeys(MESHES, CHANGED),
    ),
    "never used": (
        ModelSpec(build=lambda: chain(middle=Spare), optimizer=decayed),
        dict.fromkeys(("ddp", "zero 1", "zero 2", "tensor", "pipeline"), UNUSED),
    ),
    "hook": (
        ModelSpec(build=build_hooked, optimizer=sgd, tensor_plan={"0": "colwise", "2": "rowwise"}),
        {"zero 3": HOOK, "tensor": HOOK, "pipedream": HOOK},
    ),
    "memory": (
        ModelSpec(build=build_shared, optimizer=sgd),
        dict.fromkeys((*CUT, "pipeline"), SHARED),
    ),
    "LoRA": (ModelSpec(build=lambda: chain(LoRA), optimizer=sgd), {}),
    "scaled weight": (ModelSpec(build=lambda: chain(Scaled), optimizer=sgd), {}),
    "subclass by name": (ModelSpec(build=lambda: chain(Named), optimizer=sgd), {}),
    "weight_norm": (ModelSpec(build=lambda: chain(weight_normed), optimizer=sgd), {}),
    "LoRA in an own plan": (
        ModelSpec(build=lambda: chain(LoRA), optimizer=sgd, tensor_plan={"0": "colwise", "2": "rowwise"}),
        {"tensor": SUBCLASS},
    ),
    "PReLU between slices": (
        ModelSpec(build=lambda: chain(middle=nn.PReLU), optimizer=sgd, tensor_plan=PRELU_PLAN),
        {"tensor": SLICES},
    ),
    "PReLU that is told": (
        ModelSpec(
            build=lambda: chain(middle=nn.PReLU),
            optimizer=sgd,
            tensor_plan={**PRELU_PLAN, "1": "replicated_with_grad_allreduce"},
        ),
        {},
    ),
    "called three times": (
        ModelSpec(build=lambda: Repeated(is_reentrant=True), optimizer=sgd),
        {
            "ddp": "set parallel.static_graph to true",
            **dict.fromkeys(("zero 1", "zero 2"), "got its gradient in several parts"),
            "zero 3": FREED,
        },
    ),
    "called three times, not reentrant": (ModelSpec(build=lambda: Repeated(is_reentrant=False), optimizer=sgd), {}),
    "empty": (
        ModelSpec(build=lambda: WithParameter(torch.zeros(0, 4)), optimizer=sgd),
        {"zero 3": "'extra' has no elements"},
    ),
    "scalar": (
        ModelSpec(build=lambda: WithParameter(torch.tensor(0.5)), optimizer=sgd),
        {"zero 3": "'extra' is a scalar"},
    ),
    "norm of all weights in forward": (
        ModelSpec(build=chain, optimizer=sgd, forward=with_norm, loss=plus_norm),
        {"pipeline": UNEQUAL, "tensor": UNEQUAL_LOSS, "zero 3": MIXED},
    ),
    "weight used outside its module": (
        ModelSpec(build=Outside, optimizer=sgd, tensor_plan={"words": "vocab"}),
        {"tensor": UNEQUAL, "zero 3": MIXED},
    ),
    "derivative": (ModelSpec(build=Energy, optimizer=sgd), {"zero 3": FREED}),
    "Adafactor": (
        ModelSpec(build=chain, optimizer=lambda m: Adafactor(m.parameters(), lr=0.05)),
        dict.fromkeys(CUT, WHOLE),
    ),
    "Muon": (
        ModelSpec(build=chain, optimizer=of_matrices),
        dict.fromkeys(CUT, WHOLE),
    ),
    "subclass of SGD": (
        ModelSpec(build=chain, optimizer=lambda m: SignByNorm(m.parameters(), lr=0.1)),
        dict.fromkeys(CUT, WHOLE),
    ),
    "own": (
        ModelSpec(build=chain, optimizer=lambda m: OwnSgd(m.parameters(), lr=0.1)),
        dict.fromkeys(CUT, WHOLE),
    ),
    "own with a flag": (ModelSpec(build=chain, optimizer=own_with_flag), {}),
    "AdamW of one layer, clipped": (
        ModelSpec(build=chain, optimizer=lambda m: AdamW([{"params": [*m[2].parameters()]}], lr=0.01)),
        {},
    ),
}


def settings(num_ranks, mesh, *, clips=False):
    fields = {"epochs": 9, "max_steps": STEPS, "accumulation_steps": 2, "clip_grad_norm": 0.05 if clips else None}
    return small_config(num_ranks, train=fields, **({} if mesh is None else {"parallel": mesh}))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of one process, by the name of the tie."""
    found = {}

    def of(tie):
        if tie not in found:
            folder = tmp_path_factory.mktemp("one")
            spec = TIES[tie][0]
            finds_unused = DDP(find_unused_parameters=tie == "never used")
            run = make_run(folder, settings(1, finds_unused, clips="clipped" in tie), spec=spec)
            found[tie] = load_weights(train(run))
        return found[tie]

    return of


NOT_IN_A_CHAIN = (
    "called three times",
    "called three times, not reentrant",
    "empty",
    "scalar",
    "derivative",
    "weight used outside its module",
)
OUTSIDE = ("weight used outside its module", "tensor")
GRID = [
    (tie, mesh)
    for tie in TIES
    for mesh in MESHES
    if mesh != "pipedream" or tie in ("hook", "mark", "frozen later", "trained later")
    if mesh not in ("pipeline", "tensor") or tie not in NOT_IN_A_CHAIN or (tie, mesh) == OUTSIDE
]
SAMPLE = {
    ("place", "pipeline"), ("place in set_position", "pipeline"), ("place", "zero 3"), ("memory", "pipeline"),
    ("AdamW of one layer, clipped", "pipeline"), ("called three times", "ddp"), ("called three times", "zero 1"),
    ("called three times", "zero 2"), ("empty", "zero 1"), ("empty", "zero 3"), ("scalar", "zero 3"),
    ("scalar", "zero 2"), ("norm of all weights in forward", "pipeline"), ("norm of all weights in forward", "zero 1"),
    OUTSIDE,
    ("mark", "zero 3"), ("mark", "tensor"), ("hook", "zero 3"), ("hook", "zero 1"), ("hook", "tensor"),
    ("hook", "pipedream"), ("memory", "zero 1"), ("memory", "tensor"), ("LoRA", "tensor"), ("scaled weight", "tensor"),
    ("subclass by name", "tensor"), ("weight_norm", "tensor"), ("PReLU between slices", "tensor"),
    ("PReLU that is told", "tensor"), ("LoRA in an own plan", "tensor"), ("Adafactor", "zero 1"), ("Muon", "tensor"),
    ("subclass of SGD", "zero 2"), ("own", "zero 1"), ("own with a flag", "tensor"),
    ("frozen later", "pipeline"), ("trained later", "zero 2"), ("trained later", "tensor"), ("never used", "pipeline"),
    ("never used", "zero 3"), ("called three times", "zero 3"), ("derivative", "zero 3"), ("never used", "tensor"),
    ("AdamW of one layer, clipped", "ddp"), ("AdamW of one layer, clipped", "zero 1"),
}  # fmt: skip


@pytest.mark.parametrize(("tie", "mesh"), [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.long) for case in GRID
])  # fmt: skip
def test_M_weights_of_one_process_or_an_error(tmp_path, expected, tie, mesh):
    spec, errors = TIES[tie]
    run = make_run(tmp_path, settings(2, MESHES[mesh], clips="clipped" in tie), spec=spec)
    if mesh in errors:
        with pytest.raises(RankFailed, match=errors[mesh]):
            train(run)
        return
    found = load_weights(train(run))
    if mesh == "pipedream":  # late gradients: another algorithm
        assert all(value.isfinite().all() for value in found.values())
        return
    moved = distance(found, expected(tie))
    assert moved < 1e-5, moved


def test_M16_a_model_with_derivatives_is_validated(tmp_path):
    fields = {"epochs": 2, "validation_fraction": 0.2}
    run = make_run(tmp_path, small_config(2, train=fields), spec=ModelSpec(build=Energy))
    saved = train(run)
    assert saved.score is not None


def test_M9_derivatives_of_derivatives_through_an_exchange_of_tensor_ranks_are_an_error(tmp_path):
    spec = ModelSpec(build=Energy, tensor_plan={"layers.0": "colwise", "layers.2": "rowwise"})
    with pytest.raises(RankFailed, match="once_differentiable"):
        train(make_run(tmp_path, small_config(2, parallel=Mesh(tensor=2)), spec=spec))


def test_M2_what_a_layer_of_another_stage_has_is_an_error_that_names_it(tmp_path):
    spec = ModelSpec(build=chain, optimizer=sgd, set_position=lambda model, position: model[6].weight.mul_(1))
    with pytest.raises(RankFailed, match=r"the layer '6' is on another stage of the pipeline, and has no 'weight'"):
        train(make_run(tmp_path, settings(2, MESHES["pipeline"]), spec=spec))


def test_M12_a_schedule_without_hooks_names_a_parameter_that_is_never_used(tmp_path):
    spec = ModelSpec(build=lambda: chain(middle=Spare), optimizer=decayed)
    mesh = Mesh(pipeline=2, stages=(4, 3), schedule="zero_bubble")
    with pytest.raises(RankFailed, match=UNUSED):
        train(make_run(tmp_path, settings(2, mesh), spec=spec))


def build_wide():
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 640), nn.Tanh(), nn.Linear(640, 640), nn.Tanh(), nn.Linear(640, 3)
    )  # fmt: skip


def with_fixed_norm(model, batch):
    out = model(batch["features"])
    return {"out": out, "norm": sum(p.detach().pow(2).sum() for p in model.parameters()).expand(len(out))}


def test_M_a_loss_that_a_stage_knows_in_part_is_named(tmp_path):
    """Its gradients are those of the whole model."""
    spec = ModelSpec(build=chain, optimizer=sgd, forward=with_fixed_norm, loss=plus_norm)
    with pytest.raises(RankFailed, match=UNEQUAL_LOSS):
        train(make_run(tmp_path, settings(2, MESHES["pipeline"]), spec=spec))


@pytest.mark.parametrize(("mib", "is_compared"), [(0, False), (1, False), (2, True)])
def test_M_the_first_step_is_compared_up_to_the_size_that_is_set(tmp_path, mib, is_compared):
    spec = ModelSpec(build=build_wide, forward=with_fixed_norm, loss=plus_norm)  # weights of 1.6 MiB
    run = make_run(tmp_path, settings(2, Mesh(pipeline=2, stages=(4, 3), check_first_step_mib=mib)), spec=spec)
    with pytest.raises(RankFailed, match=UNEQUAL_LOSS) if is_compared else contextlib.nullcontext():
        train(run)
