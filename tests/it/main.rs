//! The built program between real peers. `scenarios` are the rows of `docs/conformance.md` by name, `cases` the faults of
//! `docs/cases.md`, each with its neighbours.

mod cases;
mod scenarios;
mod support;
