//! One module per case of `docs/cases.md`, named `dNN_…`.
