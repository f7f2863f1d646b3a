//! Times on the wire: PostgreSQL's own ticks, microseconds since 2000-01-01 UTC, so that no statement spends numeric arithmetic on
//! them and a time that was read is compared exactly when it is written (contract 5.1.5).

use sqlx::{
    Postgres,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, types::Oid},
};

const TIMESTAMPTZ: PgTypeInfo = PgTypeInfo::with_oid(Oid(1184));
const TIMESTAMPTZ_ARRAY: PgTypeInfo = PgTypeInfo::with_oid(Oid(1185));

/// Microseconds from 1970-01-01 to 2000-01-01.
const EPOCH_US: i64 = 946_684_800_000_000;

/// A `timestamptz` as the server counts it. `infinity` is the largest value, `-infinity` the smallest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(pub i64);

impl Ticks {
    /// From microseconds since 1970.
    pub fn from_unix_us(us: i64) -> Self {
        Self(us.saturating_sub(EPOCH_US))
    }

    /// Microseconds since 1970.
    pub fn unix_us(self) -> i64 {
        self.0.saturating_add(EPOCH_US)
    }

    /// Microseconds from `earlier` until this time.
    pub fn since(self, earlier: Self) -> i64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl sqlx::Type<Postgres> for Ticks {
    fn type_info() -> PgTypeInfo {
        TIMESTAMPTZ
    }
}

impl PgHasArrayType for Ticks {
    fn array_type_info() -> PgTypeInfo {
        TIMESTAMPTZ_ARRAY
    }
}

impl sqlx::Encode<'_, Postgres> for Ticks {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buf.extend_from_slice(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_count_from_2000() {
        assert_eq!(Ticks::from_unix_us(946_684_800_000_001), Ticks(1));
        assert_eq!(Ticks(-946_684_800_000_000).unix_us(), 0);
        assert_eq!(Ticks(i64::MAX).unix_us(), i64::MAX);
        assert_eq!(Ticks(i64::MAX).since(Ticks(-5)), i64::MAX);
    }
}
