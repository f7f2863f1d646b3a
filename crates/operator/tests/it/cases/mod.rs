//! Cases from the field (docs/cases.md) that concern the operator.

mod d34_replicas_owned_by_two_sides;
mod d35_finalizer_stuck;
mod d37_status_hot_loop;
mod d44_leader_election;
