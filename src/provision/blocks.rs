//! The blocks of a snapshot that have data, or that differ from those of another snapshot.
//!
//! A page ends where it has enough blocks, or has taken enough work, so a snapshot of any size
//! takes the same memory, and no call takes long. What differs is found by comparing the data
//! of both: only what may have data in one of them is read.

use std::ops::Range;

use super::ProvisionError;
use crate::secret::Secrets;

/// A request for the blocks of a snapshot.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    /// The handle of the snapshot.
    pub snapshot: String,
    /// Only what differs from that snapshot.
    pub base: Option<String>,
    /// The offset of the first byte that counts.
    pub from: u64,
    /// The most blocks of a page; 0: as many as fit a page.
    pub max: usize,
    /// The secrets of the storage.
    pub secrets: Secrets,
}

/// Some of the blocks of a snapshot, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPage {
    /// The size of the snapshot.
    pub bytes: u64,
    pub blocks: Vec<Range<u64>>,
    /// Where the next page begins, if there is one.
    pub next: Option<u64>,
}

/// The data of a snapshot.
pub trait SnapshotData {
    /// The size in bytes.
    fn bytes(&self) -> u64;
    /// The ranges within `part` that may have data, in order; all others read as zeros.
    fn allocated(&self, part: &Range<u64>) -> Result<Vec<Range<u64>>, ProvisionError>;
    /// Reads to the whole buffer, zeros beyond the end.
    fn read(&self, at: u64, data: &mut [u8]) -> Result<(), ProvisionError>;
}

/// A page of what is asked for. `open` opens a snapshot by its handle: its data, and the handle
/// of its volume.
pub fn snapshot_blocks<D: SnapshotData>(
    what: &BlockRequest,
    open: impl Fn(&str) -> Result<(D, String), ProvisionError>,
) -> Result<BlockPage, ProvisionError> {
    let (target, source) = open(&what.snapshot)?;
    let Some(handle) = &what.base else {
        return page(&target, None, what);
    };
    let (base, source_of_base) = open(handle)?;
    if source_of_base != source {
        let (base, target) = (handle.clone(), what.snapshot.clone());
        return Err(ProvisionError::OtherSource { base, target });
    }
    page(&target, Some(&base), what)
}

/// The part of a buffer for the data from `at` on that lies before the end, `bytes`. Fills the
/// rest with zeros.
pub fn before_end(data: &mut [u8], at: u64, bytes: u64) -> &mut [u8] {
    let inside = bytes.saturating_sub(at);
    let inside = usize::try_from(inside).map_or(data.len(), |inside| inside.min(data.len()));
    let (inside, beyond) = data.split_at_mut(inside);
    beyond.fill(0);
    inside
}

/// A page of the blocks of `target`, or of what differs in it from `base`.
fn page(
    target: &dyn SnapshotData,
    base: Option<&dyn SnapshotData>,
    what: &BlockRequest,
) -> Result<BlockPage, ProvisionError> {
    let bytes = target.bytes();
    if what.from > bytes {
        let why = format!("the snapshot has {bytes} bytes");
        let field = "starting_offset";
        return Err(ProvisionError::Size { field, why });
    }
    let mut page = PageInWork {
        blocks: Vec::new(),
        max: match what.max {
            0 => LARGEST_PAGE,
            max => max.min(LARGEST_PAGE),
        },
        work: 0,
    };
    let mut at = what.from;
    while at < bytes && !page.is_full() {
        let part = at..next_multiple(at, PART).min(bytes);
        at = match base {
            None => {
                page.work += PART_WORK;
                target
                    .allocated(&part)?
                    .into_iter()
                    .for_each(|block| page.add(block));
                part.end
            }
            Some(base) => page.compare(target, base, part)?,
        };
    }
    let next = match page.blocks.get(page.max) {
        Some(block) => Some(block.start),
        None => (at < bytes).then_some(at),
    };
    page.blocks.truncate(page.max);
    let blocks = page.blocks;
    Ok(BlockPage {
        bytes,
        blocks,
        next,
    })
}

struct PageInWork {
    blocks: Vec<Range<u64>>,
    max: usize,
    /// Bytes read, or what takes as long.
    work: u64,
}

impl PageInWork {
    fn is_full(&self) -> bool {
        self.blocks.len() > self.max || self.work >= MOST_WORK
    }

    fn add(&mut self, block: Range<u64>) {
        match self.blocks.last_mut() {
            Some(last) if last.end >= block.start => last.end = last.end.max(block.end),
            _ => self.blocks.push(block),
        }
    }

    /// Compares a part; returns where it has ended.
    fn compare(
        &mut self,
        target: &dyn SnapshotData,
        base: &dyn SnapshotData,
        part: Range<u64>,
    ) -> Result<u64, ProvisionError> {
        self.work += 2 * PART_WORK;
        let mut either = target.allocated(&part)?;
        either.extend(base.allocated(&part)?);
        either.sort_unstable_by_key(|range| range.start);
        let (mut new, mut old) = (vec![0; PIECE], vec![0; PIECE]);
        let mut done = part.start;
        for range in either {
            while done.max(range.start) < range.end {
                if self.is_full() {
                    return Ok(done);
                }
                // Whole blocks, and none of them twice.
                let block = BLOCK as u64;
                let start = done.max(range.start / block * block);
                let end = range.end.next_multiple_of(block).min(part.end);
                let piece = start..end.min(start + PIECE as u64);
                let len = usize::try_from(piece.end - piece.start).unwrap_or(PIECE);
                target.read(start, &mut new[..len])?;
                base.read(start, &mut old[..len])?;
                self.work += 2 * len as u64;
                let blocks = new[..len].chunks(BLOCK);
                let pairs = blocks.zip(old[..len].chunks(BLOCK));
                for (offset, (new, old)) in (start..).step_by(BLOCK).zip(pairs) {
                    if new != old {
                        self.add(offset..offset + new.len() as u64);
                    }
                }
                done = piece.end;
            }
        }
        Ok(part.end)
    }
}

