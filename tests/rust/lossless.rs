//! The exact classes: every bit comes back, and the smallest class that fits is taken.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod common;

use common::uniform;
use daf_rs::codec::*;
use daf_rs::dtype::FloatType;
use daf_rs::kernels::rng::mix64;
use daf_rs::pool::SlabPool;
use half::{bf16, f16};
use proptest::prelude::*;

/// Encodes, checks that every bit comes back from the pool and from a byte string, and gives the stored tensor.
fn exact<T: bytemuck::Pod>(x: &[T], layout: &Layout, kind: ElementKind) -> Option<Encoded> {
    let one = encode_lossless(Source::from_slice(x), layout, kind, SlabPool::global(), 1).unwrap();
    let two = encode_lossless(Source::from_slice(x), layout, kind, SlabPool::global(), 2).unwrap();
    assert!(
        one == two,
        "the number of threads changed the class or the bytes"
    );
    let q = one?;
    assert!(q.class().is_exact());
    same(&q, x, layout);
    let shape = TensorShape {
        sizes: vec![layout.len() as i64],
        strides: vec![1],
    };
    let (back, _) = Encoded::from_bytes(&q.to_bytes(&shape).unwrap(), SlabPool::global()).unwrap();
    assert!(back == q && back.metadata_bytes() == q.metadata_bytes());
    same(&back, x, layout);
    Some(q)
}

fn same<T: bytemuck::Pod>(q: &Encoded, x: &[T], layout: &Layout) {
    for threads in [1, 2] {
        let mut y = x.to_vec();
        // Elements are overwritten, gaps kept: start from the complement of every element.
        let at = common::places(layout, x.len());
        for &i in &at {
            bytemuck::bytes_of_mut(&mut y[i])
                .iter_mut()
                .for_each(|b| *b = !*b);
        }
        q.decode_into(
            Target::from_slice(&mut y),
            layout,
            ReadMode::Values,
            threads,
        )
        .unwrap();
        assert!(
            bytemuck::cast_slice::<T, u8>(x) == bytemuck::cast_slice::<T, u8>(&y),
            "{:?} is not exact",
            q.class()
        );
    }
}

fn bits(q: &Encoded) -> f64 {
    8.0 * (q.stored_bytes() - q.overhead_bytes()) as f64 / q.len() as f64
}

const I64: ElementKind = ElementKind::Int {
    bytes: 8,
    signed: true,
};
const F32: ElementKind = ElementKind::Float(FloatType::F32);

#[test]
fn constants_cost_nothing() {
    for n in [0, 1, 2, 10_000, 1_200_000] {
        for kind in [F32, ElementKind::Opaque { bytes: 4 }] {
            let q = exact(&vec![0.1f32; n], &Layout::contiguous(n), kind).unwrap();
            assert_eq!(
                (q.class(), q.stored_bytes()),
                (Class::Constant, q.overhead_bytes())
            );
        }
    }
    let q = exact(
        &[[1u64, 2]; 50],
        &Layout::contiguous(50),
        ElementKind::Opaque { bytes: 16 },
    )
    .unwrap();
    assert_eq!(q.class(), Class::Constant);
}

#[test]
fn two_values_by_their_bits_cost_one_bit() {
    let n = 1_300_001;
    let pick = |i: usize| mix64(i as u64) % 10 < 3;
    let layout = Layout::contiguous(n);
    let q = exact(
        &(0..n)
            .map(|i| if pick(i) { 0.0f32 } else { 1.0 / 0.7 })
            .collect::<Vec<_>>(),
        &layout,
        F32,
    )
    .unwrap();
    assert_eq!(q.class(), Class::TwoValued);
    assert!(bits(&q) < 1.01);
    // Two NaNs of different payloads, both zeros: told apart by their bits.
    for (a, b) in [(f32::NAN, f32::from_bits(0x7fc0_0001)), (0.0, -0.0)] {
        let q = exact(
            &(0..n)
                .map(|i| if pick(i) { a } else { b })
                .collect::<Vec<_>>(),
            &layout,
            F32,
        )
        .unwrap();
        assert_eq!(q.class(), Class::TwoValued);
    }
    let half: Vec<f16> = (0..n)
        .map(|i| if pick(i) { f16::ZERO } else { f16::ONE })
        .collect();
    assert_eq!(
        exact(&half, &layout, ElementKind::Float(FloatType::F16))
            .unwrap()
            .class(),
        Class::TwoValued
    );
    let wide: Vec<f64> = (0..n).map(|i| if pick(i) { 0.0 } else { 1.1 }).collect();
    assert_eq!(
        exact(&wide, &layout, ElementKind::Float64).unwrap().class(),
        Class::TwoValued
    );
    let bools: Vec<u8> = (0..n).map(|i| u8::from(pick(i))).collect();
    assert_eq!(
        exact(&bools, &layout, ElementKind::Bool).unwrap().class(),
        Class::Bool
    );
    // A bool with a byte that is neither 0 nor 1 (an out-of-range view of other memory) is still exact.
    let odd: Vec<u8> = bools.iter().map(|b| b * 2).collect();
    assert_eq!(
        exact(&odd, &layout, ElementKind::Bool).unwrap().class(),
        Class::TwoValued
    );
}

