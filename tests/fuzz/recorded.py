"""Trainings that write down which rows they got."""

import functools
import json
import os
import pathlib
from collections import Counter, defaultdict

from spark_dl import ModelSpec
from tests.fuzz.echo import Echo


def recording(folder):
    """A model that writes down the ids of the true rows of each step. # folder: one that does not exist"""
    pathlib.Path(folder).mkdir()
    return ModelSpec(build=Echo, batch_loss=functools.partial(_record, str(folder)), set_position=_set_position)


def _set_position(model, position):
    model.position = position


def _record(folder, model, batch):
    if not model.position.is_validation:
        ids = batch["id"][batch["weight"] > 0].tolist()
        with open(pathlib.Path(folder, os.environ.get("RANK", "0")), "a") as file:
            file.write(json.dumps([model.position.epoch, model.position.step, os.getpid(), ids]) + "\n")
    return model.unused.sum()


def recorded(folder):
    """How often each id was written down by all ranks, by epoch. Ids of samples are tuples."""
    found = defaultdict(Counter)
    for path in pathlib.Path(folder).iterdir():
        # DDP calls the first step of a process twice, to see which parameters take part.
        for line in dict.fromkeys(path.read_text().splitlines()):
            epoch, _, _, ids = json.loads(line)
            found[epoch].update(tuple(i) if isinstance(i, list) else i for i in ids)
    return dict(found)
