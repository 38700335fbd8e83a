"""`certify`: trains a few hundred rows in ways that should give the same weights, and says which do not, and why.

The checks are metamorphic tests (Chen et al. 1998): the right weights are not known, but two trainings must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spark_dl import driver, storage
from spark_dl.certify.causes import Cause, find_causes
from spark_dl.certify.certificate import Certificate, Check, check_page
from spark_dl.certify.on_rank import OtherPadding, Rounded, Traced, read_trace
from spark_dl.config import Checkpoint, Config, Data, Faults, Track
from spark_dl.config.checks import SettingError, suggestion
from spark_dl.config.strategies import find
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.write.shards import write_shards
from spark_dl.inputs import as_source
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.preflight import num_slots
from spark_dl.launch.session import find_session
from spark_dl.parallel.ddp import DDP
from spark_dl.rundir.checkpoint import load_weights, open_checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import ModelSpec
from spark_dl.storage.owner import temporary_prefix
from spark_dl.training.optimizer_settings import with_length

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("spark_dl")
_BATCH, _STREAMS, _EPOCHS, _CUT_AFTER = 48, 24, 2, 5
"""Rows of a global batch, its streams, which 1 to 4 ranks and 2 micro-batches share evenly; and where a run is cut."""
_LEAST, _FINE, _MOST = 1e-5, 1e-3, 1e-2
"""Limits of a difference: the smallest, the largest that ten times the effect of rounding may be, and the largest."""
_TINY = 1e-12
"""The size of weights that differ in bits alone that it does not see."""
_TRACED_BYTES = 256 << 20
"""Weights of all steps that are kept, to name the first step that differs."""
_BF16 = 0.05
"""Relative difference of the loss that bf16 may make."""

States = Mapping[str, Tensor]


def certify(
    data: DataFrame | str | os.PathLike[str] | ShardSet,
    model: Any,
    config: Config | None = None,
    *,
    rows: int = 5 * _BATCH + 5,
    accept: Sequence[str] = (),
    only: Sequence[str] = (),
    compiled: bool = False,
    page: str | os.PathLike[str] | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    spark: SparkSession | None = None,
) -> Certificate:
    """Checks that a training does not depend on ranks, micro-batches, padding and restarts. Called on the driver.

    A few of the rows are trained on by one rank, and again in other ways: on more ranks, in micro-batches, with other
    rows of weight 0, cut and resumed, by other strategies. The weights must be the same, up to rounding, which is
    measured, too. For what differs, the certificate names the first step and tensor, the cause, and what to change; if
    a setting should help, it is tried.

    Args:
        data: a DataFrame, whose first rows are used, or a dataset.
        model: a `ModelSpec`; a LightningModule, or a function that builds one; or a function of `launch`, which is
            called with the URL of a dataset of the rows, reads it with `open_dataset`, and returns the trained weights
            as tensors, such as a `state_dict`. It must share the same global batch among any number of ranks.
        config: the settings. The batch size, the number of ranks and what is logged are those of the checks.
        rows: how many rows of a DataFrame are used. Steps have 48 rows, so the default has a short last batch.
        accept: causes and names of checks that are no reason to refuse, such as `random`.
        only: names of checks, such as `2 ranks`, if not all of them are run.
        compiled: whether `train.compile` is checked, too, which takes a minute or more.
        page: HTML file to write; the data are written beside it, as JSON.
        work_dir: folder for the runs, which all executors must have access to. By default a temporary folder of the
            driver's host. It is empty again at the end.

    Raises:
        ValueError: For data that cannot be read, a page that is something else, and names of checks that are none.
            An error of a training is a failed check.

    Example:
        >>> certificate = spark_dl.certify(df, spec, config, only=("2 ranks", "cut and resumed"))
        >>> print(certificate)
    """
    start = time.perf_counter()
    config, data = config or Config(), as_source(data)
    if page is not None:
        check_page(page)
    spark = find_session(data, spark)
    has_spec = isinstance(model, ModelSpec) or _is_lightning(model)
    if work_dir is None and not str(spark.conf.get("spark.master", "local")).startswith("local"):
        raise ValueError(
            "work_dir: expected a folder or URL that the executors have access to, found none; the temporary folder of "
            "the driver's host is enough for a local master alone"
        )
    if not has_spec and not callable(model):
        raise ValueError(f"certify: expected a ModelSpec, a LightningModule, or a function of launch, found {model!r}")
    with _folder(work_dir) as folder, _quiet():
        if not has_spec and config.data == Data() and not isinstance(data, (str, ShardSet)):
            config = dataclasses.replace(config, data=Data(features=tuple(data.columns), label=None))
        shards = _sample(data, config, rows, storage.join(folder, "rows"))
        if has_spec:
            spec = model if isinstance(model, ModelSpec) else ModelSpec.from_lightning(model)
            checks: _Checks = _OfSpec(spec, _settings(config, shards), config, shards, folder, spark, progress)
        else:
            checks = _OfFunction(model, shards, folder, spark, progress)
        found = checks.run(only, compiled=compiled)
    accepted = [dataclasses.replace(check, is_accepted=_accepts(accept, check)) for check in found]
    certificate = Certificate(tuple(accepted), shards.rows, checks.steps, time.perf_counter() - start)
    if page is not None:
        certificate.write(page)
    return certificate


def _accepts(accept: Sequence[str], check: Check) -> bool:
    return check.name in accept or (bool(check.causes) and all(cause in accept for cause in check.causes))


def _is_lightning(model: Any) -> bool:
    packages = ("lightning.pytorch", "pytorch_lightning")
    bases = [getattr(sys.modules.get(name), "LightningModule", None) for name in packages]
    of = model if isinstance(model, type) else type(model)
    return any(base is not None and issubclass(of, base) for base in bases)


@contextlib.contextmanager
def _folder(work_dir: Any) -> Iterator[str]:
    """Yields a new folder, which is deleted at the end."""
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
            yield folder
        return
    url = storage.join(storage.absolute(storage.text_of(work_dir)), f"certify-{uuid.uuid4().hex[:8]}")
    try:
        yield url
    finally:
        storage.delete(url)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the trainings log to themselves: the same lines for each of them."""
    level = _log.level
    _log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _log.setLevel(level)


