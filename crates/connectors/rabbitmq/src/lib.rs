//! queuebox-rabbitmq
