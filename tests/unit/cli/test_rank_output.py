"""The output of ranks on the driver: prefixes, streams, and files of ranks that cannot reach the driver."""

import pytest

from spark_dl import Launch
from spark_dl.cli.progress import follow_logs, lines_of, show_output


def output(lines, **where):
    return {"kind": "output", "stream": "stdout", "lines": lines, **where}


def test_each_line_has_the_rank_or_the_task_that_has_no_rank_yet():
    assert lines_of(output(["a", ""], rank=3, task=1)) == ["[rank 3] a", "[rank 3] "]
    assert lines_of(output(["a"], task=1)) == ["[task 1] a"]


def test_lines_go_to_the_stream_that_they_come_from_and_other_events_are_not_shown(capsys):
    show_output({"kind": "step", "step": 1})
    show_output(output(["out"], rank=0))
    show_output({**output(["err"], rank=0), "stream": "stderr"})
    assert capsys.readouterr() == ("[rank 0] out\n", "[rank 0] err\n")
    written = []
    show_output(output(["above a bar"], rank=0), lambda line, stream: written.append(line))
    assert written == ["[rank 0] above a bar"]


def test_files_are_read_from_where_they_were_in_whole_lines(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("stdout: of an earlier attempt\n")
    (tmp_path / "rank-x.log").write_text("stdout: not of a rank\n")
    poll = follow_logs(Launch(log_dir=str(tmp_path)))
    assert poll() == []
    with open(log, "a") as file:
        file.write("stdout: one\nstderr: two: three\nstdout: ha")
    (tmp_path / "rank-10.log").write_text("stdout: of another\n")
    assert [(e["rank"], e["stream"], e["lines"]) for e in poll()] == [
        (0, "stdout", ["one"]),
        (0, "stderr", ["two: three"]),
        (10, "stdout", ["of another"]),
    ]
    with open(log, "a") as file:
        file.write("lf\n")
    assert [e["lines"] for e in poll()] == [["half"]]


@pytest.mark.parametrize(("output", "ranks"), [("all", [0, 1]), ("rank0", [0]), ("none", [])])
def test_files_of_ranks_that_are_not_wanted_are_not_read(tmp_path, output, ranks):
    poll = follow_logs(Launch(log_dir=str(tmp_path / "logs"), output=output))
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank-{rank}.log").write_text("stdout: a\n")
    assert [event["rank"] for event in poll()] == ranks


def test_without_a_folder_there_is_nothing_to_read():
    assert follow_logs(Launch())() == []
