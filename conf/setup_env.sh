#!/usr/bin/env bash
# Makes .venv with the pinned requirements and the package, and checks Python and Java. Called by every `make` target;
# does nothing when .venv is already made from the requirements as they are now.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "set-up: $*" >&2; }
fail() { echo "set-up failed: $*" >&2; exit 1; }

if ! java -version 2>&1 | grep -qE 'version "(17|21)'; then
    found=$(java -version 2>&1 | head -n 1 || true)
    if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ]; then
        say "Java 17 or 21 is needed (found: ${found:-none}); installing openjdk-17-jre-headless"
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q openjdk-17-jre-headless; } >&2 ||
            fail "apt-get could not install openjdk-17-jre-headless; install Java 17 or 21 yourself"
        java -version 2>&1 | grep -qE 'version "(17|21)' ||
            fail "Java 17 is installed, but 'java' on the PATH is ${found}; put Java 17 first on the PATH"
    else
        fail "Java 17 or 21 is needed (found: ${found:-none}). Debian or Ubuntu: sudo apt install openjdk-17-jre-headless"
    fi
fi

requirements="conf/requirements/main.txt conf/requirements/dev.txt"
key=$(cat $requirements setup.cfg conf/setup_env.sh | sha256sum | cut -c1-16)
[ "$(cat .venv/.made-from 2>/dev/null)" = "$key $PWD" ] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "Python 3.10 or newer is needed (found: $("$python" --version 2>&1)); name another one with PYTHON=python3.11 make ..."
say "making .venv (the first time, and when the requirements change; takes a few minutes)"
[ -x .venv/bin/python ] && [ "$(cut -d' ' -f2- .venv/.made-from 2>/dev/null)" = "$PWD" ] || {
    rm -rf .venv
    "$python" -m venv .venv || fail "could not make .venv; on Debian or Ubuntu: sudo apt install python3-venv"
}
rm -f .venv/.made-from
.venv/bin/python -m pip install -q --disable-pip-version-check -r conf/requirements/dev.txt >&2
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . >&2
echo "$key $PWD" >.venv/.made-from
say "done"
