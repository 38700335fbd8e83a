"""Trains on two ranks, on one of which the storage refuses a call of a save.

Run as a program: `refused.py <folder> <cases>`. Each case is a mapping of `name`, `settings` of the section
`checkpoint`, and `fault`: the rank, the step of the checkpoint, the file, the function of C, its errno, and how often.
Prints one JSON line: the result of each rank, or the error of all, by the name of the case.
"""

import ctypes
import dataclasses
import errno
import json
import pathlib
import sys
import typing

import torch.distributed as dist

from spark_dl import ModelSpec
from tests.builders.models import MLP, small_config
from tests.ranks.launcher import RankFailed, kill_ranks, run_ranks
from tests.ranks.runs import make_run, train_rank

EVERY_STEPS = 2


class Fault(typing.NamedTuple):
    """A call that fails."""

    rank: int
    step: int
    file: str
    function: str
    error: str
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Refuse:
    """`ModelSpec.set_position` that lets calls fail from the step of the checkpoint on."""

    run_dir: str
    fault: Fault

    def __call__(self, model, position):
        fault = self.fault
        if dist.get_rank() == fault.rank and position.global_step + 1 == fault.step:
            path = f"{self.run_dir}/checkpoints/step-{fault.step:08d}.gen-0000/{fault.file}"
            number = getattr(errno, fault.error)
            fail = ctypes.CDLL(None).kill_points_fail
            fail(path.encode(), fault.function.encode(), number, ctypes.c_long(fault.times))


def train(folder, name, settings, fault):
    config = small_config(2, train={"every_steps": EVERY_STEPS, "keep": 100, **settings})
    spec = MLP if fault is None else ModelSpec(build=MLP.build, set_position=Refuse(f"{folder}/{name}", Fault(*fault)))
    try:
        return run_ranks(train_rank, 2, make_run(pathlib.Path(folder), config, spec=spec, name=name), wait_s=10)
    except RankFailed as error:
        kill_ranks()
        return str(error)


def main(folder, cases):
    print(json.dumps({case["name"]: train(folder, **case) for case in json.loads(cases)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
