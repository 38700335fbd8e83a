"""A manifest is not trusted: it names files of its own folder alone, and they are all there, as long as it says."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil

import numpy as np
import pytest

from spark_dl import read_shards
from spark_dl.data.dataset.manifest import abandon, crc32_of, prepare_folder
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.write import arrays as arrays_module
from tests.builders.another_user import let_others_in
from tests.builders.datasets import write_dataset

ROWS = {"id": np.arange(100), "x": np.arange(200, dtype=np.float32).reshape(100, 2)}


def dataset(folder):
    return write_dataset(str(folder), ROWS, group_rows=16, shard_rows=32)


def change(folder, edit):
    path = folder / "_manifest.json"
    manifest = json.loads(path.read_bytes())
    edit(manifest)
    manifest.pop("crc32", None)
    path.write_text(json.dumps({**manifest, "crc32": crc32_of(manifest)}))


@pytest.mark.parametrize("name", [
    "../x.parquet", "../part-0.parquet", "/etc/passwd", "part-0/../../part-0.parquet", "part-\0.parquet", "..", ".",
    "", "..\\part-0.parquet", "%2e%2e%2fpart-0.parquet", "part-%2e%2e%2f0.parquet", "part-0.parquet\n",
    "part-0.parquet?a=b", "s3://bucket/part-0.parquet", "~/part-0.parquet", "part-０.parquet", 7, None,
    ["part-0.parquet"],
])  # fmt: skip
def test_S14_no_name_leads_out_of_the_folder(tmp_path, name):
    dataset(tmp_path / "d")
    for outside in ("x.parquet", "part-0.parquet"):
        shutil.copy(tmp_path / "d" / os.listdir(tmp_path / "d")[0], tmp_path / outside)
    change(tmp_path / "d", lambda m: m["shards"][1].update(name=name))
    with pytest.raises(
        ValueError, match=r"_manifest.json (names the shard .*, expected part-<name>|is not a manifest)"
    ):
        read_shards(str(tmp_path / "d"))


def test_S14_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    shards = dataset(tmp_path / "d")
    path = tmp_path / "d" / shards.shards[1].name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{path} is a link to .*/elsewhere, expected a file in the folder"):
        read_shards(str(tmp_path / "d"))


def test_the_folder_itself_may_be_a_link(tmp_path):
    shards = dataset(tmp_path / "d")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    assert read_shards(str(tmp_path / "link")).shards == shards.shards


@pytest.mark.parametrize("edit", [
    lambda m: m.pop("columns"), lambda m: m.pop("shards"), lambda m: m.pop("version"), lambda m: m.update(version="2"),
    lambda m: m.update(columns=7), lambda m: m.update(shards={"a": 1}), lambda m: m.update(changes={"more": 1}),
    lambda m: m["columns"][0].pop("name"), lambda m: m["columns"][0].update(more=1),
    lambda m: m["shards"][0].pop("sha256"),
    lambda m: m["shards"][0].update(row_groups=[16, -16]), lambda m: m["shards"][0].update(row_groups=["16"]),
    lambda m: m["columns"][0].update(shape=3), lambda m: m["columns"][0].update(encoding=[]),
    lambda m: m.update(version=True), lambda m: m.update(version=0), lambda m: m.update(rules=7),
    lambda m: m["rules"].update(nonfinite="none"), lambda m: m["rules"].update(more=1),
    lambda m: m["rules"].pop("nulls"), lambda m: m["rules"].update(fill=7),
])  # fmt: skip
def test_a_manifest_that_is_not_one_is_one_error(tmp_path, edit):
    dataset(tmp_path / "d")
    change(tmp_path / "d", edit)
    with pytest.raises(ValueError, match=r"_manifest.json (is not a manifest|has version)"):
        read_shards(str(tmp_path / "d"))


@pytest.mark.parametrize(("place", "key", "value"), [
    *[("columns", "dtype", d) for d in ("float33", "object", "f4,f4", "(9,)f4", "M8[s]", "U3", "", None, 4, ["f4"])],
    *[("columns", "shape", s) for s in ((-1,), ("2",), (2.0,), (True,), (2, None), (1,) * 65, (2**31,), (2**20,) * 3)],
    *[("columns", "name", n) for n in ("", 7, None, ["x"])],
    *[("columns", "codec", c) for c in ("npy", None, 3, ["scalar"], "partition", "converted", "petastorm.ndarray")],
    *[("columns", "mean_size", n) for n in ("1", -1, True, float("nan"), float("inf"), [])],
    *[("shards", "row_groups", g) for g in ([], [16, True], [16.0], "16", 16, None, {"16": 1}, [[16]])],
    *[("shards", "bytes", n) for n in (0, -1, "9", True, None, 1e9, 2**63)],
    *[("shards", "sha256", s) for s in ("x" * 64, "A", None, 7)],
    *[("shards", "footer_bytes", n) for n in (-1, 2**40, True, "8", None, 8.0)],
    *[("shards", "footer_crc32", n) for n in (-1, 2**32, None, "1")],
])  # fmt: skip
def test_a_value_that_a_manifest_cannot_have_is_named_with_its_path(tmp_path, place, key, value):
    dataset(tmp_path / "d")
    change(tmp_path / "d", lambda m: m[place][0].update({key: value}))
    with pytest.raises(ValueError, match=r"/d/_manifest.json is not a manifest: ") as caught:
        read_shards(str(tmp_path / "d"))
    assert f"found the invalid {key} {value!r:.40}" in str(caught.value)


@pytest.mark.parametrize(("edit", "match"), [
    (lambda m: m.update(shards=[]), "found no shard"), (lambda m: m.update(columns=[]), "found no column"),
    (lambda m: m["shards"].append(m["shards"][0]), r"found the shard 'part-\S+' twice"),  # its rows, too
    (lambda m: m["columns"][0].update(name="x"), "found the column 'x' twice"),
    (lambda m: m["shards"][0].update(row_groups=[16, 0]), "found a row group of 0 rows"),
    (lambda m: m["shards"][0].update(row_groups=[2**31]), "found a row group of 2147483648 rows"),
    *[(lambda m, of=of: m["columns"][0].update(encoding=of), f"encoding.{next(iter(of))}: found ") for of in (
        {"kind": "words"}, {"kind": []}, {"unit": "h"}, {"scale": "2"}, {"buckets": 0}, {"buckets": 1.5},
        {"vocabulary": "abc"}, {"vocabulary": [1]}, {"unknown": "drop"},
    )],
])  # fmt: skip
def test_what_a_manifest_cannot_say_is_one_error_that_names_it(tmp_path, edit, match):
    dataset(tmp_path / "d")
    change(tmp_path / "d", edit)
    with pytest.raises(ValueError, match=rf"/d/_manifest.json is not a manifest: .*{match}"):
        read_shards(str(tmp_path / "d"))


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"{", b"[]", b"\xff\xfe", b'{"format": "other"}', b"null"]
)
def test_other_bytes_are_no_manifest(tmp_path, content):
    dataset(tmp_path / "d")
    (tmp_path / "d" / "_manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"_manifest.json is not a manifest"):
        read_shards(str(tmp_path / "d"))


def test_a_flipped_bit_in_a_manifest_is_an_error_that_names_it(tmp_path):
    original = dataset(tmp_path / "d")
    path = tmp_path / "d" / "_manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        if whole[place : place + 1].isspace():
            with contextlib.suppress(ValueError):  # it may be white space still
                assert read_shards(original.url) == original
            continue
        with pytest.raises(ValueError, match=r"_manifest\.json"):
            read_shards(original.url)
    path.write_bytes(whole.replace(b'"x"', b'"y"'))
    with pytest.raises(ValueError, match=r"/d/_manifest.json is damaged: found the crc32 \d+, expected \d+"):
        read_shards(original.url)


def test_a_manifest_from_before_it_had_a_checksum(tmp_path):
    folder = dataset(tmp_path / "d").url
    path = tmp_path / "d" / "_manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["crc32"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"is damaged: found the crc32 None"):
        read_shards(folder)
    path.write_text(json.dumps({**manifest, "version": 2}))
    assert read_shards(folder).rows == 100


@pytest.mark.parametrize(("damage", "found"), [
    (os.unlink, "nothing"), (lambda p: os.truncate(p, 0), "0 bytes"), (lambda p: os.truncate(p, 99), "99 bytes"),
])  # fmt: skip
def test_a_missing_or_short_shard_is_seen_when_the_dataset_is_opened(tmp_path, damage, found):
    shard = dataset(tmp_path / "d").shards[2]
    damage(tmp_path / "d" / shard.name)
    match = rf"the dataset .*/d is incomplete: found {found} at {shard.name}, expected {shard.bytes} bytes"
    with pytest.raises(ValueError, match=match):
        read_shards(str(tmp_path / "d"))


@pytest.mark.parametrize("name", [
    "part-0.parquet", "part-00000-3b1e2c4d-8f6a-4c1e-9d2b-1a2b3c4d5e6f-c000.snappy.parquet", "part-00000", "part-r-1",
    "part-0123abcd.parquet", "part-0123abcd-0.parquet", "part-0123abcd-00000-c000.parquet", "part-stored.json.bak",
])  # fmt: skip
def test_files_of_others_whose_names_begin_as_those_of_shards_stay(tmp_path, name):
    (tmp_path / name).write_text("theirs")
    match = rf"is not empty and has no dataset of spark_dl, but \['{name}'\]; nothing was changed"
    with pytest.raises(ValueError, match=match):
        dataset(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=match):
            prepare_folder(str(tmp_path), overwrite=overwrite)
    assert (tmp_path / name).read_text() == "theirs"
    assert os.listdir(tmp_path) == [name]


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    names = [
        "part-0123abcd-0000.parquet", "part-0123abcd-00003-17-0000.parquet", "part-stored.json", "_probe",
        "part-0123abcd-joined-00000-4-0001.parquet", "_manifest.json.tmp-0123456789ab", "_common_metadata",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("old")
    shards = dataset(tmp_path)
    assert {*os.listdir(tmp_path)} == {"_manifest.json", "_common_metadata", *(s.name for s in shards.shards)}


def test_the_shards_of_another_write_at_the_same_time_stay(tmp_path, monkeypatch):
    others = ["part-0123abcd-00000-1-0000.parquet", "_manifest.json.tmp-0123456789ab"]
    commit = arrays_module.commit

    def while_another_one_writes(shard_set):
        for name in others:
            (tmp_path / name).write_text("theirs")
        return commit(shard_set)

    monkeypatch.setattr(arrays_module, "commit", while_another_one_writes)
    written = dataset(tmp_path)
    assert {*os.listdir(tmp_path)} == {
        "_manifest.json", "_common_metadata", *others, *(s.name for s in written.shards)
    }  # fmt: skip
    (tmp_path / "_manifest.json").unlink()
    abandon(str(tmp_path), written.shards[0].name.split("-")[1])
    assert {*os.listdir(tmp_path)} == {*others}


@pytest.mark.parametrize("lost", [("_manifest.json",), ("_manifest.json", "_common_metadata")])
@pytest.mark.parametrize("parent", [".", "several"])
def test_a_dataset_without_its_manifest_is_not_read_as_plain_parquet(tmp_path, lost, parent):
    folder = tmp_path / parent / "d"
    shards = dataset(folder)
    url = str(folder if parent == "." else folder.parent)
    assert open_parquet(str(folder), ["id"]).rows == 100
    for name in (*lost, shards.shards[1].name):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"/d/part-\S+ is a shard of a spark_dl dataset without its manifest"):
        open_parquet(url, ["id"])


@pytest.mark.parametrize("kept", [(), ("_old",)])
def test_a_folder_of_several_datasets_is_not_read_as_one(tmp_path, kept):
    for name in ("test", "deep/train", *kept):
        dataset(tmp_path / "all" / name)
    match = r"/all is not one dataset: it contains the datasets \['deep/train', 'test'\], .*; name one of them"
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path / "all"), ["id"])
    shutil.rmtree(tmp_path / "all" / "deep")
    with pytest.raises(ValueError, match=r"/all is not one dataset: it contains the datasets \['test'\]"):
        open_parquet(str(tmp_path / "all"), ["id"])
    assert open_parquet(str(tmp_path / "all" / "test"), ["id"]).rows == 100


def open_as_nobody(url, kind):
    """Runs in a process of its own."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    return read_shards(url) if kind == "ours" else open_parquet(url, ["id"])


