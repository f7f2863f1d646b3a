//! The sums of webhook signatures, used for checking and for signing alike.

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Sha256, Sha512};

/// `algorithm` of the `hmac` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// `HmacSHA256`.
    #[default]
    Sha256,
    /// `HmacSHA512`.
    Sha512,
}

/// `signaturePayloadFormat` of the `hmac` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadFormat {
    /// The bytes of the body.
    Body,
    /// `<timestamp>.<body>`.
    TimestampDotBody,
}

/// HMAC over the concatenated `parts`.
pub(crate) fn mac(algorithm: Algorithm, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    match algorithm {
        Algorithm::Sha256 => sum::<Hmac<Sha256>>(key, parts),
        Algorithm::Sha512 => sum::<Hmac<Sha512>>(key, parts),
    }
}

fn sum<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    // HMAC takes keys of every length, so this error does not exist; an empty answer matches no signature.
    let Ok(mut mac) = <M as KeyInit>::new_from_slice(key) else { return Vec::new() };
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]])
        .map(char::from)
        .collect()
}

/// Base64 with or without padding: secrets are copied by people.
pub(crate) const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The key bytes of a Standard Webhooks secret, given with or without `whsec_`.
pub(crate) fn standard_webhooks_key(secret: &str) -> Option<Vec<u8>> {
    let secret = secret.trim();
    BASE64.decode(secret.strip_prefix("whsec_").unwrap_or(secret)).ok().filter(|key| !key.is_empty())
}

/// The value of one `v1` entry, without `v1,`.
pub(crate) fn standard_webhooks(key: &[u8], id: &[u8], timestamp: &[u8], body: &[u8]) -> String {
    BASE64.encode(mac(Algorithm::Sha256, key, &[id, b".", timestamp, b".", body]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test case 2 of RFC 4231.
    #[test]
    fn hmac_of_rfc_4231() {
        let parts: [&[u8]; 2] = [b"what do ya want ", b"for nothing?"];
        assert_eq!(
            hex(&mac(Algorithm::Sha256, b"Jefe", &parts)),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            hex(&mac(Algorithm::Sha512, b"Jefe", &parts)),
            "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737"
        );
    }
}
