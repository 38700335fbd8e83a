"""Who may import whom, and which calls the package does without: the source is read, nothing is run."""

import ast
import configparser
import functools
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

import spark_dl
import spark_dl.ml
from spark_dl.config import strategies
from spark_dl.data.write.arrays import write_arrays
from spark_dl.spec import Run
from tests.builders.models import blobs, small_config

PACKAGE = Path(spark_dl.__file__).parent
ROOT = PACKAGE.parent
MODULES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
SCRIPTS = {p.relative_to(ROOT).as_posix(): p for folder in ("jobs", "examples") for p in (ROOT / folder).rglob("*.py")}
BENCHMARKS = {p.relative_to(ROOT).as_posix(): p for p in sorted((ROOT / "benchmarks").rglob("*.py"))}
ALL = {**MODULES, **SCRIPTS, **BENCHMARKS}


class Import(NamedTuple):
    module: str
    is_at_top: bool
    is_for_types: bool


class Imports(ast.NodeVisitor):
    def __init__(self):
        self.found, self._functions, self._types = [], 0, 0

    def _add(self, module):
        self.found.append(Import(module, not self._functions and not self._types, bool(self._types)))

    def visit_Import(self, node):
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            self._add(inner if is_module_of_ours(inner) else node.module)

    def visit_FunctionDef(self, node):
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815 - ast's names

    def visit_If(self, node):
        for_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        self._types += for_types
        for child in node.body:
            self.visit(child)
        self._types -= for_types
        for child in node.orelse:
            self.visit(child)


