"""How a rank leaves: nothing of DDP is left when its process group goes."""

import gc
import weakref
from unittest import mock

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spark_dl import Parallel, worker
from spark_dl.parallel import ddp
from tests.models import small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import make_run


def left_at_the_end(run):
    """How many of DDP's objects are left when the process group goes, of how many."""
    made, left = [], []
    destroy = dist.destroy_process_group

    def wrap(*args, **options):
        module = DistributedDataParallel(*args, **options)
        made.append(weakref.ref(module))
        return module

    def look(*args):
        left.append(sum(ref() is not None for ref in made))
        destroy(*args)

    gc.disable()  # they go with their last reference, not at some time later
    try:
        with (
            mock.patch.object(ddp, "DistributedDataParallel", wrap),
            mock.patch.object(dist, "destroy_process_group", look),
        ):
            worker.main(run)
    finally:
        gc.enable()
    return left[-1], len(made)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(compression="topk"), Parallel(strategy="local_sgd",
    sync_every_steps=2, sync_start_step=2)], ids=["ddp", "topk", "post_local_sgd"])  # fmt: skip
def test_ddp_goes_before_its_process_group(tmp_path, parallel):
    run = make_run(tmp_path, small_config(2, parallel=parallel))
    assert run_ranks(left_at_the_end, 2, run) == [(0, 1)] * 2
