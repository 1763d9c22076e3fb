#!/usr/bin/env bash
# Run the Rust tests on an emulated x86-64 CPU of the first generation (SSE2; no AVX, no FMA, no F16C): proves that the
# library needs nothing more, and that machines without FMA write the same bytes.
#   bash scripts/test_baseline.sh [arguments of cargo test]
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    echo "error: $*" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] || die "this check is for x86-64 machines"
if ! command -v qemu-x86_64 >/dev/null; then
    echo "missing: qemu-x86_64 (package qemu-user)"
    command -v apt-get >/dev/null || die "no apt-get here: install the above by hand, or run on Debian"
    [ "$(id -u)" = 0 ] || die "installing the above needs root: run as root once, then as any user"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends qemu-user >/dev/null
fi
qemu-x86_64 --version | head -n1
# qemu64 has SSE3; the project promises SSE2.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="qemu-x86_64 -cpu qemu64,-sse3,-cx16"
# Emulation is slow: fewer random cases.
export PROPTEST_CASES="${PROPTEST_CASES:-16}"
echo "== x86-64, SSE2 only"
# Left out: a forked child that starts threads makes qemu's user mode itself abort; `make test-rust` tests it.
cargo test --locked --no-default-features --lib --tests "$@" -- --skip a_forked_child
