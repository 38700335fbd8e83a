#!/usr/bin/env bash
# Makes .venv with the pinned requirements and the package, and checks Python and Java. Called by every `make` target;
# does nothing when .venv is already made from the requirements as they are now.
#   conf/setup_env.sh demo         makes .venv with what the package and `make train` need alone
#   conf/setup_env.sh petastorm    makes .venv-petastorm as well, in which the tests and benchmarks run Petastorm itself
#   conf/setup_env.sh peers        makes .venv-peers as well, with the other loaders that `jobs/bench.py loader` measures
#   conf/setup_env.sh oldest       makes .venv-oldest as well, with the oldest versions of setup.cfg, for `make test-oldest`
#   conf/setup_env.sh horovod      builds Horovod for the torch of .venv and installs it there; the wheel is kept in .wheels
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "set-up: $*" >&2; }
fail() { echo "set-up failed: $*" >&2; exit 1; }
key_of() { cat "$@" conf/setup_env.sh | sha256sum | cut -c1-16; }
is_own() { cat .venv/.made-from .venv/.demo-from 2>/dev/null | cut -d' ' -f2- | grep -qxF "$PWD"; } # not of a moved folder
is_made() { [ "$(cat "$1/.made-from" 2>/dev/null)" = "$2 $PWD" ]; } # folder, key
add_venv_behind() { echo "$PWD/.venv/lib/python$version/site-packages" >"$1/lib/python$version/site-packages/_after_own_packages.pth"; }
pip_of() { "$1/bin/python" -m pip --disable-pip-version-check install -q "${@:2}" >&2; } # folder, arguments

if ! java -version 2>&1 | grep -qE 'version "(17|21)'; then
    found=$(java -version 2>&1 | head -n 1 || true)
    answer=
    if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ] && [ -t 0 ]; then
        read -r -p "Java 17 or 21 is needed (found: ${found:-none}). Install openjdk-17-jre-headless with apt-get? [y/N] " answer
    fi
    if [ "$answer" = y ]; then
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q openjdk-17-jre-headless; } >&2 ||
            fail "apt-get could not install openjdk-17-jre-headless; install Java 17 or 21 yourself"
        java -version 2>&1 | grep -qE 'version "(17|21)' ||
            fail "Java 17 is installed, but 'java' on the PATH is ${found}; put Java 17 first on the PATH"
    else
        fail "Java 17 or 21 is needed (found: ${found:-none}). Debian or Ubuntu: sudo apt install openjdk-17-jre-headless"
    fi
fi

make_venv() { # what it is for
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "the pinned requirements need Python 3.11 or newer (found: $("$python" --version 2>&1)); name another one with" \
            "PYTHON=python3.11 make ... (on 3.10 the package itself can be installed: pip install .)"
    say "making .venv $1 (the first time, and when the requirements change; takes a few minutes)"
    [ -x .venv/bin/python ] && is_own || {
        rm -rf .venv
        "$python" -m venv .venv || fail "could not make .venv; on Debian or Ubuntu: sudo apt install python3-venv"
    }
    rm -f .venv/.made-from .venv/.demo-from
}
key=$(key_of conf/requirements/{main,dev,mlflow}.txt setup.cfg)
if [ "${1:-}" = demo ]; then
    is_made .venv "$key" && exit 0
    demo="$(key_of conf/requirements/main.txt setup.cfg) $PWD"
    [ "$(cat .venv/.demo-from 2>/dev/null)" = "$demo" ] && exit 0
    make_venv "for make train"
    pip_of .venv -r conf/requirements/main.txt
    pip_of .venv --no-deps --no-build-isolation -e .
    echo "$demo" >.venv/.demo-from
    say "done: $(du -sm .venv | cut -f1) MB"
    exit 0
fi
if ! is_made .venv "$key"; then
    make_venv "for the tests"
    pip_of .venv -r conf/requirements/dev.txt
    pip_of .venv --no-deps -r conf/requirements/mlflow.txt
    pip_of .venv --no-deps --no-build-isolation -e .
    echo "$key $PWD" >.venv/.made-from
    say "done"
