"""Run folders as runs leave them, with made-up lines and facts."""

import json

import numpy as np

from spark_dl import Config
from spark_dl.rundir import environment, generations

START = 1_700_000_000.0


def times_line(step, data, compute, communication=0.1):
    """A log line of ranks with these times, by the rule that the slowest waits for nobody."""
    busy = np.add(data, compute)
    return {
        "kind": "step", "step": step, "time": float(step), "seconds": float(busy.max() + communication),
        "communication_s": communication,
        "ranks": {"data_s": list(data), "compute_s": list(compute), "wait_s": (busy.max() - busy).tolist()},
    }  # fmt: skip


def step(number, *, ranks=2, slow=None, **values):
    more = 2.0 * np.eye(ranks)[slow] if slow is not None else np.zeros(ranks)
    times = times_line(number, np.zeros(ranks), 1.0 + more)
    return {**times, "time": START + 10 + number, "epoch": 0, "steps": 20, "loss": 1 / number, "lr": 0.1,
            "rows_per_s": 1234.5, "data_s": 0.0, **values}  # fmt: skip


def epoch(number, at, **values):
    return {"kind": "epoch", "epoch": number, "step": at, "steps": 20, "train_loss": 0.5, "metrics": {"loss": 0.25},
            "validation_s": 0.5, "time": START + 10 + at, **values}  # fmt: skip


def saved(at, name):
    return {"kind": "checkpoint", "epoch": 1, "step": at, "steps": 20, "url": f"/runs/1/checkpoints/{name}",
            "seconds": 0.125, "time": START + 10 + at}  # fmt: skip


LINES = [*(step(n, slow=1) for n in range(1, 11)), epoch(0, 10), *(step(n, slow=1) for n in range(11, 21)),
         epoch(1, 20, metrics={"loss": 0.125, "accuracy": 0.875}), saved(20, "step-00000020.gen-0001")]  # fmt: skip
RANKS = [{"host": f"host-{r}", "device": "cpu", "threads": 2, "pid": 10 + r} for r in range(2)]
CONFIG = Config().to_dict()


def make_run(folder, lines=LINES, *, generation=1, driver=(), ranks=RANKS, config=CONFIG, **about):
    """A run folder with these lines and facts. driver: the driver's record, or None; ranks: None without a record."""
    folder.mkdir(exist_ok=True)
    generations.start_generation(str(folder), after=generation - 1)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    common = {
        "format": "spark_dl.environment",
        "started": START,
        "config": config,
        "versions": {"torch": "2.0"},
        **about,
    }
    (folder / environment.FOLDER).mkdir(exist_ok=True)
    if driver is not None:
        record = {**common, "host": "driver-host", "pid": 1, "outcome": "finished", "ended": START + 99, **dict(driver)}
        (folder / f"environment/{generation:06d}-driver.json").write_text(json.dumps(record))
    if ranks is not None:
        (folder / f"environment/{generation:06d}-ranks.json").write_text(json.dumps({**common, "ranks": ranks}))
    return folder


OLD = [{k: v for k, v in each.items() if k not in ("ranks", "communication_s", "validation_s")} for each in LINES]
OLD[-1].pop("seconds")
