"""Settings of the strategy `mesh`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.torch_version import TorchVersion

from spark_dl.config.checks import SettingError, check_bool, check_choices, check_number
from spark_dl.config.conflicts import ELEMENTWISE, Conflict, without_average
from spark_dl.config.fields import may_change, named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.parallel.mesh.dims import Dims, mesh_of

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

OLDEST_TORCH = "2.13"
Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream"]
SEVERAL_STAGES = ("interleaved", "zero_bubble", "zbv")
"""Schedules with several stages on a rank."""
SPLIT = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""


def _mesh(config: Config) -> Mesh:
    assert isinstance(config.parallel, Mesh)
    return config.parallel


def _cuts(config: Config) -> bool:
    mesh = _mesh(config)
    return mesh.zero_stage > 0 or mesh.model > 1 or mesh.experts > 1 or mesh.context > 1


def _pipes(config: Config, *schedules: str) -> bool:
    mesh = _mesh(config)
    return mesh.pipeline > 1 and mesh.schedule in schedules


def _rounds(config: Config) -> int:
    return max(1, config.train.accumulation_steps // _mesh(config).pipeline)


EXCLUDES = (
    Conflict("train.optimizer", lambda c: _cuts(c) and not {*c.train.optimizers} <= {*ELEMENTWISE},
             f"expected one of {', '.join(ELEMENTWISE)} with parallel.strategy='mesh', whose ranks have parts of the "
             "weights, found {c.train.optimizers}"),
    Conflict("train.param_groups", lambda c: bool(c.train.param_groups) and _mesh(c).pipeline > 1,
             "expected none with parallel.pipeline above 1, whose stages have different parameters; use "
             "spec.optimizer, which gets those of a stage"),
    Conflict("train.precision", lambda c: _cuts(c) and c.train.precision == "fp16-mixed",
             "expected float32 or bf16-mixed with parallel.strategy='mesh', where ranks would use different loss "
             "scales, found fp16-mixed"),
    Conflict("train.compile",
             lambda c: c.train.compile and (_mesh(c).tensor > 1 or _mesh(c).experts > 1 or _pipes(
                 c, "zero_bubble", "zbv", "pipedream")),
             "expected false with tensor and expert ranks, whose layers exchange rows in the forward pass, and with "
             "the schedules zero_bubble, zbv and pipedream, which divide the backward pass, found true"),
    *without_average(lambda c: _pipes(c, "pipedream"), "expected null with parallel.schedule='pipedream', whose stages "
                     "have weights of different steps"),
    Conflict("checkpoint.weights", lambda c: c.checkpoint.weights == "trainable",
             "expected 'all' with parallel.strategy='mesh', whose ranks write their parts of the weights; use ddp"),
    Conflict("train.random_by",
             lambda c: c.train.random_by == "row" and (_mesh(c).pipeline > 1 or _mesh(c).tensor > 1),
             "expected 'rank' with parallel.pipeline or parallel.tensor above 1, whose ranks have parts of the "
             "activations, found 'row'"),
    Conflict("parallel.context",
             lambda c: _mesh(c).context > 1 and (_mesh(c).model > 1 or _mesh(c).experts > 1 or c.train.compile
                                                 or c.train.random_by == "row" or c.loader.ragged == "offsets"),
             "expected 1 with a pipeline, tensor or expert ranks, train.compile, train.random_by 'row' and "
             "loader.ragged 'offsets', found {c.parallel.context}"),
    Conflict("shards.storage", lambda c: _mesh(c).context > 1 and c.shards.storage == "local",
             "expected 'shared' with parallel.context above 1, whose ranks read the same rows, found 'local'"),
    Conflict("train.channels_last", lambda c: _cuts(c) and c.train.channels_last,
             "not supported with parallel.strategy='mesh', whose ranks have flat parts of the weights; set it to "
             "false, or use ddp"),
    Conflict("train.accumulation_steps", lambda c: _pipes(c, "1f1b") and c.train.accumulation_steps < _mesh(c).pipeline,
             "the number of micro-batches: expected at least {c.parallel.pipeline}, the number of stages, with "
             "parallel.schedule='1f1b', found {c.train.accumulation_steps}; raise it, or use 'gpipe'"),
    Conflict("train.accumulation_steps",
             lambda c: _pipes(c, "interleaved", "zero_bubble") and bool(c.train.accumulation_steps % _rounds(c)),
             "the number of micro-batches: expected a multiple of the number of rounds with "
             "parallel.schedule={c.parallel.schedule!r}, found {c.train.accumulation_steps}; a multiple of "
             "{c.parallel.pipeline}, the number of ranks of a pipeline, always fits"),
    Conflict("train.clip_grad_norm", lambda c: _pipes(c, "pipedream") and c.train.clip_grad_norm is not None,
             "expected null with parallel.schedule='pipedream', whose stages apply gradients of different "
             "mini-batches, so that there is no norm over the model, found {c.train.clip_grad_norm}; use '1f1b'"),
    Conflict("train.on_nonfinite", lambda c: _pipes(c, "pipedream") and c.train.on_nonfinite != "raise",
             "expected 'raise' with parallel.schedule='pipedream', whose stages apply gradients of different "
             "mini-batches, so that no update can be left out alone, found {c.train.on_nonfinite!r}; use '1f1b'"),
    Conflict("shards.storage", lambda c: _mesh(c).model > 1 and c.shards.storage == "local",
             "expected 'shared' with parallel.pipeline or parallel.tensor above 1, found 'local', which keeps the rows "
             "of a rank on its host alone: all ranks of a copy of the model read the same rows"),
    Conflict("parallel.zero_stage", lambda c: _mesh(c).experts > 1 and _mesh(c).zero_stage == 3,
             "expected 0, 1 or 2 with parallel.experts above 1, as experts are not gathered for each layer, found 3"),
    Conflict("parallel.find_unused_parameters",
             lambda c: _mesh(c).find_unused_parameters and _mesh(c).zero_stage == 3,
             "expected false with parallel.zero_stage 3, whose ranks gather the weights of a layer together, so that "
             "all of them must call the same layers; use zero_stage 2, or call all layers"),
    Conflict("parallel.find_unused_parameters",
             lambda c: _mesh(c).find_unused_parameters and _mesh(c).pipeline > 1,
             "expected false with parallel.pipeline above 1, whose stages wait for the gradients of all their layers"),
    Conflict("parallel.experts", lambda c: _mesh(c).experts > 1 and _pipes(c, *SPLIT),
             "expected 1 with parallel.schedule={c.parallel.schedule!r}, which computes the gradients of weights apart "
             "from those of tokens, found {c.parallel.experts}; use 1f1b"),
    Conflict("loader.ragged", lambda c: _mesh(c).pipeline > 1 and c.loader.ragged == "offsets",
             "expected 'pad' with parallel.pipeline above 1, where stages exchange tensors with one entry per row, "
             "found 'offsets'"),
)  # fmt: skip


def check_version(found: str) -> None:
    """Raises ValueError for a version of torch that is older than those on which the mesh was tested."""
    if TorchVersion(found) < OLDEST_TORCH:
        raise SettingError(
            "parallel.strategy",
            f"'mesh' needs torch {OLDEST_TORCH} or newer, on which it was tested, found {found}; "
            "install it on the driver and on executors, or use 'ddp'",
        )


@named_settings
@dataclass(frozen=True, kw_only=True)
class Mesh(Parallel):
    """Models larger than one device: pipeline stages, slices of layers, and shards of weights and optimizer states.

    `launch.num_ranks` / (`pipeline` * `tensor`) ranks train on different rows, the data ranks.

    Example:
        >>> launch, train = spark_dl.Launch(num_ranks=4), spark_dl.Train(accumulation_steps=4)
        >>> spark_dl.Config(launch=launch, train=train, parallel=spark_dl.Mesh(pipeline=2, zero_stage=1))
    """

    strategy: ClassVar[str] = "mesh"
    cuts_model: ClassVar[bool] = True
    excludes: ClassVar[tuple[Conflict, ...]] = EXCLUDES

    pipeline: int = may_change(1)
    """Number of ranks that have different layers."""
    schedule: Schedule = may_change("1f1b")
    """Order in which a pipeline computes the micro-batches of a step, which are `train.accumulation_steps`: one after
    another (`naive`), all forward passes first (`gpipe`), a forward and a backward pass in turn (`1f1b`), several
    stages on each rank (`interleaved`), and also the gradients of weights apart (`zero_bubble`, `zbv`). `pipedream`
    applies gradients that are late, without waiting."""
    stages: tuple[int, ...] | None = may_change(None)
    """Number of layers of each stage of a pipeline. Null: the stages take near-equal times, as the driver measures."""
    stages_per_rank: int = may_change(1)
    """Number of stages of each rank of a pipeline, with `interleaved`, `zero_bubble` and `zbv`."""
    vertical_sync: bool = may_change(False)
    """With `pipedream`: all stages compute a mini-batch with weights of the same age."""
    tensor: int = may_change(1)
    """Number of ranks that have slices of the same layers. They exchange activations in each layer, so they should be
    on one host."""
    sequence: bool = may_change(False)
    """With `tensor`: activations between the layers that are cut are slices of the sequence axis, so that norms and
    dropout are computed once."""
    context: int = may_change(1)
    """Number of ranks that have slices of the same rows, each with a part of the positions, for rows that are too long
    for one rank. They exchange keys and values in each attention (`torch.nn.functional.scaled_dot_product_attention`,
    causal or without a mask), and train with `zero_stage` as data ranks do. See
    [long rows](model-parallel.md#long-rows) for what the model must do."""
    experts: int = may_change(1)
    """Number of ranks that have different experts of `spark_dl.nn.MoE` layers. They are data ranks, too, and exchange
    tokens in each of these layers."""
    zero_stage: Literal[0, 1, 2, 3] = may_change(0)
    """What each data rank has only a shard of (ZeRO, Rajbhandari et al. 2020): 1: the optimizer's state; 2: also the
    gradients; 3: also the weights."""
    replicas: int = may_change(1)
    """With `zero_stage` above 0: number of copies of all shards. With one copy per host, shards are exchanged within
    hosts (hybrid sharding)."""
    bucket_mib: float = may_change(25.0)
    """Size of one exchange of gradients, in MiB."""
    find_unused_parameters: bool = may_change(False)
    """For models with parameters that some steps do not use. A parameter that no rank uses in a step stays as it is,
    with its state. The ranks exchange a flag for each parameter in each step. Not with `zero_stage: 3` or
    `pipeline`."""

    check_first_step_mib: int = may_change(256)
    """Up to this size of a model's weights, in MiB, the gradients and the loss of the first step are compared with the
    whole model's, without dropout, so that nothing the user has tied to his model is lost unnoticed. Each rank builds
    the whole model for it, and holds its gradients and two copies in its memory; where a rank has not enough for
    them, nothing is compared, and the log says so. 0: they are not compared, as with `ModelSpec.set_position` and
    with `pipedream`."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "context", "experts", "replicas", "stages_per_rank"):
            check_number(self, name, 1, whole=True)
        check_number(self, "bucket_mib", 0, above=True)
        check_number(self, "check_first_step_mib", 0, whole=True)
        check_choices(self)
        check_bool(self, "sequence", "vertical_sync", "find_unused_parameters")
        self._check_pipeline()
        if self.replicas > 1 and not self.zero_stage:
            raise SettingError(
                "parallel.replicas",
                f"only supported with parallel.zero_stage above 0, found {self.replicas}; without "
                "shards every data rank has a copy",
            )

    def _check_pipeline(self) -> None:
        if self.stages_per_rank > 1 and self.schedule not in SEVERAL_STAGES:
            raise SettingError(
                "parallel.stages_per_rank",
                f"expected 1 with parallel.schedule={self.schedule!r}, found "
                f"{self.stages_per_rank}; only {', '.join(SEVERAL_STAGES)} have several stages on a rank",
            )
        if self.schedule == "zbv" and self.stages_per_rank != 2:
            raise SettingError(
                "parallel.stages_per_rank", f"expected 2 with parallel.schedule='zbv', found {self.stages_per_rank}"
            )
        if self.vertical_sync and self.schedule != "pipedream":
            raise SettingError(
                "parallel.vertical_sync", f"only supported with parallel.schedule='pipedream', found {self.schedule!r}"
            )
        if self.sequence and self.tensor == 1:
            raise SettingError("parallel.sequence", "only supported with parallel.tensor above 1, found 1")
        if self.stages is not None:
            self._check_stages()
        if self.pipeline == 1:
            return
        if self.zero_stage == 2 or (self.zero_stage and self.schedule == "pipedream"):
            raise SettingError(
                "parallel.zero_stage",
                f"not supported with parallel.pipeline={self.pipeline} and parallel.schedule="
                f"{self.schedule!r}, found {self.zero_stage}: micro-batches in flight need whole gradients; use "
                f"{'0' if self.schedule == 'pipedream' else '0, 1 or 3'}",
            )
        if self.zero_stage == 3 and self.schedule in SPLIT:
            raise SettingError(
                "parallel.zero_stage",
                f"expected 0 or 1 with parallel.schedule={self.schedule!r}, which computes the "
                "gradients of weights apart, found 3; use 1f1b or gpipe",
            )

    def _check_stages(self) -> None:
        stages, expected = self.stages, self.pipeline * self.stages_per_rank
        is_list = isinstance(stages, list | tuple) and all(type(size) is int and size > 0 for size in stages)
        if not is_list or len(stages or ()) != expected:
            raise SettingError(
                "parallel.stages",
                f"expected {expected} integers > 0, one for each stage of parallel.pipeline="
                f"{self.pipeline} ranks, found {stages!r}",
            )
        object.__setattr__(self, "stages", tuple(stages or ()))  # YAML has lists

    @property
    def model(self) -> int:
        """Number of ranks that together have one copy of the model."""
        return self.pipeline * self.tensor

    @property
    def takes_bf16(self) -> bool:
        return self.zero_stage == 3 and self.model == 1 and self.experts == 1

    def dims(self, num_ranks: int) -> Dims:
        """Returns the mesh of a number of ranks. Raises ValueError if the sizes do not divide it."""
        return mesh_of(
            num_ranks, pipeline=self.pipeline, tensor=self.tensor, experts=self.experts, replicas=self.replicas,
            shard=self.zero_stage > 0, context=self.context,
        )  # fmt: skip

    def data_size(self, num_ranks: int) -> int:
        return self.dims(num_ranks).parts

    def place(self, world: World) -> World:
        dims = self.dims(world.world_size)
        at = dims.place(world.rank)
        # Ranks of a tensor group must draw the same random numbers, as they compute the same layers.
        seed_part = at.data * dims.pipeline + at.pipeline
        return replace(world, part=at.data // dims.context, num_parts=dims.parts, seed_part=seed_part)


def check_torch(spark: Any, config: Config) -> None:
    """Raises ValueError for a version of torch without what a mesh needs. Called on the driver."""
    check_version(torch.__version__)
