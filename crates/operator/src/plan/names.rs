//! Names and labels of what the operator makes.
//!
//! | object | name |
//! |---|---|
//! | Deployment, ServiceAccount, PodDisruptionBudget, NetworkPolicy, data Service | `<relay>-relay` |
//! | management Service (headless) | `<relay>-relay-management` |
//! | ConfigMap | `<relay>-relay-<content hash>` |
//!
//! A name of a Relay that is too long for a label, or has dots, is shortened and made unique by a hash.

use sha2::{Digest, Sha256};

/// Field manager of everything that the operator writes, and value of [`MANAGED_BY`].
pub const MANAGER: &str = "queuebox-operator";
/// Label that every watch selects by.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Label with [`APP`], for selectors over all relays.
pub const APP_LABEL: &str = "app.kubernetes.io/name";
/// Value of [`APP_LABEL`].
pub const APP: &str = "queuebox-relay";
/// Label by which the chart tells the operator's pods from others.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// Its value.
pub const OPERATOR: &str = "operator";
/// Label with the short name of the Relay: what Deployment and Services select pods by.
pub const RELAY_LABEL: &str = "queuebox.io/relay";
/// Label of pods, and so of ReplicaSets, with the content hash of their configuration.
pub const CONFIG_LABEL: &str = "queuebox.io/config";
/// Annotation of ConfigMaps and Deployments: how often the configuration of the Relay has been rendered anew.
pub const RENDERING_ANNOTATION: &str = "queuebox.io/rendering";
/// Annotation of Deployments: how many workers the operator asked for, whatever others did to the number since.
pub const REPLICAS_ANNOTATION: &str = "queuebox.io/replicas";
/// Annotation of Deployments: digest of the pods that were wanted, by which a change of the pods is told from one of the number.
pub const TEMPLATE_ANNOTATION: &str = "queuebox.io/template";
/// Annotation of everything that is applied: digest of what was wanted. A field that is wanted no more changes it.
pub const APPLIED_ANNOTATION: &str = "queuebox.io/applied";

/// Longest short name: with the longest suffix it is still the name of a Service (63).
const SHORT_MAX: usize = 45;

/// The first `digits` hexadecimal digits of the SHA-256 of a text.
pub fn digest(text: &str, digits: usize) -> String {
    let hash = Sha256::digest(text.as_bytes());
    let mut hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    hex.truncate(digits);
    hex
}

/// The Relay's name as far as it fits into a label.
pub fn short(relay: &str) -> String {
    let is_label = relay.len() <= SHORT_MAX && !relay.contains('.');
    // A Service's name begins with a letter.
    if is_label && relay.starts_with(|first: char| first.is_ascii_lowercase()) {
        return relay.to_owned();
    }
    let plain: String = relay.chars().map(|it| if it == '.' { '-' } else { it }).take(SHORT_MAX - 11).collect();
    let plain = plain.trim_end_matches('-');
    format!("r-{plain}-{}", digest(relay, 8))
}

/// Deployment, ServiceAccount, PodDisruptionBudget, NetworkPolicy and data Service.
pub fn workload(relay: &str) -> String {
    format!("{}-relay", short(relay))
}

/// Headless Service of the management port.
pub fn management(relay: &str) -> String {
    format!("{}-relay-management", short(relay))
}

/// ConfigMap of a rendering.
pub fn config_map(relay: &str, hash: &str) -> String {
    format!("{}-relay-{hash}", short(relay))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_fits_and_two_relays_never_share_one() {
        let long = "a".repeat(253);
        for relay in ["shop", "7shop", "team.shop", long.as_str(), &"b".repeat(46)] {
            let name = management(relay);
            assert!(name.len() <= 63 && name.starts_with(|it: char| it.is_ascii_lowercase()), "{name}");
            assert!(!name.contains('.') && !name.contains("--"), "{name}");
        }
        assert_eq!(workload("shop"), "shop-relay");
        assert_ne!(short("team.shop"), short("team-shop"));
        assert_ne!(short(&"b".repeat(46)), short(&"b".repeat(47)));
    }
}
