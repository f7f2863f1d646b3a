//! What scenarios share: a database of either kind, manifests, the running program, a receiver.
