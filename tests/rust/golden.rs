//! The same bytes for ever, from every instruction set and any number of threads.
//!
//! `tests/golden` holds byte strings of released formats; they are decoded by every later release. `DAF_BLESS=1` writes those that are
//! missing and never changes one that exists.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod common;

use std::path::PathBuf;

use common::{Content, fill, spec_of};
use daf_rs::codec::*;
use daf_rs::dtype::{Float, FloatType};
use daf_rs::kernels::{Isa, rng::mix64, try_active};
use daf_rs::pool::SlabPool;
use half::{bf16, f16};

/// Numbers without a libm behind them, so that every machine makes the same: a triangular distribution, a third zeros, an outlier.
fn portable<T: Float>(n: usize) -> Vec<T> {
    (0..n as u64)
        .map(|i| {
            let bits = mix64(i + 1);
            let (a, b) = (
                (bits & 0xffff) as f32 / 65_536.0,
                (bits >> 16 & 0xffff) as f32 / 65_536.0,
            );
            T::from_f32_finite(if bits >> 32 & 3 == 0 {
                0.0
            } else if i == 77 {
                1e4
            } else {
                a - b
            })
        })
        .collect()
}

fn encoded<T: Float>(x: &[T], spec: &ValueSpec, threads: usize) -> Encoded {
    encode_value(
        Source::from_slice(x),
        &Layout::contiguous(x.len()),
        spec,
        SlabPool::global(),
        threads,
    )
    .unwrap()
}

fn row_shape(n: usize) -> TensorShape {
    TensorShape {
        sizes: vec![n as i64],
        strides: vec![1],
    }
}

/// Name and bytes of every golden case.
fn cases() -> Vec<(&'static str, Vec<u8>)> {
    let n = 1_500;
    let x: Vec<f32> = portable(n);
    let (half, brain): (Vec<f16>, Vec<bf16>) = (portable(n), portable(n));
    let row = spec_of(FloatType::F32, 4, Geometry::Row { n });
    let channel = Geometry::Channel {
        rows: 150,
        cols: 10,
    };
    let mut odd = x.clone();
    (odd[300], odd[301], odd[900]) = (f32::NAN, f32::NEG_INFINITY, 1e38);
    odd[512..768].fill(0.1);
    let offset: Vec<f32> = x.iter().map(|v| 1000.0 + v / 128.0).collect();
    let indices: Vec<i64> = (0..n as i64)
        .map(|i| 2 * i + (mix64(i as u64) & 1) as i64 - 7)
        .collect();
    let (layout, pool) = (Layout::contiguous(n), SlabPool::global());
    let exact = |q: Option<Encoded>| q.unwrap().to_bytes(&row_shape(n)).unwrap();
    let value = |q: Encoded| q.to_bytes(&row_shape(n)).unwrap();
    let int = ElementKind::Int {
        bytes: 8,
        signed: true,
    };
    let two: Vec<f32> = x
        .iter()
        .map(|v| if *v > 0.0 { 1.25 } else { 0.0 })
        .collect();
    vec![
        (
            "value_f32_rows_4bit_dither",
            value(encoded(
                &x,
                &ValueSpec {
                    zero: ZeroPlane::Never,
                    ..row
                },
                1,
            )),
        ),
        (
            "value_f32_rows_3bit_stochastic_zero_plane",
            value(encoded(
                &x,
                &ValueSpec {
                    bits: 3,
                    rounding: Rounding::Stochastic,
                    zero: ZeroPlane::Always,
                    ..row
                },
                1,
            )),
        ),
        (
            "value_f32_channels_2bit_nearest",
            value(encoded(
                &x,
                &ValueSpec {
                    bits: 2,
                    group_size: 64,
                    rounding: Rounding::Nearest,
                    geometry: channel,
                    ..row
                },
                1,
            )),
        ),
        (
            "value_f32_rows_8bit_raw_and_constant_groups",
            value(encoded(&odd, &ValueSpec { bits: 8, ..row }, 1)),
        ),
        (
            "value_f32_channels_5bit_offset",
            value(encoded(
                &offset,
                &ValueSpec {
                    bits: 5,
                    geometry: channel,
                    ..row
                },
                1,
            )),
        ),
        (
            "value_f16_rows_1bit",
            value(encoded(
                &half,
                &ValueSpec {
                    dtype: FloatType::F16,
                    bits: 1,
                    ..row
                },
                1,
            )),
        ),
        (
            "value_bf16_channels_6bit_auto_zero_plane",
            value(encoded(
                &brain,
                &ValueSpec {
                    dtype: FloatType::BF16,
                    bits: 6,
                    geometry: channel,
                    group_size: 32,
                    ..row
                },
                1,
            )),
        ),
        (
            "two_valued_f32",
            exact(
                encode_lossless(
                    Source::from_slice(&two),
                    &layout,
                    ElementKind::Float(FloatType::F32),
                    pool,
                    1,
                )
                .unwrap(),
            ),
        ),
        (
            "integer_i64",
            exact(encode_lossless(Source::from_slice(&indices), &layout, int, pool, 1).unwrap()),
        ),
        (
            "sign_bf16",
            exact(
                encode_sign(
                    Source::from_slice(&brain),
                    &layout,
                    FloatType::BF16,
                    pool,
                    1,
                )
                .unwrap(),
            ),
        ),
        (
            "mask_f16",
            value(
                encode_mask(
                    Source::from_slice(&half),
                    &layout,
                    FloatType::F16,
                    Predicate::GreaterOrNan { t: 0.0 },
                    1.0,
                    0.0,
                    pool,
                    1,
                )
                .unwrap(),
            ),
        ),
        (
            "constant_f32",
            exact(
                encode_lossless(
                    Source::from_slice(&vec![0.1f32; n]),
                    &layout,
                    ElementKind::Float(FloatType::F32),
                    pool,
                    1,
                )
                .unwrap(),
            ),
        ),
        (
            "raw_f64",
            value(
                encode_raw(
                    Source::from_slice(&(0..n).map(|i| i as f64).collect::<Vec<_>>()),
                    &layout,
                    ElementKind::Float64,
                    pool,
                    1,
                )
                .unwrap(),
            ),
        ),
    ]
}

