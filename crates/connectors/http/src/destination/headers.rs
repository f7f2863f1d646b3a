//! Headers of a request: the destination's, then its credential, then the row's, then the standard ones, which always win
//! (contract 7.4).

use http::{HeaderMap, HeaderName, HeaderValue, header};
use queuebox_core::ports::Delivery;

const MESSAGE_ID: HeaderName = HeaderName::from_static("x-message-id");
const TOPIC: HeaderName = HeaderName::from_static("x-topic");
const ATTEMPT: HeaderName = HeaderName::from_static("x-attempt");
const MESSAGE_KEY: HeaderName = HeaderName::from_static("x-message-key");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const USER_AGENT: HeaderValue = HeaderValue::from_static(concat!("queuebox/", env!("CARGO_PKG_VERSION")));

/// A header that HTTP cannot carry. Names the header, never its value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not a token of RFC 9110.
    #[error("{0:?} is no header name")]
    Name(String),
    /// A control character.
    #[error("the value of {0} has a character that no header can hold")]
    Value(String),
}

/// What is the same for every request of a destination.
#[derive(Debug)]
pub(super) struct Base(HeaderMap);

impl Base {
    pub(super) fn new(host: &HeaderValue, configured: &[(String, String)]) -> Result<Self, HeaderError> {
        let mut headers = HeaderMap::with_capacity(configured.len() + 16);
        headers.insert(header::HOST, host.clone());
        headers.insert(header::USER_AGENT, USER_AGENT);
        for (name, value) in configured {
            let (name, value) = parse(name, value)?;
            // A manifest may choose the virtual host; the framing is hyper's alone.
            if name == header::HOST || !is_framing(&name) {
                headers.insert(name, value);
            }
        }
        Ok(Self(headers))
    }

    pub(super) fn of(
        &self,
        delivery: &Delivery,
        credential: Option<&(HeaderName, HeaderValue)>,
    ) -> Result<HeaderMap, HeaderError> {
        let mut headers = self.0.clone();
        if let Some((name, value)) = credential {
            headers.insert(name, value.clone());
        }
        for (name, value) in &delivery.headers {
            let (name, value) = parse(name, value)?;
            if !is_framing(&name) {
                headers.insert(name, value);
            }
        }
        standard(&mut headers, delivery)?;
        Ok(headers)
    }
}

fn standard(headers: &mut HeaderMap, delivery: &Delivery) -> Result<(), HeaderError> {
    let mut id = uuid::Uuid::encode_buffer();
    let id = delivery.id.hyphenated().encode_lower(&mut id);
    headers.insert(header::CONTENT_TYPE, JSON);
    headers.insert(MESSAGE_ID, value(MESSAGE_ID.as_str(), id)?);
    headers.insert(TOPIC, value("X-Topic", &delivery.topic)?);
    headers.insert(ATTEMPT, HeaderValue::from(delivery.attempt));
    match &delivery.key {
        Some(key) => headers.insert(MESSAGE_KEY, value("X-Message-Key", key)?),
        // A forwarded webhook may bring one of its own; without a key there is none.
        None => headers.remove(MESSAGE_KEY),
    };
    Ok(())
}

fn parse(name: &str, text: &str) -> Result<(HeaderName, HeaderValue), HeaderError> {
    let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| HeaderError::Name(name.to_owned()))?;
    Ok((parsed, value(name, text)?))
}

fn value(name: &str, text: &str) -> Result<HeaderValue, HeaderError> {
    // UTF-8 goes out as it is: RFC 9110 calls such bytes opaque, and receivers of all frameworks can read them.
    HeaderValue::from_bytes(text.as_bytes()).map_err(|_| HeaderError::Value(name.to_owned()))
}

/// Framing and hop-by-hop headers: they describe the connection on which they came, never the message.
fn is_framing(name: &HeaderName) -> bool {
    const FRAMING: [HeaderName; 10] = [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::CONNECTION,
        header::TE,
        header::TRAILER,
        header::UPGRADE,
        header::EXPECT,
        header::CONTENT_ENCODING,
        header::ACCEPT_ENCODING,
    ];
    FRAMING.contains(name) || name == "keep-alive" || name.as_str().starts_with("proxy-")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn delivery(headers: &[(&str, &str)], key: Option<&str>) -> Delivery {
        Delivery {
            id: uuid::Uuid::nil(),
            topic: "order.created".to_owned(),
            key: key.map(str::to_owned),
            aggregate_type: None,
            payload: bytes::Bytes::from_static(b"{}"),
            headers: headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
            attempt: 3,
            routing_key: None,
            time_left: Duration::from_secs(30),
        }
    }

    fn base(configured: &[(&str, &str)]) -> Base {
        let configured: Vec<_> = configured.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        Base::new(&HeaderValue::from_static("receiver:1234"), &configured).unwrap()
    }

    #[test]
    fn a_header_that_cannot_travel_is_named_without_its_value() {
        let error = base(&[]).of(&delivery(&[("x-note", "a\nb: c")], None), None).unwrap_err();
        assert_eq!(error.to_string(), "the value of x-note has a character that no header can hold");
        let error = base(&[]).of(&delivery(&[("x note", "v")], None), None).unwrap_err();
        assert_eq!(error, HeaderError::Name("x note".to_owned()));
        let error = base(&[]).of(&delivery(&[], Some("k\0")), None).unwrap_err();
        assert_eq!(error, HeaderError::Value("X-Message-Key".to_owned()));
    }

    #[test]
    fn unicode_travels_as_utf_8() {
        let headers = base(&[]).of(&delivery(&[], Some("kéy")), None).unwrap();
        assert_eq!(headers["x-message-key"].as_bytes(), "kéy".as_bytes());
    }

    #[test]
    fn a_row_without_a_key_sends_none() {
        let headers = base(&[]).of(&delivery(&[("X-Message-Key", "of somebody else")], None), None).unwrap();
        assert!(!headers.contains_key("x-message-key"));
        assert_eq!(headers["x-attempt"], "3");
    }

    #[test]
    fn a_manifest_may_choose_the_host_but_not_the_framing() {
        let headers = base(&[("Host", "virtual"), ("Content-Length", "5")])
            .of(&delivery(&[("HOST", "evil")], None), None)
            .unwrap();
        assert_eq!(headers["host"], "virtual");
        assert!(!headers.contains_key("content-length"));
    }
}
