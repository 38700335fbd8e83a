"""The weights, or the program, of a checkpoint in formats of other programs.

`spark_dl.rundir.foreign` reads weights in these formats, whichever program wrote them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.evaluate import load_model
from spark_dl.rundir import checkpoint, foreign
from spark_dl.rundir.checkpoint import Saved, load_weights
from spark_dl.rundir.generations import create_exclusively
from spark_dl.scoring.program import export_program, program_of
from spark_dl.scoring.saved_model import separate
from spark_dl.scoring.scorer import scorer_of
from spark_dl.spec import ModelSpec
from spark_dl.storage.owner import temporary_prefix

ExportFormat = Literal["safetensors", "hf", "dcp", "export", "onnx"]
EXPORT_FORMATS = get_args(ExportFormat)
_PROGRAMS = ("export", "onnx")


def export(
    checkpoint_url: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: ExportFormat = "safetensors",  # noqa: A002 - the word that Spark and torch use
    spec: ModelSpec | None = None,
    module: str = "",
    max_shard_bytes: int = 5 * 10**9,
    signing_key_file: str | None = None,
) -> str:
    """Writes the weights and buffers of a checkpoint, or of the last one of a run, for other programs.

    Called on the driver. The tensors are whole and have their names in the model, whichever strategy, mesh and number
    of ranks trained it. All of them fit the memory of the driver twice. `train.init_from` reads the first three
    formats, on any strategy and mesh.

    - `"safetensors"`: one file. A weight that modules share is stored under each of its names.
    - `"hf"`: a folder that `from_pretrained` reads, and torch's `HuggingFaceStorageReader`. It has safetensors of at
      most `max_shard_bytes`, with an index if there are several. For a model of transformers, and with `spec`, it is
      what the model's `save_pretrained` writes, with its `config.json`.
    - `"dcp"`: a folder that `torch.distributed.checkpoint.load` reads. The state dict has the key "model". The metadata
      is a pickle, as torch has no other format for it; the formats before have none.
    - `"export"`: one file, a program of `torch.export` from features to predictions.
    - `"onnx"`: the same program in ONNX. Weights of 2 GB and more are in a second file beside it.

    Returns the absolute path or URL.

    Args:
        path: path or URL of the file or the folder. Nothing is overwritten.
        spec: the model's functions. Required by `"export"` and `"onnx"`.
        module: the name of the submodule to write, such as "encoder", with the names of its weights within it; all
            without it. For the formats of weights.
        signing_key_file: file with the key that must have signed the checkpoint.

    Raises:
        ValueError: If something is there already, without a valid checkpoint, for a module without weights, and for a
            model that the format does not take.
        ImportError: If `"onnx"` is not installed (`pip install spark_dl[onnx]`).

    Example:
        >>> spark_dl.export("runs/1", "model.safetensors")
        >>> spark_dl.export("runs/1", "models/hf", format="hf", spec=spec)
    """
    url = check_export(path, format, spec)
    if module and format in _PROGRAMS:
        raise ValueError(f"export: module={module!r} is for weights, and format={format!r} is a program of the model")
    saved = checkpoint.find(checkpoint_url, only_weights=True, key_file=signing_key_file)
    if format == "safetensors":
        about = {"format": "pt", "spark_dl.checkpoint": storage.name(saved.url), "spark_dl.step": str(saved.step)}
        _write_new(url, safetensors.torch.save(separate(_weights_of(saved, module)), metadata=about))
    elif format == "export":
        _write_new(url, export_program(*_model_of(saved, spec, signing_key_file)))
    elif format == "onnx":
        with _published(url, is_folder=False) as folder:
            _write_onnx(folder / storage.name(url), *_model_of(saved, spec, signing_key_file))
    else:
        with _published(url, is_folder=True) as folder:
            if format == "dcp":
                _write_dcp(folder, separate(_weights_of(saved, module)))
            else:
                _write_hf(folder, saved, spec, module, max_shard_bytes)
    return url


def check_export(path: str | os.PathLike[str], format: str, spec: ModelSpec | None) -> str:  # noqa: A002
    """Returns the absolute path or URL to export to. Raises ValueError and ImportError as `export` does for these."""
    if format not in EXPORT_FORMATS:
        raise ValueError(f"export: format: expected one of {', '.join(map(repr, EXPORT_FORMATS))}, found {format!r}")
    if format in _PROGRAMS and spec is None:
        raise ValueError(f"export: format={format!r} needs spec=, whose functions are parts of the program")
    if format == "onnx":
        try:
            import onnxscript  # noqa: F401 - torch imports it after minutes of work
        except ImportError as error:
            raise ImportError(f"export: format='onnx' needs a package: pip install spark_dl[onnx] ({error})") from error
    url = storage.absolute(path)
    if storage.exists(url):
        raise _exists(url)
    return url


def _exists(url: str) -> ValueError:
    return ValueError(f"export: {url} exists, and nothing is overwritten; choose another path, or delete it")


def _write_new(url: str, content: bytes) -> None:
    if not create_exclusively(url, content):
        raise _exists(url)


@contextlib.contextmanager
def _published(url: str, *, is_folder: bool) -> Iterator[Path]:
    """Gives a temporary folder, and writes its files to the storage after the block: all of them, or none.

    Args:
        url: of the folder to be made, or of the last of the files.
    """
    target = url if is_folder else storage.dirname(url)
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as name:
        folder = Path(name)
        yield folder
        # The index of a folder is last, so that no reader takes a part for the whole.
        files = sorted(folder.iterdir(), key=lambda file: file.name in (*foreign.INDEXES, storage.name(url)))
        written: list[str] = []
        try:
            for file in files:
                _write_new(storage.join(target, file.name), file.read_bytes())
                written.append(storage.join(target, file.name))
        except BaseException:
            for there in written:
                storage.delete_file(there)
            if is_folder and storage.is_local(target):
                with contextlib.suppress(OSError):  # it has files of others, or is not there
                    os.rmdir(storage.resolve(target)[1])
            raise


def _weights_of(saved: Saved, module: str) -> Mapping[str, Tensor]:
    weights = load_weights(saved)
    if not module:
        return weights
    prefix = f"{module}."
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        first = ", ".join(sorted({name.partition(".")[0] for name in weights}))
        raise ValueError(f"export: the checkpoint {saved.url} has no weights of a module {module!r}; it has {first}")
    return found


def _model_of(saved: Saved, spec: ModelSpec | None, key_file: str | None) -> tuple[nn.Module, ModelSpec, Config, Any]:
    assert spec is not None
    scorer = scorer_of(spec, saved.url, key_file=key_file)
    return scorer.load(), spec, scorer.config, scorer.columns


def _write_dcp(folder: Path, weights: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist asks for
        save({foreign.MODEL: dict(weights)}, storage_writer=FileSystemWriter(folder), no_dist=True)


def _write_hf(folder: Path, saved: Saved, spec: ModelSpec | None, module: str, most: int) -> None:
    if spec is not None:
        model = load_model(spec, saved.url, sha256=saved.sha256)
        try:
            part = model.get_submodule(module)
        except AttributeError as error:
            raise ValueError(f"export: the model of spec.build has no module {module!r}: {error}") from error
        transformers = sys.modules.get("transformers")  # build has imported it, if the model is one of its own
        if transformers is not None and isinstance(part, transformers.PreTrainedModel):
            part.save_pretrained(folder, max_shard_size=most)
            return
    _write_shards(folder, separate(_weights_of(saved, module)), most)


def _write_shards(folder: Path, weights: Mapping[str, Tensor], most: int) -> None:
    """Writes safetensors, and the index of several, as Hugging Face names them. # most: bytes of a file"""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        safetensors.torch.save_file(shards[0], folder / foreign.HF_SINGLE, metadata={"format": "pt"})
        return
    files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    for file, shard in files.items():
        safetensors.torch.save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(value.nbytes for value in weights.values())},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }
    (folder / foreign.HF_INDEX).write_text(json.dumps(index, indent=2))


def _write_onnx(path: Path, model: nn.Module, spec: ModelSpec, config: Config, columns: Any) -> None:
    program, names, outputs = program_of(model, spec, config, columns)
    convert: Callable[..., Any] = torch.onnx.export
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx = convert(program, (), dynamo=True, verbose=False, input_names=names, output_names=outputs)
            onnx.save(path)
    except Exception as error:  # torch raises many types
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"export: torch {torch.__version__} cannot write the model as ONNX: {type(error).__name__}: {cause}; use "
            "format='export'"
        ) from error
