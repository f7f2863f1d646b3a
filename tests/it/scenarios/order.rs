//! Section G: order.
