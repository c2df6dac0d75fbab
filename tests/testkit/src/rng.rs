//! Random choices that can be repeated.

/// A small generator (splitmix64); the seed is printed, and taken from
/// `STORY_SEED` if that is set.
pub struct Rng(u64);

impl Rng {
    pub fn new() -> Self {
        let seed = std::env::var("STORY_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(|| {
                std::time::UNIX_EPOCH
                    .elapsed()
                    .map_or(1, |now| u64::from(now.subsec_nanos()))
            });
        println!("STORY_SEED={seed}");
        Self(seed)
    }

    /// Another, independent generator.
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// Below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
