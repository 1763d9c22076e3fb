//! The slab pool against a model: random programs of alloc, shrink, free and trim, on several threads, and across a fork.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;

use daf_rs::kernels::rng::mix64;
use daf_rs::pool::{Extent, PoolConfig, SlabPool, UNIT};
use proptest::prelude::*;

const CHUNK: usize = 4 << 20;
const PAGE: usize = 64 << 10;

fn small() -> Arc<SlabPool> {
    SlabPool::new(PoolConfig {
        chunk_bytes: CHUNK,
        warm_floor: 0,
    })
}

/// A pattern of an extent's own, of a length that no power of two shares.
fn pattern(seed: u64) -> [u8; 71] {
    std::array::from_fn(|i| (mix64(seed) >> (i % 57)) as u8)
}

fn paint(e: &mut Extent, seed: u64) {
    let pattern = pattern(seed);
    for piece in e.as_mut_slice().chunks_mut(pattern.len()) {
        piece.copy_from_slice(&pattern[..piece.len()]);
    }
}

fn intact(e: &Extent, seed: u64) -> bool {
    let pattern = pattern(seed);
    e.as_slice()
        .chunks(pattern.len())
        .all(|piece| *piece == pattern[..piece.len()])
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(usize),
    Free(prop::sample::Index),
    Shrink(prop::sample::Index, f64),
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop_oneof![0..2_000usize, 0..300_000usize, Just(CHUNK), 3_000_000..6_000_000usize].prop_map(Op::Alloc),
        3 => any::<prop::sample::Index>().prop_map(Op::Free),
        2 => (any::<prop::sample::Index>(), 0.0..1.2f64).prop_map(|(i, f)| Op::Shrink(i, f)),
        1 => Just(Op::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_keep_every_promise(ops in prop::collection::vec(op(), 1..80)) {
        let pool = small();
        let mut live: Vec<(Extent, u64)> = Vec::new();
        let mut peak = 0;
        for (step, op) in ops.into_iter().enumerate() {
            match op {
                Op::Alloc(bytes) => {
                    let mut e = pool.alloc(bytes).unwrap();
                    prop_assert_eq!((e.len(), e.reserved()), (bytes, bytes.div_ceil(UNIT) * UNIT));
                    paint(&mut e, step as u64);
                    live.push((e, step as u64));
                }
                Op::Free(i) if !live.is_empty() => {
                    let (e, seed) = live.swap_remove(i.index(live.len()));
                    prop_assert!(intact(&e, seed));
                }
                Op::Shrink(i, share) if !live.is_empty() => {
                    let at = i.index(live.len());
                    let (e, seed) = &mut live[at];
                    let before = e.len();
                    let to = (before as f64 * share) as usize;
                    e.shrink_to(to);
                    prop_assert_eq!(e.len(), to.min(before));
                    prop_assert_eq!(e.reserved(), e.len().div_ceil(UNIT) * UNIT);
                    prop_assert!(intact(e, *seed));
                }
                Op::Trim => {
                    pool.trim();
                }
                _ => {}
            }
            // No two extents overlap.
            let mut places: Vec<(usize, usize)> =
                live.iter().filter(|(e, _)| e.reserved() > 0).map(|(e, _)| (e.as_slice().as_ptr() as usize, e.reserved())).collect();
            places.sort_unstable();
            prop_assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
            let stats = pool.stats();
            let reserved: usize = live.iter().map(|(e, _)| e.reserved()).sum();
            peak = peak.max(stats.live);
            prop_assert_eq!(stats.live, reserved);
            prop_assert!(stats.peak >= peak && stats.resident == stats.live + stats.warm && stats.resident <= stats.mapped);
            prop_assert_eq!(stats.extents, live.iter().filter(|(e, _)| e.reserved() > 0).count());
        }
        prop_assert!(live.iter().all(|(e, seed)| intact(e, *seed)));
        live.clear();
        pool.trim();
        let stats = pool.stats();
        prop_assert_eq!((stats.live, stats.warm, stats.extents, stats.mapped), (0, 0, 0, 0));
    }
}

#[test]
fn the_best_fit_is_taken_and_neighbours_merge() {
    let pool = small();
    let a: Vec<Extent> = (0..64).map(|_| pool.alloc(UNIT).unwrap()).collect();
    let at = |e: &Extent| e.as_slice().as_ptr() as usize;
    let (first, fifth) = (at(&a[0]), at(&a[5]));
    assert!(
        a.windows(2).all(|w| at(&w[0]) + UNIT == at(&w[1])),
        "units are handed out in order"
    );
    let mut a: Vec<Option<Extent>> = a.into_iter().map(Some).collect();
    // A hole of one unit and one of three, freed in an order that needs merging on both sides.
    for i in [5, 10, 12, 11] {
        a[i] = None;
    }
    let three = pool.alloc(3 * UNIT).unwrap();
    assert_eq!(at(&three), first + 10 * UNIT);
    assert_eq!(
        at(&pool.alloc(1).unwrap()),
        fifth,
        "the smallest hole that fits"
    );
}

#[test]
fn steps_reuse_warm_memory_and_a_smaller_load_returns_it() {
    let pool = small();
    let step = |mib: usize| {
        let all: Vec<Extent> = (0..mib).map(|_| pool.alloc(1 << 20).unwrap()).collect();
        assert_eq!(pool.stats().live, mib << 20);
        drop(all);
    };
    step(64);
    let after = pool.stats();
    assert!(
        after.live == 0 && after.warm >= 64 << 20,
        "kept for the next step: {after:?}"
    );
    let mapped = after.mapped;
    for _ in 0..5 {
        step(64);
        assert_eq!(pool.stats().mapped, mapped, "no step maps anew");
    }
    for _ in 0..80 {
        step(8);
    }
    assert!(
        pool.stats().resident <= 24 << 20,
        "the rest went back: {:?}",
        pool.stats()
    );
    pool.reset_peak();
    assert_eq!(pool.stats().peak, 0);
}

#[test]
fn returned_memory_reads_as_new() {
    let pool = small();
    let mut keep = pool.alloc(UNIT).unwrap();
    keep.as_mut_slice().fill(7);
    let mut e = pool.alloc(CHUNK - UNIT).unwrap();
    e.as_mut_slice().fill(9);
    drop(e);
    assert!(pool.trim() >= CHUNK - 2 * PAGE);
    let e = pool.alloc(CHUNK - UNIT).unwrap();
    assert!(
        e.as_slice()[PAGE..].iter().all(|b| *b == 0),
        "whole pages came back from the system"
    );
    assert!(keep.as_slice().iter().all(|b| *b == 7));
}

#[test]
fn threads_share_the_pool() {
    let pool = small();
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let pool = &pool;
            scope.spawn(move || {
                let mut live: Vec<(Extent, u64)> = Vec::new();
                for i in 0..400 {
                    let seed = t << 32 | i;
                    let r = mix64(seed);
                    if r.is_multiple_of(3) && !live.is_empty() {
                        let (e, seed) = live.swap_remove((r >> 8) as usize % live.len());
                        assert!(intact(&e, seed));
                    } else {
                        let mut e = pool.alloc((r >> 40) as usize % 100_000).unwrap();
                        e.shrink_to((r >> 20) as usize % 100_000);
                        paint(&mut e, seed);
                        live.push((e, seed));
                    }
                }
                // Dropped on another thread than the one that made it.
                std::thread::spawn(move || assert!(live.iter().all(|(e, seed)| intact(e, *seed))))
                    .join()
                    .unwrap();
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.live, stats.extents), (0, 0));
}

#[test]
fn what_cannot_be_mapped_is_an_error() {
    for bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
        let e = small().alloc(bytes).unwrap_err();
        assert!(matches!(e, daf_rs::Error::OutOfMemory(_)), "{e}");
    }
}