def is_module_of_ours(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports_of(path):
    visitor = Imports()
    visitor.visit(tree_of(path))
    return visitor.found


def top_name(module):
    return module.split(".")[0]


@functools.cache
def ours(path):
    """The modules of the package that a file needs when it runs, without `spark_dl.`."""
    found = {i.module for i in imports_of(path) if top_name(i.module) == "spark_dl" and not i.is_for_types}
    return {module.removeprefix("spark_dl").removeprefix(".") for module in found}


def module_of(name):
    return name.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


NAMES = {module_of(name) for name in MODULES}


def files(*prefixes):
    return {name: path for name, path in MODULES.items() if name.startswith(prefixes)}


def test_the_package_is_found():
    assert {"data/plan.py", "launch/barrier.py", "parallel/ddp.py", "driver.py"} <= MODULES.keys()
    assert "jobs/train.py" in SCRIPTS


def test_pyspark_is_imported_on_the_driver_s_side_and_when_it_is_needed():
    driver_side = ("cli/", "driver.py", "prepare.py", "checks/settings.py", "inputs.py", "predict.py", "data/write/",
                   "data/store/", "data/load/local.py", "launch/", "ml/", "scoring/", "baselines/",
                   "doctor/", "ledger.py", "validator.py", "trials/tune.py", "commands/", "certify/")  # fmt: skip
    at_top = ("ml/", "launch/daemon.py")  # Spark ML's classes, and what Spark itself starts
    for name, path in MODULES.items():
        for found in imports_of(path):
            if top_name(found.module) == "pyspark":
                assert name.startswith(driver_side), f"{name} imports {found.module}"
                assert not found.is_at_top or name.startswith(at_top), f"{name} imports it when it is imported"


def test_optional_packages_are_imported_when_they_are_needed():
    optional = {"petastorm", "horovod", "matplotlib", "mlflow", "tensorboard", "datasets", "boto3", "botocore",
                "optuna", "lightning", "pytorch_lightning"}  # fmt: skip
    for name, path in ALL.items():
        at_top = {top_name(i.module) for i in imports_of(path) if i.is_at_top}
        assert not at_top & optional, name


def test_horovod_is_imported_in_its_strategy_alone():
    users = {name for name, path in MODULES.items() if "horovod" in {top_name(i.module) for i in imports_of(path)}}
    assert users == {"parallel/hvd.py"}


@pytest.mark.parametrize("part", ["data", "launch", "parallel"])
def test_data_launch_and_parallel_know_only_themselves_and_what_is_common(part):
    common = {
        "_version",
        "channel",
        "config",
        "gather",
        "generators",
        "nn",
        "optimization",
        "spark_job",
        "spec",
        "storage",
        "world",
    }
    for name, path in files(f"{part}/").items():
        for module in ours(path):
            if name == "launch/daemon.py" and not module:  # an entry of its own, which imports all there is
                continue
            assert module.split(".")[0] in common | {part}, f"{name} imports spark_dl.{module}"


CORRIDOR = (
    "plan", "columns", "parquet", "petastorm", "dataset", "write", "store", "external", "read",
    "load",
)  # fmt: skip
"""The rooms of `data`, in the order in which rows walk through them."""


def test_no_arrow_goes_up_the_corridor():
    for name, path in files("data/").items():
        room = name.split("/")[1].removesuffix(".py")
        others = [module for module in ours(path) if module.startswith("data.")] if room != "__init__" else []
        for module in others:
            assert CORRIDOR.index(module.split(".")[1]) <= CORRIDOR.index(room), f"{name} imports {module}"


def room_of(module):
    """The room of a module: its folder, or the module itself if it stands at the top of the package."""
    parts = module.split(".")
    folder = parts if (PACKAGE / Path(*parts)).is_dir() else parts[:-1]
    return ".".join(folder) or module


def test_rooms_import_each_other_in_one_direction():
    """So that a room can be read, moved and tested without those above it."""
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        room = room_of(module_of(name))
        rooms.setdefault(room, set()).update({room_of(module) for module in ours(path) & NAMES} - {room, ""})
    assert len(rooms) > 40
    assert {"rundir", "parallel"} <= rooms["training"]
    check_no_circle(rooms)


def test_there_is_no_circle():
    check_no_circle({module_of(name): {m for m in ours(path) if m in NAMES} for name, path in MODULES.items()})


def test_each_module_can_be_imported_first():
    """As a task does that unpickles a class. Python imports the packages of a module before the module itself."""
    graph = {}
    for name, path in MODULES.items():
        module = module_of(name)
        found = {i.module.removeprefix("spark_dl").removeprefix(".") for i in imports_of(path) if i.is_at_top}
        with_packages = {p for m in found & NAMES for p in (m, *packages_of(m))}
        graph[module] = with_packages - {module, *packages_of(module)}
    check_no_circle(graph)


def packages_of(module):
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def check_no_circle(graph):
    graph.pop("", None)  # the public names
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_no_module_imports_the_package_that_imports_it():
    names = [
        name for name in MODULES if not name.startswith(("launch/daemon", "commands/"))
    ]  # which use it as users do
    assert [name for name in names if "" in ours(MODULES[name])] == []


def test_every_package_that_is_imported_is_declared():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options"]["install_requires"].split("\n")
    extras = ("plot", "all", "dev")
    declared += [line for extra in extras for line in settings["options.extras_require"][extra].split("\n")]
    names = {re.split(r"[^\w-]", line.strip())[0].lower() for line in declared}
    modules = {"pyyaml": "yaml", "pillow": "PIL"}
    not_on_pypi = ("horovod", "petastorm")  # what pip installs of them does not work beside this torch and pyarrow
    known = {*sys.stdlib_module_names, *not_on_pypi, "spark_dl", "py4j", *(modules.get(name, name) for name in names)}
    at_top = {top_name(i.module) for name in MODULES for i in imports_of(MODULES[name]) if i.is_at_top}
    assert at_top <= known


PURE = {
    **files("data/plan.py", "parallel/exchange/buckets.py", "parallel/exchange/rounds.py", "parallel/cost/cost.py",
            "parallel/mesh/dims.py", "parallel/mesh/planner/"),
    **{name: BENCHMARKS[name] for name in ("benchmarks/model/staleness.py", "benchmarks/model/profiles.py")},
}  # fmt: skip


def test_plans_and_models_of_cost_are_pure():
    pure = {module_of(path.relative_to(ROOT).as_posix()) for path in PURE.values()}
    for name, path in PURE.items():
        needed = {top_name(i.module) for i in imports_of(path) if i.module not in pure}
        assert needed <= {*sys.stdlib_module_names, "numpy"}, name
        assert not needed & {"os", "io", "pathlib", "time", "random", "socket", "threading"}, name


def test_the_guard_of_a_testbed_needs_the_standard_library_alone():
    path = BENCHMARKS["benchmarks/testbed/reap.py"]
    assert {top_name(i.module) for i in imports_of(path)} <= set(sys.stdlib_module_names)


def test_the_rules_of_parameter_servers_are_pure():
    for name in ("rules.py", "deal.py"):
        path = MODULES[f"baselines/servers/{name}"]
        needed = {top_name(i.module) for i in imports_of(path)} - {"spark_dl"}
        assert needed <= {*sys.stdlib_module_names}
        assert not needed & {"os", "io", "pathlib", "time", "random", "socket", "threading"}
        assert ours(path) <= {"baselines.servers.deal", "baselines.servers.settings"}


def test_strategies_are_imported_when_they_are_used():
    """Beside their settings, which are public."""
    for name, path in MODULES.items():
        known = {module for module in ours(path) if module.startswith(("baselines.", "parallel.mesh.auto."))} - {
            "baselines.servers.rules",  # which a benchmark asks how many gradients an update takes
            "baselines.servers.settings",
            "parallel.mesh.auto.settings",
        }
        allowed = ("baselines/", "parallel/mesh/auto/", "checks/", "planning/", "prepare.py", "__init__.py")
        assert not known or name.startswith(allowed), f"{name} imports {known}"


def test_a_strategy_is_named_in_its_module_and_in_the_table_alone():
    """What others must know of it, the class variables of its settings say (`config/parallel.py`)."""
    for name, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Compare) and "strategy" in ast.unparse(node.left):
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                assert not words & {*strategies.BUILT_IN}, f"{name}:{node.lineno}"


