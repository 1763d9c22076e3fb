//! Damaged and hostile byte strings: an error or a tensor, never a panic, an access out of bounds or a huge allocation.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod common;

use common::{Content, fill, spec_of, uniform};
use daf_rs::Error;
use daf_rs::codec::*;
use daf_rs::dtype::FloatType;
use daf_rs::kernels::rng::mix64;
use daf_rs::pool::SlabPool;

const N: usize = 400;

/// A small byte string of every class and of every shape of a block.
fn samples() -> Vec<Vec<u8>> {
    let shape = TensorShape {
        sizes: vec![20, 20],
        strides: vec![1, 20],
    };
    let (layout, pool) = (Layout::contiguous(N), SlabPool::global());
    let float = ElementKind::Float(FloatType::F32);
    let x: Vec<f32> = fill(Content::Relu, N, 1);
    let odd: Vec<f32> = {
        let mut odd = x.clone();
        (odd[40], odd[41]) = (f32::NAN, f32::INFINITY);
        odd[64..96].fill(1.0);
        odd
    };
    let row = ValueSpec {
        group_size: 32,
        ..spec_of(FloatType::F32, 2, Geometry::Row { n: N })
    };
    let channel = ValueSpec {
        geometry: Geometry::Channel { rows: 40, cols: 10 },
        ..row
    };
    let value = |x: &[f32], spec: ValueSpec| {
        encode_value(Source::from_slice(x), &layout, &spec, pool, 1).unwrap()
    };
    let indices: Vec<i64> = (0..N as i64).map(|i| i * i).collect();
    let bools: Vec<u8> = x.iter().map(|v| u8::from(*v > 0.0)).collect();
    let two: Vec<u16> = bools.iter().map(|b| 7 + 3 * u16::from(*b)).collect();
    let all = [
        value(&x, row),
        value(
            &x,
            ValueSpec {
                zero: ZeroPlane::Never,
                ..row
            },
        ),
        value(&odd, row),
        value(&odd, channel),
        value(
            &x,
            ValueSpec {
                zero: ZeroPlane::Always,
                bits: 1,
                ..channel
            },
        ),
        value(&fill::<f32>(Content::Offset, N, 1), row),
        encode_lossless(
            Source::from_slice(&vec![1.5f64; N]),
            &layout,
            ElementKind::Float64,
            pool,
            1,
        )
        .unwrap()
        .unwrap(),
        encode_lossless(
            Source::from_slice(&two),
            &layout,
            ElementKind::Int {
                bytes: 2,
                signed: false,
            },
            pool,
            1,
        )
        .unwrap()
        .unwrap(),
        encode_lossless(
            Source::from_slice(&bools),
            &layout,
            ElementKind::Bool,
            pool,
            1,
        )
        .unwrap()
        .unwrap(),
        encode_lossless(
            Source::from_slice(&indices),
            &layout,
            ElementKind::Int {
                bytes: 8,
                signed: true,
            },
            pool,
            1,
        )
        .unwrap()
        .unwrap(),
        encode_mask(
            Source::from_slice(&x),
            &layout,
            FloatType::F32,
            Predicate::Within { lo: 0.1, hi: 1.0 },
            2.0,
            -1.0,
            pool,
            1,
        )
        .unwrap(),
        encode_sign(Source::from_slice(&x), &layout, FloatType::F32, pool, 1)
            .unwrap()
            .unwrap(),
        encode_raw(Source::from_slice(&x), &layout, float, pool, 1).unwrap(),
    ];
    let classes: std::collections::BTreeSet<_> = all.iter().map(Encoded::class).collect();
    assert_eq!(
        classes.into_iter().collect::<Vec<_>>(),
        Class::ALL,
        "a sample of every class"
    );
    all.iter().map(|q| q.to_bytes(&shape).unwrap()).collect()
}

