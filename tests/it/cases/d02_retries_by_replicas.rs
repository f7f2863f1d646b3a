//! D02: retries multiply with the number of replicas.

use std::time::Duration;

use crate::{
    scenarios::claims::failing_row,
    support::{Kind, on_every_database},
};

/// The requests of one failing row, one attempt each, are as many and as far apart with six workers as with one.
async fn same_requests_and_gaps(kind: Kind) {
    let (one, six) = (failing_row(kind, 1).await, failing_row(kind, 6).await);
    assert_eq!(one.len(), six.len());
    for gap in one.iter().chain(&six) {
        // Jitter only adds, and a slow machine makes gaps longer.
        assert!(*gap >= Duration::from_millis(590), "{one:?} {six:?}");
    }
}

on_every_database!(same_requests_and_gaps);
