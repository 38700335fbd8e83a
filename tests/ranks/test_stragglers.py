"""Ranks that are slowed down on purpose: the others wait for them, and the weights are what they were."""

from spark_dl import Faults
from spark_dl.rundir import checkpoint
from spark_dl.training.metrics import read_metrics
from tests.builders.models import same_bits, small_config
from tests.ranks.runs import cut_at, make_run, train


def test_F20_a_slow_rank_holds_up_ddp_and_changes_no_weights(tmp_path):
    delay_s, steps, trained = 0.2, 5, {}
    slow = Faults(straggler="constant", straggler_s=delay_s, straggler_ranks=(1,))
    for name, faults in (("even", Faults()), ("slow", slow)):
        run = make_run(tmp_path, cut_at(small_config(2, faults=faults), steps), name=name)
        trained[name] = checkpoint.load(train(run), "model.pt")["0"]
        seconds = [line["seconds"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
        assert len(seconds) == steps
    # The clock is that of rank 0, and may start when the first delay of rank 1 is nearly over.
    assert sum(seconds) > delay_s * (steps - 1)
    assert same_bits(trained["even"], trained["slow"])
