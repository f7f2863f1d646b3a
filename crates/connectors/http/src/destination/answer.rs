//! What an answer means: statuses, `Retry-After`, and as much of its body as helps (contract 7.5, 7.6).

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header, response};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use queuebox_core::{Class, Fault, redact::redact_with};
use url::Url;

use super::status_name;

/// Beyond this the rest of an answer is not read: its connection is closed instead of kept.
const DRAIN_BYTES_MAX: usize = 64 * 1024;
/// So much more of a failed answer is read at most, to recognise a secret that stands at the cut.
const MARGIN_BYTES_MAX: usize = 16 * 1024;

/// An entry of `permanentStatuses`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusRule {
    /// One status.
    Exactly(u16),
    /// `4xx`, but never 408, 425 and 429, which ask for another try.
    ClientErrors,
    /// `5xx`.
    ServerErrors,
}

impl StatusRule {
    fn covers(self, status: StatusCode) -> bool {
        match self {
            Self::Exactly(code) => status == code,
            Self::ClientErrors => status.is_client_error() && !matches!(status.as_u16(), 408 | 425 | 429),
            Self::ServerErrors => status.is_server_error(),
        }
    }
}

/// As much of a body as was asked for.
pub(super) struct Kept {
    bytes: Vec<u8>,
    /// The body went on beyond `bytes`.
    is_cut: bool,
    /// The answer was read to its end, so the connection can carry another.
    pub(super) is_whole: bool,
}

impl Kept {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).trim().to_owned()
    }

    /// At most `bytes_max` bytes of text without `secrets`. The body was read with [`margin`] in addition.
    fn redacted(&self, bytes_max: usize, secrets: &[&str]) -> String {
        let mut text = redact_with(&self.text(), secrets);
        // The cut may have gone through a secret, whose head nobody would recognise.
        let end = if self.is_cut { text.len().saturating_sub(margin(secrets)) } else { text.len() };
        text.truncate(text.floor_char_boundary(end.min(bytes_max)));
        text
    }
}

/// The longest form in which one of `secrets` may stand in a text: every byte percent-encoded.
fn margin(secrets: &[&str]) -> usize {
    secrets.iter().map(|secret| secret.len() * 3).max().unwrap_or(0).min(MARGIN_BYTES_MAX)
}

/// Reads to the end of `body`, at most [`DRAIN_BYTES_MAX`], and keeps its first `keep` bytes. An answer that breaks off
/// has said its status already, so that is no error.
pub(super) async fn read(body: &mut Incoming, keep: usize) -> Kept {
    let mut kept = Kept { bytes: Vec::new(), is_cut: false, is_whole: body.is_end_stream() };
    let mut seen = 0;
    while !kept.is_whole && seen < DRAIN_BYTES_MAX {
        match body.frame().await {
            None => kept.is_whole = true,
            Some(Err(_)) => return kept,
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    seen += data.len();
                    let room = keep.saturating_sub(kept.bytes.len()).min(data.len());
                    kept.bytes.extend_from_slice(&data[..room]);
                    kept.is_cut |= room < data.len();
                }
                kept.is_whole = body.is_end_stream();
            }
        }
    }
    kept
}

/// What decides about an answer that is not 2xx.
pub(super) struct Rule<'a> {
    pub(super) permanent: &'a [StatusRule],
    pub(super) url: &'a Url,
    /// Values that must not appear in the text.
    pub(super) secrets: Vec<&'a str>,
    /// So much of the body is told.
    pub(super) body_bytes_max: usize,
}

