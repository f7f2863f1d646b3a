//! One module per case of `docs/cases.md`, named `dNN_…`.
mod d01_waiting_rows;
mod d02_retries_by_replicas;
mod d03_graceful_stop;
mod d04_skipped_rows;
mod d05_overtaking;
mod d09_database_away;
mod d19_slow_endpoint;
mod d21_equal_keys;
mod d23_nul_and_surrogates;
mod d23_unstorable_text;
mod d25_numbers;
mod d29_idle_in_transaction;
mod d32_retention;
mod d33_clocks_and_zones;
mod d40_secrets_in_errors;
mod d41_cardinality;
mod d42_replay;
