#!/usr/bin/env bash
# Run Rust tests under valgrind's memcheck: reads of what was never written, accesses outside of an allocation, leaks.
#   bash scripts/test_valgrind.sh [filters of cargo test]
# valgrind knows no AVX-512, so the kernels run at DAF_ISA=avx2 (or scalar where the CPU lacks it).
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    echo "error: $*" >&2
    exit 1
}

if ! command -v valgrind >/dev/null; then
    echo "missing: valgrind"
    command -v apt-get >/dev/null || die "no apt-get here: install the above by hand, or run on Debian"
    [ "$(id -u)" = 0 ] || die "installing the above needs root: run as root once, then as any user"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends valgrind libc6-dbg >/dev/null
fi
valgrind --version
host=$(rustc -vV | awk '/^host:/ { print $2 }')
runner=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$host")_RUNNER
export "$runner=valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite"
export DAF_ISA="${DAF_ISA:-avx2}"
export PROPTEST_CASES="${PROPTEST_CASES:-4}"
echo "== valgrind, DAF_ISA=$DAF_ISA"
tests=(--lib --test corruption --test lossless --test pool_model --test roundtrip)
# Left out: valgrind emulates MXCSR's rounding mode but not its denormal modes, which one test sets; and a forked child
# has lost the threads that own some of its memory, which memcheck calls a leak.
cargo test --locked --no-default-features "${tests[@]}" "$@" -- --skip the_guard_enters_the_default_environment --skip fork