ON_RANKS = ("data/", "launch/", "parallel/", "baselines/servers/", "rundir/", "training/", "evaluate", "loop",
            "lightning/", "nn/", "optimization", "channel", "generators", "strategy", "trials/rank", "trials/order",
            "worker", "world", "spec", "config", "storage")  # fmt: skip


def test_what_runs_on_ranks_knows_nothing_of_the_driver_s_side():
    above = {"driver", "prepare", "inputs", "cli", "predict", "track", "ml", "scoring", "trials", "planning"}
    for name, path in files(*ON_RANKS).items():
        found = ours(path) - {"trials.order"}
        assert not {module.split(".")[0] for module in found} & above, name
        assert not [module for module in found if module.startswith("baselines.driver_loop")], name


def test_baselines_are_made_of_what_all_ways_of_training_have_in_common():
    common = {"_version", "baselines", "channel", "config", "data", "gather", "generators", "launch", "loop",
              "parallel", "rundir", "spark_job", "spec", "training", "world"}  # fmt: skip
    for name, path in files("baselines/").items():
        assert {module.split(".")[0] for module in ours(path)} <= common, name


def test_jobs_and_examples_use_the_public_names():
    open_to_jobs = {"cli", "track"}
    for name, node in [(name, node) for name, path in SCRIPTS.items() for node in nodes_of(path)]:
        used = set()
        if isinstance(node, ast.ImportFrom) and top_name(node.module) == "spark_dl":
            is_public = node.module in ("spark_dl", "spark_dl.ml")
            used = {a.name for a in node.names} if is_public else {node.module.split(".")[1]}
        elif isinstance(node, ast.Import):
            used = {a.name.split(".")[1] for a in node.names if a.name.startswith("spark_dl.")}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spark_dl":
            used = {node.attr}
        assert used <= {*spark_dl.__all__, *spark_dl.ml.__all__, *open_to_jobs}, name


