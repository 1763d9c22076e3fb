//! Which dimension is the channel: decided by the consumer, never read from the layout alone.

use super::super::tensor::TensorView;
use crate::codec::Geometry;

/// A consumer's word on the channel dimension of the tensor that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// The last dimension (linear).
    Last,
    /// The last dimension makes rows of unlike scale that backward divides by (layer norm, softmax): never a channel.
    Row,
    /// Dimension 1 (convolutions, batch and group norm, pooling).
    Dim1,
    /// Everything inside the token dimension -2, in stride order (scaled dot product attention).
    Heads,
    /// As the tensor was produced: the last of 2 or 3 dimensions, dimension 1 of a channels-last map, else none.
    Producer,
    /// No channel.
    Flat,
}

impl Axis {
    /// The axis with this name in the policy table.
    pub(crate) fn from_name(name: &str) -> Option<Axis> {
        Some(match name {
            "last" => Axis::Last,
            "row" => Axis::Row,
            "dim1" => Axis::Dim1,
            "heads" => Axis::Heads,
            "producer" => Axis::Producer,
            "flat" => Axis::Flat,
            _ => return None,
        })
    }
}

/// The user's choice of group shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    /// By consumer and layout.
    Auto,
    /// Always consecutive elements.
    Row,
    /// Down the columns wherever a channel is known.
    Channel,
}

/// Rows below which a column is too short for channel groups.
const MIN_CHANNEL_ROWS: usize = 128;
/// The smallest group.
const MIN_GROUP: usize = 32;
/// The group size where rows fit no power of two and are too few for channel groups.
const SHORT_ROW_GROUP: u16 = 32;

/// One dimension of a view in memory order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dim {
    pub(crate) size: usize,
    pub(crate) stride: usize,
    /// Which dimension of the tensor.
    pub(crate) logical: usize,
}

/// The dimensions of a view by falling stride, without those of size 1 and the expanded ones (stride 0).
///
/// `None` where two elements share an address in a way that is no plain expansion, or a stride is negative.
pub(crate) fn memory_order(view: &TensorView) -> Option<Vec<Dim>> {
    let mut dims = Vec::with_capacity(view.sizes.as_slice().len());
    for (logical, (&size, &stride)) in view
        .sizes
        .as_slice()
        .iter()
        .zip(view.strides.as_slice())
        .enumerate()
    {
        let (size, stride) = (usize::try_from(size).ok()?, usize::try_from(stride).ok()?);
        if size != 1 && stride != 0 {
            dims.push(Dim {
                size,
                stride,
                logical,
            });
        }
    }
    dims.sort_by(|a, b| b.stride.cmp(&a.stride).then(a.logical.cmp(&b.logical)));
    let mut reach = 1;
    for dim in dims.iter().rev() {
        if dim.stride < reach {
            return None;
        }
        reach = reach.checked_add((dim.size - 1).checked_mul(dim.stride)?)?;
    }
    Some(dims)
}

/// The dimensions with neighbours merged: equal for every view of the same set of elements.
pub(crate) fn element_set(dims: &[Dim]) -> Vec<(usize, usize)> {
    let mut merged: Vec<(usize, usize)> = Vec::with_capacity(dims.len());
    for dim in dims {
        match merged.last_mut() {
            Some((size, stride)) if *stride == dim.size * dim.stride => {
                *size *= dim.size;
                *stride = dim.stride;
            }
            _ => merged.push((dim.size, dim.stride)),
        }
    }
    merged
}

/// Group shape and size for the elements of `dims` (memory order), as the consumer and the user want them.
pub(crate) fn choose(
    dims: &[Dim],
    ndim: usize,
    axis: Axis,
    groups: Groups,
    group_size: u16,
) -> (Geometry, u16, Option<&'static str>) {
    let n: usize = dims.iter().map(|dim| dim.size).product();
    let flat = (Geometry::Row { n }, group_size, None);
    if groups == Groups::Row && axis == Axis::Flat {
        return flat;
    }
    let Some(cols) = channel_width(dims, ndim, axis) else {
        if axis == Axis::Dim1 {
            let size = plane_group(dims, group_size);
            return (Geometry::Row { n }, size, None);
        }
        return flat;
    };
    if cols == 0 || n == 0 {
        return flat;
    }
    let rows = n / cols;
    let channel = (Geometry::Channel { rows, cols }, group_size, None);
    if groups != Groups::Row && axis != Axis::Row && rows >= MIN_CHANNEL_ROWS {
        return channel;
    }
    // Row groups must not span rows of unlike scale: the largest power of two that divides the row.
    let fitting = 1usize << cols.trailing_zeros().min(31);
    if fitting >= MIN_GROUP {
        let size = fitting.min(group_size as usize);
        #[expect(clippy::cast_possible_truncation, reason = "at most group_size, a u16")]
        return (Geometry::Row { n }, size as u16, None);
    }
    if groups == Groups::Channel && axis != Axis::Row {
        return channel;
    }
    (
        Geometry::Row { n },
        SHORT_ROW_GROUP,
        Some("groups of 32 span rows: no power of two divides a row"),
    )
}

