//! durable
