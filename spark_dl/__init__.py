"""Train PyTorch on the data that your Spark cluster already has."""

from spark_dl import nn
from spark_dl._version import __version__ as __version__
from spark_dl.baselines.driver_loop.shuffle_reduce import ShuffleReduce
from spark_dl.baselines.driver_loop.tree_reduce import TreeReduce
from spark_dl.baselines.servers.settings import ParameterServer
from spark_dl.config import Checkpoint, Config, Data, Faults, Launch, Loader, Parallel, Sequences, Shards, Track, Train
from spark_dl.config.load import load_config
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.local import RankRows
from spark_dl.data.store.store import clean_store, store_shards
from spark_dl.data.write.shards import write_shards
from spark_dl.doctor.doctor import diagnose
from spark_dl.doctor.findings import Diagnosis, Finding
from spark_dl.driver import TrainResult, evaluate, launch, run_on_dataframe, train
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.session import build_session
from spark_dl.open_dataset import open_dataset
from spark_dl.optimization import Optimization
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.hvd import Horovod
from spark_dl.parallel.local_sgd import LocalSGD
from spark_dl.parallel.mesh.auto.settings import Auto
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.single import DPSingleProcess, Single
from spark_dl.planning.plan import MeshPlans, plan_mesh
from spark_dl.predict import predict, predict_udf, save_model
from spark_dl.rundir.own_checkpoints import Checkpoints, LoadedCheckpoint, open_checkpoints
from spark_dl.scoring.export import export
from spark_dl.scoring.saved_model import load_model
from spark_dl.spec import ModelSpec, import_object
from spark_dl.strategies import Strategy
from spark_dl.track.report import report
from spark_dl.trials.results import TrialResult, TuneResult
from spark_dl.trials.tune import tune
from spark_dl.world import World

__all__ = [
    "DDP",
    "Auto",
    "Checkpoint",
    "Checkpoints",
    "Config",
    "DPSingleProcess",
    "Data",
    "Diagnosis",
    "Faults",
    "Finding",
    "Horovod",
    "Launch",
    "LoadedCheckpoint",
    "Loader",
    "LocalSGD",
    "Mesh",
    "MeshPlans",
    "ModelSpec",
    "Optimization",
    "Parallel",
    "ParameterServer",
    "RankError",
    "RankRows",
    "Sequences",
    "ShardSet",
    "Shards",
    "ShuffleReduce",
    "Single",
    "Strategy",
    "Track",
    "Train",
    "TrainResult",
    "TreeReduce",
    "TrialResult",
    "TuneResult",
    "World",
    "build_session",
    "clean_store",
    "diagnose",
    "evaluate",
    "export",
    "import_object",
    "launch",
    "load_config",
    "load_model",
    "nn",
    "open_checkpoints",
    "open_dataset",
    "plan_mesh",
    "predict",
    "predict_udf",
    "read_shards",
    "report",
    "run_on_dataframe",
    "save_model",
    "store_shards",
    "train",
    "tune",
    "write_shards",
]
