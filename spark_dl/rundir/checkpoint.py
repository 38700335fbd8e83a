"""Checkpoints: folders with one file per rank. A checkpoint is committed by its manifest, which is written last.

    <run_dir>/checkpoints/step-00000120.gen-0001/
        model.pt  training.pt                   by rank 0: state that is the same on all ranks
        rank-00000.pt  rank-00001.pt ...        by each rank: its random number generators and other state of the rank
        MANIFEST.json                           by rank 0, last: sizes, SHA-256, step, generation, settings
        UNFINISHED                              by rank 0, first, and deleted after the manifest is written

Files contain tensors and plain data, and are read with `weights_only=True`. Damaged checkpoints are skipped and logged.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.fields import fixed_on_resume
from spark_dl.data.columns.schema import Column
from spark_dl.parallel import pieces
from spark_dl.parallel.modules import plain_name
from spark_dl.rundir import checkpoint_files, signing
from spark_dl.rundir.checkpoint_files import (
    AVERAGE,
    MANIFEST,
    MODEL,
    TRAINING,
    UNFINISHED,
    DamagedError,
    TensorFiles,
    is_weights,
    parse_name,
    rank_file,
)
from spark_dl.rundir.generations import read_run_id
from spark_dl.rundir.generations import start_generation as start_generation

_log = logging.getLogger("spark_dl")
FOLDER = "checkpoints"

_NAMED = 5
"""Names of parameters in an error."""


@dataclass(frozen=True)
class Score:
    """The value by which the best checkpoints are kept. Values of other metrics cannot be compared with it."""

    value: float
    metric: str
    mode: str
    """Which value is better: "min" or "max"."""
    rows: str | None = None
    """Checksum of the validation dataset; None if it is a part of the training rows."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    url: str
    step: int
    generation: int
    manifest: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Checksum of the manifest, which has the checksums of all files."""
        return str(self.manifest["sha256"])

    @property
    def score(self) -> float | None:
        """The value by which the best checkpoints are kept; None for one that was saved within an epoch."""
        recorded = self.manifest.get("score")
        return float(recorded) if isinstance(recorded, int | float) else None

    @property
    def branch(self) -> list[tuple[int, int]]:
        """Earlier attempts that it goes on from: [generation, step of their last checkpoint that counts], in order."""
        return [(int(generation), int(step)) for generation, step in self.manifest.get("branch", [])]

    @property
    def frozen(self) -> Mapping[str, str]:
        """Checksums of the frozen weights that it leaves out, by name (`checkpoint.weights`)."""
        return dict(self.manifest.get("frozen", {}))

    def is_before(self, other: Saved) -> bool:
        """Whether another checkpoint goes on from this one, or is it: a resume from an earlier one leaves the rest."""
        if "branch" not in other.manifest:  # of a version before
            return True
        last = dict([*other.branch, (other.generation, other.step)])
        return self.step <= last.get(self.generation, -1)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the training dataset."""
        return tuple(Column.from_plain(c) for c in self.manifest["columns"])


class NoCheckpointError(ValueError):
    """There is no checkpoint at a URL."""


def folder(run_dir: str) -> str:
    """Returns the folder of a run's checkpoints."""
    return storage.within(run_dir, FOLDER)


def folders(run_dir: str) -> list[tuple[tuple[int, int], str]]:
    """Returns ((generation, step), URL) of each folder with the name of a checkpoint, oldest first.

    Checkpoints of a later attempt are newer at any step, because it may have resumed from an earlier step.
    """
    named = [(parse_name(name), storage.join(folder(run_dir), name)) for name in storage.list_names(folder(run_dir))]
    return sorted((at, url) for at, url in named if at is not None)


def newest_attempt(run_dir: str) -> int:
    """Returns the newest generation among the names of checkpoint folders; 0 without any."""
    return max((attempt for (attempt, _), _ in folders(run_dir)), default=0)