#[test]
fn a_third_value_anywhere_is_seen() {
    let n = 1_100_000;
    for at in [2, 8_191, 8_192, 524_287, 524_288, n - 1] {
        let mut x: Vec<f32> = (0..n).map(|i| (i % 2) as f32).collect();
        x[at] = 0.5;
        assert!(exact(&x, &Layout::contiguous(n), F32).is_none(), "at {at}");
    }
    // A lone second value at the very end.
    let mut x = vec![1f32; n];
    x[n - 1] = 2.0;
    assert_eq!(
        exact(&x, &Layout::contiguous(n), F32).unwrap().class(),
        Class::TwoValued
    );
}

/// Indices as max-pool 2x2 stores them.
fn pool_indices(maps: usize, size: usize) -> Vec<i64> {
    let (mut out, mut s) = (Vec::new(), 7);
    for _ in 0..maps {
        for r in 0..size / 2 {
            for c in 0..size / 2 {
                let (dy, dx) = (
                    (uniform(&mut s) * 2.0) as usize,
                    (uniform(&mut s) * 2.0) as usize,
                );
                out.push(((2 * r + dy) * size + 2 * c + dx) as i64);
            }
        }
    }
    out
}

#[test]
fn indices_are_narrow() {
    for (size, most) in [(32, 7.0), (56, 8.0), (112, 9.0), (224, 9.5)] {
        let x = pool_indices(40, size);
        let q = exact(&x, &Layout::contiguous(x.len()), I64).unwrap();
        println!(
            "max-pool indices of {size}x{size} maps: {:.2} bits",
            bits(&q)
        );
        assert!(
            q.class() == Class::Integer && bits(&q) < most,
            "{size}: {} bits",
            bits(&q)
        );
    }
    let tokens: Vec<i64> = (0..100_000u64)
        .map(|i| (mix64(i) % 50_257) as i64)
        .collect();
    let q = exact(&tokens, &Layout::contiguous(tokens.len()), I64).unwrap();
    assert!(bits(&q) < 17.0, "{} bits", bits(&q));
    let positions: Vec<i32> = (0..100_000).map(|i| i % 512).collect();
    let q = exact(
        &positions,
        &Layout::contiguous(positions.len()),
        ElementKind::Int {
            bytes: 4,
            signed: true,
        },
    )
    .unwrap();
    assert!(bits(&q) < 2.0, "{} bits", bits(&q));
}

#[test]
fn extremes_of_integers_are_exact() {
    let patterns: [fn(u64) -> u64; 5] = [
        |_| u64::MAX,
        |i| i << 62,
        |i| mix64(i) >> 40,
        |i| (mix64(i) % 3).wrapping_sub(1),
        |i| u64::MAX - i,
    ];
    for (p, pattern) in patterns.into_iter().enumerate() {
        for n in [1, 63, 64, 65, 8_193] {
            let words: Vec<u64> = (0..n)
                .map(|i| if i % 7 == 0 { 5 } else { pattern(i) })
                .collect();
            for signed in [false, true] {
                let layout = Layout::contiguous(n as usize);
                exact(&words, &layout, ElementKind::Int { bytes: 8, signed });
                exact(
                    &words.iter().map(|w| *w as u32).collect::<Vec<_>>(),
                    &layout,
                    ElementKind::Int { bytes: 4, signed },
                );
                exact(
                    &words.iter().map(|w| *w as u16).collect::<Vec<_>>(),
                    &layout,
                    ElementKind::Int { bytes: 2, signed },
                );
                exact(
                    &words.iter().map(|w| *w as u8).collect::<Vec<_>>(),
                    &layout,
                    ElementKind::Int { bytes: 1, signed },
                );
            }
        }
        assert!(p < 5);
    }
}

#[test]
fn what_does_not_shrink_is_refused_and_kept_raw() {
    let x: Vec<u64> = (0..70_000).map(mix64).collect();
    let layout = Layout::contiguous(x.len());
    assert!(exact(&x, &layout, I64).is_none());
    let q = encode_raw(Source::from_slice(&x), &layout, I64, SlabPool::global(), 2).unwrap();
    same(&q, &x, &layout);
    let gapped = Layout::from_strided(&[100, 30], &[1, 130]);
    same(
        &encode_raw(Source::from_slice(&x), &gapped, I64, SlabPool::global(), 1).unwrap(),
        &x[..gapped.span()],
        &gapped,
    );
}

