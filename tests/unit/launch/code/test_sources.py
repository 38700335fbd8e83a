"""Modules beside the user's program: sent with a call, and what ranks run, whatever they have themselves."""

import importlib
import inspect
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import spark_dl
from spark_dl.launch.code import sources
from spark_dl.launch.code.sources import Project, Source

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


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This process as a driver in a folder, and then as a rank; all that was imported is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "_known", {})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]
    sources._is_in_project.cache_clear()


def loaded(name):
    importlib.invalidate_caches()
    return importlib.import_module(name)


def as_rank(sent):
    """Takes modules as another process does."""
    sources.install(Project(sent, "another process"))


def test_what_is_loaded_of_the_project_is_sent_with_its_text_and_place(here):
    (here / "inner").mkdir()
    (here / "inner" / "__init__.py").write_text("A = 1\n")
    (here / "inner" / "part.py").write_text("B = 2\n")
    (here / "never_loaded.py").write_text("")
    loaded("inner.part")
    sent = sources.project()
    assert sent.sources == {
        "inner": Source(str(here / "inner" / "__init__.py"), True, "A = 1\n"),
        "inner.part": Source(str(here / "inner" / "part.py"), False, "B = 2\n"),
    }
    assert sent.process == sources._PROCESS
    os.remove(here / "inner" / "part.py")  # a cell of a notebook has moved it
    assert [*sources.project().sources] == ["inner"]


def test_an_edit_is_sent_when_the_module_is_loaded_again(here, caplog):
    path = here / "edited_module.py"
    path.write_text("A = 1\n")
    module = loaded("edited_module")

    def sent():
        caplog.clear()
        return sources.project().sources["edited_module"].text, "was edited and not loaded again" in caplog.text

    assert sent() == ("A = 1\n", False)
    path.write_text("A = 12\n")
    assert sent() == ("A = 1\n", True)
    assert sent() == ("A = 1\n", False)  # it is said once
    importlib.reload(module)
    assert sent() == ("A = 12\n", False)
    os.utime(path, ns=(0, 10**18))  # saved again, as it is
    assert sent() == ("A = 12\n", False)


def test_a_project_of_data_is_not_sent(here, monkeypatch):
    (here / "long_module.py").write_text("#" * 99 + "\n")
    loaded("long_module")
    monkeypatch.setattr(sources, "_MAX_BYTES", 100)
    assert [*sources.project().sources] == ["long_module"]
    monkeypatch.setattr(sources, "_MAX_BYTES", 99)
    assert sources.project().sources == {}


def test_a_rank_has_the_file_the_text_and_the_package_of_the_driver(here):
    package, part = str(here / "sent_package" / "__init__.py"), str(here / "sent_package" / "part.py")
    (here / "sent_package").mkdir()
    text = "def fail():\n    raise KeyError('here')\n"
    as_rank({"sent_package": Source(package, True, "A = 1\n"), "sent_package.part": Source(part, False, text)})
    module = loaded("sent_package.part")
    assert (module.__file__, module.__package__, inspect.getsource(module.fail)) == (part, "sent_package", text)
    assert module.__loader__.get_filename() == part
    assert (sys.modules["sent_package"].__file__, sys.modules["sent_package"].__path__[0]) == (
        package, str(here / "sent_package"),
    )  # fmt: skip
    with pytest.raises(KeyError) as error:
        module.fail()
    assert "raise KeyError('here')" in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("owner", ["this user", "another user", "nobody"])
def test_a_package_has_its_folder_if_it_is_this_user_s_and_what_is_installed(here, monkeypatch, owner):
    folder, installed = here / "elsewhere" / "a_package", here / "a_package"
    installed.mkdir()
    if owner != "nobody":
        folder.mkdir(parents=True)
    if owner == "another user" and os.geteuid() == 0:
        os.chown(folder, 65534, -1)
    elif owner == "another user":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    as_rank({"a_package": Source(str(folder / "__init__.py"), True, "A = 1\n")})
    assert [*loaded("a_package").__path__] == [*[str(folder)] * (owner == "this user"), str(installed)]


def test_a_folder_without_a_module_of_its_own_leads_to_those_below_it(here):
    as_rank({"spaces.deep.part": Source("/nowhere/spaces/deep/part.py", False, "B = 2\n")})
    assert loaded("spaces.deep.part").B == 2
    with pytest.raises(ModuleNotFoundError):
        loaded("spaces.other")
    with pytest.raises(ModuleNotFoundError):
        loaded("space")


def test_a_later_call_replaces_what_has_changed_and_keeps_the_rest(here):
    as_rank({"one_sent": Source("/a/one_sent.py", False, "A = 1\n")})
    first = loaded("one_sent")
    as_rank({"one_sent": Source("/a/one_sent.py", False, "A = 1\n")})
    assert loaded("one_sent") is first
    as_rank({})  # a call of a function that needs none
    assert loaded("one_sent") is first
    as_rank({"one_sent": Source("/a/one_sent.py", False, "A = 2\n")})
    assert loaded("one_sent").A == 2
    assert sum(isinstance(finder, sources._Finder) for finder in sys.meta_path) == 1


def test_a_module_that_was_found_elsewhere_is_replaced_with_those_that_took_from_it(here):
    (here / "found_here.py").write_text("A = 1\n")
    as_rank({"taker": Source("/a/taker.py", False, "from found_here import A\n")})
    assert loaded("taker").A == 1
    as_rank({"taker": Source("/a/taker.py", False, "from found_here import A\n"),
             "found_here": Source("/a/found_here.py", False, "A = 2\n")})  # fmt: skip
    assert (loaded("taker").A, loaded("found_here").__file__) == (2, "/a/found_here.py")


def test_the_process_that_has_loaded_the_modules_keeps_them(here):
    (here / "kept_module.py").write_text("A = 1\n")
    module = loaded("kept_module")
    sources.install(Project({"kept_module": Source("/a", False, "A = 2\n")}, sources._PROCESS))
    assert loaded("kept_module") is module