def newest_committed_attempt(run_dir: str) -> int:
    """Returns the newest generation that has committed a checkpoint; 0 without any."""
    return max((attempt for (attempt, _), url in folders(run_dir) if _was_committed(url)), default=0)


def last_step(run_dir: str) -> int | None:
    """Returns the step of the newest committed checkpoint, even if it is damaged; None without any."""
    steps = [step for (_, step), url in folders(run_dir) if _was_committed(url)]
    return steps[-1] if steps else None


def _was_committed(url: str) -> bool:
    """Whether the manifest exists or, if it was lost, all files that rank 0 writes before it."""
    names = storage.list_names(url)
    if UNFINISHED in names:
        return MANIFEST in names
    return MANIFEST in names or ({TRAINING, rank_file(0)} <= {*names} and any(is_weights(name) for name in names))


def list_checkpoints(run_dir: str) -> list[Saved]:
    """Returns the committed checkpoints of a run, oldest first, without those whose manifest or sizes are damaged."""
    checkpoints = []
    for _, url in folders(run_dir):
        try:
            saved = _open(url)
        except ValueError:
            continue
        if saved is not None:
            checkpoints.append(saved)
    return checkpoints


def latest(run_dir: str) -> Saved | None:
    """Returns the newest of `list_checkpoints`, or None."""
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1] if checkpoints else None


def how_to_resume(run_dir: str) -> str:
    """Returns how to go on from the last checkpoint of a run that has failed. Called on the driver."""
    resume = f"resume=True / --resume with the run_dir {run_dir}"
    try:
        saved, last = latest(run_dir), last_step(run_dir)
    except OSError as error:  # that of the run says more
        return f"The last checkpoint cannot be read ({error}); {resume} goes on from it."
    if saved is None and last is not None:
        return (
            f"All checkpoints of {run_dir} are damaged, or of another version (the last one is of step {last}). "
            "A resume says what is wrong with each; overwrite would delete them."
        )
    if saved is None:
        return "No checkpoint has been saved yet, so the next call begins from the start."
    return f"The last checkpoint is {saved.url} (step {saved.step}). {resume} goes on from it."


def by_score(found: Sequence[Saved], mode: str, metric: str = "loss") -> list[Saved]:
    """Returns the checkpoints that have a score, the best first: the lowest (mode "min") or the highest ("max").

    Of equal ones the oldest is first, as in early stopping. Those with the score of another metric are left out, and
    those from which the newest one does not go on, as the run went back to an earlier one.
    """
    named: dict[str, Any] = {"metric": metric, "mode": mode, "rows": None}
    scored = [
        saved
        for saved in found
        if saved.score is not None and not math.isnan(saved.score) and saved.is_before(found[-1])
        if [saved.manifest.get("score_of", named).get(key) for key in ("metric", "mode")] == [metric, mode]
    ]
    scored = [s for s in scored if s.manifest.get("score_of") == scored[-1].manifest.get("score_of")]
    return sorted(scored, key=lambda saved: (saved.score or 0.0) * (1 if mode == "min" else -1))


def best_url(run_dir: str, mode: str, metric: str = "loss") -> str | None:
    """Returns the URL of the best checkpoint of a run; None if none has a score."""
    ranked = by_score(list_checkpoints(run_dir), mode, metric)
    return ranked[0].url if ranked else None


