//! The RabbitMQ connector against a real RabbitMQ.

mod support;

mod contract;
