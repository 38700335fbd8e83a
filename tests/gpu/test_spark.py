"""Spark's own GPUs: from the discovery script to the device of a rank, of a script, and of predictions.

On a CPU, the sessions have no GPUs, and the same programs run on the CPU.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.spark.conftest import FAST_JVM, REPOSITORY, SPARK_HOME

START = """
import json, os, sys
import torch
import spark_dl

DEVICE, FOLDER, MASTER, CONF = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
spark = spark_dl.build_session("gpu", master=MASTER, conf=CONF)
df = spark.range(240).selectExpr("array(CAST(id % 3 AS FLOAT), 1F) AS x", "id % 3 AS label", "id").repartition(2)
spec = spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 3), predict=lambda output: {
    "best": output.argmax(1), "on": torch.full((len(output),), float(output.is_cuda))})

def config(num_ranks, **launch):
    return spark_dl.Config(
        data=spark_dl.Data(features=("x",), label="label"), launch=spark_dl.Launch(num_ranks=num_ranks, **launch),
        train=spark_dl.Train(global_batch_size=48, epochs=3, lr=0.5, metrics={
            "accuracy": {"class": "MulticlassAccuracy", "num_classes": 3}}, validation_fraction=0.2))

def meet():
    import torch.distributed as dist
    model = torch.nn.Linear(2, 2)
    if DEVICE == "cuda":
        model = model.to(torch.cuda.current_device())
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    return str(next(model.parameters()).device)
"""
CLUSTER = """
settings = config(1) if DEVICE == "cuda" else config(1, device="cpu")  # on a GPU without being told
found = {}
for again in range(2):  # the second one in the Python workers of the first
    result = spark_dl.train(df, spec, settings, run_dir=f"{FOLDER}/run-{again}", progress=False)
    found[f"accuracy {again}"] = result.metrics["accuracy"]
    found[f"evaluate {again}"] = spark_dl.evaluate(df, spec, result.checkpoint, progress=False)["accuracy"]
rows = spark_dl.predict(df, spec, result.checkpoint).collect()
found["predictions"] = sum(row.best == row.label for row in rows) / len(rows)
found["predicted on a GPU"] = {row.on for row in rows} == {1.0}
found["rank"] = spark_dl.launch(meet, settings=settings.launch)
with open(f"{FOLDER}/script.py", "w") as file:
    file.write("import os, torch; open(os.path.dirname(__file__) + '/out', 'w').write("
               "f'{os.environ.get(\\"CUDA_VISIBLE_DEVICES\\", \\"\\")} {torch.cuda.device_count()}')")
spark_dl.launch(f"{FOLDER}/script.py", settings=settings.launch)
found["script"] = open(f"{FOLDER}/out").read()
print(json.dumps(found))
"""
LOCAL = """
settings = config(2, device=DEVICE, gpus_per_rank=0.5)
result = spark_dl.train(df, spec, settings, run_dir=f"{FOLDER}/run", progress=False)
print(json.dumps({"accuracy": result.metrics["accuracy"], "ranks": spark_dl.launch(meet, settings=settings.launch)}))
"""


@pytest.fixture
def run(device, tmp_path):
    """The last line of a program in a session of its own."""

    def run(program, master, conf):
        (tmp_path / "program.py").write_text(START + program)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
        env |= {
            "PYTHONPATH": str(REPOSITORY), "JAVA_TOOL_OPTIONS": FAST_JVM, "SPARK_HOME": SPARK_HOME,
            "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable,
        }  # fmt: skip
        conf = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", **conf}
        command = [sys.executable, "program.py", device, str(tmp_path), master, json.dumps(conf)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.timeout(300)
def test_a_cluster_gives_ranks_whole_gpus_and_tasks_a_part(run, device):
    """Tasks of predictions have half a GPU, as in the session; ranks have a profile of their own."""
    conf = {}
    if device == "cuda":
        conf = {"spark.task.resource.gpu.amount": "0.5"}
        for part in ("worker", "executor"):
            conf[f"spark.{part}.resource.gpu.amount"] = "1"
            conf[f"spark.{part}.resource.gpu.discoveryScript"] = str(REPOSITORY / "conf" / "discover_gpu.sh")
    found = run(CLUSTER.replace("config(1) if", "config(1, gpus_per_rank=1) if"), "local-cluster[1,2,1024]", conf)
    for name in ("accuracy 0", "accuracy 1", "evaluate 0", "evaluate 1", "predictions"):
        assert found[name] > 0.9, name
    assert found["predicted on a GPU"] == (device == "cuda")
    visible, count = found["script"].rsplit(" ", 1)
    if device == "cuda":
        assert found["rank"][0].startswith("cuda:")
        assert visible.startswith("GPU-")
        assert count == "1"
    else:
        assert found["rank"] == ["cpu"]


@pytest.mark.timeout(300)
def test_with_a_local_master_two_ranks_share_a_gpu(run, device):
    found = run(LOCAL, "local[2]", {})
    assert found["accuracy"] > 0.9
    assert found["ranks"] == (["cuda:0"] * 2 if device == "cuda" else ["cpu"] * 2)