def last_valid(
    run_dir: str,
    *,
    strict: bool = False,
    only_weights: bool = False,
    trusted: Saved | None = None,
    key_file: str | None = None,
) -> Saved | None:
    """Returns the newest checkpoint of a run whose files have the right checksums; None if there are no checkpoints.

    Called on the driver. Newer checkpoints that cannot be used are logged with their causes.

    Args:
        only_weights: whether only the files of the weights are checked.
        trusted: a checkpoint that was checked before.
        key_file: file with the key that must have signed the checkpoint. None: signatures are ignored.

    Raises:
        ValueError: If no checkpoint is valid, and with `strict` if the newest one is not.
    """
    refused: list[DamagedError | signing.SignatureError] = []
    for _, url in reversed(folders(run_dir)):
        try:
            saved = _open(url)
            if saved is None:
                continue
            _check_signature(saved, key_file)
            if saved != trusted:
                checkpoint_files.check_contents(url, saved.manifest, only_weights=only_weights)
        except (DamagedError, signing.SignatureError) as error:
            if not storage.exists(storage.join(url, MANIFEST)) and not _was_committed(url):
                continue  # another process is deleting it
            if strict:
                restore = "restore the file, " if isinstance(error, DamagedError) else ""
                raise ValueError(
                    f"checkpoint.strict: {error}; {restore}or set checkpoint.strict to false to resume from the last "
                    "valid checkpoint"
                ) from error
            refused.append(error)
            continue
        if refused and saved != trusted:
            _log.warning("using the checkpoint %s, as newer ones cannot be used: %s", saved.url, _causes(refused))
        return saved
    if refused:
        raise ValueError(f"{run_dir} has no valid checkpoint: {_causes(refused)}; {_advice(refused)}")
    return None


def _causes(refused: Sequence[DamagedError | signing.SignatureError]) -> str:
    return "; ".join(error.found if isinstance(error, signing.SignatureError) else str(error) for error in refused)


def _advice(refused: Sequence[DamagedError | signing.SignatureError]) -> str:
    """Returns what to do if all checkpoints were refused. To start again helps only against damage."""
    of_signatures = [error.advice for error in refused if isinstance(error, signing.SignatureError)]
    if not of_signatures:
        return "restore the files, or start again with overwrite or another run_dir"
    restore = ["restore the damaged files"] if len(of_signatures) < len(refused) else []
    return "; ".join([*dict.fromkeys(of_signatures), *restore])


def _open(url: str) -> Saved | None:
    """Opens a checkpoint and checks the sizes of its files. Returns None if it is not committed or is being deleted.

    Raises DamagedError, and ValueError for another version of the format.
    """
    try:
        saved = open_checkpoint(url)
    except FileNotFoundError:
        if _was_committed(url):
            raise DamagedError(storage.join(url, MANIFEST), "it is missing") from None
        return None
    checkpoint_files.check_sizes(url, saved.manifest)
    return saved


def open_checkpoint(url: str, *, sha256: str | None = None) -> Saved:
    """Opens a checkpoint by its manifest. Called on the driver and on workers; `load` checks the files.

    Args:
        sha256: checksum of the manifest that the driver has checked, or that this run has saved. Raises
            FileNotFoundError without a manifest, DamagedError for a damaged one, ValueError for another version,
            RuntimeError for another checksum.
    """
    manifest = checkpoint_files.read_manifest(url)
    if sha256 is not None and manifest["sha256"] != sha256:
        raise RuntimeError(
            f"{storage.join(url, MANIFEST)} has changed since this run checked or saved it (found the SHA-256 "
            f"{manifest['sha256']}, expected {sha256}); another job writes to this folder, or somebody has changed it"
        )
    return Saved(url, manifest["step"], manifest["generation"], manifest)


def find(url: str | os.PathLike[str], *, only_weights: bool = False, key_file: str | None = None) -> Saved:
    """Opens a checkpoint by its URL, or the last valid checkpoint by the run folder, and checks its files.

    Called on the driver. only_weights: whether only the files of the weights are checked. key_file: file with the key
    that must have signed it; None ignores signatures. Raises NoCheckpointError if there is none, and ValueError if it
    is damaged or has another signature, with the file and the cause.
    """
    url = storage.absolute(url)
    if parse_name(storage.name(url)) is not None or storage.exists(storage.join(url, MANIFEST)):
        saved = _open(url)
        if saved is None:
            raise NoCheckpointError(f"no checkpoint at {url}: it has no {MANIFEST}")
        _check_signature(saved, key_file)
        checkpoint_files.check_contents(url, saved.manifest, only_weights=only_weights)
        return saved
    saved = last_valid(url, only_weights=only_weights, key_file=key_file)
    if saved is None:
        raise NoCheckpointError(f"no checkpoint at {url}: expected a checkpoint, or a run folder with checkpoints")
    return saved


