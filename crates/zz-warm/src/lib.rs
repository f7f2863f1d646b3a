//! zz-warm
