"""Owners in names: which are dead, and that all temporary folders of the package have one."""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import spark_dl
from spark_dl.storage.owner import Owner, owner_of, owner_of_folder, start_time, temporary_prefix, this_process

PACKAGE = Path(spark_dl.__file__).parent
needs_proc = pytest.mark.skipif(this_process() is None, reason="owners are known by /proc")


@needs_proc
def test_a_folder_names_its_owner(tmp_path):
    folder = tempfile.mkdtemp(prefix=temporary_prefix(), dir=tmp_path)
    owner = owner_of_folder(os.path.basename(folder))
    assert owner == this_process() == owner_of(f"{owner}-0123")
    assert (owner.pid, owner.namespace) == (os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    assert not owner.is_dead()


@needs_proc
def test_an_owner_is_dead_when_its_process_has_ended_also_as_a_zombie_and_when_its_pid_is_used_again():
    here = this_process()
    process = subprocess.Popen(["sleep", "600"])
    owner = Owner(process.pid, start_time(process.pid), here.namespace, here.boot)
    assert not owner.is_dead()
    assert Owner(owner.pid, owner.started - 1, here.namespace, here.boot).is_dead()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_dead(), "a zombie"
    process.wait()
    assert owner.is_dead()


@needs_proc
def test_nothing_is_said_about_the_owners_of_another_place():
    here = this_process()
    assert Owner(here.pid, 1, here.namespace, here.boot).is_dead()
    assert not Owner(here.pid, 1, here.namespace + 1, here.boot).is_dead()
    assert not Owner(here.pid, 1, here.namespace, "ffffffff").is_dead()


INNER = "from spark_dl.storage.owner import this_process; print(this_process())"


@needs_proc
@pytest.mark.slow
def test_a_process_whose_proc_is_that_of_another_namespace_has_no_owner():
    """As in a container that shares the host's /proc: the processes there have other numbers."""
    space = ["unshare", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make PID namespaces")
    command = [*space, sys.executable, "-c", INNER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("None\n", "")


@pytest.mark.parametrize("name", ["", "abc", "12-34-0", "1-2-3-0123456-abc", "1-2-3-01234567", "1-2-3-01234567-",
                                  "1-2-3-01234567-a/b", "1234567890-2-3-01234567-a", "-1-2-3-01234567-a"])  # fmt: skip
def test_other_names_have_no_owner(name):
    assert owner_of(name) is None
    assert owner_of_folder(f"spark_dl-{name}") is None
    assert owner_of_folder("1-2-3-01234567-a") is None


def temporary(tree):
    """Yields the prefix of each call that makes a temporary folder or file."""
    makers = ("mkdtemp", "TemporaryDirectory", "mkstemp", "NamedTemporaryFile")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in makers:
            yield next((ast.unparse(each.value) for each in node.keywords if each.arg == "prefix"), None)


def test_every_temporary_folder_of_the_package_has_its_owner_in_its_name():
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "bench"]
    found = {path.relative_to(PACKAGE).as_posix(): set(temporary(ast.parse(path.read_text()))) for path in paths}
    assert set().union(*found.values()) == {"temporary_prefix()"}, found
    assert {"data/load/local.py", "launch/rank/script.py", "track/tensorboard.py"} <= {n for n, p in found.items() if p}
