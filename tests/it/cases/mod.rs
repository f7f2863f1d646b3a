//! One module per case of `docs/cases.md`, named `dNN_…`.
mod d05_overtaking;
mod d09_database_away;
mod d23_unstorable_text;
mod d25_numbers;
mod d29_idle_in_transaction;
mod d40_secrets_in_errors;
