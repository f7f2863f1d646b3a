//! Section F: fan-out.
