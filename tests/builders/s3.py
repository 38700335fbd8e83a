"""A real S3 server on loopback, in a process of its own: moto's."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import boto3

ENV = {
    "AWS_ACCESS_KEY_ID": "key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "MARKER-secret-of-the-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucket"


class S3Server:
    """Started on construction, with an empty bucket."""

    def __init__(self):
        # The server picks its port: one that is looked for here could become that of another worker's server.
        command = [pathlib.Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", "0"]
        with tempfile.TemporaryFile("w+") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
            self.address = self._wait_for_address(log)
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://{self.address}",
            region_name="us-east-1",
            aws_access_key_id=ENV["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=ENV["AWS_SECRET_ACCESS_KEY"],
        )
        self.client.create_bucket(Bucket=BUCKET)

    def _wait_for_address(self, log):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            log.seek(0)
            if found := re.search(r"Running on http://(127\.0\.0\.1:\d+)", log.read()):
                return found.group(1)
            assert self.process.poll() is None, "moto_server ended"
            time.sleep(0.05)
        raise AssertionError("moto_server did not start within 30 s")

    def url(self, path, bucket=BUCKET):
        return f"s3://{bucket}/{path}?endpoint_override={self.address}&scheme=http"

    def check_credentials(self):
        """From now on only known users are let in; there is none."""
        url, headers = f"http://{self.address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=b"0", headers=headers, method="POST")
        urllib.request.urlopen(request, timeout=5).close()

    def keys(self, prefix=""):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def kill(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def sessions_server():
    """For a fixture of the whole session: the environment, and a server."""
    os.environ.update(ENV)
    server = S3Server()
    yield server
    server.kill()
