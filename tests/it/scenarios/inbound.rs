//! Section A, C and K: what comes in.
