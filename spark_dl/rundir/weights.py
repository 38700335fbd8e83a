"""The weights of a checkpoint, whichever strategy and mesh it was saved by."""

from __future__ import annotations

from torch import Tensor

from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import Saved
from spark_dl.rundir.checkpoint_files import MODEL
from spark_dl.rundir.tensor_files import TensorFiles


def load_weights(saved: Saved) -> dict[str, Tensor]:
    """Returns the weights and buffers of a checkpoint by name, whole, on the CPU. Called on any side.

    Raises DamagedError for a damaged file.
    """
    if "tensors" not in saved.manifest:
        weights: dict[str, Tensor] = checkpoint.load(saved, MODEL)["0"]
        return weights
    return TensorFiles(saved.url, saved.manifest, "model").read_whole()
