#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer (GCC) beside the normal one and runs the
# operators' tests on it. Usage: ci/sanitized_tests.sh PYTHON [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=$(command -v "$1")
[[ $python == /* ]] || python=$PWD/$python
shift
cxx=${CXX:-c++}
lib=$root/build/sanitized/lib

# A whole package tree apart from the checkout: the extension in continuum_ops/ stays the optimised one.
rm -rf "$lib"
CONTINUUM_OPS_SANITIZE=1 "$python" setup.py -q build --build-base build/sanitized --build-lib "$lib"

# The interpreter is not instrumented, so the runtimes are loaded before it; libstdc++ too, because ASan looks
# __cxa_throw up at start and aborts at the first C++ exception otherwise.
preload=
for library in libasan.so libubsan.so libstdc++.so.6; do
  path=$($cxx -print-file-name="$library")
  [[ $path == /* ]] || { echo "$cxx has no $library: the sanitized build needs GCC with its sanitizer runtimes" >&2; exit 1; }
  preload+="${preload:+:}$path"
done

# Leaks are not looked for: CPython and torch keep interned objects and registries until the process ends.
export LD_PRELOAD=$preload PYTHONPATH=$lib OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

# Python puts the working directory before PYTHONPATH: in the checkout the optimised extension would be tested.
cd "$root/build/sanitized"
"$python" - "$lib" <<'PYTHON'
import sys
import continuum_ops._C as extension
assert extension.__file__.startswith(sys.argv[1]), extension.__file__
assert extension.build_info()["sanitizer"] == "address", extension.build_info()
print("sanitized extension:", extension.__file__, "kernels:", extension.isa())
PYTHON

# The chunked path is PyTorch, of the grid forms the axis products are compiled, the GPU kernels have tests of their own: nothing of them is
# compiled here.
shopt -s nullglob extglob
tests=()
for file in "$root"/tests/test_{continuum,patch,position}_attention*.py "$root"/tests/test_{direct,fourier_patch_attention,philox,axis_product}.py; do
  [[ $file == *_@(cuda*|triton|grid*).py ]] || tests+=("$file")
done
exec "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -n "${WORKERS:-2}" --dist worksteal \
  -p no:cacheprovider -m "not slow and not gpu" -k "not chunked" "$@" "${tests[@]}"