/// The least multiple of `size` that is more than `at`.
fn next_multiple(at: u64, size: u64) -> u64 {
    (at / size + 1).saturating_mul(size)
}

/// The most blocks of a page, also where a request allows more.
const LARGEST_PAGE: usize = 4096;
/// The unit in which blocks are compared.
const BLOCK: usize = 4096;
/// Bytes read at once.
const PIECE: usize = 1 << 20;
/// Bytes whose allocation is looked up at once.
const PART: u64 = 1 << 30;
/// What such a look-up counts as work.
const PART_WORK: u64 = 4 << 20;
/// The most work for one page.
const MOST_WORK: u64 = 256 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Data in memory, of which whole units are allocated.
    #[derive(Debug)]
    struct Memory(Vec<u8>);

    const UNIT: usize = 512;

    impl SnapshotData for Memory {
        fn bytes(&self) -> u64 {
            self.0.len() as u64
        }

        fn allocated(&self, part: &Range<u64>) -> Result<Vec<Range<u64>>, ProvisionError> {
            let units = (0..).step_by(UNIT).zip(self.0.chunks(UNIT));
            let used = units.filter(|(_, unit)| unit.iter().any(|byte| *byte != 0));
            let ranges = used.map(|(at, unit)| at..at + unit.len() as u64);
            let inside = ranges.map(|range| range.start.max(part.start)..range.end.min(part.end));
            Ok(inside.filter(|range| !range.is_empty()).collect())
        }

        fn read(&self, at: u64, data: &mut [u8]) -> Result<(), ProvisionError> {
            let rest = self
                .0
                .get(usize::try_from(at).unwrap()..)
                .unwrap_or_default();
            let len = rest.len().min(data.len());
            data[..len].copy_from_slice(&rest[..len]);
            data[len..].fill(0);
            Ok(())
        }
    }

    /// All blocks, page by page.
    fn all(target: &Memory, base: Option<&Memory>, from: u64, max: usize) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut next = Some(from);
        while let Some(from) = next {
            let what = BlockRequest {
                snapshot: String::new(),
                base: None,
                from,
                max,
                secrets: Secrets::default(),
            };
            let base = base.map(|base| base as &dyn SnapshotData);
            let page = page(target, base, &what).unwrap();
            assert!(page.blocks.len() <= max);
            assert!(page.next.is_none_or(|next| next > from));
            found.extend(page.blocks);
            next = page.next;
        }
        assert!(
            found
                .iter()
                .all(|block| !block.is_empty() && block.start >= from)
        );
        assert!(found.is_sorted_by(|one, other| one.end <= other.start));
        found
    }

    fn memory() -> impl Strategy<Value = Memory> {
        let writes = proptest::collection::vec((0..60_000_usize, 1..9000_usize, 1..4_u8), 0..6);
        (writes, 0..60_000_usize).prop_map(|(writes, len)| {
            let mut data = vec![0; len];
            for (at, size, byte) in writes {
                let end = (at + size).min(len);
                data.get_mut(at..end)
                    .into_iter()
                    .for_each(|data| data.fill(byte));
            }
            Memory(data)
        })
    }

    proptest! {
        #[test]
        fn every_byte_of_data_is_in_a_block(target in memory(), from in 0..60_000_usize, max in 1..5_usize) {
            prop_assume!(from <= target.0.len());
            let found = all(&target, None, from as u64, max);
            for (at, byte) in (0..).zip(&target.0).skip(from) {
                prop_assert!(*byte == 0 || found.iter().any(|block| block.contains(&at)));
            }
        }

        #[test]
        fn every_changed_byte_is_in_a_block_and_every_block_has_one(
            target in memory(), base in memory(), from in 0..60_000_u64, max in 1..5_usize,
        ) {
            prop_assume!(from <= target.bytes());
            let found = all(&target, Some(&base), from, max);
            let mut old = vec![0; target.0.len()];
            base.read(0, &mut old).unwrap();
            let differs = |at: u64| {
                let at = usize::try_from(at).unwrap();
                target.0[at] != old[at]
            };
            for at in from..target.bytes() {
                prop_assert!(!differs(at) || found.iter().any(|block| block.contains(&at)));
            }
            for block in found {
                prop_assert!(block.end <= target.bytes());
                prop_assert!(block.into_iter().any(differs));
            }
        }
    }

    #[test]
    fn an_offset_beyond_the_end_is_refused() {
        let what = BlockRequest {
            snapshot: String::new(),
            base: None,
            from: 4097,
            max: 0,
            secrets: Secrets::default(),
        };
        let error = page(&Memory(vec![1; 4096]), None, &what).unwrap_err();
        assert!(error.to_string().contains("4096"), "{error}");
    }
}
