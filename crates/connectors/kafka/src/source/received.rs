//! A Kafka record as the intake takes it (contract 6.2, 6.3).

use std::panic::{AssertUnwindSafe, catch_unwind};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use queuebox_core::ports::Received;
use rdkafka::message::{BorrowedMessage, Headers, Message};

/// What the intake gets. A record without a body (a tombstone) has an empty one, which is no JSON and so becomes a dead row
/// (contract 6.4).
pub(super) fn received(record: &BorrowedMessage<'_>) -> Received {
    Received {
        body: Bytes::copy_from_slice(record.payload().unwrap_or_default()),
        headers: headers(record),
        record_key: record.key().filter(|key| !key.is_empty()).map(text),
        published_at_us: record.timestamp().to_millis().filter(|ms| *ms >= 0).map(|ms| ms.saturating_mul(1000)),
        position: Some(format!("{}/{}/{}", record.topic(), record.partition(), record.offset())),
        ..Received::default()
    }
}

fn headers(record: &BorrowedMessage<'_>) -> Vec<(String, String)> {
    let Some(headers) = record.headers() else { return Vec::new() };
    (0..headers.count())
        .filter_map(|index| {
            // The library panics on a name that is not UTF-8. Such a record must not stop its partition for ever, and a
            // name that no row can hold is not worth a dead row: the header is left out.
            let header = catch_unwind(AssertUnwindSafe(|| headers.try_get(index))).ok().flatten()?;
            Some((header.key.to_owned(), text(header.value.unwrap_or_default())))
        })
        .collect()
}

/// Bytes as contract 6.3 says: as text when they are UTF-8, else `base64:` and the encoding.
fn text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| format!("base64:{}", STANDARD.encode(bytes)), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn bytes_that_are_no_text_are_encoded() {
        assert_eq!(text("grün".as_bytes()), "grün");
        assert_eq!(text(&[0xff, 0x00]), "base64:/wA=");
    }
}
