"""What the cost model takes Spark's treeReduce to do is what Spark does."""

import operator

import pytest

from spark_dl.parallel.cost.cost import tree_levels

pytestmark = pytest.mark.modes("local")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("num_partitions", "depth"), [(4, 2), (5, 2), (10, 2), (16, 2), (16, 3), (27, 3)])
def test_tree_reduce_has_the_stages_that_are_foretold(spark, num_partitions, depth):
    context, group = spark.sparkContext, f"tree-{num_partitions}-{depth}"
    context.setJobGroup(group, group)
    rows = context.parallelize(range(num_partitions), num_partitions)
    assert rows.treeReduce(operator.add, depth) == sum(range(num_partitions))
    context.setLocalProperty("spark.jobGroup.id", None)  # the session serves other tests too
    tracker = context.statusTracker()
    (job,) = tracker.getJobIdsForGroup(group)
    stages = sorted(tracker.getJobInfo(job).stageIds)
    assert [tracker.getStageInfo(stage).numTasks for stage in stages] == tree_levels(num_partitions, depth)
