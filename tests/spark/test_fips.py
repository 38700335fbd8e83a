"""Hosts in FIPS mode, whose Python refuses MD5. SHA-1 is refused here, too, as some of them do."""

import subprocess
import sys

import pytest

from tests.spark.conftest import REPOSITORY
from tests.spark.test_jobs import environment as job_environment

REFUSES = """
import hashlib, hmac

def refused(name, make):
    def call(*args, usedforsecurity=True, **kwargs):
        if usedforsecurity:
            raise ValueError(f"[digital envelope routines] unsupported: {name}")
        return make(*args, usedforsecurity=False, **kwargs)
    return call

def checked(make, at):
    def call(*args, **kwargs):
        digest = kwargs.get("digestmod", kwargs.get("digest", args[at] if len(args) > at else ""))
        if digest in ("md5", "sha1", hashlib.md5, hashlib.sha1):
            raise ValueError(f"[digital envelope routines] unsupported: {digest}")
        return make(*args, **kwargs)
    return call

new = hashlib.new
hashlib.md5, hashlib.sha1 = refused("md5", hashlib.md5), refused("sha1", hashlib.sha1)
hashlib.new = lambda name, *args, **kwargs: (
    getattr(hashlib, name) if name in ("md5", "sha1") else lambda *a, **k: new(name, *a, **k)
)(*args, **kwargs)
hmac.new, hmac.digest = checked(hmac.new, 2), checked(hmac.digest, 2)
"""
JOB = f"""
import hashlib, hmac, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import spark_dl
from tests.builders.models import MLP, small_config

def refuses():
    import hashlib, hmac
    found = []
    for call in (lambda: hashlib.md5(b""), lambda: hmac.new(b"k", b"m", "md5"), lambda: hashlib.new("sha1")):
        try:
            call()
        except ValueError as error:
            found.append(str(error)[-3:])
    return found

spark = spark_dl.build_session("test", master="local[3]")
print("refused", refuses(), spark_dl.launch(refuses, num_ranks=2, spark=spark))
df = spark.range(96).selectExpr("array(cast(id % 5 as float), 1f, 0f, 2f) as features", "id % 3 as label")
for ranks, parallel in ((2, spark_dl.DDP()), (3, spark_dl.ParameterServer(num_servers=1))):
    config = small_config(ranks, train={{"epochs": 1}}, parallel=parallel)
    result = spark_dl.train(df, MLP, config, run_dir=sys.argv[1] + str(ranks))
    print("trained", result.rows, spark_dl.evaluate(df, MLP, result.checkpoint)["rows"])
    print("predicted", spark_dl.predict(df, MLP, result.checkpoint).count())
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_host_that_refuses_md5_trains_evaluates_and_predicts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    (tmp_path / "job.py").write_text(JOB)
    env = job_environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env.get('PYTHONPATH', '')}".rstrip(":")
    done = subprocess.run(
        [sys.executable, tmp_path / "job.py", tmp_path / "run"], env=env, timeout=200, capture_output=True, text=True
    )
    refused = ["md5", "md5", "ha1"]
    assert done.stdout.splitlines() == [
        f"refused {refused} {[refused, refused]}", *["trained 96 96", "predicted 96"] * 2
    ], done.stderr[-3000:]  # fmt: skip
