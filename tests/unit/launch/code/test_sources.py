"""Modules beside the user's program: sent with a call, and what ranks run, whatever they have themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spark_dl

ROOT = str(Path(spark_dl.__file__).parents[1])
RANK = """
import sys
from spark_dl.launch.code import payload
for path in sys.argv[1:]:
    fn, args, kwargs = payload.unpack_call(open(path, "rb").read())
    print(fn(*args))
"""


def python(folder, program, *args, path=()):
    """Runs a program in a folder, with our package and the folders `path` on its import path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), ROOT])}
    done = subprocess.run(
        [sys.executable, *program, *map(str, args)], capture_output=True, text=True, cwd=folder, env=env, timeout=60
    )
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def project(tmp_path):
    """A program with a package, a folder of modules without `__init__.py`, and a module that nothing refers to."""
    folder = tmp_path / "project"
    (folder / "models" / "parts").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("")
    (folder / "models" / "mlp.py").write_text(
        "from . import sizes\nfrom models.parts.layer import width\n"
        "def build(factor):\n    return sizes.DEPTH * width() * factor\n"
        "def fail():\n    raise KeyError('here')\n"
    )
    (folder / "models" / "sizes.py").write_text("DEPTH = 3\n")
    (folder / "models" / "parts" / "layer.py").write_text("def width():\n    return 7\n")
    (folder / "pack.py").write_text(
        "import sys, numpy, models.mlp as mlp\nfrom spark_dl.launch.code import payload\n"
        "fn, args = (mlp.fail, ()) if sys.argv[2] == 'fail' else (mlp.build, (2,))\n"
        "open(sys.argv[1], 'wb').write(payload.pack_call(fn, args, {}))\n"
    )
    return folder


def pack(project, call, what="build", cwd=None):
    _, errors = python(cwd or project, [project / "pack.py"], call, what)
    assert call.exists(), errors
    return call


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_module_beside_the_program_reaches_a_process_that_does_not_have_it(tmp_path, project, in_folder):
    call = pack(project, tmp_path / "call", cwd=project if in_folder else "/")
    assert python("/", ["-c", RANK], call) == (["42"], "")


@pytest.mark.slow
def test_the_driver_s_modules_come_before_those_of_the_process_which_has_the_others(tmp_path, project):
    """An older wheel on the executors: what the driver has loaded is what runs, and what it has not is found there."""
    call = pack(project, tmp_path / "call")
    other = tmp_path / "installed" / "models"
    other.mkdir(parents=True)
    (other / "mlp.py").write_text("def build(factor):\n    return 'its own'\n")
    (other / "extra.py").write_text("WORD = 'of the wheel'\n")
    rank = RANK + "import models.extra; print(models.extra.WORD)"
    assert python("/", ["-c", rank], call, path=[tmp_path / "installed"]) == (["42", "of the wheel"], "")
    imported_before = "import models.mlp\n" + RANK
    assert python("/", ["-c", imported_before], call, path=[tmp_path / "installed"]) == (["42"], "")


EDITED = """
import importlib, os, sys, models.sizes as sizes, models.mlp as mlp
from spark_dl.launch.code import payload
def pack(name):
    importlib.reload(mlp)
    open(name, "wb").write(payload.pack_call(mlp.build, (2,), {}))
pack("first")
open(sizes.__file__, "w").write("DEPTH = 7\\n")
pack("edited")
pack("edited again")
importlib.reload(sizes)
pack("reloaded")
"""


@pytest.mark.slow
def test_what_is_loaded_is_sent_and_an_edit_that_is_not_is_said_once(tmp_path, project):
    """Also in the folder of the modules, which Python looks in first, as a worker of local mode does."""
    said = python(project, ["-c", EDITED])[1]
    assert said.count("sizes.py was edited and not loaded again: the ranks run the text that was loaded") == 1
    calls = [project / name for name in ("first", "edited", "edited again", "reloaded", "first")]
    for folder in ("/", project):
        assert python(folder, ["-c", RANK], *calls) == (["42", "42", "42", "98", "42"], ""), folder


@pytest.mark.slow
def test_a_package_finds_its_files(tmp_path, project):
    (project / "models" / "words.txt").write_text("rome oslo")
    text = (project / "models" / "mlp.py").read_text()
    read = "resources.files('models').joinpath('words.txt').read_text()"
    read = f"from importlib import resources\ndef build(factor):\n    return {read}\n"
    (project / "models" / "mlp.py").write_text(text + read)
    assert python("/", ["-c", RANK], pack(project, tmp_path / "call")) == (["rome oslo"], "")


@pytest.mark.long
@pytest.mark.slow
def test_a_changed_module_replaces_the_earlier_one_in_a_process_that_is_used_again(tmp_path, project):
    first = pack(project, tmp_path / "first")
    (project / "models" / "sizes.py").write_text("DEPTH = 5\n")
    second = pack(project, tmp_path / "second")
    assert python("/", ["-c", RANK], first, second, first) == (["42", "70", "42"], "")


@pytest.mark.slow
def test_a_traceback_has_the_lines_of_the_module(tmp_path, project):
    _, errors = python("/", ["-c", RANK], pack(project, tmp_path / "call", "fail"))
    assert f'File "{project / "models" / "mlp.py"}", line 6, in fail' in errors
    assert "raise KeyError('here')" in errors


def test_installed_packages_and_ours_are_not_sent(tmp_path, project):
    program = (
        "import json, os, sys, numpy, torch, models.mlp, spark_dl\n"
        "from spark_dl.launch.code.sources import project\nprint(sorted(project().sources))"
    )
    names = ["models", "models.mlp", "models.parts.layer", "models.sizes"]
    assert python(project, ["-c", program]) == ([str(names)], "")


def test_a_module_is_sent_in_the_encoding_that_it_names(project, tmp_path):
    """One old file stopped all calls."""
    text = "# -*- coding: latin-1 -*-\nDEPTH = len('fünf')\n"
    (project / "models" / "sizes.py").write_bytes(text.encode("latin-1"))
    call = pack(project, tmp_path / "call")
    assert python(tmp_path, ["-c", RANK], call)[0] == ["56"]


def test_a_module_that_is_no_text_is_named(project, tmp_path):
    program = (project / "pack.py").read_text()
    no_text = "open(mlp.sizes.__file__, 'wb').write(b'\\xff')"
    (project / "pack.py").write_text(program.replace("\nfrom spark_dl", f"\n{no_text}\nfrom spark_dl", 1))
    _, errors = python(project, [project / "pack.py"], tmp_path / "call", "build")
    assert "ValueError: cannot send the module 'models.sizes' to the ranks: " in errors
