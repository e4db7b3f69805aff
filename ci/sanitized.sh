# Sourced. sanitized address|thread PYTHON: builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer, or with
# ThreadSanitizer (GCC), beside the normal one; sets root and python; what python runs in this shell from then on uses it.
sanitized() {
  local kind=$1 cxx=${CXX:-c++} libraries path library preload=
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  cd "$root"
  python=$(command -v "$2")
  [[ $python == /* ]] || python=$PWD/$python
  local lib=$root/build/$kind/lib

  # A whole package tree apart from the checkout: the extension in continuum_ops/ stays the optimised one.
  rm -rf "$lib"
  CONTINUUM_OPS_SANITIZE=${kind/address/1} "$python" setup.py -q build --build-base "build/$kind" --build-lib "$lib"

  # The interpreter is not instrumented, so the runtimes are loaded before it; libstdc++ too, because a sanitizer looks
  # __cxa_throw up at start and aborts at the first C++ exception otherwise.
  libraries=(libtsan.so libstdc++.so.6)
  [[ $kind == thread ]] || libraries=(libasan.so libubsan.so libstdc++.so.6)
  for library in "${libraries[@]}"; do
    path=$($cxx -print-file-name="$library")
    [[ $path == /* ]] || { echo "$cxx has no $library: the sanitized build needs GCC with its sanitizer runtimes" >&2; exit 1; }
    preload+="${preload:+:}$path"
  done

  # Leaks are not looked for: CPython and torch keep interned objects and registries until the process ends. Memory that
  # torch's own, uninstrumented threads touch says nothing about races here.
  export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1
  export LD_PRELOAD=$preload PYTHONPATH=$lib OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

  # Python puts the working directory before PYTHONPATH: in the checkout the optimised extension would be used.
  cd "$root/build/$kind"
  "$python" - "$lib" "$kind" <<'PYTHON'
import sys
import continuum_ops._C as extension
assert extension.__file__.startswith(sys.argv[1]), extension.__file__
assert extension.build_info()["sanitizer"] == sys.argv[2], extension.build_info()
print("sanitized extension:", extension.__file__, "kernels:", extension.isa())
PYTHON
}
