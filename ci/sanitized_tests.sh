#!/usr/bin/env bash
# The operators' tests on the extension with AddressSanitizer and UndefinedBehaviorSanitizer, then a short fuzzing of its
# entry points on it and on one with ThreadSanitizer. Usage: ci/sanitized_tests.sh PYTHON [pytest arguments]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/sanitized.sh"
given=$1
shift
bash "$here/fuzz.sh" "$given" 60
sanitized address "$given"

# The chunked path is PyTorch, of the grid forms the axis products are compiled, the GPU kernels have tests of their own:
# nothing of them is compiled here.
shopt -s nullglob extglob
tests=()
for file in "$root"/tests/test_{continuum,patch,position}_attention*.py "$root"/tests/test_{direct,fourier_patch_attention,philox,axis_product,native_arguments,position_transform}.py; do
  [[ $file == *_@(cuda*|triton|grid*).py ]] || tests+=("$file")
done
exec "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -n "${WORKERS:-2}" --dist worksteal \
  -p no:cacheprovider -m "not slow and not gpu" -k "not chunked" "$@" "${tests[@]}"
