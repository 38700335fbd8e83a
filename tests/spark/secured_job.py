"""A training in a session that is secured as Spark can be: `python -m tests.spark.secured_job FOLDER`.

All its secrets have the word of `MARKER`, or are in `FOLDER/secrets`. What anybody can see of it is in the other files.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import pathlib
import sys
import traceback
import urllib.request

import spark_dl
from tests.builders.models import MLP, blobs, small_config
from tests.spark.conftest import FAST_JVM, SPARK_HOME

MARKER, SEEN = "m4rk3rs3cr3t", "s33nbyall"
CONF = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": f"{MARKER}-spark",
    "spark.hadoop.fs.azure.account.key.account.dfs.core.windows.net": f"{MARKER}-azure",
    "spark.hadoop.fs.azure.sas.container.account.blob.core.windows.net": f"{MARKER}-sas",
    "spark.hadoop.fs.gs.auth.service.account.private.key": f"{MARKER}-google",
    "spark.hadoop.fs.s3a.encryption.key": f"{MARKER}-s3",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.executor.extraJavaOptions": FAST_JVM,
    "spark.executor.memory": "512m",
    "spark.log.level": "INFO",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
}


def keep_secrets(folder):
    """Writes down every secret of a run, as `os.urandom` makes them."""
    urandom, file = os.urandom, open(folder / "secrets", "a")  # noqa: SIM115 - open to the end

    def kept(size):
        made = urandom(size)
        if size == 32:
            file.write(made.hex() + "\n")
            file.flush()
        return made

    os.urandom = kept


def look_around(has_failed=False):
    """On a rank: what any user of its host sees of all processes, and the secret that it was given."""
    seen = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            seen.append(pathlib.Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    if has_failed:
        raise ValueError("the cause")
    return {"cmdlines": seen, "given": hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest()}


def rest(spark):
    """What Spark's UI says of the application."""
    context, found = spark.sparkContext, ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
    for page in ("jobs", "stages", "executors", "environment", "sql?details=true&planDescription=true", "storage/rdd"):
        found += opener.open(f"{url}/{page}", timeout=20).read().decode()
    return found


def main(folder):
    keep_secrets(folder)
    for name in ("events", "local"):
        (folder / name).mkdir(mode=0o700)
    os.environ.update(AWS_SECRET_ACCESS_KEY=f"{MARKER}-aws")
    conf = {**CONF, "spark.eventLog.dir": f"file://{folder}/events", "spark.local.dir": str(folder / "local")}
    spark = spark_dl.build_session(SEEN, master="local-cluster[1,2,768]", conf=conf)
    settings = spark_dl.Launch(num_ranks=2, start_timeout_s=100, collective_timeout_s=60)
    answer = {"conf": {key: spark.conf.get(key, None) for key in CONF if MARKER not in CONF[key]}}
    answer["logs"] = f"{SPARK_HOME}/work/{spark.sparkContext.applicationId}"
    try:
        spark_dl.launch(look_around, settings=settings, spark=spark)
    except ValueError as error:
        answer["refused"] = str(error)
    private = {"start_timeout_s": 100, "collective_timeout_s": 60, "allow_plaintext": True}
    settings = spark_dl.Launch(num_ranks=2, **private)
    env = {"MY_TOKEN": f"{MARKER}-env"}
    found = spark_dl.launch(look_around, settings=settings, spark=spark, env=env)
    answer["given"] = [each["given"] for each in found]
    (folder / "cmdlines").write_text("\n".join(line for each in found for line in each["cmdlines"]))
    rows = blobs(96)
    df = spark.createDataFrame([(f.tolist(), int(n)) for f, n in zip(rows["features"], rows["label"], strict=True)],
                               "features array<float>, label long")  # fmt: skip
    config = small_config(2, train={"epochs": 1, "global_batch_size": 24}, launch=private)
    result = spark_dl.train(df, MLP, config, run_dir=str(folder / "run"), progress=False)
    answer["steps"] = result.steps
    (folder / "rest").write_text(rest(spark))
    try:
        spark_dl.launch(look_around, True, settings=settings, spark=spark, env=env)
    except spark_dl.RankError:
        traceback.print_exc(file=(text := io.StringIO()))
        (folder / "traceback").write_text(text.getvalue())
    spark.stop()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