#[test]
fn masks_and_signs_answer_for_every_value() {
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        0.5,
        1.0,
        6.0,
        -1.0,
        7.5,
    ];
    let x: Vec<f32> = (0..600_000)
        .map(|i| special[mix64(i) as usize % special.len()])
        .collect();
    let layout = Layout::from_strided(&[500, 1_000], &[1_100, 1]);
    let at = common::places(&layout, x.len());
    type Holds = fn(f32) -> bool;
    let predicates: [(Predicate, Holds); 3] = [
        (Predicate::GreaterOrNan { t: 0.5 }, |x| {
            x > 0.5 || x.is_nan()
        }),
        (Predicate::Within { lo: 0.0, hi: 6.0 }, |x| {
            (0.0..=6.0).contains(&x)
        }),
        (Predicate::NotBeyond { lo: 0.0, hi: 6.0 }, |x| {
            !(x <= 0.0 || x >= 6.0)
        }),
    ];
    for (p, holds) in predicates {
        for threads in [1, 2] {
            let q = encode_mask(
                Source::from_slice(&x),
                &layout,
                FloatType::F32,
                p,
                1.5,
                -2.0,
                SlabPool::global(),
                threads,
            )
            .unwrap();
            assert!(q.class() == Class::Mask && bits(&q) < 1.01);
            let mut y = vec![9f32; x.len()];
            q.decode_into(
                Target::from_slice(&mut y),
                &layout,
                ReadMode::Values,
                threads,
            )
            .unwrap();
            assert!(
                at.iter()
                    .all(|&i| y[i] == if holds(x[i]) { 1.5 } else { -2.0 }),
                "{p:?}"
            );
            assert_eq!(
                y.iter().filter(|y| **y == 9.0).count(),
                x.len() - at.len(),
                "gaps are left alone"
            );
        }
    }
    assert!(
        encode_sign(
            Source::from_slice(&x),
            &layout,
            FloatType::F32,
            SlabPool::global(),
            2
        )
        .unwrap()
        .is_none()
    );
    let numbers: Vec<f32> = x
        .iter()
        .map(|v| if v.is_nan() { -3.0 } else { *v })
        .collect();
    let q = encode_sign(
        Source::from_slice(&numbers),
        &layout,
        FloatType::F32,
        SlabPool::global(),
        2,
    )
    .unwrap()
    .unwrap();
    let mut y = vec![9f32; x.len()];
    q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 1)
        .unwrap();
    assert!(at.iter().all(|&i| y[i]
        == if numbers[i] == 0.0 {
            0.0
        } else {
            numbers[i].signum()
        }));
    let brain: Vec<bf16> = numbers.iter().map(|v| bf16::from_f32(*v)).collect();
    let q = encode_sign(
        Source::from_slice(&brain),
        &layout,
        FloatType::BF16,
        SlabPool::global(),
        1,
    )
    .unwrap()
    .unwrap();
    let mut y = vec![bf16::ZERO; x.len()];
    q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 1)
        .unwrap();
    assert!(at.iter().all(|&i| y[i].to_f32()
        == if brain[i].to_f32() == 0.0 {
            0.0
        } else {
            brain[i].to_f32().signum()
        }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_integers_in_any_view_are_exact(
        start in any::<i64>(),
        ramp in prop_oneof![Just(0i64), -3i64..4, any::<i64>()],
        width in 0u32..=64,
        rows in 1i64..300,
        cols in 1i64..90,
        gap in 0i64..3,
        log_bytes in 0u32..4,
        signed in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let layout = Layout::from_strided(&[rows, cols], &[cols + gap, 1]);
        let mask = if width == 0 { 0 } else { u64::MAX >> (64 - width) };
        let words: Vec<u64> = (0..layout.span() as u64)
            .map(|i| (start as u64).wrapping_add((ramp as u64).wrapping_mul(i)).wrapping_add(mix64(seed ^ i) & mask))
            .collect();
        let kind = ElementKind::Int { bytes: 1 << log_bytes, signed };
        match log_bytes {
            0 => exact(&words.iter().map(|w| *w as u8).collect::<Vec<_>>(), &layout, kind),
            1 => exact(&words.iter().map(|w| *w as u16).collect::<Vec<_>>(), &layout, kind),
            2 => exact(&words.iter().map(|w| *w as u32).collect::<Vec<_>>(), &layout, kind),
            _ => exact(&words, &layout, kind),
        };
    }
}