def _sample(data: Any, config: Config, rows: int, url: str) -> ShardSet:
    """Returns the rows that are trained on: the first ones of a DataFrame, or a dataset as it is."""
    if isinstance(data, ShardSet):
        return data
    if isinstance(data, str):
        return read_shards(data)
    return write_shards(data.limit(rows), url, config.data, shards=config.shards, columns=config.stored_columns)


def _settings(config: Config, shards: ShardSet) -> Config:
    """Returns the settings of the training of one rank, in float32, with small steps that ranks can share."""
    parallel = config.parallel if isinstance(config.parallel, DDP) else DDP()
    steps = -(-shards.rows // _BATCH)
    # A run that is cut has the schedule of the whole run.
    whole = with_length(config, min(_EPOCHS * steps, 12 if steps > 8 else _EPOCHS * steps), steps)
    return dataclasses.replace(
        whole,
        parallel=parallel,
        train=dataclasses.replace(
            whole.train, global_batch_size=_BATCH, accumulation_steps=1, epochs=_EPOCHS, precision="float32",
            max_steps=None if steps <= 8 else 12, compile=False, log_every=1, early_stop_metric=None,
            check_replicas_every=0, ema_decay=None, swa_start=None,  # which follows from the weights
        ),
        loader=dataclasses.replace(config.loader, num_streams=_STREAMS, max_tokens=None),
        launch=dataclasses.replace(config.launch, num_ranks=1, min_ranks=None, max_restarts=0, gpus_per_rank="auto"),
        shards=dataclasses.replace(config.shards, storage="shared", store=None),
        checkpoint=Checkpoint(), track=Track(), faults=Faults(),
    )  # fmt: skip


@dataclass
class _Trained:
    """The end of a training, or why there is none."""

    weights: States = field(default_factory=dict)
    trace: list[States] = field(default_factory=list)
    """Weights before each step and after the last one, as far as they were kept."""
    rows: int = 0
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    checkpoint: str = ""
    error: str = ""
    seconds: float = 0.0


class _Checks:
    """Trainings in several ways, and the differences of their weights from the first one."""

    steps = 0

    def __init__(self, spark: Any, progress: bool):
        self._slots = num_slots(spark)
        self._spark, self._progress = spark, progress
        self._base = _Trained()
        self._limit = _LEAST
        self._noisy: frozenset[str] = frozenset()
        """Tensors that rounding moves as much as training does, and which are not compared."""

    def run(self, only: Sequence[str], *, compiled: bool) -> list[Check]:
        """Trains, and returns what was found. only: names of checks; all if there are none."""
        raise NotImplementedError

    def _say(self, name: str) -> None:
        if self._progress:
            sys.stderr.write(f"certify: {name}\n")

    def _lacks(self, ranks: int) -> str:
        """Returns why so many ranks cannot run, or nothing."""
        if self._slots is None or self._slots >= ranks:
            return ""
        return f"needs {ranks} task slots, found {self._slots}"

    def _compared(self, name: str, found: _Trained, *, limit: float | None = None) -> Check:
        """Returns the check of a training, without its causes."""
        limit = self._limit if limit is None else limit
        about = {"seconds": found.seconds, "limit": limit}
        if found.error:
            return Check(name, "failed", why=found.error, **about)  # type: ignore[arg-type]
        expected = {name: tensor for name, tensor in self._base.weights.items() if name not in self._noisy or not limit}
        size = _difference(found.weights, expected, self._start)
        if not limit and np.isfinite(size):  # to the bit, also of integers
            size = 0.0 if all(torch.equal(found.weights[n], t) for n, t in expected.items()) else max(size, _TINY)
        step, tensor = self._first(found, limit) if size > limit else (None, "")
        return Check(name, "same" if size <= limit else "differs", size, step=step, tensor=tensor, **about)  # type: ignore[arg-type]

    @property
    def _start(self) -> States:
        return self._base.trace[0] if self._base.trace else {}

    def _first(self, found: _Trained, limit: float) -> tuple[int | None, str]:
        """Returns the first step after which weights differ, and the first tensor that does."""
        for step, (own, expected) in enumerate(zip(found.trace, self._base.trace, strict=False)):
            for name in expected:
                if (
                    name in own
                    and name not in self._noisy
                    and _difference({name: own[name]}, {name: expected[name]}, self._start) > limit
                ):
                    return step, name
        return None, ""


class _OfSpec(_Checks):
    """The checks of a `ModelSpec`."""

    def __init__(
        self, spec: ModelSpec, config: Config, given: Config, shards: ShardSet, folder: str, spark: Any, progress: bool
    ):
        super().__init__(spark, progress)
        self._spec, self._config, self._given, self._shards, self._folder = spec, config, given, shards, folder
        self._number = 0
        self._causes: list[Cause] | None = None
        self._remedied: dict[str, _Trained] = {}
        """Trainings of one rank with the remedy of a cause, by its key."""

    def run(self, only: Sequence[str], *, compiled: bool) -> list[Check]:
        checks: list[Check] = []
        self._base = self._train(FIRST)
        if _NO_MEAN in self._base.error:  # with this known, the other checks show what comes of it
            checks.append(self._failed(Check("mean over rows", "failed", why=self._base.error)))
            self._config = _changed(self._config, {"train": {"check_batch_loss": False}})
            self._base = self._train(FIRST)
        if self._base.error:
            return [*checks, self._failed(Check(FIRST, "failed", why=self._base.error))]
        self.steps = len(self._base.losses)
        rounded = self._train("rounding", spec=dataclasses.replace(self._spec, build=Rounded(self._spec.build)))
        checks.append(self._of_rounding(rounded))
        planned = self._planned()
        if self._given.train.precision == "bf16-mixed":
            planned["bf16"] = self._of_bf16
        if compiled or self._given.train.compile or "compiled" in only:
            planned["compiled"] = lambda: self._check("compiled", "compiled", limit=_MOST, train={"compile": True})
        _check_names(only, planned)
        return [*checks, *(check() for name, check in planned.items() if not only or name in only)]

    def _planned(self) -> dict[str, Callable[[], Check]]:
        """Returns the checks by name, in the order in which they are run."""

        def ways(kind: str, **settings: Any) -> Callable[[str], Check]:
            return lambda name: self._check(name, kind, **settings)

        micro_batches = {"train": {"accumulation_steps": 2}}
        padded = dataclasses.replace(self._spec, transform=OtherPadding(self._spec.transform))
        settings: Any = find("mesh").settings
        mesh, by_spark = settings(zero_stage=3), find("tree_reduce").settings()
        found = {
            "the same again": ways("again", limit=0.0),
            "2 ranks": ways("ranks", ranks=2),
            "3 ranks": ways("ranks", ranks=3),
            "2 micro-batches": ways("micro-batches", **micro_batches),
            "2 ranks, 2 micro-batches": ways("ranks", ranks=2, **micro_batches),
            "other padding": ways("padding", spec=padded),
            "cut and resumed": ways("resumed", limit=0.0, cut=True),
            "cut on 1 rank, resumed on 2": ways("ranks", ranks=2, cut=True),
            "each row once": lambda name: self._of_rows(),
            "evaluation on 2 ranks": lambda name: self._of_evaluations(),
            "ZeRO 3 on 2 ranks": ways("ranks", ranks=2, parallel=mesh, limit=3 * self._limit),
            "tree_reduce on 2 ranks": ways("ranks", ranks=2, parallel=by_spark, limit=3 * self._limit),
        }
        if (most := self._given.loader.max_tokens) is not None:
            found["max_tokens on 2 ranks"] = ways("micro-batches", ranks=2, loader={"max_tokens": most})
        return {name: functools.partial(check, name) for name, check in found.items()}

    def _failed(self, check: Check) -> Check:
        key = next((key for text, key in _ERRORS if text in check.why), "error")
        return dataclasses.replace(check, causes=(key,))

    def _train(
        self, name: str, *, ranks: int = 1, spec: ModelSpec | None = None, cut: bool = False,
        **changes: Mapping[str, Any],
    ) -> _Trained:  # fmt: skip
        """Trains with these settings of sections. cut: ends after a few steps on one rank, and goes on from there."""
        self._say(name)
        self._number += 1
        start, run_dir = time.perf_counter(), storage.join(self._folder, f"run-{self._number}")
        config = _changed(self._config, {"launch": {"num_ranks": ranks}, **changes})
        spec, traced = spec or self._spec, storage.join(self._folder, f"trace-{self._number}")
        if isinstance(config.parallel, DDP):
            spec = dataclasses.replace(spec, set_position=Traced(spec.set_position, traced, _TRACED_BYTES))
        try:
            if cut:
                first = _changed(config, {"launch": {"num_ranks": 1}, "train": {"max_steps": _CUT_AFTER}})
                driver.train(self._shards, spec, first, run_dir=run_dir, progress=False, spark=self._spark)
            result = driver.train(
                self._shards, spec, config, run_dir=run_dir, resume=cut, progress=False, spark=self._spark
            )
        except (ValueError, RuntimeError) as error:  # a RankError, too
            return _Trained(error=_in_short(error), seconds=time.perf_counter() - start)
        lines = [line for line in read_metrics(run_dir) if line["kind"] == "step"]
        weights = {name: tensor.clone() for name, tensor in load_weights(open_checkpoint(result.checkpoint)).items()}
        trace = read_trace(traced)
        return _Trained(
            weights, [*trace, weights] if trace else [], result.rows, [line["lr"] for line in lines],
            [line["loss"] for line in lines], result.checkpoint, seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _check(
        self, name: str, kind: str, *, ranks: int = 1, limit: float | None = None, **changes: Any
    ) -> Check:  # fmt: skip
        if why := self._lacks(ranks):
            return Check(name, "not run", why=why)
        sections = {key: value for key, value in changes.items() if key not in ("spec", "cut")}
        try:
            _changed(self._config, {"launch": {"num_ranks": ranks}, **sections})
        except SettingError as error:  # settings of the user that this way excludes
            return Check(name, "not run", why=str(error))
        found = self._train(name, ranks=ranks, **changes)
        check = self._compared(name, found, limit=limit)
        if check.outcome == "same":
            return check
        return self._explained(check, kind, found, ranks, changes)

    def _explained(
        self, check: Check, kind: str, found: _Trained, ranks: int, changes: Mapping[str, Any]
    ) -> Check:  # fmt: skip
        """Adds the causes of a difference, and whether a setting helps, which is tried."""
        if check.outcome == "failed":
            return self._failed(check)
        for step, (own, expected) in enumerate(zip(found.rates, self._base.rates, strict=False), 1):
            if own != expected:
                return dataclasses.replace(
                    check, causes=("rates",),
                    why=f"the learning rate of step {step} is {own:g}, and {expected:g} in the training of one rank",
                    change="train.lr_scaling: none, or a schedule that does not depend on the number of ranks",
                )  # fmt: skip
        causes = [cause for cause in self._found_causes() if kind in cause.explains]
        if not causes:
            return dataclasses.replace(check, causes=("unknown",), why=f"no cause was found: {_UNKNOWN[kind]}")
        return dataclasses.replace(
            check, causes=tuple(cause.key for cause in causes), why="; ".join(cause.text for cause in causes),
            change="; ".join(cause.change for cause in causes),
            size_with_change=self._tried(causes[0], check, ranks, changes) if len(causes) == 1 else None,
        )  # fmt: skip

    def _tried(self, cause: Cause, check: Check, ranks: int, changes: Mapping[str, Any]) -> float | None:
        """Trains with the remedy of a cause, on one rank and as in the check. Returns the size of the difference."""
        if not cause.remedy or ("parallel" in changes and cause.remedy[0][0] == "parallel"):
            return None
        remedy: dict[str, Any] = {}
        for section, name, value in cause.remedy:
            remedy.setdefault(section, {})[name] = value
        if cause.key not in self._remedied:
            self._remedied[cause.key] = self._train(f"1 rank, {cause.change}", **remedy)
        train = {**changes.get("train", {}), **remedy.get("train", {})}
        merged = {**changes, **remedy, **({"train": train} if train else {})}
        found = self._train(f"{check.name}, {cause.change}", ranks=ranks, **merged)
        base = self._remedied[cause.key]
        expected = {name: tensor for name, tensor in base.weights.items() if name not in self._noisy}
        return None if found.error or base.error else _difference(found.weights, expected, self._start)

    def _found_causes(self) -> list[Cause]:
        if self._causes is None:
            config = _changed(self._config, {"train": {"validation_fraction": 0.0}})
            loader = build_train_loader(self._shards, self._spec, config, rank=0, world_size=1)
            steps = loader.epoch(0)
            try:
                (batch,) = next(steps).micro_batches
            finally:
                steps.close()
            try:
                self._causes = find_causes(self._spec, self._config, batch)
            except Exception as error:  # the trainings have shown what there is to show
                _log.error("certify: the causes are not known: %s", error)
                self._causes = []
        return self._causes

    def _of_rounding(self, rounded: _Trained) -> Check:
        """Sets the limit of differences by what weights that differ by rounding at the start make of it."""
        if rounded.error:
            return self._failed(Check("rounding", "failed", why=rounded.error))
        sizes = {
            name: _difference({name: rounded.weights[name]}, {name: tensor}, self._start)
            for name, tensor in self._base.weights.items() if name in rounded.weights
        }  # fmt: skip
        # Such as a bias before a BatchNorm: its gradient is 0 up to rounding, of which Adam makes steps of the rate.
        noisy = frozenset(name for name, size in sizes.items() if size > _MOST)
        if len(noisy) < len(sizes):
            self._noisy = noisy
        check = self._compared("rounding", rounded, limit=_MOST)
        assert check.size is not None
        self._limit = max(_LEAST, min(10 * check.size, _FINE), min(check.size, 1.0))
        if check.outcome != "differs":
            listed = ", ".join(map(repr, sorted(noisy)))
            return dataclasses.replace(
                check, why=f"rounding alone moves {listed}, not compared" if noisy else check.why
            )
        return dataclasses.replace(
            check, causes=("rounding",),
            why="weights that differ by rounding at the start do not stay near: this training makes more of rounding "
            "than other checks could find",
            change="a lower train.lr, or fewer steps",
        )  # fmt: skip

    def _of_rows(self) -> Check:
        """Each row of the sample was trained on once in an epoch."""
        name, found = "each row once", self._base.rows
        if self._config.train.max_steps is not None:
            return Check(name, "not run", why="the dataset has more rows than the steps of the checks use")
        held_out = round(self._config.train.validation_fraction * self._shards.rows)
        expected = _EPOCHS * (self._shards.rows - held_out)
        if found == expected:
            return Check(name, "same")
        why = f"{found} rows were trained on in {_EPOCHS} epochs, expected {expected}"
        return Check(name, "differs", causes=("rows",), why=why)

    def _of_evaluations(self) -> Check:
        """The metrics of the same weights do not depend on ranks."""
        name, start, values = "evaluation on 2 ranks", time.perf_counter(), []
        if why := self._lacks(2):
            return Check(name, "not run", why=why)
        self._say(name)
        for ranks in (1, 2):
            config = _changed(self._config, {"launch": {"num_ranks": ranks}})
            try:
                values.append(driver.evaluate(
                    self._shards, self._spec, self._base.checkpoint, config, spark=self._spark, progress=False,
                    run_dir=storage.join(self._folder, f"evaluation-{ranks}"),
                ))  # fmt: skip
            except (ValueError, RuntimeError) as error:
                return Check(name, "failed", why=_in_short(error), causes=("error",))
        one, two = ({name: value for name, value in each.items() if _is_number(value)} for each in values)
        size = max((_relative(one[name], two[name]) for name in one), default=0.0)
        seconds = time.perf_counter() - start
        if size <= _LEAST:
            return Check(name, "same", size, _LEAST, seconds=seconds)
        causes = [cause for cause in self._found_causes() if cause.key == "loss"]
        return Check(
            name, "differs", size, _LEAST, causes=tuple(cause.key for cause in causes) or ("unknown",),
            why="; ".join(cause.text for cause in causes) or f"{values[0]} on 1 rank, {values[1]} on 2",
            change="; ".join(cause.change for cause in causes), seconds=seconds,
        )  # fmt: skip

    def _of_bf16(self) -> Check:
        found = self._train("bf16", train={"precision": "bf16-mixed"})
        if found.error:
            return Check("bf16", "failed", why=found.error, causes=("error",))
        size = abs(found.losses[-1] - self._base.losses[-1]) / max(abs(self._base.losses[-1]), 1e-9)
        is_same = size <= _BF16
        return Check(
            "bf16", "same" if is_same else "differs", size, _BF16, causes=() if is_same else ("bf16",),
            why="" if is_same else f"the last loss is {found.losses[-1]:.4g}; in float32 {self._base.losses[-1]:.4g}",
            change="" if is_same else "train.precision: float32, or a lower train.lr", seconds=found.seconds,
        )  # fmt: skip


FIRST = "1 rank"
_NO_MEAN = "is not a mean over the"
_ERRORS = (
    (_NO_MEAN, "loss"), ("do not depend on the parameters", "unused"),
    ("does not depend on the parameters", "unused"), ("draws random numbers", "transform"),
)  # fmt: skip
"""Texts of errors, and the causes that they name."""


def _check_names(only: Sequence[str], planned: Mapping[str, Any]) -> None:
    """Raises ValueError for names of checks that are none."""
    for name in only:
        if name not in planned:
            raise ValueError(f"only: there is no check {name!r}{suggestion(name, list(planned))}")


_UNKNOWN = {
    "again": "two equal trainings differ, as with numbers that are drawn from the time or the system",
    "ranks": "something depends on the rank, such as files, the environment or time",
    "micro-batches": "something depends on the number of forward passes of a step",
    "padding": "something reads rows of weight 0, or the ends of ragged cells",
    "resumed": "something is not in checkpoints, such as variables outside of the model",
    "compiled": "the compiled model computes something else; look for code that reads the time, files or attributes",
}


class _OfFunction(_Checks):
    """The checks of a function of `launch`."""

    def __init__(self, fn: Any, shards: ShardSet, folder: str, spark: Any, progress: bool):
        super().__init__(spark, progress)
        self._fn, self._shards, self._folder = fn, shards, folder

    def run(self, only: Sequence[str], *, compiled: bool) -> list[Check]:
        self._base = self._launch(FIRST, 1)
        if self._base.error:
            return [Check(FIRST, "failed", why=self._base.error, causes=("error",))]
        planned = {"the same again": 1, "2 ranks": 2, "3 ranks": 3}
        _check_names(only, planned)
        return [self._on_ranks(name, ranks) for name, ranks in planned.items() if not only or name in only]

    def _on_ranks(self, name: str, ranks: int) -> Check:
        if why := self._lacks(ranks):
            return Check(name, "not run", why=why)
        check = self._compared(name, self._launch(name, ranks), limit=0.0 if ranks == 1 else None)
        if check.outcome == "same":
            return check
        why = _UNKNOWN["again"] if ranks == 1 else _OF_FUNCTIONS
        return dataclasses.replace(check, causes=("unknown",), why=check.why or why)

    @property
    def _start(self) -> States:
        return {}

    def _launch(self, name: str, ranks: int) -> _Trained:
        self._say(name)
        start = time.perf_counter()
        try:
            results = driver.launch(self._fn, self._shards.url, num_ranks=ranks, spark=self._spark)
        except (ValueError, RuntimeError) as error:
            return _Trained(error=_in_short(error), seconds=time.perf_counter() - start)
        weights = dict(_tensors_of(results[0]))
        if not weights:
            raise ValueError(
                "certify: expected the trained weights, such as model.state_dict(), from "
                f"{getattr(self._fn, '__name__', self._fn)}, found {type(results[0]).__name__}"
            )
        return _Trained(weights, seconds=time.perf_counter() - start)


_OF_FUNCTIONS = (
    "what the ranks compute together is not what one computes: the loss is not the mean over the global batch "
    "(divide the sums of all ranks by batch_rows, or by all tokens), BatchNorm or dropout depend on the rank, or the "
    "batch size of a rank is not that of the global batch divided by the ranks"
)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns settings with other values in some sections; a section can be replaced as a whole."""
    sections = {}
    for name, values in changes.items():
        section = getattr(config, name)
        sections[name] = dataclasses.replace(section, **values) if isinstance(values, Mapping) else values
    return dataclasses.replace(config, **sections)


def _difference(found: States, expected: States, start: States) -> float:
    """Returns the norm of the difference of weights, divided by that of what training changed, or by their own.

    Infinite if a tensor is missing, has another shape, or is not finite. Integers are not compared.
    """
    if any(name not in found or found[name].shape != tensor.shape for name, tensor in expected.items()):
        return float("inf")
    names = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    of_start = names if start and any(name in start for name in names) else []
    squares = [0.0, 0.0]
    for name in names:
        own, other = found[name].double(), expected[name].double()
        squares[0] += float((own - other).square().sum())
        if of_start:
            squares[1] += float((other - start[name].double()).square().sum()) if name in start else 0.0
        else:
            squares[1] += float(other.square().sum())
    if not all(np.isfinite(squares)):
        return float("inf")
    return float((squares[0] / squares[1]) ** 0.5) if squares[1] else float(squares[0] > 0)


def _relative(value: float, expected: float) -> float:
    """Returns the relative difference of two numbers; infinite if one alone is not finite."""
    if np.isfinite(value) and np.isfinite(expected):
        return abs(value - expected) / max(abs(expected), 1e-9)
    return 0.0 if np.array_equal(value, expected, equal_nan=True) else float("inf")


def _tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dicts and lists, and their arrays and numbers as tensors."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors_of(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _tensors_of(each, f"{name}[{i}]")
    elif isinstance(value, (Tensor, np.ndarray)) or _is_number(value):
        yield name or "result", torch.as_tensor(value).double()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _in_short(error: BaseException) -> str:
    """Returns the message of an error: of a rank, without its traceback."""
    text = str(getattr(error, "message", "") or error).strip()
    if isinstance(error, RankError):
        lines = [line for line in text.splitlines() if line.strip()]
        causes = [line for line in lines if line.startswith(("ValueError: ", "RuntimeError: "))]
        text = (causes or lines[:1] or [text])[-1]
    return text