/// The group size for a map whose channels are planes: groups that divide a plane where a power of two does, else so
/// small that few of them span two planes. Normalization weighs channels by their own scale.
fn plane_group(dims: &[Dim], group_size: u16) -> u16 {
    let Some(at) = dims.iter().position(|dim| dim.logical == 1) else {
        return group_size;
    };
    let plane: usize = dims[at + 1..].iter().map(|dim| dim.size).product();
    let dividing = 1usize << plane.trailing_zeros().min(31);
    let size = if dividing >= MIN_GROUP {
        dividing
    } else {
        (plane / 4 + 1).next_power_of_two().max(MIN_GROUP)
    };
    u16::try_from(size).unwrap_or(group_size).min(group_size)
}

/// The number of innermost elements that are channels, where the channel is innermost in memory.
fn channel_width(dims: &[Dim], ndim: usize, axis: Axis) -> Option<usize> {
    let last = ndim.checked_sub(1)?;
    let innermost = dims.last()?;
    match axis {
        Axis::Last | Axis::Row => {
            (ndim >= 2 && innermost.logical == last).then_some(innermost.size)
        }
        Axis::Dim1 if ndim == 2 => (innermost.logical == 1).then_some(innermost.size),
        Axis::Dim1 => (ndim > 2 && innermost.logical == 1).then_some(innermost.size),
        Axis::Heads => {
            let token = ndim.checked_sub(2)?;
            let at = dims.iter().position(|dim| dim.logical == token)?;
            let inside: usize = dims[at + 1..].iter().map(|dim| dim.size).product();
            // The channels must be one dense run, so that a row of them has one pitch.
            let dense = dims[at + 1..].iter().rev().try_fold(1, |reach, dim| {
                (dim.stride == reach).then_some(reach * dim.size)
            });
            (at + 1 < dims.len() && dense.is_some()).then_some(inside)
        }
        Axis::Producer => match ndim {
            2 | 3 => (innermost.logical == last).then_some(innermost.size),
            4 | 5 => (innermost.logical == 1).then_some(innermost.size),
            _ => None,
        },
        Axis::Flat => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(sizes: &[usize], strides: &[usize]) -> Vec<Dim> {
        let mut dims: Vec<Dim> = sizes
            .iter()
            .zip(strides)
            .enumerate()
            .map(|(logical, (&size, &stride))| Dim {
                size,
                stride,
                logical,
            })
            .collect();
        dims.sort_by_key(|dim| std::cmp::Reverse(dim.stride));
        dims
    }

    #[test]
    fn tokens_take_channel_groups() {
        let dims = dims(&[8, 128, 768], &[128 * 768, 768, 1]);
        let (geometry, group, _) = choose(&dims, 3, Axis::Last, Groups::Auto, 256);
        assert_eq!(
            geometry,
            Geometry::Channel {
                rows: 1024,
                cols: 768
            }
        );
        assert_eq!(group, 256);
    }

    #[test]
    fn groups_of_a_map_stay_within_their_planes() {
        for (side, expected) in [
            (32, 256),
            (16, 256),
            (8, 64),
            (28, 256),
            (14, 64),
            (7, 32),
            (4, 32),
        ] {
            let dims = dims(
                &[16, 64, side, side],
                &[64 * side * side, side * side, side, 1],
            );
            let (geometry, group, _) = choose(&dims, 4, Axis::Dim1, Groups::Auto, 256);
            let n = 16 * 64 * side * side;
            assert_eq!((geometry, group), (Geometry::Row { n }, expected), "{side}");
        }
    }

    #[test]
    fn normalized_rows_are_never_mixed() {
        let dims = dims(&[8, 128, 768], &[128 * 768, 768, 1]);
        for groups in [Groups::Auto, Groups::Row, Groups::Channel] {
            let (geometry, group, _) = choose(&dims, 3, Axis::Row, groups, 512);
            assert_eq!((geometry, group), (Geometry::Row { n: 8 * 128 * 768 }, 256));
        }
    }

    #[test]
    fn heads_of_a_b_t_h_d_tensor_are_all_channels() {
        let dims = dims(&[4, 8, 64, 16], &[64 * 128, 16, 128, 1]);
        let (geometry, ..) = choose(&dims, 4, Axis::Heads, Groups::Auto, 256);
        assert_eq!(
            geometry,
            Geometry::Channel {
                rows: 256,
                cols: 128
            }
        );
    }

    #[test]
    fn few_rows_get_the_largest_group_that_divides_a_row() {
        let dims = dims(&[16, 96], &[96, 1]);
        let (geometry, group, _) = choose(&dims, 2, Axis::Last, Groups::Auto, 256);
        assert_eq!((geometry, group), (Geometry::Row { n: 16 * 96 }, 32));
    }

    #[test]
    fn a_merged_set_is_the_same_for_every_view() {
        assert_eq!(
            element_set(&dims(&[8, 128, 768], &[128 * 768, 768, 1])),
            vec![(8 * 128 * 768, 1)]
        );
        assert_eq!(
            element_set(&dims(&[1024, 256], &[768, 1])),
            vec![(1024, 768), (256, 1)]
        );
    }
}