def _check_signature(saved: Saved, key_file: str | None) -> None:
    """Raises SignatureError unless the key in the file has signed the checkpoint, for the run in whose folder it is.

    Args:
        key_file: None if it need not be signed.
    """
    if key_file is not None:
        run_id = None if (run_dir := run_dir_of(saved)) == saved.url else read_run_id(run_dir)
        signing.check(storage.join(saved.url, MANIFEST), saved.manifest, key_file, run_id=run_id)


def run_dir_of(saved: Saved) -> str:
    """Returns the run folder of a checkpoint; the checkpoint's own folder if it was copied from its run."""
    parent = storage.dirname(saved.url)
    run_dir = storage.dirname(parent)
    return run_dir if parent == folder(run_dir) else saved.url


def load(saved: Saved, name: str) -> Any:
    """Loads one file of a checkpoint to the CPU. Raises DamagedError if it is damaged."""
    return checkpoint_files.read(saved.url, saved.manifest, name)


def check_same_settings(saved: Saved, config: Config) -> None:
    """Raises ValueError that lists the settings in which a run to be resumed differs from the one that was saved.

    Fields that `config.fields.may_change` marks may differ: they do not change what was trained so far.
    """
    before, now = saved.manifest["config"], config.to_dict()
    if before.get("parallel", {}).get("strategy") in config.parallel.resumes:
        # An earlier attempt has planned these; a plan does not change the weights.
        now["parallel"] = before["parallel"]
        now["train"]["accumulation_steps"] = before["train"]["accumulation_steps"]
    optional = {name for name in now if getattr(type(getattr(config, name)), "MAY_CHANGE", False)}
    if unknown := sorted((before.keys() ^ now.keys()) - optional):
        raise ValueError(
            f"cannot resume from {saved.url}, which another version of spark_dl has written (sections of its settings "
            f"that differ: {', '.join(unknown)}); train again in another run_dir"
        )
    differ: list[str] = []
    for name in now:
        old, new = before.get(name) or {}, now[name] or {}
        section = getattr(config, name)
        keys = {*fixed_on_resume(type(section))} if section is not None else old.keys()
        if old.get("strategy") != new.get("strategy"):  # the others are settings of another strategy
            keys = {"strategy"}
        differ += [
            f"{name}.{key}: was {old.get(key)!r}, now {new.get(key)!r}"
            for key in sorted(keys)
            if old.get(key) != new.get(key)
        ]
    if differ:
        raise ValueError(
            f"cannot resume from {saved.url} with other settings ({'; '.join(differ)}); restore them, or use "
            "another run_dir"
        )


def load_weights(saved: Saved) -> dict[str, Tensor]:
    """Returns the weights and buffers of a checkpoint by name, whole, on the CPU. Called on any side.

    With `train.ema_decay`, the weights are their average. A resumed run goes on with the weights themselves. Without
    those of `Saved.frozen`, which a model has as it is built.

    Raises DamagedError for a damaged file.
    """
    if "tensors" not in saved.manifest:
        model: dict[str, dict[str, Tensor]] = load(saved, MODEL)
        return {**model["0"], **model.get(AVERAGE, {})}
    return {**TensorFiles(saved.url, saved.manifest, "model").read_whole(), **_averages(saved)}


def _averages(saved: Saved) -> dict[str, Tensor]:
    """Returns the average of the weights, which a mesh saves as a part of the optimizer's state."""
    files = TensorFiles(saved.url, saved.manifest, "optimizer")
    names = [name for name in files.shapes if name.rpartition("/")[2] == pieces.AVERAGE]
    return {name.rpartition("/")[0]: value for name, value in files.read_whole(names).items()}


