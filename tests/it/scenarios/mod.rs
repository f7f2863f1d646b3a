//! One module per section of `docs/conformance.md`.
