//! A forked child goes on encoding and decoding, with threads and pool of its own, while the parent's threads were at work.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::atomic::{AtomicBool, Ordering};

use daf_rs::codec::*;
use daf_rs::dtype::FloatType;
use daf_rs::pool::SlabPool;

fn round_trip(x: &[f32], key: u64) -> Encoded {
    let layout = Layout::contiguous(x.len());
    let geometry = Geometry::Row { n: x.len() };
    let spec = ValueSpec {
        dtype: FloatType::F32,
        bits: 4,
        group_size: 256,
        rounding: Rounding::Dither,
        geometry,
        key,
        zero: ZeroPlane::Auto,
    };
    let q = encode_value(Source::from_slice(x), &layout, &spec, SlabPool::global(), 3).unwrap();
    let mut y = vec![0f32; x.len()];
    q.decode_into(Target::from_slice(&mut y), &layout, ReadMode::Values, 3)
        .unwrap();
    assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 0.1));
    q
}

#[test]
fn a_forked_child_encodes_and_decodes() {
    let x: Vec<f32> = (0..2_000_000).map(|i| (i as f32 * 0.001).sin()).collect();
    let before = round_trip(&x, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Other threads take the pool's lock and the thread pool all the time.
        for key in 2..4 {
            let (x, stop) = (&x, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    round_trip(&x[..400_000], key);
                }
            });
        }
        for _ in 0..20 {
            // SAFETY: the child calls only code that is meant to work after a fork, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let good = std::panic::catch_unwind(|| {
                    // What the parent stored is readable, new tensors get new memory, old ones can be dropped.
                    let again = round_trip(&x, 1);
                    again == before && SlabPool::global().stats().live > 0
                });
                // SAFETY: ends the child at once, without running the parent's exit handlers.
                unsafe { libc::_exit(if matches!(good, Ok(true)) { 0 } else { 1 }) };
            }
            assert!(child > 0);
            let started = std::time::Instant::now();
            let mut status = 0;
            // SAFETY: waits for the child made above; `status` is a live local.
            while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
                if started.elapsed().as_secs() > 120 {
                    // SAFETY: the child made above.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                    stop.store(true, Ordering::Relaxed);
                    panic!("the child hangs");
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            if status != 0 {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "the child failed");
        }
        stop.store(true, Ordering::Relaxed);
    });
    let q = round_trip(&x, 1);
    assert!(q == before);
}
