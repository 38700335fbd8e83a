"""Programs as the function of a rank: what can be one, and how its end is reported."""

import dataclasses
import os
import signal
import subprocess
import sys
import sysconfig
import time

import pytest
from pyspark import SparkFiles

from spark_dl.launch.failures.errors import ScriptError
from spark_dl.launch.rank.script import Script, read_script, run_script


def script_of(tmp_path, text, *args, env=None):
    path = tmp_path / "train.py"
    path.write_text(text)
    return read_script(str(path), args, env or {})


@pytest.mark.parametrize(("program", "args", "message"), [
    ("missing.py", (), "no file 'missing.py' on the driver"),
    (".", (), "no file"),
    ("-m", (), 'name of a module after "-m"'),
    ("-m", ("--lr",), 'name of a module after "-m"'),
    ("-m", ("json", {"lr": 1}), r"strings or numbers, found \{'lr': 1\}"),
    ("-m", ("json", True), "strings or numbers, found True"),
])  # fmt: skip
def test_what_is_no_program_is_an_error_on_the_driver(program, args, message):
    with pytest.raises(ValueError, match=message):
        read_script(program, args, {})


@pytest.mark.parametrize(("env", "message"), [
    (["A=1"], "env: expected a mapping of names to values"),
    ({"A": 1}, "env: expected names and values of type str, found 'A': 1"),
    ({"MASTER_PORT": "1"}, "env: MASTER_PORT is set by spark_dl on each rank"),
])  # fmt: skip
def test_variables_that_ranks_cannot_get_are_an_error_on_the_driver(env, message):
    with pytest.raises(ValueError, match=message):
        read_script("-m", ["json"], env)


def test_a_program_runs_where_it_is_with_its_arguments_and_the_driver_s_folder(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("value = 7")
    monkeypatch.chdir(tmp_path)
    text = (
        "import os, sys, beside\n"
        "open('out', 'w').write(repr((sys.argv, os.getcwd(), beside.value, os.environ['LR'], __name__)))"
    )
    run_script(script_of(tmp_path, text, "--lr", 0.1, env={"LR": "3"}))
    path = str(tmp_path / "train.py")
    assert (tmp_path / "out").read_text() == repr(([path, "--lr", "0.1"], str(tmp_path), 7, "3", "__main__"))


def test_a_program_sees_the_gpus_of_its_rank_unless_the_user_says_which(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # tests without a GPU set it
    text = "import os; open('out', 'a').write(os.environ.get('CUDA_VISIBLE_DEVICES', 'all') + ' ')"
    text = text.replace("'out'", repr(str(tmp_path / "out")))
    for gpu_env, env in (({}, {}), ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {}),
                         ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "7"})):  # fmt: skip
        run_script(script_of(tmp_path, text, env=env), gpu_env=gpu_env)
    assert (tmp_path / "out").read_text() == "all GPU-a 7 "


def test_a_program_that_another_host_does_not_have_is_sent(tmp_path):
    script = script_of(tmp_path, f"import os; open({str(tmp_path / 'out')!r}, 'w').write(__file__)")
    (tmp_path / "train.py").write_text("raise SystemExit('another program of this name')")
    run_script(Script(name=script.name, args=(), folder="/nowhere", env={}, source=script.source))
    copy = (tmp_path / "out").read_text()
    assert copy.endswith("/train.py")
    assert not os.path.exists(os.path.dirname(copy))


