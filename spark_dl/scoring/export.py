"""The weights of a checkpoint as one safetensors file, for other programs."""

from __future__ import annotations

import os

import safetensors.torch

from spark_dl import storage
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.generations import create_exclusively
from spark_dl.scoring.saved_model import separate


def export(
    checkpoint_url: str | os.PathLike[str], path: str | os.PathLike[str], *, signing_key_file: str | None = None
) -> str:
    """Writes the weights and buffers of a checkpoint, or of the last one of a run, to one safetensors file.

    Called on the driver. The tensors are whole and have their names in the model, whichever strategy, mesh and number
    of ranks trained it. A weight that modules share is stored under each of its names. All of them fit the memory of
    the driver twice.

    Returns the absolute path or URL. Raises ValueError if something is there already, and without a valid checkpoint.

    Args:
        path: path or URL of the file. Nothing is overwritten.
        signing_key_file: file with the key that must have signed the checkpoint.

    Example:
        >>> spark_dl.export("runs/1", "model.safetensors")
    """
    url = check_export(path)
    saved = checkpoint.find(checkpoint_url, only_weights=True, key_file=signing_key_file)
    about = {"format": "pt", "spark_dl.checkpoint": storage.name(saved.url), "spark_dl.step": str(saved.step)}
    content = safetensors.torch.save(separate(load_weights(saved)), metadata=about)
    if not create_exclusively(url, content):
        raise _exists(url)
    return url


def check_export(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path or URL of a file to export to. Raises ValueError if something is there already."""
    url = storage.absolute(path)
    if storage.exists(url):
        raise _exists(url)
    return url


def _exists(url: str) -> ValueError:
    return ValueError(f"export: {url} exists, and nothing is overwritten; choose another path, or delete it")
