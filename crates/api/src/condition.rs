//! Words of conditions: what the operator reports of the three kinds (design: resources). One list, so that manifests,
//! documentation and alerts can be compared with it.

/// Type of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ConditionType {
    /// The manifest is valid together with what it refers to.
    Accepted,
    /// Named Sources, Destinations, Relays and secret keys exist.
    ResolvedRefs,
    /// For this generation: accepted, resolved, rolled out, and the workers have connected once.
    Ready,
    /// Messages get through.
    Delivering,
    /// The consumer or route is up.
    Receiving,
    /// Who sets the replicas.
    ScalingActive,
    /// Why there are not more replicas.
    ScalingLimited,
    /// Dead rows exist.
    DeadLettering,
    /// By spec or annotation.
    Paused,
    /// In progress.
    Reconciling,
    /// Cannot go on without a person.
    Stalled,
}

impl ConditionType {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Accepted,
        Self::ResolvedRefs,
        Self::Ready,
        Self::Delivering,
        Self::Receiving,
        Self::ScalingActive,
        Self::ScalingLimited,
        Self::DeadLettering,
        Self::Paused,
        Self::Reconciling,
        Self::Stalled,
    ];

    /// The word in `type`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "Accepted",
            Self::ResolvedRefs => "ResolvedRefs",
            Self::Ready => "Ready",
            Self::Delivering => "Delivering",
            Self::Receiving => "Receiving",
            Self::ScalingActive => "ScalingActive",
            Self::ScalingLimited => "ScalingLimited",
            Self::DeadLettering => "DeadLettering",
            Self::Paused => "Paused",
            Self::Reconciling => "Reconciling",
            Self::Stalled => "Stalled",
        }
    }
}

/// Annotation with the value `"false"`: hands off.
pub const RECONCILE_ANNOTATION: &str = "queuebox.io/reconcile";
/// Annotation that restarts the workers when its value changes.
pub const RESTARTED_AT_ANNOTATION: &str = "queuebox.io/restartedAt";