/// Decoded elements as bytes.
fn decoded(bytes: &[u8]) -> Vec<u8> {
    let (q, shape) = Encoded::from_bytes(bytes, SlabPool::global()).unwrap();
    let layout = Layout::from_strided(&shape.sizes, &shape.strides);
    let mut out = vec![0u64; (q.len() * q.kind().size()).div_ceil(8)];
    q.decode_into(Target::from_slice(&mut out), &layout, ReadMode::Values, 1)
        .unwrap();
    bytemuck::cast_slice(&out)[..q.len() * q.kind().size()].to_vec()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

#[test]
fn golden_files_are_written_and_read_as_ever() {
    let manifest_path = folder().join("manifest.txt");
    if std::env::var_os("DAF_BLESS").is_some() {
        std::fs::create_dir_all(folder()).unwrap();
        let mut manifest = String::from(
            "# file, CRC-32 of the file, CRC-32 of the decoded elements; format version 1\n",
        );
        for (name, bytes) in cases() {
            let path = folder().join(format!("{name}.bin"));
            if !path.exists() {
                std::fs::write(&path, &bytes).unwrap();
            }
            let bytes = std::fs::read(&path).unwrap();
            manifest += &format!(
                "{name} {:08x} {:08x}\n",
                crc32fast::hash(&bytes),
                crc32fast::hash(&decoded(&bytes))
            );
        }
        if !manifest_path.exists() {
            std::fs::write(&manifest_path, manifest).unwrap();
        }
    }
    let manifest = std::fs::read_to_string(&manifest_path).unwrap();
    let now = cases();
    let mut seen = 0;
    for line in manifest.lines().filter(|l| !l.starts_with('#')) {
        let mut fields = line.split(' ');
        let (name, file, values) = (
            fields.next().unwrap(),
            fields.next().unwrap(),
            fields.next().unwrap(),
        );
        let bytes = std::fs::read(folder().join(format!("{name}.bin"))).unwrap();
        assert_eq!(
            format!("{:08x}", crc32fast::hash(&bytes)),
            file,
            "{name}: the file changed"
        );
        assert_eq!(
            format!("{:08x}", crc32fast::hash(&decoded(&bytes))),
            values,
            "{name} decodes to other elements"
        );
        let case = now.iter().find(|(n, _)| *n == name);
        assert!(
            case.is_some_and(|(_, now)| *now == bytes),
            "{name} is encoded to other bytes than before"
        );
        seen += 1;
    }
    assert_eq!(seen, now.len());
}

/// One number for the bytes and the decoded elements of many tensors.
fn digest(threads: usize) -> u32 {
    let mut hash = crc32fast::Hasher::new();
    for bits in 1..=8u8 {
        for (i, content) in Content::ALL.into_iter().enumerate() {
            let geometry = [
                Geometry::Row { n: 70_007 },
                Geometry::Channel {
                    rows: 70_007 / 77,
                    cols: 77,
                },
                Geometry::Channel {
                    rows: 1_000,
                    cols: 64,
                },
            ][(i + usize::from(bits)) % 3];
            let rounding = [Rounding::Dither, Rounding::Stochastic, Rounding::Nearest][i % 3];
            let zero = [ZeroPlane::Auto, ZeroPlane::Always][(i + usize::from(bits)) % 2];
            let group_size = [32, 256, 64, 1024, 128][(i + usize::from(bits)) % 5];
            for dtype in FloatType::ALL {
                let spec = ValueSpec {
                    rounding,
                    zero,
                    group_size,
                    ..spec_of(dtype, bits, geometry)
                };
                let bytes = match dtype {
                    FloatType::F32 => bytes_of::<f32>(content, &spec, threads),
                    FloatType::F16 => bytes_of::<f16>(content, &spec, threads),
                    FloatType::BF16 => bytes_of::<bf16>(content, &spec, threads),
                };
                hash.update(&bytes);
                hash.update(&decoded(&bytes));
            }
        }
    }
    for (_, bytes) in cases() {
        hash.update(&bytes);
    }
    hash.finalize()
}

fn bytes_of<T: Float>(content: Content, spec: &ValueSpec, threads: usize) -> Vec<u8> {
    let n = spec.geometry.len();
    encoded(&fill::<T>(content, n, 5), spec, threads)
        .to_bytes(&row_shape(n))
        .unwrap()
}

#[test]
#[ignore = "every_level_writes_the_same_bytes runs it, in a process for each level"]
fn print_digest() {
    println!("digest {} {:08x}", try_active().unwrap(), digest(1));
}

#[test]
fn every_level_writes_the_same_bytes() {
    let levels = Isa::available();
    let digests: Vec<String> = levels
        .iter()
        .map(|isa| {
            let run = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "--nocapture", "print_digest"])
                .env("DAF_ISA", isa.name())
                .output()
                .unwrap();
            let text = String::from_utf8(run.stdout).unwrap();
            let line = text
                .lines()
                .find_map(|l| l.find("digest ").map(|at| l[at..].to_string()));
            line.unwrap_or_else(|| {
                panic!(
                    "{isa}: no digest; {text} {}",
                    String::from_utf8_lossy(&run.stderr)
                )
            })
        })
        .collect();
    println!("levels compared: {digests:?}");
    for (isa, line) in levels.iter().zip(&digests) {
        assert!(
            line.starts_with(&format!("digest {isa} ")),
            "{isa} was not used: {line}"
        );
        assert_eq!(
            line.split(' ').next_back(),
            digests[0].split(' ').next_back(),
            "{isa} writes other bytes than {}",
            levels[0]
        );
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let n = 3_000_001;
    let x: Vec<f32> = fill(Content::Normal, n, 2);
    for geometry in [
        Geometry::Row { n },
        Geometry::Channel {
            rows: 3_000_000 / 300,
            cols: 300,
        },
    ] {
        let spec = spec_of(FloatType::F32, 3, geometry);
        let x = &x[..geometry.len()];
        let one = encoded(x, &spec, 1);
        let mut values = vec![0f32; x.len()];
        one.decode_into(
            Target::from_slice(&mut values),
            &Layout::contiguous(x.len()),
            ReadMode::Values,
            1,
        )
        .unwrap();
        for threads in [2, 3, 8] {
            assert!(encoded(x, &spec, threads) == one, "{threads} threads");
            let mut again = vec![0f32; x.len()];
            one.decode_into(
                Target::from_slice(&mut again),
                &Layout::contiguous(x.len()),
                ReadMode::Values,
                threads,
            )
            .unwrap();
            assert!(values == again, "{threads} threads");
        }
    }
}