@pytest.mark.parametrize("kind", ["ours", "external"])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_B15_what_may_not_be_read_is_an_error_that_names_it(tmp_path, kind, what):
    let_others_in(tmp_path)
    shards = dataset(tmp_path / "d")
    name = "_manifest.json" if kind == "ours" else shards.shards[0].name
    path = tmp_path / "d" if what == "folder" else tmp_path / "d" / name
    for readable in (tmp_path / "d", *(tmp_path / "d").iterdir()):
        os.chmod(readable, 0o755)
    os.chmod(path, 0o000)
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        opened = pool.apply_async(open_as_nobody, (str(tmp_path / "d"), kind))
        named = path if kind == "external" else tmp_path / "d"
        with pytest.raises(ValueError, match=rf"{re.escape(str(named))}\b.*Permission denied"):
            opened.get(60)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1], [1, 1.5], [1, True], "12", 7, None])
def test_elements_of_a_ragged_column_that_cannot_be_are_refused(tmp_path, counts):
    dataset(tmp_path / "d")
    change(tmp_path / "d", lambda m: m["shards"][0].update(elements={"x": counts}))
    with pytest.raises(ValueError, match="_manifest.json is not a manifest: "):
        read_shards(str(tmp_path / "d"))
    change(tmp_path / "d", lambda m: m["shards"][0].pop("elements"))  # a manifest from before they were kept
    assert read_shards(str(tmp_path / "d")).rows == 100


@pytest.mark.parametrize(
    "name", ["two words", "größe-模型", "a#b", "100%", "a%20b", "what?", "[x]", "a&b=c", "s3:", "~"]
)
def test_B15_folders_and_files_of_any_name_are_opened(tmp_path, name):
    file = dataset(tmp_path / name).shards[0].name
    assert read_shards(str(tmp_path / name)).rows == 100
    assert read_shards((tmp_path / name).as_uri()).rows == 100
    (tmp_path / "other" / name).mkdir(parents=True)
    shutil.copy(tmp_path / name / file, tmp_path / "other" / name / f"{name}.parquet")
    for url in (str(tmp_path / "other"), (tmp_path / "other" / name / f"{name}.parquet").as_uri()):
        assert open_parquet(url, ["id"]).rows == 32


def test_B15_a_path_without_a_scheme_is_a_local_one_and_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"no dataset at {tmp_path}/bucket/key: found nothing"):
        read_shards("bucket/key")
    with pytest.raises(
        ValueError, match=rf"no dataset at {tmp_path}/bucket/key: .*a path without a scheme is a local path"
    ):
        open_parquet("bucket/key", ["id"])
