//! Manifests from their text to the checked value or the report.

mod check;
mod classic;
mod load;
mod table;
