//! Rules of URLs, paths, header names and authentication blocks.

use std::time::Duration;

use url::Url;

use super::Case;
use crate::{
    checked::{self, Accepted, Hmac, InboundAuth, OutboundAuth, Signing},
    spec::auth::{HmacAlgorithm, InboundAuthSpec, OutboundAuthSpec, SignaturePayloadFormat, SigningSpec},
};

const FIVE_MINUTES: Duration = Duration::from_secs(300);

/// A token of HTTP: what a header may be called.
pub(super) fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// A value that a header can carry.
pub(super) fn is_header_value(text: &str) -> bool {
    text.chars().all(|character| character == '\t' || !character.is_control())
}

/// A segment that leads elsewhere, also percent-encoded.
fn has_dot_segment(path: &str) -> bool {
    path.split(['/', '\\']).any(|segment| {
        let segment = segment.to_ascii_lowercase().replace("%2e", ".");
        segment == "." || segment == ".."
    })
}

/// The path of an http source, or the base path.
pub(super) fn check_route_path(case: &Case<'_>, at: &str, path: &str) {
    if path.is_empty() {
        return;
    }
    if path.contains(['?', '#']) || path.chars().any(|character| character.is_whitespace() || character.is_control()) {
        case.error(at, "must not hold \"?\", \"#\" or blanks");
    }
    if !path.is_ascii() {
        let encoded = Url::parse("http://host").ok().map(|mut url| {
            url.set_path(path);
            url.path().to_owned()
        });
        case.error_with_hint(
            at,
            "must be ASCII: senders percent-encode everything else, and a path is taken literally",
            &format!("write {}", encoded.unwrap_or_default()),
        );
    }
    if path.contains("//") || has_dot_segment(path) {
        case.error(at, "must not hold empty, \".\" or \"..\" segments");
    }
    if path.contains(['{', '}']) {
        case.error(at, "must not hold braces: a path is taken literally");
    }
}

/// An absolute http or https URL (contract 13.3).
pub(super) fn url(case: &Case<'_>, at: &str, text: &str) -> Option<Url> {
    if text.is_empty() {
        return None;
    }
    let fail = |message: &str| {
        case.error(at, message);
        None
    };
    if !text.contains("://") {
        case.error_with_hint(at, "is no absolute URL", &format!("did you forget http://? Write http://{text}"));
        return None;
    }
    let Ok(url) = Url::parse(text) else { return fail("is no absolute URL, such as https://host/path") };
    if !matches!(url.scheme(), "http" | "https") {
        return fail("must begin with http:// or https://");
    }
    if url.host_str().is_none_or(str::is_empty) {
        return fail("has no host");
    }
    if !url.username().is_empty() || url.password().is_some() {
        case.error_with_hint(at, "holds credentials", "write them as auth.basic, with passwordFrom");
        return None;
    }
    // The parser has resolved dot segments already, so they are looked for in the text.
    let path = text.splitn(4, '/').nth(3).unwrap_or_default();
    if has_dot_segment(path.split(['?', '#']).next().unwrap_or_default()) {
        return fail("must not hold \".\" or \"..\" segments");
    }
    Some(url)
}

pub(super) fn inbound_auth(case: &Case<'_>, at: &str, auth: Option<&InboundAuthSpec>) -> Option<InboundAuth> {
    let auth = auth?;
    case.exactly_one(
        at,
        &[
            ("bearer", auth.bearer.is_some()),
            ("apiKey", auth.api_key.is_some()),
            ("hmac", auth.hmac.is_some()),
            ("standardWebhooks", auth.standard_webhooks.is_some()),
            ("stripe", auth.stripe.is_some()),
            ("github", auth.github.is_some()),
        ],
    );
    let mut found = None;
    if let Some(it) = &auth.bearer {
        let at = format!("{at}.bearer");
        found = Some(InboundAuth::Bearer(case.accepted(&at, "token", &it.token_from, it.previous_token_from.as_ref())));
    }
    if let Some(it) = &auth.api_key {
        let at = format!("{at}.apiKey");
        let header = it.header_name.clone().unwrap_or_else(|| "X-API-Key".to_owned());
        case.header_name(&format!("{at}.headerName"), &header);
        let key = case.accepted(&at, "key", &it.key_from, it.previous_key_from.as_ref());
        found = Some(InboundAuth::ApiKey { key, header });
    }
    if let Some(it) = &auth.hmac {
        let at = format!("{at}.hmac");
        let secret = case.accepted(&at, "secret", &it.secret_from, it.previous_secret_from.as_ref());
        let form = hmac_form(
            case,
            &at,
            &HmacFields {
                header: it.header_name.as_ref(),
                algorithm: it.algorithm,
                prefix: it.signature_prefix.as_ref(),
                timestamp_header: it.timestamp_header.as_ref(),
                format: it.signature_payload_format,
            },
        );
        if it.timestamp_tolerance.is_some() && it.timestamp_header.is_none() {
            case.warning(&format!("{at}.timestampTolerance"), "has no effect without timestampHeader");
        }
        let timestamp_tolerance = it.timestamp_tolerance.map_or(FIVE_MINUTES, |it| it.0);
        found = Some(InboundAuth::Hmac { secret, form, timestamp_tolerance });
    }
    if let Some(it) = &auth.standard_webhooks {
        let at = format!("{at}.standardWebhooks");
        let secret = case.accepted(&at, "secret", &it.secret_from, it.previous_secret_from.as_ref());
        found = Some(InboundAuth::StandardWebhooks { secret, tolerance: it.tolerance.map_or(FIVE_MINUTES, |it| it.0) });
    }
    if let Some(it) = &auth.stripe {
        let at = format!("{at}.stripe");
        let secret = case.accepted(&at, "secret", &it.secret_from, it.previous_secret_from.as_ref());
        found = Some(InboundAuth::Stripe { secret, tolerance: it.tolerance.map_or(FIVE_MINUTES, |it| it.0) });
    }
    if let Some(it) = &auth.github {
        let at = format!("{at}.github");
        found =
            Some(InboundAuth::GitHub(case.accepted(&at, "secret", &it.secret_from, it.previous_secret_from.as_ref())));
    }
    found
}

