//! Section E: sending over HTTP.
