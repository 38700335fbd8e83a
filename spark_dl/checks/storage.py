"""Checks before training that every rank can read the datasets and write to the run folder.

Without this check, a host that does not mount a folder fails at its first read, or writes checkpoints that other hosts
cannot read.
"""

from __future__ import annotations

import uuid

from spark_dl import storage
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.local import Gather
from spark_dl.data.load.mixture import Mixture
from spark_dl.rundir.checkpoint_files import MANIFEST
from spark_dl.spec import Run
from spark_dl.training.initial import InitialWeights


def check_reach(run: Run, gather: Gather, *, rank: int, host: str, writes: bool) -> None:
    """Opens a shard of each dataset and the checkpoint, and with `writes` writes to the run folder. Collective.

    Raises the same RuntimeError on all ranks, with the path and the hosts that have no access.
    """
    problem = _cannot_read(run)
    probe = storage.join(run.run_dir, f"probe-{uuid.uuid4().hex}")
    if writes and not problem:
        problem = _cannot_write(probe)
    try:
        found = gather("reach", {"host": host, "problem": problem, "probe": probe})
        _raise_first(found)
        if not writes:
            return
        problem = "" if is_there(found[0]["probe"]) else (
            f"the run_dir {run.run_dir} is another folder than on the host of rank 0 ({found[0]['host']})"
        )  # fmt: skip
        _raise_first(gather("reach each other", {"host": host, "problem": problem}))
    finally:
        if writes:
            delete_probe(probe)


def _raise_first(found: list[dict[str, str]]) -> None:
    bad = [(rank, f["host"], f["problem"]) for rank, f in enumerate(found) if f["problem"]]
    if not bad:
        return
    rank, host, problem = bad[0]
    hosts = sorted({h for _, h, _ in bad[1:]})
    more = f" (and on {len(bad) - 1} more ranks, on {', '.join(hosts[:8])})" if hosts else ""
    raise RuntimeError(
        f"rank {rank} on host {host}: {problem}{more}; all executors need access to datasets and run_dir by the same "
        "path: use a folder on shared storage, and check its permissions"
    )


def _cannot_read(run: Run) -> str:
    """Returns what this rank cannot read, and why; empty if it can read everything."""
    files = [("dataset", url) for url in _first_shards(run.train)]
    files += [("validation dataset", url) for url in _first_shards(run.validation)]
    if run.checkpoint is not None:
        files.append(("checkpoint", storage.join(run.checkpoint, MANIFEST)))
    if run.spec is not None and isinstance(run.spec.build, InitialWeights):
        files.append(("checkpoint of train.init_from", storage.join(run.spec.build.url, MANIFEST)))
    for name, url in files:
        try:
            storage.open_input(url).close()
        except (OSError, ValueError, RuntimeError) as error:  # ValueError if a package is missing on this host
            return f"the {name} {storage.dirname(url)} is not readable: {error}"
    return ""


def _first_shards(data: ShardSet | Mixture | None) -> list[str]:
    """Returns the first shard of each dataset, except datasets on the local disks of ranks."""
    datasets = data.datasets.values() if isinstance(data, Mixture) else [data] if data is not None else []
    return [storage.join(d.url, d.shards[0].name) for d in datasets if d.shards and d.placement is None]


def _cannot_write(probe: str) -> str:
    why = write_probe(probe)
    return why and f"the run_dir {storage.dirname(probe)} is not writable: {why}"


def write_probe(probe: str) -> str:
    """Returns why this host cannot write a file and read it again; empty if it can."""
    content = b"spark_dl writes here, and deletes this"
    try:
        storage.write_bytes(probe, content)
        return "" if storage.read_bytes(probe) == content else f"{probe} does not have the content that was written"
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)


def is_there(url: str) -> bool:
    """Whether this host sees a file. An error of the storage counts as no."""
    try:
        return storage.exists(url)
    except (OSError, RuntimeError):
        return False


def delete_probe(probe: str) -> None:
    """Deletes a file of these checks, if possible."""
    try:
        storage.delete_file(probe)
    except (OSError, ValueError, RuntimeError):  # reported before
        return