struct HmacFields<'s> {
    header: Option<&'s String>,
    algorithm: Option<HmacAlgorithm>,
    prefix: Option<&'s String>,
    timestamp_header: Option<&'s String>,
    format: Option<SignaturePayloadFormat>,
}

fn hmac_form(case: &Case<'_>, at: &str, fields: &HmacFields<'_>) -> Hmac {
    let header = fields.header.cloned().unwrap_or_else(|| "X-Signature".to_owned());
    case.header_name(&format!("{at}.headerName"), &header);
    if let Some(name) = fields.timestamp_header {
        case.header_name(&format!("{at}.timestampHeader"), name);
    }
    let signs_timestamp = match fields.format {
        Some(SignaturePayloadFormat::TimestampDotBody) => {
            if fields.timestamp_header.is_none() {
                case.error(&format!("{at}.signaturePayloadFormat"), "TIMESTAMP_DOT_BODY needs timestampHeader");
            }
            true
        }
        Some(SignaturePayloadFormat::Body) => false,
        None => fields.timestamp_header.is_some(),
    };
    Hmac {
        header,
        algorithm: fields.algorithm.unwrap_or_default(),
        prefix: fields.prefix.cloned().unwrap_or_else(|| "sha256=".to_owned()),
        timestamp_header: fields.timestamp_header.cloned(),
        signs_timestamp,
    }
}

pub(super) fn outbound_auth(case: &Case<'_>, at: &str, auth: Option<&OutboundAuthSpec>) -> Option<OutboundAuth> {
    let auth = auth?;
    case.at_most_one(
        at,
        &[
            ("bearer", auth.bearer.is_some()),
            ("basic", auth.basic.is_some()),
            ("header", auth.header.is_some()),
            ("oauth2", auth.oauth2.is_some()),
        ],
    );
    let mut found = None;
    if let Some(it) = &auth.bearer {
        found = Some(OutboundAuth::Bearer(case.reference(&format!("{at}.bearer.tokenFrom"), &it.token_from)));
    }
    if let Some(it) = &auth.basic {
        if it.username.contains(':') {
            case.error(&format!("{at}.basic.username"), "must not hold a colon");
        }
        let password = case.reference(&format!("{at}.basic.passwordFrom"), &it.password_from);
        found = Some(OutboundAuth::Basic { username: it.username.clone(), password });
    }
    if let Some(it) = &auth.header {
        let name = it.name.clone().unwrap_or_else(|| "Authorization".to_owned());
        case.header_name(&format!("{at}.header.name"), &name);
        let value = case.reference(&format!("{at}.header.valueFrom"), &it.value_from);
        found = Some(OutboundAuth::Header { name, value });
    }
    if let Some(it) = &auth.oauth2 {
        let at = format!("{at}.oauth2");
        let client_secret = case.reference(&format!("{at}.clientSecretFrom"), &it.client_secret_from);
        if let Some(token_url) = url(case, &format!("{at}.tokenUrl"), &it.token_url) {
            found = Some(OutboundAuth::OAuth2 {
                client_id: it.client_id.clone(),
                client_secret,
                token_url,
                scope: it.scope.clone(),
                extra_params: it.extra_params.clone().unwrap_or_default(),
            });
        }
    }
    found
}

pub(super) fn signing(case: &Case<'_>, at: &str, signing: Option<&SigningSpec>) -> Option<Signing> {
    let signing = signing?;
    case.at_most_one(
        at,
        &[("standardWebhooks", signing.standard_webhooks.is_some()), ("hmac", signing.hmac.is_some())],
    );
    let webhooks = signing.standard_webhooks.as_ref().map(|it| {
        let at = format!("{at}.standardWebhooks");
        let secrets: Accepted = case.accepted(&at, "secret", &it.secret_from, it.previous_secret_from.as_ref());
        Signing::StandardWebhooks(secrets)
    });
    let hmac = signing.hmac.as_ref().map(|it| {
        let at = format!("{at}.hmac");
        let secret = case.reference(&format!("{at}.secretFrom"), &it.secret_from);
        let form: checked::Hmac = hmac_form(
            case,
            &at,
            &HmacFields {
                header: it.header_name.as_ref(),
                algorithm: it.algorithm,
                prefix: it.signature_prefix.as_ref(),
                timestamp_header: it.timestamp_header.as_ref(),
                format: it.signature_payload_format,
            },
        );
        Signing::Hmac { secret, form }
    });
    webhooks.or(hmac)
}
