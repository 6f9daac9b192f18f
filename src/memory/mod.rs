//! Backends without a server.
