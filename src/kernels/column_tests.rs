//! Column kernels of every level against the scalar ones, bit for bit.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use half::{bf16, f16};

use super::parity::{Guarded, Random, assert_planes_equal, bits_of, levels};
use super::*;

/// A row group somewhere in a block, of any shape.
fn shape(random: &mut Random) -> ColumnShape {
    let width = match random.below(3) {
        0 => random.one_of(&[8, 16, 32, 64, 96, 128]),
        1 => random.one_of(&[1, 7, 9, 15, 17, 25, 31, 33, 63, 65, 104, 120, 125, 127]),
        _ => 1 + random.below(128),
    };
    let padded = width.next_multiple_of(8);
    let most = BLOCK_SLOTS / padded;
    let rows = 1 + random.below(most.min(300));
    let any = random.below(most - rows + 1);
    let first_row = random.one_of(&[0, most - rows, any]);
    let pitch = width + random.one_of(&[0, 0, 1, 5, 64, 1024 - 128]);
    ColumnShape {
        pitch,
        rows,
        width,
        first_row,
    }
}

/// Group parameters that fit the data: inverse 0 for groups that are not coded, and for some others.
fn parameters(random: &mut Random, min: &[f32], max: &[f32], bits: usize) -> (Vec<f32>, Vec<f32>) {
    let levels = ((1u32 << bits) - 1) as f32;
    let inv = |(lo, hi): (&f32, &f32)| {
        let inv = 256.0 / ((hi - lo) / levels * 1.004) * (1.0 - 0.5f32.powi(21));
        if inv.is_finite() && random.below(10) > 0 {
            inv
        } else {
            0.0
        }
    };
    (min.to_vec(), min.iter().zip(max).map(inv).collect())
}

fn compare<T: Element>(seed: u64, cases: usize) {
    let _env = FpEnv::enter();
    let scalar = for_isa::<T>(Isa::Scalar).unwrap();
    for isa in levels(&format!("columns of {}", T::TYPE.name())) {
        let table = for_isa::<T>(isa).unwrap();
        let mut random = Random::new(seed);
        for case in 0..cases {
            let shape = shape(&mut random);
            let mut src = Guarded::<T>::new(shape.span());
            random.elements(src.as_mut());
            let columns = Columns { src: &src, shape };
            let params = random.params();
            let name = format!("case {case} on {isa}: {shape:?}, {params:?}");
            let mut ahead = Prefetch::columns(&columns);

            let skip_zeros = random.below(2) == 0;
            let (mut min, mut max) = ([7.0; 128], [7.0; 128]);
            scalar.range_cols(
                &columns,
                skip_zeros,
                &mut Prefetch::none(),
                &mut min,
                &mut max,
            );
            let (mut found_min, mut found_max) = ([7.0; 128], [7.0; 128]);
            table.range_cols(
                &columns,
                skip_zeros,
                &mut ahead,
                &mut found_min,
                &mut found_max,
            );
            assert_eq!(
                bits_of(&min),
                bits_of(&found_min),
                "minima, skip_zeros {skip_zeros}: {name}"
            );
            assert_eq!(
                bits_of(&max),
                bits_of(&found_max),
                "maxima, skip_zeros {skip_zeros}: {name}"
            );

            let (m, inv) = parameters(
                &mut random,
                &min[..shape.width],
                &max[..shape.width],
                params.bits,
            );
            let mut planes = random.planes();
            let mut found = planes.clone();
            scalar.quantize_cols(
                &columns,
                &m,
                &inv,
                &params,
                &mut Prefetch::none(),
                &mut planes,
            );
            table.quantize_cols(&columns, &m, &inv, &params, &mut ahead, &mut found);
            assert_planes_equal(&planes, &found, &name);

            // Planes that end right behind the group's last slot.
            let len = plane_len(shape.end_slot());
            let packed: Vec<u8> = (0..params.bits)
                .flat_map(|k| planes.plane(k)[..len].to_vec())
                .collect();
            let packed = Guarded::of(&packed);
            let packed = PlaneSrc::new(&packed, params.bits, len).unwrap();
            let finite = |x: &f32| if x.is_finite() { *x } else { 0.0 };
            let c0: Vec<f32> = m.iter().map(finite).collect();
            let step: Vec<f32> = inv.iter().map(|inv| finite(&(1.0 / inv))).collect();
            let mut values = Guarded::<T>::new(shape.span());
            random.bytes(bytemuck::cast_slice_mut(values.as_mut()));
            let mut found = Guarded::of(&values);
            let stream = random.below(2) == 0;
            scalar.dequantize_cols(&packed, &shape, &c0, &step, &params, false, values.as_mut());
            table.dequantize_cols(&packed, &shape, &c0, &step, &params, stream, found.as_mut());
            let (values, found): (&[u8], &[u8]) =
                (bytemuck::cast_slice(&values), bytemuck::cast_slice(&found));
            assert!(values == found, "values differ: {name}");
        }
    }
}

#[test]
fn every_level_treats_columns_of_f32_as_the_scalar_kernels_do() {
    compare::<f32>(1, 150);
}

#[test]
fn every_level_treats_columns_of_f16_as_the_scalar_kernels_do() {
    compare::<f16>(2, 150);
}

#[test]
fn every_level_treats_columns_of_bf16_as_the_scalar_kernels_do() {
    compare::<bf16>(3, 150);
}
