"""Random models with what users tie to them, in random meshes: the weights of one process, or an error."""

import functools
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

from spark_dl import DDP, Mesh, ModelSpec, Optimization
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import small_config
from tests.fuzz.errors import note, without_digits
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import distance, make_run, train
from tests.ranks.test_ties import LoRA, Named, OwnSgd, Scaled, SignByNorm, Spare, weight_normed

LINEAR = {"plain": nn.Linear, "LoRA": LoRA, "scaled": Scaled, "named": Named, "weight_norm": weight_normed}
MIDDLE = {"tanh": nn.Tanh, "prelu": nn.PReLU, "norm": functools.partial(nn.LayerNorm, 8), "spare": Spare}
OPTIMIZERS = {
    "sgd": functools.partial(SGD, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(AdamW, lr=0.01, weight_decay=0.3),
    "amsgrad": functools.partial(AdamW, lr=0.01, amsgrad=True),
    "adafactor": functools.partial(Adafactor, lr=0.05),
    "muon": functools.partial(Muon, lr=0.02),
    "by norm": functools.partial(SignByNorm, lr=0.1),
    "own": functools.partial(OwnSgd, lr=0.1),
}
GROUPS = ("one", "by place", "by mark", "by name", "reversed", "one layer")
MESHES = {
    "ddp": DDP(),
    "zero 1": Mesh(zero_stage=1),
    "zero 2": Mesh(zero_stage=2),
    "zero 3": Mesh(zero_stage=3),
    "tensor": Mesh(tensor=2),
    "pipeline": Mesh(pipeline=2, stages=(4, 3)),
    "zero_bubble": Mesh(pipeline=2, stages=(4, 3), schedule="zero_bubble"),
    "small buckets": Mesh(zero_stage=1, bucket_mib=1e-4),
}
_OF_TORCH = "mixed torch.Tensor and DTensor"
"""Torch's own text for weights that are used outside their module."""


@dataclass(frozen=True)
class Case:
    """A model of four layers, its optimizer, and where it trains."""

    linear: str
    middle: str
    optimizer: str
    groups: str
    mesh: str
    has_hook: bool = False
    is_shared: bool = False
    is_tied: bool = False
    frozen: int | None = None
    is_elementwise: bool = False
    has_plan: bool = False
    clip: float | None = None
    accumulation: int = 1


@st.composite
def cases(draw):
    def rarely(value):
        return value if draw(st.integers(0, 4)) == 0 else None

    mesh = draw(st.sampled_from([*MESHES]))
    is_pipeline = MESHES[mesh].strategy == "mesh" and MESHES[mesh].pipeline > 1
    return Case(
        draw(st.sampled_from([*LINEAR])), draw(st.sampled_from([*MIDDLE])), draw(st.sampled_from([*OPTIMIZERS])),
        draw(st.sampled_from(GROUPS)), mesh, bool(rarely(True)), bool(rarely(True)),
        bool(rarely(True)), rarely(draw(st.sampled_from([0, 2, 4, 6]))), draw(st.booleans()), draw(st.booleans()),
        draw(st.sampled_from([None, None, 0.05])), draw(st.integers(2 if is_pipeline else 1, 3)),
    )  # fmt: skip


def build(case):
    model = nn.Sequential(
        nn.Linear(4, 8), MIDDLE[case.middle](), LINEAR[case.linear](8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip
    for layer in (model[0], model[4]):
        layer.weight.is_marked = True
    if case.has_hook:
        model[4].weight.register_hook(lambda gradient: gradient * 0.25)
    if case.is_shared:
        model[4].bias.data = model[0].bias.data
    if case.is_tied:
        model[4].bias = model[0].bias
    if case.frozen is not None:
        model[case.frozen].requires_grad_(False)
    return model


def optimizer_of(case, model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if case.optimizer == "muon":
        named = [(name, p) for name, p in named if p.ndim == 2]
    rate = OPTIMIZERS[case.optimizer].keywords["lr"]
    groups = {
        "one": [named],
        "by place": [[(n, p) for n, p in named if n.startswith(f"{i}.")] for i in range(len(model))],
        "by mark": [[(n, p) for n, p in named if hasattr(p, "is_marked") is marked] for marked in (True, False)],
        "by name": [[(n, p) for n, p in named if n.endswith(end)] for end in ("weight", "bias")],
        "reversed": [named[::-1]],
        "one layer": [[(n, p) for n, p in named if n.startswith("4.")]],
    }[case.groups]
    found = [{"params": [p for _, p in g], "lr": rate * 0.7**i} for i, g in enumerate(groups) if g]
    optimizer = OPTIMIZERS[case.optimizer](found)
    return Optimization(optimizer=optimizer, elementwise=True) if case.is_elementwise else optimizer


def _may_leave_out(mesh):
    if isinstance(mesh, Mesh) and (mesh.zero_stage == 3 or mesh.pipeline > 1):
        return mesh
    return replace(mesh, find_unused_parameters=True)


def check(spark, folder, case):
    folder.mkdir()
    if case.is_elementwise and case.optimizer in ("by norm", "adafactor", "muon"):
        return  # the user says what is not true
    plan = {"0": "colwise", "2": "rowwise"} if case.has_plan else None
    spec = ModelSpec(
        build=functools.partial(build, case), optimizer=functools.partial(optimizer_of, case), tensor_plan=plan
    )
    fields = {"max_steps": 5, "epochs": 9, "accumulation_steps": case.accumulation, "clip_grad_norm": case.clip}
    runs = [(1, MESHES["ddp"]), (2, MESHES[case.mesh])]
    if case.middle == "spare":
        runs = [(ranks, _may_leave_out(mesh)) for ranks, mesh in runs]
    found = []
    for number, (ranks, mesh) in enumerate(runs):
        run = make_run(folder, small_config(ranks, train=fields, parallel=mesh), spec=spec, name=f"run-{number}")
        try:
            found.append(load_weights(train(run)))
        except RankFailed as error:
            text = str(error)
            lines = [line for line in text.splitlines() if line.startswith(("ValueError: ", "RuntimeError: parallel."))]
            if (not lines and _OF_TORCH not in text) or "cannot be computed" in text:
                raise
            note(f"{'mesh' if number else 'one process'}: {without_digits(lines[0] if lines else _OF_TORCH)}")
            return
    moved = distance(found[1], found[0])
    assert moved < 1e-5, f"the weights differ by {moved:.3g}"
    note(f"ties: right in {case.mesh}")
