//! Address and key templates: `{{ topic }}`, `{{ payload.a.b }}` and the like (contract 7.3).
/// A checked template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {}
