//! Section D: the relay.