def test_a_module_runs_as_under_torchrun(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "job.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.chdir(tmp_path)
    run_script(read_script("-m", ["package.job", "0"], {}))
    with pytest.raises(ScriptError, match=r"^-m package.job ended with exit code 3$"):
        run_script(read_script("-m", ["package.job", "3"], {}))


LIKE_PYTHON = """
import multiprocessing, pickle, sys
class Named: pass
def work(queue): queue.put(__name__)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Named())).__class__ is Named
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=work, args=((queue := context.Queue()),))
    worker.start()
    found = [sorted(n for n in globals() if n != "__cached__"), __file__, __spec__, __doc__, __builtins__.__name__,
             sys.modules["__main__"].Named is Named, sys.argv, sys.path[0], queue.get(timeout=60)]
    open(sys.argv[1], "w").write(repr(found))
"""


def test_a_program_finds_what_python_would_give_it(tmp_path):
    """Names, the path, pickles of its classes, and processes that multiprocessing spawns."""
    script = script_of(tmp_path, LIKE_PYTHON, tmp_path / "out")
    run_script(script)
    found = (tmp_path / "out").read_text()
    subprocess.run([sys.executable, tmp_path / "train.py", tmp_path / "out"], check=True, timeout=60, cwd="/")
    assert found == (tmp_path / "out").read_text()


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A working folder where somebody has put modules, as a worker of a local session finds it; yields what they do."""
    folder, marker = tmp_path / "shared", tmp_path / "exploded"
    folder.mkdir()
    for name in ("ctypes", "os", "io", "runpy", "importlib", "torch", "json", "sitecustomize", "usercustomize",
                 "random", "encodings", "posixpath", "spark_dl", "as_program", "beside"):  # fmt: skip
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # Python's -m does so
    return marker


@pytest.mark.parametrize("path", [None, "", ":/tmp", "/tmp::"])
@pytest.mark.parametrize("is_there", [True, False])
def test_S21_a_program_finds_nothing_in_the_working_folder(tmp_path, planted, monkeypatch, path, is_there):
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("value = 7")
    text = f"import ctypes, json, os, random, torch; open({str(tmp_path / 'out')!r}, 'w').write(os.getcwd())"
    script = script_of(tmp_path / "own", ("import beside; assert beside.value == 7; " if is_there else "") + text)
    if not is_there:  # on a host that does not have it
        script = dataclasses.replace(script, name="/nowhere/train.py")
    run_script(script)
    assert (tmp_path / "out").read_text() == str(tmp_path / "shared")
    assert not planted.exists(), planted.read_text()


@pytest.mark.parametrize("is_below_site_packages", [False, True])
def test_a_program_finds_what_was_sent_to_the_executor(tmp_path, monkeypatch, is_below_site_packages):
    """Spark's entry of the path is `.`, the executor's working folder, which is not the program's."""
    if is_below_site_packages:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "sent_module.py").write_text("value = 3")
    script = script_of(tmp_path, "import sent_module; assert sent_module.value == 3")
    monkeypatch.chdir(tmp_path / "executor")
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(SparkFiles, "_root_directory", ".")
    run_script(script)


@pytest.mark.parametrize(("text", "end"), [
    ("import sys; sys.exit(5)", "ended with exit code 5"),
    ("raise KeyError('x')", "ended with exit code 1"),
    ("import os; os._exit(7)", "ended with exit code 7"),
    ("import os; os.kill(os.getpid(), 9)", r"was killed by SIGKILL \(9\)"),
])  # fmt: skip
def test_the_exit_code_or_the_signal_is_named(tmp_path, text, end):
    with pytest.raises(ScriptError, match=f"^train.py {end}$"):
        run_script(script_of(tmp_path, text))


def test_a_rank_that_is_killed_takes_its_program_with_it(tmp_path):
    script = tmp_path / "train.py"
    pid_file = tmp_path / "pid"
    script.write_text(
        f"import os, time; open({str(pid_file) + '.new'!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(pid_file) + '.new'!r}, {str(pid_file)!r}); time.sleep(60)"
    )
    rank = (
        "import sys; from spark_dl.launch.rank.script import read_script, run_script\n"
        "run_script(read_script(sys.argv[1], [], {}))"
    )
    process = subprocess.Popen([sys.executable, "-c", rank, str(script)])
    end = time.monotonic() + 60
    while not pid_file.exists():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pid = int(pid_file.read_text())
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
