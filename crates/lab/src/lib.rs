//! The dual-write lab: what a crash between two writes leaves behind, on a real database, with the real engine.
//!
//! It reproduces the table of the document on consistency and the outbox:
//!
//! | order of writes | crash between them leaves |
//! |---|---|
//! | DB, then publish | paid, never shipped (lost message) |
//! | publish, then DB | shipped, not paid (ghost message) |
//! | outbox + relay + inbox | nothing broken; duplicates absorbed |
//!
//! A crash falls between two writes when the next number of the generator mulberry32, started with the seed, is below 0.1; so the
//! figures come out exactly. The shop and the shipping service share one database here, but never a transaction.

mod database;
mod random;
mod run;
mod shop;

pub use self::{
    database::Database,
    random::Mulberry32,
    run::{Line, dual_write},
    shop::{Break, Shop},
};
