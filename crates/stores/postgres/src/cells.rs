//! Reads the columns of a row one after the other.

use sqlx::{
    Postgres, Row, ValueRef,
    postgres::{PgRow, PgValueFormat},
};

use crate::{error::Error, values::Ticks};

/// A row and the column that comes next.
pub struct Cells<'r> {
    row: &'r PgRow,
    at: usize,
}

impl<'r> Cells<'r> {
    /// From the first column.
    pub fn of(row: &'r PgRow) -> Self {
        Self::at(row, 0)
    }

    /// From column `at`, counted from 0.
    pub fn at(row: &'r PgRow, at: usize) -> Self {
        Self { row, at }
    }

    /// The next value.
    pub fn next<T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>>(&mut self) -> Result<T, Error> {
        let value = self.row.try_get(self.at)?;
        self.at += 1;
        Ok(value)
    }

    /// The bytes of the next value as they came; of a text, the text.
    pub fn bytes(&mut self) -> Result<Option<&'r [u8]>, Error> {
        let value = self.row.try_get_raw(self.at)?;
        self.at += 1;
        if value.is_null() {
            return Ok(None);
        }
        value.as_bytes().map(Some).map_err(|error| sqlx::Error::Decode(error).into())
    }

    /// The next value as a time.
    pub fn ticks(&mut self) -> Result<Option<Ticks>, Error> {
        let at = self.at;
        let value = self.row.try_get_raw(at)?;
        self.at += 1;
        if value.is_null() {
            return Ok(None);
        }
        let binary = value.format() == PgValueFormat::Binary;
        let bytes = value.as_bytes().map_err(sqlx::Error::Decode)?;
        match <[u8; 8]>::try_from(bytes) {
            Ok(bytes) if binary => Ok(Some(Ticks(i64::from_be_bytes(bytes)))),
            _ => Err(sqlx::Error::Decode(format!("column {at} is no timestamptz").into()).into()),
        }
    }
}
