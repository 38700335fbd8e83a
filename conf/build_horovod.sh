#!/usr/bin/env bash
# Builds a wheel of Horovod 0.28.1, the last release, for the torch of a Python interpreter, and leaves it in a folder.
#   conf/build_horovod.sh .venv/bin/python wheels
# Needed: a C++ compiler that knows C++20, and make. Horovod's own variables go through, such as HOROVOD_GPU_OPERATIONS=NCCL.
# The interpreter's environment is not changed.
set -euo pipefail

python=$1
mkdir -p "$2"
folder=$(realpath "$2")
pins=$(realpath "$(dirname "$0")/requirements/horovod.txt")
compiler=${CXX:-c++}
for tool in "${compiler%% *}" make; do
    command -v "$tool" >/dev/null && continue
    echo "error: no $tool on the PATH; on Debian or Ubuntu: sudo apt install g++ make" >&2
    exit 1
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# An environment for the tools of the build; torch itself is found behind it.
env=$scratch/env
"$python" -m venv "$env"
pip() { "$env/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q -r "$pins"
path_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
path_of "$python" >"$(path_of "$env/bin/python")/_after_own_packages.pth"
export PATH="$env/bin:$PATH"

pip download -q --no-deps --no-build-isolation --no-binary horovod --dest "$scratch" horovod==0.28.1
tar -xzf "$scratch/horovod-0.28.1.tar.gz" -C "$scratch"
cd "$scratch/horovod-0.28.1"
# NOTE: two changes to its source, which go when a release has them. It asks for C++14, and gloo in it for C++11, with which
# the headers of torch 2.13 do not compile. And the second of its two Gloo contexts, in which gradients travel, is bound to
# the address that the host's name has, and not to HOROVOD_GLOO_IFACE: 127.0.0.1 or 127.0.1.1 on many hosts.
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i 's/ -std=c++11 -fPIC/ -fPIC/' third_party/gloo/CMakeLists.txt
context=horovod/common/gloo/gloo_context.cc
sed -i '/InitializeForProcessSet/,$ s/iface = gloo_iface_/iface = global_context.gloo_iface_/' $context
grep -q 'iface = global_context.gloo_iface_' $context

unset CMAKE_GENERATOR MAKELEVEL # the caller may be a make
export MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_CMAKE="$env/bin/cmake" HOROVOD_LOCAL_VERSION=patched
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI="${HOROVOD_WITHOUT_MPI-1}"
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$folder" .
