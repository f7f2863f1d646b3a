//! Names to addresses, and which addresses are private (contract 7.5).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use async_trait::async_trait;

/// Turns a host name into addresses. Called for every connection, never cached here: the address that was checked is the
/// address that is used.
#[async_trait]
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of `host`, each with `port`.
    async fn resolve(&self, host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>>;
}

/// The resolver of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolve for SystemResolver {
    async fn resolve(&self, host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((host, port)).await?.collect())
    }
}

/// Loopback, link-local, site-local, unspecified, multicast and `fc00::/7`, also where an IPv6 address carries an IPv4
/// address inside (mapped, compatible, NAT64, 6to4).
pub fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_private_v4(v4),
        IpAddr::V6(v6) => is_private_v6(v6),
    }
}

fn is_private_v4(v4: Ipv4Addr) -> bool {
    v4.is_loopback()
        || v4.is_link_local()
        || v4.is_private()
        || v4.is_multicast()
        || v4.is_broadcast()
        // The whole of "this network": Linux takes 0.0.0.0 for the own host.
        || v4.octets()[0] == 0
}

fn is_private_v6(v6: Ipv6Addr) -> bool {
    let segments = v6.segments();
    let own = v6.is_loopback()
        || v6.is_unspecified()
        || v6.is_multicast()
        || segments[0] & 0xfe00 == 0xfc00
        || segments[0] & 0xffc0 == 0xfe80
        || segments[0] & 0xffc0 == 0xfec0;
    own || embedded_v4(segments).is_some_and(is_private_v4)
}

fn embedded_v4(segments: [u16; 8]) -> Option<Ipv4Addr> {
    let from = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Ipv4Addr::new(a, b, c, d)
    };
    match segments {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] => Some(from(high, low)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(from(high, low)),
        [0x2002, high, low, ..] => Some(from(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_known_in_every_spelling() {
        let private = [
            "127.0.0.1",
            "127.255.255.254",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fec0::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "2002:7f00:1::",
        ];
        for text in private {
            assert!(is_private(text.parse().unwrap()), "{text}");
        }
        for text in ["203.0.113.10", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::"] {
            assert!(!is_private(text.parse().unwrap()), "{text}");
        }
    }
}