fn with_sum(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 4;
    let sum = crc32fast::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn expect_corrupt(bytes: &[u8], what: &str) {
    match Encoded::from_bytes(bytes, SlabPool::global()) {
        Err(Error::CorruptData(_)) => {}
        Err(e) => panic!("{what}: {e}"),
        Ok(_) => panic!("{what} was accepted"),
    }
}

/// Reads and, where that works, decodes in every way that the class allows.
fn survive(bytes: &[u8]) -> bool {
    match Encoded::from_bytes(bytes, SlabPool::global()) {
        Err(Error::CorruptData(_)) => false,
        Err(e) => panic!("{e}"),
        Ok((q, shape)) => {
            let layout = Layout::from_strided(&shape.sizes, &shape.strides);
            assert_eq!(layout.len(), q.len());
            if q.len() * q.kind().size() <= 1 << 20 {
                let mut out = vec![0u64; (q.len() * q.kind().size()).div_ceil(8)];
                for mode in [ReadMode::Values, ReadMode::ValuesPositive] {
                    q.decode_into(Target::from_slice(&mut out), &layout, mode, 1)
                        .unwrap();
                }
                let mask = q.decode_into(Target::from_slice(&mut out), &layout, ReadMode::Mask, 1);
                assert_eq!(mask.is_ok(), q.has_zero_plane());
            } else {
                // Too large to decode here; asking with too little memory is an error before any work.
                let e = q.decode_into(
                    Target::from_slice(&mut [0u64; 4]),
                    &layout,
                    ReadMode::Values,
                    1,
                );
                assert!(matches!(e, Err(Error::InvalidArgument(_))));
            }
            assert!(
                Encoded::from_bytes(&q.to_bytes(&shape).unwrap(), SlabPool::global())
                    .unwrap()
                    .0
                    == q
            );
            true
        }
    }
}

#[test]
fn every_truncation_is_found() {
    for (i, bytes) in samples().into_iter().enumerate() {
        assert!(survive(&bytes), "sample {i}");
        for end in 0..bytes.len() {
            expect_corrupt(&bytes[..end], &format!("sample {i} cut at {end}"));
            if end >= 4 {
                // The same with a sum that fits what is left.
                assert!(
                    !survive(&with_sum(bytes[..end].to_vec())),
                    "sample {i} cut at {end} with its sum"
                );
            }
        }
        let longer: Vec<u8> = bytes.iter().copied().chain([0; 8]).collect();
        expect_corrupt(&longer, "trailing bytes");
        expect_corrupt(&with_sum(longer), "trailing bytes with their sum");
    }
}

#[test]
fn every_flipped_bit_is_found() {
    for (i, bytes) in samples().into_iter().enumerate() {
        for bit in 0..8 * bytes.len() {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            expect_corrupt(&bad, &format!("sample {i}, bit {bit}"));
        }
    }
}

#[test]
fn every_flipped_bit_with_its_sum_is_survived() {
    let mut accepted = 0;
    for bytes in samples() {
        for bit in 0..8 * (bytes.len() - 4) {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            accepted += usize::from(survive(&with_sum(bad)));
        }
    }
    // Flipped codes are other codes: most mutations must get as far as the decoder, or this test would test nothing.
    assert!(accepted > 10_000, "{accepted}");
}

#[test]
fn random_mutations_are_survived() {
    let samples = samples();
    let mut s = 1u64;
    for round in 0..30_000 {
        let mut bad = samples[round % samples.len()].clone();
        for _ in 0..1 + (uniform(&mut s) * 6.0) as usize {
            // Headers and lengths more often than codes.
            let reach = if uniform(&mut s) < 0.7 {
                bad.len().min(200)
            } else {
                bad.len()
            };
            let at = (uniform(&mut s) * reach as f64) as usize;
            let word = match (uniform(&mut s) * 4.0) as u32 {
                0 => u64::MAX,
                1 => 0,
                2 => 1 << (uniform(&mut s) * 64.0) as u32,
                _ => mix64(round as u64),
            };
            let n = (bad.len() - at).min(1 << (uniform(&mut s) * 4.0) as usize);
            bad[at..at + n].copy_from_slice(&word.to_le_bytes()[..n]);
        }
        survive(&with_sum(bad));
    }
}

#[test]
fn a_byte_string_of_nothing_but_a_claim_is_refused() {
    // A header that promises 2^40 parts' worth of elements, with a sum that fits.
    for class in 0..8u8 {
        for rows in [1u64 << 40, u64::MAX, 1 << 62] {
            let mut bytes = b"DAFRSQT\x1a\x01\x00".to_vec();
            bytes.extend([class, 0, 4, 0, 0, 1, 0, 0, 1, 0]);
            bytes.extend(u32::MAX.to_le_bytes());
            for word in [0, rows, 0, 0, 0, rows, 1] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend([0; 4]);
            expect_corrupt(&with_sum(bytes), &format!("class {class}, {rows} rows"));
        }
    }
}
