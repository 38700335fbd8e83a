import json
import os
from pathlib import Path

import pytest

from benchmarks.literature import bert, gpipe, pipedream, zero
from benchmarks.literature.literature import Options, measure


def test_all_cells_of_zero_s_table_are_those_of_the_formulas():
    cells = zero.cells()
    assert len(cells) == 54
    assert [cell for cell in cells if not cell["equal"]] == []


def test_a_cell_that_is_not_equal_is_seen(monkeypatch):
    monkeypatch.setitem(zero.PUBLISHED, 4, ("52.4", "41.4", "30.1", "895", "706", "512", "7000", "5500", "4000"))
    different = [cell["published_gb"] for cell in zero.cells() if not cell["equal"]]
    assert different == [52.4, 41.4, 30.1, 895, 706]  # 41.25 is 41.2 or 41.3


def test_gpipe_s_table_fits_for_32_micro_batches_and_not_for_4():
    fits = {(row["micro_batches"], row["stages"]): row["fits"] for row in gpipe.rows()}
    assert fits == {(4, 2): True, (4, 4): False, (4, 8): False, (32, 2): True, (32, 4): True, (32, 8): True}
    assert [round(gpipe.speedup(stages, 32), 2) for stages in (2, 4, 8)] == [1.94, 3.66, 6.56]
    assert [round(gpipe.speedup(stages, 4), 2) for stages in (2, 4, 8)] == [1.6, 2.29, 2.91]
    assert gpipe.speedup(2, 1) == 1  # what the table is relative to


def test_the_model_of_scaling_finds_its_own_parameters_and_is_near_bert_s_times():
    assert bert.fit({n: bert.predict(400, 80, n) for n in (1, 2, 8)}) == pytest.approx((400, 80))
    rows = bert.rows()["rows"]
    assert [row["published_min"] for row in rows] == [399, 214, 118, 61]
    assert max(abs(row["error"]) for row in rows) < 0.04
    assert [row["from_1_and_8_min"] for row in rows if not row["held_out"]] == pytest.approx([399, 61])
    assert max(abs(row["from_1_and_8_error"]) for row in rows if row["held_out"]) < 0.06


def test_pipedream_s_plans_are_those_of_its_authors():
    rows = pipedream.rows(profiles())
    assert [row for row in rows if not row["equal"]] == []
    first, fast, resnet = rows[:3]
    assert (first["cut"], first["replication"]) == (15, "3-1")
    assert first["period_s"] == pytest.approx(0.174498, abs=1e-6)
    assert first["times_data_parallel"] == pytest.approx(2.866, abs=1e-3)
    assert fast["times_data_parallel"] == pytest.approx(1.232, abs=1e-3)
    assert (resnet["replication"], round(resnet["times_data_parallel"], 3)) == ("straight", 1.544)


def test_profiles_are_found_as_in_the_authors_repository(tmp_path):
    for name in ("vgg16", "resnet50"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "graph.txt").write_text((profiles() / f"{name}.txt").read_text())
    assert all(row["equal"] for row in pipedream.rows(tmp_path))


def test_without_the_profiles_the_section_says_so_and_the_others_are_there(tmp_path):
    shown = []
    results = measure(Options(profiles=str(tmp_path)), shown.append)
    assert "pipedream" not in results
    assert f"there is no {tmp_path}" in results["pipedream_left_out"]
    assert any(line.startswith("Left out: there is no") and "--profiles" in line for line in shown)
    assert "54 of 54 cells are equal" in "\n".join(shown)
    assert json.loads(json.dumps(results)) == results


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("SPARK_DL_TEST_DATA", raising=False)
    results = measure(Options(), lambda line: None)
    assert "SPARK_DL_TEST_DATA is not set" in results["pipedream_left_out"]


def test_the_tables_say_where_a_model_does_not_fit():
    shown = []
    measure(Options(profiles=str(profiles())), shown.append)
    text = "\n".join(shown)
    assert text.count("DOES NOT FIT") == 2
    assert text.count("DIFFERENT") == 0
    assert "0.174498 (0.174498)" in text


def profiles():
    """The folder with PipeDream's profiles; skips the test without it."""
    folder = Path(os.environ.get("SPARK_DL_TEST_DATA", "nowhere"), "pipedream_profiles")
    if not folder.is_dir():
        pytest.skip("SPARK_DL_TEST_DATA names no folder with pipedream_profiles/ (graph.txt of msr-fiddle/pipedream)")
    return folder