fi
if [ "${1:-}" = horovod ]; then
    recipe=$(grep '^torch==' conf/requirements/main.txt && readlink -f .venv/bin/python && cat conf/build_horovod.sh conf/requirements/horovod.txt)
    key=$(echo "$recipe" | sha256sum | cut -c1-16)
    [ "$(cat .venv/.horovod-from 2>/dev/null)" = "$key" ] && exit 0
    wheels=.wheels/$key
    log=.wheels/build.log
    if ! ls $wheels/horovod-*.whl >/dev/null 2>&1; then
        say "building Horovod 0.28.1 (the first time, and when torch's version changes; takes some minutes)"
        rm -rf .wheels && mkdir -p $wheels
        conf/build_horovod.sh .venv/bin/python $wheels >$log 2>&1 ||
            fail "Horovod could not be built: $(grep -E 'error: |CMake Error' $log | grep -v subprocess-exited | head -n 1 | cut -c1-200)" \
                "(all of it in $log); the tests that need it are skipped"
    fi
    pip_of .venv --no-deps --force-reinstall $wheels/horovod-*.whl
    if ! .venv/bin/python -c 'import horovod.torch' >$log 2>&1; then
        .venv/bin/python -m pip uninstall -q -y horovod
        fail "Horovod is built, but cannot be imported: $(tail -n 1 $log | cut -c1-200); the tests that need it are skipped"
    fi
    echo "$key" >.venv/.horovod-from
    say "Horovod is installed in .venv"
    exit 0
fi
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "${1:-}" = peers ]; then
    env=.venv-peers
    key=$(key_of conf/requirements/peers.txt)
    is_made $env "$key" && exit 0
    say "making $env with Mosaic StreamingDataset, WebDataset, Ray Data and mpi4py (the first time, and when its requirements change)"
    rm -rf $env
    .venv/bin/python -m venv $env || fail "could not make $env"
    pip_of $env --no-deps -r conf/requirements/peers.txt || fail "pip could not install conf/requirements/peers.txt into $env"
    add_venv_behind $env
    $env/bin/python -c 'import sys; from importlib.util import find_spec, module_from_spec
sys.modules["streaming"] = module_from_spec(find_spec("streaming")) # as benchmarks/peers/dataset_peers.py does
import ray.data, streaming.base, torch, webdataset' || fail "$env is made, but its loaders cannot be imported there"
    echo "$key $PWD" >$env/.made-from
    say "done"
    exit 0
fi
if [ "${1:-}" = oldest ]; then
    env=.venv-oldest
    key=$(key_of conf/requirements/oldest.txt)
    is_made $env "$key" && exit 0
    [ "$version" = 3.11 ] || fail "$env needs Python 3.11, and .venv has $version"
    say "making $env with PySpark 3.5, pyarrow 14 and numpy 1.26 (the first time, and when its requirements change)"
    rm -rf $env
    .venv/bin/python -m venv $env || fail "could not make $env"
    pip_of $env --no-deps -r conf/requirements/oldest.txt || fail "pip could not install conf/requirements/oldest.txt into $env"
    add_venv_behind $env
    $env/bin/python -c 'import numpy, pyarrow, pyspark, torch; assert (pyspark.__version__, numpy.__version__) == ("3.5.0", "1.26.0")' ||
        fail "$env is made, but its packages cannot be imported there"
    echo "$key $PWD" >$env/.made-from
    say "done"
    exit 0
fi
[ "${1:-}" = petastorm ] || exit 0

env=.venv-petastorm
key=$(key_of conf/requirements/petastorm.txt)
is_made $env "$key" && exit 0
[ "$version" = 3.11 ] || fail "$env (Petastorm 0.13.1) needs Python 3.11, and .venv has $version; without it the tests that" \
    "need Petastorm are skipped. To have it: make clean, then PYTHON=python3.11 make ..."
say "making $env with Petastorm 0.13.1 (the first time, and when its requirements change; takes a minute)"
rm -rf $env
.venv/bin/python -m venv $env || fail "could not make $env"
pip_of $env -r conf/requirements/petastorm.txt || fail "pip could not install conf/requirements/petastorm.txt into $env"
pip_of $env --no-deps petastorm==0.13.1 || fail "pip could not install petastorm==0.13.1 into $env"
# What it does not have itself, torch above all, comes from .venv, which stands behind it on the path.
add_venv_behind $env
$env/bin/python -c 'import numpy, torch, petastorm.pytorch; assert numpy.__version__ < "2"; torch.from_numpy(numpy.ones(1))' ||
    fail "$env is made, but Petastorm's loaders cannot be imported there"
echo "$key $PWD" >$env/.made-from
say "done"