impl Rule<'_> {
    /// So much of the body is to be read.
    pub(super) fn keep(&self) -> usize {
        self.body_bytes_max + margin(&self.secrets)
    }

    /// The code is `http_<status>`, from which the status class of the metrics is read.
    pub(super) fn fault(&self, head: &response::Parts, body: &Result<Kept, String>) -> Fault {
        let status = head.status;
        let code = format!("http_{}", status.as_u16());
        let mut detail = status_name(status);
        if let Some(location) = self.location(head) {
            let location = redact_with(location.as_str(), &self.secrets);
            detail.push_str(&format!(" to {location} (redirects are never followed)"));
        }
        let body = match body {
            Ok(kept) => kept.redacted(self.body_bytes_max, &self.secrets),
            Err(reason) => reason.clone(),
        };
        if !body.is_empty() {
            detail.push_str(": ");
            detail.push_str(&body);
        }
        if self.permanent.iter().any(|rule| rule.covers(status)) {
            let fault = Fault::new(Class::Refused, code, detail);
            return if trips_breaker(status) { fault.tripping() } else { fault };
        }
        let throttled = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let class = if throttled { Class::Throttled } else { Class::Transient };
        let mut fault = Fault::new(class, code, detail);
        if throttled {
            fault.retry_after = retry_after(&head.headers, jiff::Timestamp::now().into());
        }
        if trips_breaker(status) { fault.tripping() } else { fault }
    }

    /// Where a redirect points, without user information, query and fragment, in which secrets travel.
    fn location(&self, head: &response::Parts) -> Option<Url> {
        let text = head.headers.get(header::LOCATION).filter(|_| head.status.is_redirection())?;
        let mut location = self.url.join(text.to_str().ok()?).ok()?;
        location.set_query(None);
        location.set_fragment(None);
        // Both fail only for URLs that cannot have user information.
        let _ = location.set_username("");
        let _ = location.set_password(None);
        Some(location)
    }
}

fn trips_breaker(status: StatusCode) -> bool {
    status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS
}

/// The longest valid `Retry-After`, in whole seconds or as an HTTP date; invalid and past ones are ignored. A date is
/// compared with the answer's own `Date` where there is one, so that our clock need not be right.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let date = headers.get(header::DATE).and_then(|value| value.to_str().ok());
    let now = date.and_then(|text| httpdate::parse_http_date(text).ok()).unwrap_or(now);
    headers
        .get_all(header::RETRY_AFTER)
        .iter()
        .filter_map(|value| pause(value.to_str().ok()?.trim(), now))
        .max()
        .filter(|pause| !pause.is_zero())
}

fn pause(text: &str, now: SystemTime) -> Option<Duration> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are a number all the same; the ceiling is the engine's.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    httpdate::parse_http_date(text).ok()?.duration_since(now).ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn asked(values: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::RETRY_AFTER, HeaderValue::from_str(value).unwrap());
        }
        retry_after(&headers, httpdate::parse_http_date(NOW).unwrap())
    }

    /// The values of case D16.
    #[test]
    fn d16_retry_after_values() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(asked(&["5"]), seconds(5));
        assert_eq!(asked(&["Sun, 06 Nov 1994 08:49:42 GMT"]), seconds(5));
        assert_eq!(asked(&["Sun, 06 Nov 1994 08:49:36 GMT"]), None);
        assert_eq!(asked(&["99999999999999999999"]), seconds(u64::MAX));
        assert_eq!(asked(&["3", "8"]), seconds(8));
        assert_eq!(asked(&["3", "junk"]), seconds(3));
        for ignored in ["0", "-1", "abc", "1e9", "", "1.5", "+5", "0x10"] {
            assert_eq!(asked(&[ignored]), None, "{ignored}");
        }
    }

    #[test]
    fn a_date_is_compared_with_the_answers_own_clock() {
        let mut headers = HeaderMap::new();
        headers.insert(header::DATE, HeaderValue::from_static("Sun, 06 Nov 1994 09:00:00 GMT"));
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("Sun, 06 Nov 1994 09:00:07 GMT"));
        assert_eq!(retry_after(&headers, httpdate::parse_http_date(NOW).unwrap()), Some(Duration::from_secs(7)));
    }

    #[test]
    fn a_class_never_covers_the_statuses_that_ask_for_another_try() {
        for code in [408, 425, 429] {
            let status = StatusCode::from_u16(code).unwrap();
            assert!(!StatusRule::ClientErrors.covers(status));
            assert!(StatusRule::Exactly(code).covers(status));
        }
        assert!(StatusRule::ClientErrors.covers(StatusCode::NOT_FOUND));
        assert!(!StatusRule::ClientErrors.covers(StatusCode::BAD_GATEWAY));
    }
}
