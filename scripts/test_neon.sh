#!/usr/bin/env bash
# Run the Rust tests for aarch64 (NEON) on x86-64 Debian under qemu: once on a CPU with every extension, once on plain
# ARMv8.0, so that both sides of each runtime dispatch are tested.
#   bash scripts/test_neon.sh [arguments of cargo test]
# Needs root and apt for what is missing: a cross C compiler and qemu-user are installed; Debian's rustc with its arm64
# standard library is only unpacked, under target/ (ARM_TC names another folder). Cargo is the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."

TC="${ARM_TC:-$PWD/target/arm-tc}"
TARGET=aarch64-unknown-linux-gnu

die() {
    echo "error: $*" >&2
    exit 1
}

missing=()
[ -f "$TC/complete" ] || missing+=("an aarch64 Rust toolchain in $TC (packages rustc-web, libstd-rust-web-dev:arm64)")
command -v qemu-aarch64 >/dev/null || missing+=("qemu-aarch64 (package qemu-user)")
command -v aarch64-linux-gnu-gcc >/dev/null || missing+=("aarch64-linux-gnu-gcc (package gcc-aarch64-linux-gnu)")
[ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ] || missing+=("the aarch64 C library (package libc6-dev-arm64-cross)")

if [ "${#missing[@]}" -gt 0 ]; then
    printf 'missing: %s\n' "${missing[@]}"
    [ "$(uname -m)" = x86_64 ] || die "this script cross-compiles from x86-64; on aarch64 run 'make test-rust'"
    command -v apt-get >/dev/null || die "no apt-get here: install the above by hand, or run on Debian"
    [ "$(id -u)" = 0 ] || die "installing the above needs root: run as root once, then as any user"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user \
        gcc libc6-dev libz3-4 libedit2 libxml2 libffi8 zlib1g libzstd1 >/dev/null
fi

if [ ! -f "$TC/complete" ]; then
    rm -rf "$TC"
    mkdir -p "$TC"/{bin,debs,lists/partial,cache/archives/partial}
    chmod 755 "$TC"
    # A private package list that also knows arm64, so that the system's own list of architectures stays as it is.
    apt=(-qq -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o Dir::State::lists="$TC/lists"
        -o Dir::Cache="$TC/cache" -o APT::Sandbox::User=root)
    apt-get "${apt[@]}" update
    version=$(apt-cache "${apt[@]}" policy rustc-web | awk '/Candidate:/ { print $2 }')
    [ -n "$version" ] && [ "$version" != "(none)" ] || die "apt knows no package rustc-web; Debian's security suite carries it"
    minor=$(cut -d. -f1,2 <<<"$version")
    llvm=$(apt-cache "${apt[@]}" show "libstd-rust-web-$minor=$version" | grep -oE 'libllvm[0-9]+' | sort -u | head -n1)
    [ -n "$llvm" ] || die "libstd-rust-web-$minor=$version names no libllvm it depends on"
    (
        cd "$TC/debs"
        apt-get "${apt[@]}" download "rustc-web:amd64=$version" "libstd-rust-web-$minor:amd64=$version" \
            "libstd-rust-web-dev:amd64=$version" "libstd-rust-web-dev:arm64=$version" "$llvm:amd64"
        for deb in *.deb; do dpkg-deb -x "$deb" "$TC"; done
    )
    rm -rf "$TC"/{debs,lists,cache}
    for tool in rustc rustdoc; do
        cat >"$TC/bin/$tool" <<WRAPPER
#!/bin/sh
export LD_LIBRARY_PATH="$TC/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "$TC/usr/bin/$tool" --sysroot "$TC/usr" "\$@"
WRAPPER
        chmod +x "$TC/bin/$tool"
    done
    touch "$TC/complete"
fi

"$TC/bin/rustc" -V
qemu-aarch64 --version | head -n1
export RUSTC="$TC/bin/rustc" RUSTDOC="$TC/bin/rustdoc" CARGO_TARGET_DIR="${ARM_TARGET_DIR:-$PWD/target/arm}"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# LD_LIBRARY_PATH: where libc6:arm64 is installed too, ld.so would take that libc from its cache and hang in pthread_create.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=/usr/aarch64-linux-gnu/lib"
# A forced level that the CPU lacks is an error, so NEON cannot be skipped unnoticed.
export DAF_ISA=neon
# Emulation is slow: optimised code, fewer random cases. Link-time optimisation would cost more than it saves.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0
export PROPTEST_CASES="${PROPTEST_CASES:-32}"
# Left out: a forked child that starts threads makes qemu's user mode itself abort (7.2: qemu_plugin_vcpu_init_hook). What
# follows a fork is not specific to a processor, and `make test-rust` tests it.
for cpu in max cortex-a53; do
    echo "== aarch64, CPU model $cpu, DAF_ISA=$DAF_ISA"
    QEMU_CPU=$cpu cargo test --locked --release --no-default-features --target "$TARGET" "$@" -- \
        --skip a_forked_child --skip every_level_writes_the_same_bytes
    # That last test starts itself again for each level, which this kernel cannot do with a foreign program: done here.
    digests=$(for isa in scalar neon; do
        DAF_ISA=$isa QEMU_CPU=$cpu cargo test -q --locked --release --no-default-features --target "$TARGET" --test golden -- \
            --ignored --exact --nocapture print_digest | grep -o "digest $isa .*"
    done)
    echo "$digests"
    [ "$(awk '{ print $3 }' <<<"$digests" | sort -u | wc -l)" = 1 ] || die "the levels write different bytes"
    [ "$(wc -l <<<"$digests")" = 2 ] || die "a level gave no digest"
done
