//! Plane kernels of every level against the scalar ones, bit for bit.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use half::{bf16, f16};

use super::parity::{Guarded, Random, levels};
use super::*;

/// Lengths around the vectors' and the words'.
fn length(random: &mut Random) -> usize {
    let any = random.below(3000);
    random.one_of(&[1, 7, 8, 31, 33, 63, 64, 65, 127, 128, 1000, any, any])
}

fn guarded_garbage(random: &mut Random, len: usize) -> Guarded<u8> {
    let mut bytes = Guarded::new(len);
    random.bytes(bytes.as_mut());
    bytes
}

fn compare<T: Element>(seed: u64, cases: usize) {
    let _env = FpEnv::enter();
    let scalar = for_isa::<T>(Isa::Scalar).unwrap();
    for isa in levels(&format!("planes of {}", T::TYPE.name())) {
        let table = for_isa::<T>(isa).unwrap();
        let mut random = Random::new(seed);
        for case in 0..cases {
            let n = length(&mut random);
            let mut src = Guarded::<T>::new(n);
            random.elements(src.as_mut());
            let name = format!("case {case} on {isa}: {n} elements");

            let mut out = guarded_garbage(&mut random, plane_len(n));
            let mut found = guarded_garbage(&mut random, plane_len(n));
            let count = scalar.nonzero_plane_rows(&src, out.as_mut());
            assert_eq!(
                table.nonzero_plane_rows(&src, found.as_mut()),
                count,
                "{name}"
            );
            assert!(out[..] == found[..], "nonzeros: {name}");

            let (a, b) = (
                random.one_of(&[0.0, 0.5, -0.5, 0.1, f32::NAN]),
                random.one_of(&[0.0, 0.5, 1.0, 6.0, f32::INFINITY]),
            );
            for predicate in [
                Predicate::GreaterOrNan { t: a },
                Predicate::Within { lo: a, hi: b },
                Predicate::NotBeyond { lo: a, hi: b },
            ] {
                scalar.predicate_plane(&src, predicate, out.as_mut());
                table.predicate_plane(&src, predicate, found.as_mut());
                assert!(out[..] == found[..], "{predicate:?}: {name}");
            }

            let mut negative = guarded_garbage(&mut random, plane_len(n));
            let mut found_negative = guarded_garbage(&mut random, plane_len(n));
            let signed = scalar.sign_planes(&src, out.as_mut(), negative.as_mut());
            assert_eq!(
                table.sign_planes(&src, found.as_mut(), found_negative.as_mut()),
                signed,
                "{name}"
            );
            if signed {
                assert!(
                    out[..] == found[..] && negative[..] == found_negative[..],
                    "signs: {name}"
                );
            }
            // Any planes, those of NaN tensors and of overlapping signs too.
            random.bytes(out.as_mut());
            let (mut values, mut found) = (Guarded::<T>::new(n), Guarded::<T>::new(n));
            scalar.sign_values(&out, &negative, values.as_mut());
            table.sign_values(&out, &negative, found.as_mut());
            assert!(
                bytes_of(&values) == bytes_of(&found),
                "values of signs: {name}"
            );

            let group = random.one_of(&[32, 64, 256]);
            let slot0 = 8 * random.below(5);
            let smallest = T::smallest_positive().to_f32();
            let floors: Vec<f32> = (0..n.div_ceil(32))
                .map(|_| random.one_of(&[f32::NEG_INFINITY, smallest, 0.25]))
                .collect();
            let plane = guarded_garbage(&mut random, plane_len(slot0 + n));
            let (mut values, mut found) = (Guarded::of(&src), Guarded::of(&src));
            scalar.apply_nonzero_rows(&plane, slot0, group, &floors, values.as_mut());
            table.apply_nonzero_rows(&plane, slot0, group, &floors, found.as_mut());
            assert!(
                bytes_of(&values) == bytes_of(&found),
                "zeros applied, groups of {group}, slot {slot0}: {name}"
            );
        }
    }
}