def dotted(node):
    """`os.environ.get` for such an expression; nothing for a call's result."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_environment_variables_are_touched_in_launch_alone():
    for name, path in ALL.items():
        used = {dotted(node) for node in nodes_of(path) if isinstance(node, ast.Attribute)}
        used |= {f"{n.module}.{a.name}" for n in nodes_of(path) if isinstance(n, ast.ImportFrom) for a in n.names}
        if not name.startswith("launch/") and name != "parallel/hvd.py":  # which sets HOROVOD_* alone
            assert not used & {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}, name


REVIEWED = {
    ("spec.py", "exec"): "the user's own file, by the name that the driver's caller gave: file.py:name",
    ("config/load.py", "yaml.load"): "with a SafeLoader, which also takes 1e-3 for a number",
    ("launch/rank/as_program.py", "exec"): 'the user\'s program, launch("train.py"), in a process of its own',
    ("launch/code/payload.py", "pickle.loads"): "the user's own code, on its way from the driver to the ranks",
    ("data/petastorm/unischema.py", "pickle.Unpickler"): "creates stubs alone, by exact names; S01 attacks it",
    (
        "baselines/driver_loop/gradient_sum.py",
        "pickle.Unpickler",
    ): "finds arrays and gradient sums alone; S16 attacks it",
    ("rundir/foreign.py", "pickle.Unpickler"): "finds the classes of DCP's metadata alone; S03 attacks it",
    ("rundir/foreign.py", "torch.distributed.checkpoint.FileSystemReader"): "with metadata that was read before",
    ("rundir/foreign.py", "torch.distributed.checkpoint.load"): "of tensors alone, which torch loads as weights only",
    ("scoring/program.py", "torch.export.load"): "of an archive that has only what was checked; S03 attacks it",
}
"""What may be dangerous and was read, with the reason why it is not."""
UNPICKLE = {f"{m}.{f}" for m in ("pickle", "cloudpickle", "dill", "joblib", "marshal") for f in ("load", "loads")}
FORBIDDEN = UNPICKLE | {
    "eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "pickle.Unpickler", "pandas.read_pickle", "shelve.open", "tempfile.mktemp", "diskcache.Cache", "torch.export.load",
    "torch.package.PackageImporter", "torch.hub.load", "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.FileSystemReader", "multiprocessing.connection.Client",
    "shutil.unpack_archive",
}  # fmt: skip
UNPICKLING_COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                          "send_object_list", "recv_object_list", "broadcast_object", "broadcast_optimizer_state",
                          "allgather_object")  # fmt: skip


def full_names(nodes):
    """What each imported name stands for: `{"p": "pickle", "load": "torch.load"}`."""
    found = {"np": "numpy", "pd": "pandas"}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def full_name(node, known):
    first, _, rest = dotted(node).partition(".")
    if not first:  # a method of what a call returns
        return f".{rest}"
    return ".".join(filter(None, [known.get(first, first), rest]))


def dangers(nodes):
    """Yields the names of calls and base classes that may run what they read, and of collectives that unpickle."""
    known = full_names(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from {f"{node.module}.{a.name}" for a in node.names} & FORBIDDEN
        if isinstance(node, ast.ClassDef):
            yield from {full_name(base, known) for base in node.bases} & FORBIDDEN
        if isinstance(node, ast.Attribute) and full_name(node, known) in UNPICKLE:  # also without a call
            yield full_name(node, known)
        if not isinstance(node, ast.Call):
            continue
        called = full_name(node.func, known)
        arguments = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if called in FORBIDDEN or called.split(".")[-1] in UNPICKLING_COLLECTIVES:
            yield called
        if called.split(".")[-1] == "extractall":
            yield f"{called}: the names in an archive are not checked"
        if arguments.get("shell", False) is not False or arguments.get("allow_pickle", False) is not False:
            yield f"{called} with shell or allow_pickle"
        if called in ("subprocess.getoutput", "subprocess.getstatusoutput"):
            yield f"{called} runs a shell"
        if called in ("torch.load", "torch.jit.load") and arguments.get("weights_only") is not True:
            yield f"{called} without weights_only=True"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "recv" and not node.args:
            yield f"{called}: the connections of multiprocessing unpickle, recv_bytes does not"


def dangers_of(code):
    return list(dangers(list(ast.walk(ast.parse(code)))))


def test_S02_nothing_is_unpickled_or_evaluated_but_what_was_reviewed():
    found = {(name, danger) for name, path in ALL.items() for danger in dangers(nodes_of(path))}
    assert found == REVIEWED.keys()
    assert all(REVIEWED.values())


@pytest.mark.parametrize("code", [
    "pickle.loads(b)", "from pickle import loads", "eval('1')", "exec(code)", "subprocess.run(c, shell=True)",
    "subprocess.run(c, shell=flag)", "subprocess.getoutput(c)", "yaml.load(f)", "torch.load(f)",
    "torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)", "np.load(f, allow_pickle=True)",
    "conn.recv()", "from joblib import load", "from tempfile import mktemp", "import pickle as p\np.load(f)",
    "from torch import load\nload(f)", "import torch as t\nt.load(f)", "read = pickle.loads",
    "class U(pickle.Unpickler): pass", "import diskcache\ndiskcache.Cache(f)", "archive.extractall(f)",
    "import torch.distributed.checkpoint as dcp\ndcp.load(s)", "from torch.distributed.checkpoint import load",
])  # fmt: skip
def test_S02_a_dangerous_call_would_be_seen(code):
    assert dangers_of(code)


@pytest.mark.parametrize("code", [
    "pickle.dumps(a)", "yaml.safe_load(f)", "torch.load(f, weights_only=True)", "json.loads(b)", "conn.recv_bytes()",
    "sock.recv(4)", "np.lib.format.read_array(f, allow_pickle=False)", "subprocess.run([c], shell=False)",
    "tempfile.mkdtemp()", "model.eval()", "build().eval()", "from torch import nn",
])  # fmt: skip
def test_S02_what_is_safe_is_no_danger(code):
    assert dangers_of(code) == []


@pytest.mark.parametrize("name", UNPICKLING_COLLECTIVES)
def test_S08_a_collective_that_unpickles_what_peers_send_would_be_seen(name):
    """None is in the package: S02 looks there for all dangers."""
    assert dangers_of(f"dist.{name}(a, b)")
    assert dangers_of("dist.all_gather(a, b); dist.broadcast(a, 0); hvd.broadcast_parameters(a)") == []


@pytest.mark.parametrize(("code", "expected"), [
    ("import pyspark", Import("pyspark", True, False)),
    ("if TYPE_CHECKING:\n    import pyspark", Import("pyspark", False, True)),
    ("def f():\n    from pyspark.sql import DataFrame", Import("pyspark.sql", False, False)),
    ("try:\n    import pyspark\nexcept ImportError:\n    pass", Import("pyspark", True, False)),
    ("class A:\n    from spark_dl import storage", Import("spark_dl.storage", True, False)),
    ("from spark_dl import Config", Import("spark_dl", True, False)),
])  # fmt: skip
def test_an_import_would_be_seen(tmp_path, code, expected):
    (tmp_path / "m.py").write_text(code)
    assert imports_of(tmp_path / "m.py") == [expected]


NETWORK = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "huggingface_hub"}


def test_S20_nothing_is_loaded_from_the_internet():
    """Storage and MLflow's server are named by the user, and reached by their own libraries."""
    uploads = {"track/mlflow_run.py": {"requests"}}  # asks whether the server of the settings answers
    loading = {"from_pretrained", "urlopen", "urlretrieve", "load_state_dict_from_url", "hf_hub_download"}
    for name, path in MODULES.items():
        assert NETWORK & {found.module for found in imports_of(path)} <= uploads.get(name, set()), name
        for call in (node for node in nodes_of(path) if isinstance(node, ast.Call)):
            is_of_a_folder = any(k.arg == "local_files_only" and ast.unparse(k.value) == "True" for k in call.keywords)
            assert is_of_a_folder or dotted(call.func).split(".")[-1] not in loading, name


