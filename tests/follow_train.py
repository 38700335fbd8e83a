"""Lists the files of spark_dl that a plain `train` of a DataFrame enters before the first step of its optimizer.

`python -m tests.follow_train` prints them: those of the driver, then those that only the ranks enter. A file is entered
when one of its functions is called, except by an import. The run has two ranks of `ddp`, and the usual settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = "SPARK_DL_TEST_FOLLOWED"
"""Environment variable with the folder where each process writes what it has entered."""


class Follower:
    """Notes the files that this process enters. A rank stops at its first step, and the driver at that of a rank."""

    def __init__(self, folder: str, *, is_rank: bool):
        self._folder, self._is_rank = Path(folder), is_rank
        self._entered: dict[str, None] = {}
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT / 'spark_dl'}{os.sep}"):
            if path not in self._entered and not _is_import(frame) and not any(self._folder.glob("rank-*.json")):
                self._entered[path] = None
        elif self._is_rank and frame.f_code.co_name == "step" and f"{os.sep}optim{os.sep}" in path:
            self.write()

    def write(self) -> None:
        """Ends, and writes the files."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        files = [str(Path(path).relative_to(ROOT)) for path in self._entered]
        name = f"rank-{os.getpid()}.json" if self._is_rank else "driver.json"
        (self._folder / name).write_text(json.dumps(files))


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def files_of_train() -> tuple[list[str], list[str]]:
    """Trains, and returns the files that the driver enters, and those that a rank enters. Needs Spark and two slots."""
    with tempfile.TemporaryDirectory() as folder:
        # Python imports a `sitecustomize` when it starts, also in Spark's workers.
        Path(folder, "sitecustomize.py").write_text(
            "import os, sys\n"
            "if '-c' not in sys.orig_argv:\n"
            "    from tests.follow_train import Follower\n"
            f"    Follower(os.environ[{_FOLDER!r}], is_rank=True)\n"
        )
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, "-c", "from tests.follow_train import train; train()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), _FOLDER: folder},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
        return json.loads(Path(folder, "driver.json").read_text()), max(found, key=len)


def train() -> None:
    """The training that is followed."""
    from torch import nn

    import spark_dl
    from spark_dl.launch.session import build_session

    spark = build_session("follow", master="local[2]")
    df = spark.range(64).selectExpr("CAST(id AS FLOAT) AS x", "id % 2 AS y")
    spec = spark_dl.ModelSpec(
        build=lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2)), loss="CrossEntropyLoss"
    )
    config = spark_dl.Config(
        data=spark_dl.Data(features=["x"], label="y"),
        train=spark_dl.Train(global_batch_size=32, epochs=1),
        launch=spark_dl.Launch(num_ranks=2),
    )
    follower = Follower(os.environ[_FOLDER], is_rank=False)
    spark_dl.train(df, spec, config, run_dir=os.path.join(os.environ[_FOLDER], "run"), progress=False)
    follower.write()


if __name__ == "__main__":
    of_driver, of_rank = files_of_train()
    print("driver:", *of_driver, "rank:", *(name for name in of_rank if name not in of_driver), sep="\n  ")
    print(len({*of_driver, *of_rank}), "files")
