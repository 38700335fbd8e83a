"""Train PyTorch on the data that your Spark cluster already has."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from spark_dl._version import __version__ as __version__

if TYPE_CHECKING:
    from spark_dl import nn
    from spark_dl.baselines.driver_loop.shuffle_reduce import ShuffleReduce
    from spark_dl.baselines.driver_loop.tree_reduce import TreeReduce
    from spark_dl.baselines.servers.settings import ParameterServer
    from spark_dl.certify.certificate import Certificate, Check
    from spark_dl.certify.certify import certify
    from spark_dl.config import (
        Checkpoint,
        Config,
        Data,
        Faults,
        Launch,
        Loader,
        Parallel,
        Sequences,
        Shards,
        Track,
        Train,
    )
    from spark_dl.config.checks import SettingError
    from spark_dl.config.load import load_config
    from spark_dl.config.strategies import Strategy
    from spark_dl.data.dataset.manifest import read_shards
    from spark_dl.data.dataset.records import ShardSet
    from spark_dl.data.load.local import RankRows
    from spark_dl.data.store.store import clean_store, store_shards
    from spark_dl.data.write.groups import group_rows
    from spark_dl.data.write.shards import write_shards
    from spark_dl.data.write.tokens import pack_rows, tokenize
    from spark_dl.doctor.doctor import diagnose
    from spark_dl.doctor.findings import Diagnosis, Finding
    from spark_dl.driver import TrainResult, evaluate, launch, run_on_dataframe, train
    from spark_dl.gather import gather_rows
    from spark_dl.hooks import Hooks, StepInfo
    from spark_dl.launch.failures.errors import RankError
    from spark_dl.launch.session import build_session
    from spark_dl.ledger import ledger, why
    from spark_dl.open_dataset import open_dataset
    from spark_dl.optimization import CombinedOptimizer, MasterWeights, Optimization
    from spark_dl.parallel.ddp import DDP
    from spark_dl.parallel.hvd import Horovod
    from spark_dl.parallel.local_sgd import LocalSGD
    from spark_dl.parallel.mesh.auto.settings import Auto
    from spark_dl.parallel.mesh.settings import Mesh
    from spark_dl.parallel.single import DPSingleProcess, Single
    from spark_dl.planning.plan import MeshPlans, plan_mesh
    from spark_dl.predict import predict, predict_udf, save_model
    from spark_dl.retention import Removed, clean
    from spark_dl.rundir.own_checkpoints import Checkpoints, LoadedCheckpoint, open_checkpoints
    from spark_dl.scoring.export import export
    from spark_dl.scoring.saved_model import load_model
    from spark_dl.spec import ModelSpec, import_object
    from spark_dl.track.report import report
    from spark_dl.trials.study import TrialResult, TuneResult
    from spark_dl.trials.tune import tune
    from spark_dl.validator import Validator
    from spark_dl.world import World

_MODULES = {
    "Auto": "spark_dl.parallel.mesh.auto.settings",
    "Certificate": "spark_dl.certify.certificate",
    "Check": "spark_dl.certify.certificate",
    "Checkpoint": "spark_dl.config",
    "Checkpoints": "spark_dl.rundir.own_checkpoints",
    "CombinedOptimizer": "spark_dl.optimization",
    "MasterWeights": "spark_dl.optimization",
    "Config": "spark_dl.config",
    "DDP": "spark_dl.parallel.ddp",
    "DPSingleProcess": "spark_dl.parallel.single",
    "Data": "spark_dl.config",
    "Diagnosis": "spark_dl.doctor.findings",
    "Faults": "spark_dl.config",
    "Finding": "spark_dl.doctor.findings",
    "Hooks": "spark_dl.hooks",
    "Horovod": "spark_dl.parallel.hvd",
    "Launch": "spark_dl.config",
    "LoadedCheckpoint": "spark_dl.rundir.own_checkpoints",
    "Loader": "spark_dl.config",
    "LocalSGD": "spark_dl.parallel.local_sgd",
    "Mesh": "spark_dl.parallel.mesh.settings",
    "MeshPlans": "spark_dl.planning.plan",
    "ModelSpec": "spark_dl.spec",
    "Optimization": "spark_dl.optimization",
    "Parallel": "spark_dl.config",
    "ParameterServer": "spark_dl.baselines.servers.settings",
    "RankError": "spark_dl.launch.failures.errors",
    "RankRows": "spark_dl.data.load.local",
    "Sequences": "spark_dl.config",
    "SettingError": "spark_dl.config.checks",
    "Removed": "spark_dl.retention",
    "ShardSet": "spark_dl.data.dataset.records",
    "Shards": "spark_dl.config",
    "ShuffleReduce": "spark_dl.baselines.driver_loop.shuffle_reduce",
    "Single": "spark_dl.parallel.single",
    "StepInfo": "spark_dl.hooks",
    "Strategy": "spark_dl.config.strategies",
    "Track": "spark_dl.config",
    "Train": "spark_dl.config",
    "TrainResult": "spark_dl.driver",
    "TreeReduce": "spark_dl.baselines.driver_loop.tree_reduce",
    "TrialResult": "spark_dl.trials.study",
    "TuneResult": "spark_dl.trials.study",
    "Validator": "spark_dl.validator",
    "World": "spark_dl.world",
    "build_session": "spark_dl.launch.session",
    "certify": "spark_dl.certify.certify",
    "clean": "spark_dl.retention",
    "clean_store": "spark_dl.data.store.store",
    "diagnose": "spark_dl.doctor.doctor",
    "evaluate": "spark_dl.driver",
    "export": "spark_dl.scoring.export",
    "gather_rows": "spark_dl.gather",
    "group_rows": "spark_dl.data.write.groups",
    "import_object": "spark_dl.spec",
    "launch": "spark_dl.driver",
    "ledger": "spark_dl.ledger",
    "load_config": "spark_dl.config.load",
    "load_model": "spark_dl.scoring.saved_model",
    "nn": "spark_dl.nn",
    "open_checkpoints": "spark_dl.rundir.own_checkpoints",
    "open_dataset": "spark_dl.open_dataset",
    "pack_rows": "spark_dl.data.write.tokens",
    "plan_mesh": "spark_dl.planning.plan",
    "predict": "spark_dl.predict",
    "predict_udf": "spark_dl.predict",
    "read_shards": "spark_dl.data.dataset.manifest",
    "report": "spark_dl.track.report",
    "run_on_dataframe": "spark_dl.driver",
    "save_model": "spark_dl.predict",
    "store_shards": "spark_dl.data.store.store",
    "train": "spark_dl.driver",
    "tokenize": "spark_dl.data.write.tokens",
    "tune": "spark_dl.trials.tune",
    "why": "spark_dl.ledger",
    "write_shards": "spark_dl.data.write.shards",
}
"""The module of each public name. It is loaded when the name is used, so that a task imports what it runs alone."""

__all__ = [
    "DDP",
    "Auto",
    "Certificate",
    "Check",
    "Checkpoint",
    "Checkpoints",
    "CombinedOptimizer",
    "Config",
    "DPSingleProcess",
    "Data",
    "Diagnosis",
    "Faults",
    "Finding",
    "Hooks",
    "Horovod",
    "Launch",
    "LoadedCheckpoint",
    "Loader",
    "LocalSGD",
    "MasterWeights",
    "Mesh",
    "MeshPlans",
    "ModelSpec",
    "Optimization",
    "Parallel",
    "ParameterServer",
    "RankError",
    "RankRows",
    "Removed",
    "Sequences",
    "SettingError",
    "ShardSet",
    "Shards",
    "ShuffleReduce",
    "Single",
    "StepInfo",
    "Strategy",
    "Track",
    "Train",
    "TrainResult",
    "TreeReduce",
    "TrialResult",
    "TuneResult",
    "Validator",
    "World",
    "build_session",
    "certify",
    "clean",
    "clean_store",
    "diagnose",
    "evaluate",
    "export",
    "gather_rows",
    "group_rows",
    "import_object",
    "launch",
    "ledger",
    "load_config",
    "load_model",
    "nn",
    "open_checkpoints",
    "open_dataset",
    "pack_rows",
    "plan_mesh",
    "predict",
    "predict_udf",
    "read_shards",
    "report",
    "run_on_dataframe",
    "save_model",
    "store_shards",
    "tokenize",
    "train",
    "tune",
    "why",
    "write_shards",
]


class _Package(types.ModuleType):
    """The package, whose public names come before its modules: `spark_dl.launch` is the function.

    Python makes each module that is imported an attribute of its package, also one with the name of a function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, types.ModuleType) and name in _MODULES and name != "nn"):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES[name])
        value = module if name == "nn" else getattr(module, name)
        super().__setattr__(name, value)
        return value

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)  # by name, as cloudpickle has modules of no class of their own

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *_MODULES})


sys.modules[__name__].__class__ = _Package