@pytest.mark.parametrize("path", sorted((ROOT / "conf/requirements").glob("*.txt")), ids=lambda path: path.name)
def test_S20_every_package_of_our_environments_has_one_version(path):
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("-r ")]
    assert packages
    assert [line for line in packages if not re.fullmatch(r"[\w.\[\]-]+==[\w.+]+(; .*)?", line)] == []


def modules_after(statement):
    """The modules of the package that a new process has after a statement."""
    program = f"{statement}; import sys; print(*[m for m in sys.modules if m.split('.')[0] == 'spark_dl'])"
    return subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).split()


def test_an_import_loads_what_it_runs():
    """A package that imports all of itself makes every task import the driver and Spark ML."""
    assert len(modules_after("import spark_dl")) <= 2
    assert len(modules_after("import spark_dl.world")) <= 5
    of_ranks = modules_after("import spark_dl.worker")
    not_of_ranks = ("driver", "ml", "trials", "planning", "doctor", "cli")
    assert [m for m in of_ranks if m.split(".")[1:2] and m.split(".")[1] in not_of_ranks] == []


TRAINING = """
import pickle, sys
from spark_dl import worker
with open(sys.argv[1], "rb") as file:
    worker.main(pickle.load(file))
print(*sys.modules)
"""


def test_a_rank_loads_what_it_runs(tmp_path):
    """Spark starts a Python worker for each rank: what it loads costs each start, and each reader."""
    train = write_arrays(blobs(96), str(tmp_path / "d"))
    spec = spark_dl.ModelSpec(build=functools.partial(nn.Linear, 4, 3))
    run = Run(spec=spec, config=small_config(1), train=train, run_dir=str(tmp_path / "r"))
    (tmp_path / "run").write_bytes(pickle.dumps(run))
    found = subprocess.check_output([sys.executable, "-c", TRAINING, tmp_path / "run"], text=True, timeout=110).split()
    of_driver = {"yaml", "pyspark", "pandas", "mlflow"} | {
        f"spark_dl.{name}" for name in ("driver", "inputs", "prepare", "cli", "track", "checks.settings", "data.write")
    }
    assert sorted(of_driver & {*found}) == []
    own = [name for name in found if name.split(".")[0] == "spark_dl"]
    assert len(own) <= 125, own