fn compare_columns<T: Element>(seed: u64, cases: usize) {
    let _env = FpEnv::enter();
    let scalar = for_isa::<T>(Isa::Scalar).unwrap();
    for isa in levels(&format!("planes of columns of {}", T::TYPE.name())) {
        let table = for_isa::<T>(isa).unwrap();
        let mut random = Random::new(seed);
        for case in 0..cases {
            let any = 1 + random.below(128);
            let width = random.one_of(&[8, 16, 32, 64, 128, 104, 9, 15, any, any]);
            let rows = 1 + random.below(60);
            let pitch = width + random.one_of(&[0, 0, 3, 100]);
            let shape = ColumnShape {
                pitch,
                rows,
                width,
                first_row: random.below(10),
            };
            let name = format!("case {case} on {isa}: {shape:?}");
            let mut src = Guarded::<T>::new(shape.span());
            random.elements(src.as_mut());
            let columns = Columns { src: &src, shape };
            let len = plane_len(shape.end_slot());
            let mut out = guarded_garbage(&mut random, len);
            let mut found = Guarded::of(&out);
            let count = scalar.nonzero_plane_cols(&columns, out.as_mut());
            assert_eq!(
                table.nonzero_plane_cols(&columns, found.as_mut()),
                count,
                "{name}"
            );
            assert!(out[..] == found[..], "nonzeros: {name}");

            random.bytes(out.as_mut());
            let smallest = T::smallest_positive().to_f32();
            let floors: Vec<f32> = (0..width)
                .map(|_| random.one_of(&[f32::NEG_INFINITY, smallest, 0.25]))
                .collect();
            let (mut values, mut found) = (Guarded::of(&src), Guarded::of(&src));
            scalar.apply_nonzero_cols(&out, &shape, &floors, values.as_mut());
            table.apply_nonzero_cols(&out, &shape, &floors, found.as_mut());
            assert!(
                bytes_of(&values) == bytes_of(&found),
                "zeros applied: {name}"
            );
        }
    }
}

fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

#[test]
fn every_level_makes_the_scalar_kernels_planes_of_f32() {
    compare::<f32>(11, 300);
    compare_columns::<f32>(12, 200);
}

#[test]
fn every_level_makes_the_scalar_kernels_planes_of_f16() {
    compare::<f16>(13, 300);
    compare_columns::<f16>(14, 200);
}

#[test]
fn every_level_makes_the_scalar_kernels_planes_of_bf16() {
    compare::<bf16>(15, 300);
    compare_columns::<bf16>(16, 200);
}

#[test]
fn every_level_compacts_and_expands_as_the_scalar_kernels_do() {
    let scalar = planes_for_isa(Isa::Scalar).unwrap();
    for isa in levels("compaction") {
        let table = planes_for_isa(isa).unwrap();
        let mut random = Random::new(17);
        for case in 0..200 {
            let len = 8 * random.one_of(&[0, 1, 2, 3, 17, 512]);
            let plane = guarded_garbage(&mut random, len);
            let mut mask = guarded_garbage(&mut random, len);
            match random.below(4) {
                0 => mask.as_mut().fill(0),
                1 => mask.as_mut().fill(0xff),
                _ => {}
            }
            let mut out = guarded_garbage(&mut random, len);
            let mut found = Guarded::of(&out);
            let ones = scalar.compact(&plane, &mask, out.as_mut());
            assert_eq!(
                table.compact(&plane, &mask, found.as_mut()),
                ones,
                "case {case} on {isa}"
            );
            assert!(
                out[..] == found[..],
                "case {case} on {isa}: {len} bytes compacted"
            );

            let packed = Guarded::of(&out[..plane_len(ones)]);
            let mut found = guarded_garbage(&mut random, len);
            table.expand(&packed, &mask, found.as_mut());
            let wanted: Vec<u8> = plane
                .iter()
                .zip(&mask[..])
                .map(|(plane, mask)| plane & mask)
                .collect();
            assert!(
                found[..] == wanted[..],
                "case {case} on {isa}: {len} bytes expanded"
            );
        }
    }
}

#[test]
fn every_level_matches_two_values_and_writes_them_as_the_scalar_kernels_do() {
    let scalar = planes_for_isa(Isa::Scalar).unwrap();
    for isa in levels("two values") {
        let table = planes_for_isa(isa).unwrap();
        let mut random = Random::new(18);
        for case in 0..400 {
            let word = random.one_of(&[1, 2, 4, 8]);
            let n = length(&mut random);
            let (a, b) = (random.bits(), random.bits());
            let low = !0u64 >> (64 - 8 * word as u32);
            let (a, b) = (a & low, b & low);
            let plane = guarded_garbage(&mut random, plane_len(n));
            let (mut src, mut found) = (Guarded::<u8>::new(n * word), Guarded::<u8>::new(n * word));
            scalar.select(&plane, word, a, b, src.as_mut());
            table.select(&plane, word, a, b, found.as_mut());
            let name = format!("case {case} on {isa}: {n} words of {word}");
            assert!(src[..] == found[..], "selected: {name}");

            // Sometimes one word is a third value.
            let strange = random.below(3) == 0;
            if strange {
                let at = random.below(n * word);
                src.as_mut()[at] ^= 1 << random.below(8);
            }
            let mut out = guarded_garbage(&mut random, plane_len(n));
            let mut found = guarded_garbage(&mut random, plane_len(n));
            let matches = scalar.match_plane(&src, word, a, b, out.as_mut());
            assert_eq!(
                table.match_plane(&src, word, a, b, found.as_mut()),
                matches,
                "{name}"
            );
            assert!(!matches || out[..] == found[..], "matched: {name}");
        }
    }
}
