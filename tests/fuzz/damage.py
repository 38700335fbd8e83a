"""Random damage to the files of a run: what reads them gives what it gave before, or an error."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from dataclasses import dataclass

from hypothesis import strategies as st

import spark_dl
from spark_dl import ModelSpec
from spark_dl.scoring import saved_model
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, build_mlp, small_config
from tests.fuzz.errors import clear_text, note, without_digits

SPEC = ModelSpec(build=build_mlp)
KINDS = ("flip", "cut", "zero", "delete", "append", "empty", "swap", "repeat")
USES = ("predict", "evaluate", "resume", "save_model", "read_shards", "open_dataset", "report")


@dataclass(frozen=True)
class Case:
    """Damage to one file, and what then reads the run."""

    file: float
    """Which file, as a fraction of their number."""
    kind: str
    place: float
    """Where in the file, as a fraction of its size."""
    use: str


def cases():
    """Any kind of damage to any file."""
    fraction = st.floats(0, 1, exclude_max=True)
    return st.builds(Case, fraction, st.sampled_from(KINDS), fraction, st.sampled_from(USES))


@functools.cache
def run_folder():
    """A run of two epochs with its dataset, made once: `data`, `run`."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="spark-dl-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    data = write_dataset(str(folder / "data"), blobs(96), group_rows=16, shard_rows=48)
    spark_dl.train(data, SPEC, config_of(epochs=2), run_dir=str(folder / "run"))
    return folder


def config_of(epochs):
    return small_config(1, train={"epochs": epochs}, keep=1)


def damage(path, kind, place, other):
    found = path.read_bytes()
    at = int(place * len(found))
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
    else:
        new = {
            "flip": found[:at] + bytes([found[at] ^ (1 << int(place * 8e6) % 8)]) + found[at + 1 :] if found else b"",
            "cut": found[:at],
            "zero": found[:at] + bytes(len(found[at : at + 64])) + found[at + 64 :],
            "append": found + found[: 1 + at % 100],
            "empty": b"",
            "repeat": found[:at] + found[max(0, at - 40) :],
        }[kind]
        path.write_bytes(new)


def use(spark, folder, what):
    """What a use of the run gives, to be compared with what it gave before."""
    run, data = str(folder / "run"), str(folder / "data")
    if what == "predict":
        found = spark_dl.predict(data, SPEC, run, keys=["label"], spark=spark).toPandas()
        return sorted((row.label, *map(float, row.prediction)) for row in found.itertuples())
    if what == "evaluate":
        return spark_dl.evaluate(data, SPEC, run)
    if what == "resume":
        result = spark_dl.train(data, SPEC, config_of(epochs=3), run_dir=run, resume=True)
        return [tensor.tolist() for tensor in result.load_model(SPEC).state_dict().values()]
    if what == "save_model":
        spark_dl.save_model(str(folder / "model"), SPEC, run)
        return [tensor.tolist() for tensor in saved_model.load_model(str(folder / "model")).state_dict().values()]
    if what == "read_shards":
        shards = spark_dl.read_shards(data)
        return (str(shards.columns), shards.group_rows.tolist())
    if what == "open_dataset":
        batches = spark_dl.open_dataset(data, batch_size=8, shuffle=False)
        return [{name: cells.tolist() for name, cells in batch.items()} for batch in batches]
    return len(spark_dl.report(run)) > 0


@functools.cache
def before(spark, what):
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "copy")
        shutil.copytree(run_folder(), copy, symlinks=True)
        return use(spark, copy, what)


def check(spark, folder, case):
    expected = before(spark, case.use)
    shutil.copytree(run_folder(), folder, symlinks=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[int(case.file * len(files))]
    damage(path, case.kind, case.place, files[(int(case.file * len(files)) + 1) % len(files)])
    try:
        found = use(spark, folder, case.use)
    except Exception as error:
        text = clear_text(error)
        if text is None and type(error).__name__ not in ("RuntimeError", "FileNotFoundError", "OSError"):
            raise
        words = without_digits(str(error).replace(str(folder), ""))
        note(f"{case.use} of {path.suffix}: {type(error).__name__}: {words}")
        return
    assert found == expected, f"{case.use} after {case.kind} of {path.relative_to(folder)}: another result"
