//! Lanes: the 64 parts of a table (SQLite: one part), by a hash of the key, so that all rows of a key are in one lane.
//! A worker owns lanes, never rows (contract 5.2).

/// Number of a lane, 0 to 63.
pub type Lane = u8;

/// A set of lanes, one bit each. The type that the stores bind as a 64-bit mask.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LaneSet(u64);

impl LaneSet {
    /// No lane.
    pub const EMPTY: Self = Self(0);

    /// The lanes 0 to `count - 1`; `count` is at most 64.
    pub fn first(count: u8) -> Self {
        if count >= 64 { Self(u64::MAX) } else { Self((1u64 << count) - 1) }
    }

    /// From a bit mask.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// As a bit mask.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The bit mask as the signed integer that SQL knows.
    pub fn as_i64(self) -> i64 {
        i64::from_ne_bytes(self.0.to_ne_bytes())
    }

    /// Is `lane` in the set?
    pub fn contains(self, lane: Lane) -> bool {
        lane < 64 && self.0 & (1 << lane) != 0
    }

    /// Adds a lane.
    pub fn insert(&mut self, lane: Lane) {
        debug_assert!(lane < 64, "lanes are 0 to 63");
        self.0 |= 1 << (lane & 63);
    }

    /// Removes a lane.
    pub fn remove(&mut self, lane: Lane) {
        self.0 &= !(1 << (lane & 63));
    }

    /// Number of lanes in the set.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// No lane in the set?
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Lanes in either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Lanes in both sets.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Lanes of this set that are not in `other`.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The lanes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = Lane> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let lane = rest.trailing_zeros() as Lane;
            rest &= rest - 1;
            Some(lane)
        })
    }
}

impl FromIterator<Lane> for LaneSet {
    fn from_iter<I: IntoIterator<Item = Lane>>(lanes: I) -> Self {
        let mut set = Self::EMPTY;
        for lane in lanes {
            set.insert(lane);
        }
        set
    }
}

impl std::fmt::Debug for LaneSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_behave_like_sets() {
        let mut set: LaneSet = [0, 5, 63].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 5, 63]);
        assert!(set.contains(63) && !set.contains(62));
        set.remove(5);
        assert_eq!(set.len(), 2);
        assert_eq!(set.minus(LaneSet::first(1)).iter().collect::<Vec<_>>(), [63]);
        assert_eq!(LaneSet::first(64).len(), 64);
        assert_eq!(LaneSet::first(64).as_i64(), -1);
    }
}
