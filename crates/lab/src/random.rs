//! The generator that decides where a crash falls.

/// mulberry32, a public-domain generator with 32 bits of state.
#[derive(Debug, Clone)]
pub struct Mulberry32(u32);

impl Mulberry32 {
    /// Started with `seed`.
    pub fn new(seed: u32) -> Self {
        Self(seed)
    }

    /// The next number in [0, 1).
    pub fn next_number(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x6d2b_79f5);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 15)).wrapping_mul(mixed | 1);
        mixed ^= mixed.wrapping_add((mixed ^ (mixed >> 7)).wrapping_mul(mixed | 61));
        f64::from(mixed ^ (mixed >> 14)) / 4_294_967_296.0
    }

    /// Does a crash fall here?
    pub fn crashes(&mut self) -> bool {
        self.next_number() < 0.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_1_gives_the_crashes_of_the_table() {
        let mut random = Mulberry32::new(1);
        assert_eq!((0..200).filter(|_| random.crashes()).count(), 21);
        let mut random = Mulberry32::new(1);
        let deliveries: usize =
            (0..200).map(|_| 1 + std::iter::from_fn(|| random.crashes().then_some(())).count()).sum();
        assert_eq!(deliveries, 225);
    }
}
