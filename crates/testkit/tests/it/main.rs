//! The testkit tested: peers start, serve, survive what tests do to them, and go away.

mod peers;
mod tools;
