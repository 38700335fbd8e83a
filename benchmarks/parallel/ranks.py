"""One rank of the measurements: a process with the environment of torchrun.

python -m benchmarks.parallel.ranks held '<arguments as JSON>' result.json
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.parallel import activations, held, plans, sent, stages, vgg16
from benchmarks.parallel.training import TIMEOUT_S
from spark_dl.config import Launch
from spark_dl.launch.rank.rendezvous import join

SECTIONS: Mapping[str, Callable[..., Any]] = {
    "held": held.measure,
    "activations": activations.measure,
    "sent": sent.measure,
    "bubbles": stages.measure_bubbles,
    "pipedream": stages.measure_pipedream,
    "plans": plans.measure,
    "vgg16": vgg16.measure,
}


def _main(section: str, arguments: str, path: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of torch's own names, for its next versions
    launch = Launch(device="cpu", threads=1, collective_timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)
    with join(launch) as world:
        found = SECTIONS[section](world, **json.loads(arguments))
        if world.rank == 0:
            Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
