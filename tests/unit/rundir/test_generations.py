"""Attempts of a run: a generation is given once, and what is damaged in its file loses no number."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spark_dl.rundir import generations
from spark_dl.rundir.generations import create_exclusively

TIMES = 50
TAKE = """
import sys
from spark_dl.rundir.generations import start_generation
for line in sys.stdin:
    print(start_generation(line.strip()), flush=True)
"""


def test_every_attempt_has_a_higher_number(tmp_path):
    run_dir = str(tmp_path)
    assert generations.read_generation(run_dir) == 0
    assert [generations.start_generation(run_dir) for _ in range(11)] == list(range(1, 12))
    assert generations.read_generation(run_dir) == 11
    assert generations.start_generation(run_dir, after=20) == 21
    assert generations.start_generation(run_dir, after=3) == 22


def test_each_attempt_has_the_id_of_the_run_and_a_new_run_one_of_its_own(tmp_path):
    ids = []
    for name, given in (("a", None), ("a", None), ("a", "other"), ("b", "given"), ("b", None), ("c", None)):
        generations.start_generation(str(tmp_path / name), run_id=given)
        ids.append(generations.read_run_id(str(tmp_path / name)))
    assert ids[0] == ids[1] == ids[2]
    assert ids[3] == ids[4] == "given"
    assert len({*ids}) == 3


def test_drivers_that_take_each_number_are_an_error_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(generations, "_MAX_TRIES", 3)
    started = iter(range(1, 4))

    def taken(url, content):
        generations._create_local(url, b"of another driver")
        assert url.endswith(f"{next(started):06d}")
        return create_exclusively(url, content)

    monkeypatch.setattr(generations, "create_exclusively", taken)
    (tmp_path / "generations").mkdir()
    with pytest.raises(RuntimeError, match=r"other drivers took the generations 1 to 3 of .*; stop them"):
        generations.start_generation(str(tmp_path))


def test_of_two_threads_each_gets_a_number_of_its_own(tmp_path):
    for i in range(TIMES):
        run_dir, start, found = str(tmp_path / str(i)), threading.Barrier(2), []

        def take(run_dir=run_dir, start=start, found=found):
            start.wait(10)
            found.append(generations.start_generation(run_dir))

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(found) == [1, 2]


@pytest.mark.slow
def test_of_two_processes_each_gets_a_number_of_its_own(tmp_path):
    takers = [
        subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        found = []
        for i in range(TIMES):
            for taker in takers:  # both have their line before either answers
                taker.stdin.write(f"{tmp_path / str(i)}\n")
                taker.stdin.flush()
            found.append(sorted(int(taker.stdout.readline()) for taker in takers))
    finally:
        for taker in takers:
            taker.communicate(timeout=30)
    assert found == [[1, 2]] * TIMES


def test_what_is_at_the_place_of_the_file_is_never_replaced(tmp_path):
    target = tmp_path / "precious"
    folder = tmp_path / "run" / generations.FOLDER
    folder.mkdir(parents=True)
    for name, make in (
        ("file", lambda p: p.write_bytes(b"old")),
        ("folder", Path.mkdir),
        ("link", lambda p: p.symlink_to(target)),
    ):
        make(folder / name)
        assert not create_exclusively(str(folder / name), b"new")
    assert (folder / "file").read_bytes() == b"old"
    assert not target.exists()
    assert create_exclusively(str(folder / "none"), b"new")
    assert (folder / "none").read_bytes() == b"new"


GOES_ON = "The newer attempt continues; a resume would end it."


def test_the_file_says_who_took_it_and_other_names_do_not_count(tmp_path):
    run_dir = str(tmp_path)
    generations.start_generation(run_dir)
    for name in ("000009.tmp", "7", "notes", "00000x"):
        (tmp_path / generations.FOLDER / name).write_text("9")
    assert generations.start_generation(run_dir) == 2
    why = generations.superseded(run_dir, 1)
    record = generations.read_record(generations.record_url(run_dir, 2))
    assert "attempt 1" in why
    assert f"attempt 2 has started since, on host {record['host']} by process {record['pid']}" in why
    assert generations.superseded(run_dir, 2) == generations.advice(run_dir, 2) == ""
    assert generations.advice(run_dir, 1) == f"{why.capitalize()[0]}{why[1:]}. {GOES_ON}"
    with pytest.raises(RuntimeError, match="attempt 2 has started since"):
        generations.check_newest(run_dir, 1)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _link(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(("damage", "cause"), [
    (lambda p: p.write_bytes(b""), "is damaged"),
    (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "is damaged"),
    (_flip, "is damaged"),
    (lambda p: p.write_text("[]"), "is damaged"),
    (lambda p: p.write_text(json.dumps({"format": "other"})), "is damaged"),
    (_link, "symbolic link"),
    (Path.unlink, "is missing"),
], ids=["empty", "half", "bit", "list", "other", "link", "gone"])  # fmt: skip
def test_a_damaged_file_is_named_with_its_cause_and_loses_no_number(tmp_path, damage, cause):
    run_dir = str(tmp_path)
    for _ in range(2):
        generations.start_generation(run_dir)
    url = generations.record_url(run_dir, 2)
    damage(Path(url))
    with pytest.raises(ValueError, match=rf"generations/000002 .*{cause}|generations/000002 {cause}"):
        generations.read_record(url)
    assert generations.start_generation(run_dir, after=2) == 3


def test_an_older_attempt_is_told_why_it_fails(tmp_path):
    run_dir = str(tmp_path)
    generation = generations.start_generation(run_dir)
    with pytest.raises(KeyError, match="own"), generations.explained(run_dir, generation):
        raise KeyError("own")
    generations.start_generation(run_dir)
    with (
        pytest.raises(RuntimeError, match=r"attempt 1 .*attempt 2 has started since.*its shards are gone"),
        generations.explained(run_dir, generation),
    ):
        raise FileNotFoundError("its shards are gone")
