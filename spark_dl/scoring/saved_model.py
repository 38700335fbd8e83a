"""Saved models: weights as safetensors, and everything else as JSON. Read without Spark and without unpickling.

A folder has `model.json` and `model.safetensors`. The functions of the model are stored by their importable names, so
their modules must be installed where the model is loaded. With `format="export"` the folder has `model.pt2`, a program
of `torch.export`, instead of weights and names. It needs no module but torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import safetensors.torch
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.config import Config, Data, Loader
from spark_dl.data.columns.schema import Column
from spark_dl.parallel.modules import plain_name
from spark_dl.rundir.checkpoint import load_into
from spark_dl.scoring import names
from spark_dl.scoring.program import export_program, input_names, load_program
from spark_dl.spec import Batch, ModelSpec

Format = Literal["weights", "export"]
FORMATS = get_args(Format)
DESCRIPTION, WEIGHTS, PROGRAM = "model.json", "model.safetensors", "model.pt2"
_FILE = re.compile(r"model(-[0-9a-f]{16})?\.(safetensors|pt2)", re.ASCII)
"""The names of the content. A model that replaces another one has a part of its checksum in the name."""
STAGE = "model"
"""Folder of the saved model in a saved stage of Spark ML."""
_FORMAT, _VERSION = "spark_dl.model", 1
_FUNCTIONS = ("build", "forward", "predict", "transform")


@dataclass(frozen=True)
class SavedModel:
    """The description of a saved model."""

    url: str
    spec: ModelSpec
    config: Config
    """The settings of the features and of their batches; all others are defaults."""
    columns: tuple[Column, ...]
    """The features, as the model was trained on them."""
    sha256: str
    """Checksum of the description, which has that of the weights."""


@dataclass(frozen=True)
class PackedModel:
    """The content of a folder of a saved model."""

    described: dict[str, Any]
    content: bytes

    def write(self, url: str | os.PathLike[str], *, overwrite: bool = False) -> str:
        """Writes the folder. Called on the driver. Returns the checksum of the description, `SavedModel.sha256`.

        Args:
            overwrite: whether a model that is there is replaced. Readers find the whole model of before or the whole
                new one: the description is written last, and names a file that the model of before does not have.

        Raises:
            ValueError: For a folder that is in use, or, with `overwrite`, that has no saved model.
        """
        url = storage.absolute(url)
        described, before = self.described, None
        if storage.exists(url) and storage.list_names(url):
            if not overwrite:
                raise ValueError(
                    f"cannot save a model to {url}: the folder is not empty; choose another one, delete it, or replace "
                    "the model that is there (overwrite=True)"
                )
            before = _read_description(url)[0]["file"]
            stem, _, ending = described["file"].partition(".")
            described = {**described, "file": f"{stem}-{described['sha256'][:16]}.{ending}"}
        storage.make_folder(url)
        storage.write_bytes(storage.join(url, described["file"]), self.content)
        description = json.dumps(described, indent=1).encode()
        storage.write_bytes(storage.join(url, DESCRIPTION), description)
        if before not in (None, described["file"]):
            storage.delete_file(storage.join(url, before))
        return hashlib.sha256(description).hexdigest()


def pack_model(
    model: nn.Module,
    spec: ModelSpec,
    config: Config,
    columns: Sequence[Column],
    *,
    format: Format = "weights",  # noqa: A002 - the word that Spark and torch use
) -> PackedModel:
    """Returns the files of a model, before anything is written or deleted. Called on the driver.

    Args:
        model: the trained model, on the CPU, in evaluation mode.
        columns: the features as trained.

    Raises:
        ValueError: For functions without an importable name (`format="weights"`), and for models that `torch.export`
            does not take (`format="export"`).
    """
    if format not in FORMATS:
        raise ValueError(f"format: expected {' or '.join(map(repr, FORMATS))}, found {format!r}")
    described: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "data": dataclasses.asdict(features_only(config.data)),
        "ragged": config.loader.ragged,
        "columns": [c.to_plain() for c in columns],
    }
    if format == "weights":
        functions = {name: getattr(spec, name) for name in _FUNCTIONS}
        described["functions"] = {
            name: names.name_of(function, f"spec.{name}") for name, function in functions.items() if function
        }
        content, file = safetensors.torch.save(separate(model.state_dict())), WEIGHTS
    else:
        content, file = export_program(model, spec, config, columns), PROGRAM
        described["data"]["assemble"] = None  # the program does it
    return PackedModel({**described, "file": file, "sha256": hashlib.sha256(content).hexdigest()}, content)


def write_saved_model(url: str | os.PathLike[str], *args: Any, overwrite: bool = False, **kwargs: Any) -> None:
    """Writes a model, with the arguments of `pack_model`, as `PackedModel.write` does."""
    pack_model(*args, **kwargs).write(url, overwrite=overwrite)


def read_saved_model(url: str | os.PathLike[str]) -> SavedModel:
    """Reads the description of a saved model, and imports its functions. Called on any side.

    Load only models that you trust: it imports the modules that the file names, and calls `build`.
    Raises ValueError if the folder has no model, or a function cannot be imported.
    """
    url = _folder_of(url)
    described, sha256 = _read_description(url)
    spec = _spec_of(url, described, sha256)
    config = Config(data=Data(**described["data"]), loader=Loader(ragged=described["ragged"]))
    return SavedModel(url, spec, config, tuple(Column.from_plain(c) for c in described["columns"]), sha256)


def _spec_of(url: str, described: Mapping[str, Any], sha256: str) -> ModelSpec:
    if _is_program(described):
        inputs = input_names(described["data"]["features"], [Column.from_plain(c) for c in described["columns"]])
        build = functools.partial(load_model, url, sha256=sha256)
        return ModelSpec(build=build, forward=functools.partial(_run_program, inputs=inputs), loss=_no_loss)
    functions = {
        name: names.object_of(described_by, f"{storage.join(url, DESCRIPTION)}: functions.{name}")
        for name, described_by in described["functions"].items()
    }
    return ModelSpec(loss=_no_loss, **functions)


def _run_program(program: nn.Module, batch: Batch, *, inputs: Sequence[str]) -> Any:
    return program(*(batch[name] for name in inputs))


def _is_program(described: Mapping[str, Any]) -> bool:
    return str(described["file"]).endswith(PROGRAM.partition(".")[2])


def _read_content(path: str, sha256: str) -> tuple[bytes, ValueError | None]:
    """Returns the content of the weights or the program, or the error if it is missing or damaged."""
    try:
        content = storage.read_bytes(path)
    except FileNotFoundError:
        return b"", ValueError(f"{path} is missing; copy the whole folder of the model")
    if hashlib.sha256(content).hexdigest() != sha256:
        return b"", ValueError(f"{path} is damaged: its checksum is not that of {DESCRIPTION}; save the model again")
    return content, None


def load_model(url: str | os.PathLike[str], *, sha256: str | None = None) -> nn.Module:
    """Loads a model of `save_model`, on the CPU, in evaluation mode. Needs no Spark. Called on any side.

    Load only models that you trust: the modules that the files name are imported, and their functions called. Nothing
    is unpickled. An exported program is called with the features in their order, a ragged one with its mask after it,
    and returns columns by name.

    Raises ValueError as `read_saved_model` does, and if the file is damaged, the weights are those of another model, or
    the model has been replaced.

    Args:
        sha256: `SavedModel.sha256`, if the description was read before, so that it and the weights are of one model.

    Example:
        >>> model = spark_dl.load_model("models/1")
    """
    url = _folder_of(url)
    described, found = _read_description(url)
    path = storage.join(url, described["file"])
    content, error = b"", None
    if sha256 in (None, found):
        content, error = _read_content(path, described["sha256"])
    if error is not None and _read_description(url)[1] != found:  # replaced between the two
        if sha256 is None:
            return load_model(url)
        found = ""
    if sha256 not in (None, found):
        raise ValueError(
            f"the saved model {url} was replaced after it was read; call predict (predict_udf, load) again, and save "
            "each model to a folder of its own while others use the last one"
        )
    if error is not None:
        raise error
    if _is_program(described):
        return load_program(content, path)
    model = _spec_of(url, described, found).build()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{url}: {described['functions']['build']!r} returned {type(model).__name__}, expected a torch.nn.Module; "
            "save the model again"
        )
    load_into(model, safetensors.torch.load(content), f"the weights of {url}")
    return model.eval()


def _folder_of(url: str | os.PathLike[str]) -> str:
    """Returns the folder of a saved model; of a stage that Spark ML has saved, the folder in it."""
    url = storage.absolute(url)
    inner = storage.join(url, STAGE)
    has_own = storage.exists(storage.join(url, DESCRIPTION))
    return inner if not has_own and storage.exists(storage.join(inner, DESCRIPTION)) else url


def _read_description(url: str) -> tuple[dict[str, Any], str]:
    """Returns the description of a saved model, and its checksum."""
    path = storage.join(url, DESCRIPTION)
    try:
        content = storage.read_bytes(path)
        description = json.loads(content)
    except FileNotFoundError as error:
        raise ValueError(f"{url} has no {DESCRIPTION}, so it is not a saved model; save_model writes one") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; save the model again") from error
    if (
        not isinstance(description, dict)
        or description.get("format") != _FORMAT
        or description.get("version") != _VERSION
    ):
        raise ValueError(
            f"{path}: expected the format {_FORMAT!r}, version {_VERSION}; save the model with this version of spark_dl"
        )
    if not _FILE.fullmatch(str(description.get("file"))):  # no other name, which could lead out of the folder
        raise ValueError(
            f"{path}: found the file {description.get('file')!r:.80}, expected {WEIGHTS} or {PROGRAM}; save the model "
            "again"
        )
    return description, hashlib.sha256(content).hexdigest()


def features_only(data: Data) -> Data:
    """Returns the settings of the features, which is all that a model needs to predict."""
    kept = set(data.features)

    def of_features(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name in kept}

    # Every row gets a prediction: a bad image is an error, and none that is dropped.
    encode = {n: {k: v for k, v in how.items() if k != "bad"} for n, how in of_features(data.encode).items()}
    fill = of_features(data.fill)
    can_fill = {"nulls": data.nulls, "nonfinite": data.nonfinite} if fill else {
        "nulls": "error" if data.nulls == "fill" else data.nulls,
        "nonfinite": "error" if data.nonfinite == "fill" else data.nonfinite,
    }  # fmt: skip
    return Data(
        features=data.features, label=None, encode=encode, cast=of_features(data.cast), fill=fill,
        assemble=data.assemble, **can_fill,
    )  # fmt: skip


def separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns contiguous tensors that share no memory, as safetensors needs. Tied weights are stored twice."""
    return {plain_name(name): tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def _no_loss(output: Any, label: Any) -> Any:
    raise RuntimeError("a saved model has no loss; evaluate the checkpoint, with the ModelSpec of its training")
