"""A host on which ranks keep failing gets no more ranks, and the others go on from the checkpoint."""

import pytest
import torch

from benchmarks.testbed.standalone import start_spark
from spark_dl.rundir import checkpoint
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
from tests.builders.reference import reference
from tests.hosts.conftest import run_driver
from tests.hosts.left_out_job import config

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_F31_a_host_on_which_ranks_keep_failing_gets_no_more_ranks(hosts, tmp_path):
    columns = blobs(240)
    shards = write_dataset(str(tmp_path / "data"), columns, group_rows=40)
    with hosts(3) as bed:
        master, bad = start_spark(bed), bed.hosts[1].name
        arguments = (master, bad, shards.url, str(tmp_path / "run"))
        found = run_driver(bed, tmp_path, "tests.hosts.left_out_job", *arguments)
    assert found["restarts"] == 2
    assert [len(hosts) for hosts in found["attempts"]] == [3, 3, 2]
    failed = {*found["attempts"][0]} - {*found["attempts"][2]}
    assert len(failed) == 1
    assert f"leaving out {failed.pop()}, where ranks keep failing" in (tmp_path / "stderr").read_text()
    group_rows = tuple(n for s in shards.shards for n in s.row_groups)
    _, expected = reference(columns, config(3), group_rows)
    trained = checkpoint.load(checkpoint.find(str(tmp_path / "run")), "model.pt")["0"]
    for name, weights in expected.items():
        torch.testing.assert_close(trained[name], weights, rtol=1e-5, atol=1e-6)
