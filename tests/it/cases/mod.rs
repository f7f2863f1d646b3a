//! One module per case of `docs/cases.md`, named `dNN_…`.
mod d05_overtaking;
mod d25_numbers;
mod d40_secrets_in_errors;
