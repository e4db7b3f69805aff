#!/usr/bin/env bash
# Fuzzes the C++ entry points: one half of the time with AddressSanitizer and UndefinedBehaviorSanitizer on one thread, the
# other with ThreadSanitizer on four. Usage: ci/fuzz.sh PYTHON SECONDS [arguments of fuzz.py]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/sanitized.sh"
given=$1 seconds=$(($2 / 2))
shift 2
(sanitized address "$given"; exec "$python" "$here/fuzz.py" --seconds "$seconds" "$@")
# Addresses at random leave ThreadSanitizer of older GCC no room for its shadow.
(sanitized thread "$given"; exec setarch -R "$python" "$here/fuzz.py" --seconds "$seconds" --threads 4 "$@")