def test_public_names_come_before_modules_of_the_same_name():
    program = (
        "import spark_dl, spark_dl.launch.barrier, spark_dl.predict, spark_dl.evaluate, spark_dl.open_dataset; "
        "print(*[type(getattr(spark_dl, n)).__name__ for n in ('launch', 'predict', 'evaluate', 'open_dataset', 'nn')])"
    )
    found = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).split()
    assert found == ["function"] * 4 + ["module"]
    assert {*spark_dl.__all__} <= {*dir(spark_dl)}
    assert all(hasattr(spark_dl, name) for name in spark_dl.__all__)
    with pytest.raises(AttributeError, match="module 'spark_dl' has no attribute 'trian'"):
        spark_dl.trian  # noqa: B018


def test_each_module_has_tests_that_make_check_runs():
    tests_of = runpy.run_path(str(ROOT / "conf" / "changed_tests.py"))["tests_of"]
    assert [name for name in MODULES if not tests_of(f"spark_dl/{name}")] == []
    assert [p.as_posix() for p in tests_of("spark_dl/storage/__init__.py")] == ["tests/unit/test_storage.py"]


def test_each_module_has_a_test_file_of_its_name_or_the_list_says_which():
    listed = runpy.run_path(str(ROOT / "conf" / "changed_tests.py"))["listed_tests"]()
    of_tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    others = {n for n in MODULES if not n.endswith("__init__.py") and f"test_{Path(n).stem}" not in of_tests}
    assert others - {*listed} == set()
    assert {*listed} - {*MODULES} == set()
    of_one_name = {n for n, tests in listed.items() if tests == [f"unit/{Path(n).with_name(f'test_{Path(n).name}')}"]}
    assert of_one_name == set()  # whose name says it
    assert [test for tests in listed.values() for test in tests if not (ROOT / "tests" / test).is_file()] == []


def test_the_package_is_pickled_by_its_name():
    """A function of a notebook, whose variable `spark_dl` it is, goes to the executors."""
    from pyspark import cloudpickle

    assert pickle.loads(pickle.dumps(spark_dl)) is spark_dl
    assert pickle.loads(cloudpickle.dumps(lambda: spark_dl))() is spark_dl