def shapes_of(saved: Saved) -> dict[str, list[int]]:
    """Returns the shapes of a checkpoint's weights by name, from its manifest; none for a checkpoint without them."""
    if "tensors" in saved.manifest:
        return {name: list(entry["shape"]) for name, entry in saved.manifest["tensors"]["model"].items()}
    return dict(saved.manifest.get("shapes", {}))


def checksum(value: Tensor) -> str:
    """Returns a checksum of a tensor: of its dtype, its shape and its bytes."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode() + content.tobytes()).hexdigest()


def frozen_checksums(model: nn.Module) -> dict[str, str]:
    """Returns a checksum of each weight that is not trained, by name."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): checksum(parameter) for name, parameter in named if not parameter.requires_grad}


def load_into(
    model: nn.Module, weights: Mapping[str, Any], what: str, *, same_dtypes: bool = False,
    frozen: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Loads weights and buffers into a model. what: begins errors, such as "the weights of <URL>".

    Names are compared without those that `torch.compile` adds.
    Raises ValueError unless names and shapes are the same (and dtypes, with `same_dtypes`), and if the model has one
    tensor for weights that differ, as an embedding that is tied now and was not.

    Args:
        frozen: `Saved.frozen` of the checkpoint. The model must have these weights already.
    """
    of_model = model.state_dict(keep_vars=True)
    tensors = {plain_name(name): value for name, value in weights.items()}
    own = {plain_name(name): value for name, value in of_model.items()}
    if changed := [name for name, sha in (frozen or {}).items() if name in own and checksum(own[name]) != sha]:
        raise ValueError(
            f"{what} do not have the frozen weights (checkpoint.weights: trainable), and spec.build makes other ones "
            f"than in the training: {_list(changed)}; load the same pretrained weights in spec.build"
        )
    tensors |= {name: own[name] for name in frozen or {} if name in own and name not in tensors}
    renamed: Any = type(weights)() if isinstance(weights, dict) else {}
    renamed.update({name: tensors.pop(plain_name(name)) for name in of_model if plain_name(name) in tensors} | tensors)
    if (about := getattr(weights, "_metadata", None)) is not None:
        renamed._metadata = about
    problems = _differences(of_model, renamed, same_dtypes=same_dtypes) if same_dtypes else []
    if not problems:
        problems = _tied_now(of_model, renamed)
    if not problems:
        try:
            model.load_state_dict(renamed)
        except RuntimeError as error:
            problems = _differences(of_model, renamed) or [str(error)]
    if problems:
        raise ValueError(f"{what} do not fit the model of spec.build ({'; '.join(problems)})")


def _differences(own: Mapping[str, Any], weights: Mapping[str, Any], *, same_dtypes: bool = False) -> list[str]:
    problems = []
    if not same_dtypes:
        if missing := [name for name in own if name not in weights]:
            problems.append(f"not in the checkpoint: {_list(missing)}")
        if unknown := [name for name in weights if name not in own]:
            problems.append(f"not in the model: {_list(unknown)}")
    different = [
        f"{name}: {_describe(weights[name])} in the checkpoint, {_describe(value)} in the model"
        for name, value in own.items()
        if name in weights and not _fits(value, weights[name], same_dtypes=same_dtypes)
    ]
    return [*problems, _list(different)] if different else problems


def _fits(own: Any, found: Any, *, same_dtypes: bool) -> bool:
    if not isinstance(own, Tensor) or not isinstance(found, Tensor):
        return isinstance(own, Tensor) == isinstance(found, Tensor)
    return own.shape == found.shape and (not same_dtypes or own.dtype == found.dtype)


def _tied_now(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Names weights that differ and for which the model has one tensor, so that the last one loaded would win."""
    names: dict[Any, str] = {}
    problems = []
    for name, value in own.items():
        if not isinstance(value, Tensor) or not isinstance(weights.get(name), Tensor):
            continue
        memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else id(value)
        first = names.setdefault(memory, name)
        if first != name and not torch.equal(weights[first], weights[name]):
            problems.append(f"{name} is the same tensor as {first} in the model, and another one in the checkpoint")
    return problems


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):  # of get_extra_state
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
