"""Random changes of a model and its optimizer between a stop and a resume: what a plain loop trains, or an error."""

import functools
import zlib
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from spark_dl import DDP, Mesh, ModelSpec
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import blobs, small_config
from tests.fuzz.errors import note, without_digits
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import distance, make_run, resume, train

ROWS = 48
"""All in one step, so that a plain loop needs no order of rows."""
LAYERS = {"first": (4, 8), "second": (8, 8), "head": (8, 3)}
OPTIMIZERS = {
    "SGD": functools.partial(SGD, momentum=0.9),
    "AdamW": AdamW,
    "amsgrad": functools.partial(AdamW, amsgrad=True),
    "Adagrad": Adagrad,
    "RMSprop": functools.partial(RMSprop, momentum=0.5),
}
PLACES = {
    "alone": (1, DDP()),
    "ddp": (2, DDP()),
    "zero 1": (2, Mesh(zero_stage=1)),
    "zero 2": (2, Mesh(zero_stage=2)),
    "zero 3": (2, Mesh(zero_stage=3)),
    "one of a mesh": (1, Mesh()),
    "small buckets": (2, Mesh(zero_stage=1, bucket_mib=1e-4)),
}


@dataclass(frozen=True)
class Part:
    """A model, its optimizer, and where it trains, for some steps."""

    steps: int
    layers: tuple[str, ...]
    """In the order in which the class defines them."""
    optimizer: str
    rates: dict[str, float]
    """By the word that the names of parameters have."""
    decay: float
    groups: tuple[str, ...]
    """Words, in the order of the groups; one group without any."""
    frozen: tuple[str, ...]
    place: str


_CHANGES = {
    "layers": st.permutations(list(LAYERS)).map(tuple),
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "rates": st.fixed_dictionaries({name: st.sampled_from([0.01, 0.02]) for name in LAYERS}),
    "decay": st.sampled_from([0.0, 0.1]),
    "groups": st.one_of(st.just(()), st.permutations(list(LAYERS)).map(tuple)),
    "frozen": st.lists(st.sampled_from(["first", "second", "head.bias"]), max_size=2, unique=True).map(tuple),
    "place": st.sampled_from(list(PLACES)),
}


@st.composite
def cases(draw):
    """Two or three parts of a run; each has up to two changes."""
    found = [Part(draw(st.integers(1, 4)), **{name: draw(values) for name, values in _CHANGES.items()})]
    for _ in range(draw(st.integers(1, 2))):
        names = draw(st.lists(st.sampled_from(sorted(_CHANGES)), max_size=2, unique=True))
        changed = {name: draw(_CHANGES[name]) for name in names}
        if "place" in changed:  # the driver refuses another strategy
            strategy = PLACES[found[0].place][1].strategy
            changed["place"] = draw(st.sampled_from([key for key, (_, p) in PLACES.items() if p.strategy == strategy]))
        found.append(replace(found[-1], steps=draw(st.integers(1, 3)), **changed))
    return tuple(found)


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        for name in part.layers:
            layer = nn.Linear(*LAYERS[name])
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.4, generator=generator)
            setattr(self, name, layer)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(part.frozen))

    def forward(self, features):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(features)))))


def optimizer_of(part, model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [[p for name, p in named if name.startswith(word)] for word in part.groups or ("",)]
    rates = [part.rates[word] for word in part.groups] or [part.rates["head"]]
    found = [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True) if group]
    return OPTIMIZERS[part.optimizer](found, lr=0.01, weight_decay=part.decay)


def check(spark, folder, case):
    folder.mkdir()
    done, saved = 0, None
    for part in case:
        done += part.steps
        ranks, place = PLACES[part.place]
        fields = {"global_batch_size": ROWS, "epochs": 100, "max_steps": done}
        config = small_config(ranks, train=fields, parallel=place)
        spec = ModelSpec(build=functools.partial(Model, part), optimizer=functools.partial(optimizer_of, part))
        run = make_run(folder, config, spec=spec, rows=ROWS)
        try:
            saved = train(run) if saved is None else resume(run, saved)
        except RankFailed as error:
            lines = [line for line in str(error).splitlines() if line.startswith("ValueError: ")]
            if not lines:
                raise
            note(f"changes: {without_digits(lines[0])}")
            return
        assert saved.step == done
    moved = distance(load_weights(saved), plain(case))
    assert moved < 1e-5, f"the weights differ by {moved:.3g}"
    note("changes: right")


def plain(case):
    """The weights of one process, whose optimizer of a part takes the state of the one before by name."""
    columns = {name: torch.from_numpy(values) for name, values in blobs(ROWS).items()}
    weights, states, before = None, {}, None
    for part in case:
        model = Model(part)
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = optimizer_of(part, model)
        assert before in (None, part.optimizer), "another class of optimizer was not refused"
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name in states:
                optimizer.state[parameter] = states[name]
        for _ in range(part.steps):
            optimizer.zero_grad()
            F.cross_entropy(model(columns["features"]), columns["label"]).backward()
            optimizer.step()
        weights, before = model.state_dict(), part.optimizer
        states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return weights
