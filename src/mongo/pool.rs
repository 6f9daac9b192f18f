//! How many open streams keep a connection of one client busy, and the warning when few are left over. It counts what
//! models tell it, and knows nothing of the driver: that does not show a client's `max_pool_size`. Called by the model
//! and the reading task.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What the driver takes when `max_pool_size` is not set.
const DRIVERS_DEFAULT: u32 = 10;
/// How many connections are to be left over for everything else.
const LEFT_OVER: u32 = 4;
/// How many more than the streams a client should have.
const SUITABLE: u32 = 16;

/// The connections of one client, as far as change streams keep them busy. A cheap clone; clones count together.
///
/// An open stream keeps one connection of its client busy for as long as it is open. When fewer than 4 are left over
/// for everything else (saves, look-ups, your own operations), these wait for a connection: nothing is lost, but
/// everything is late. The stream whose opening crosses that line logs one warning with both numbers.
///
/// The driver does not show what a client's `max_pool_size` is, so it has to be told. Hand one pool to all models of a
/// client: only streams of models that share it are counted together. Not counted are streams of other models, of other
/// processes and of the driver's own `watch`, and operations of any kind. The driver has a pool for each server; that
/// streams of one client may be spread over several is not taken into account.
///
/// ```no_run
/// use mongosub::bson::Document;
/// use mongosub::mongodb::{Client, options::ClientOptions};
/// use mongosub::{ChangeStreamModel, ConnectionPool};
///
/// # async fn example() -> mongosub::mongodb::error::Result<()> {
/// let mut options = ClientOptions::parse("mongodb://localhost/?replicaSet=rs0").await?;
/// options.max_pool_size = Some(40);
/// let pool = ConnectionPool::from(options.max_pool_size);
/// let shop = Client::with_options(options)?.database("shop");
/// let model = |name| ChangeStreamModel::collection(&shop.collection::<Document>(name)).connection_pool(pool.clone());
/// let (orders, invoices) = (model("orders"), model("invoices"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ConnectionPool {
    size: Option<u32>,
    streams: Arc<AtomicU32>,
}

impl ConnectionPool {
    /// A client's pool of this `max_pool_size`.
    pub fn of_size(max_pool_size: u32) -> Self {
        Some(max_pool_size).into()
    }

    /// Its size: what was told, or the driver's default of 10.
    pub fn size(&self) -> u32 {
        self.size.unwrap_or(DRIVERS_DEFAULT)
    }

    /// How many open streams keep a connection of it busy now, as far as they are counted.
    pub fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    /// Counts a stream for as long as the answer lives.
    pub(super) fn open(&self) -> OpenStream {
        let streams = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        // This very one is the first that leaves too few over; if there were too few from the beginning, the first is.
        if streams == self.size().saturating_sub(LEFT_OVER) + 1 {
            let (size, better) = (self.size(), streams.saturating_add(SUITABLE));
            let told = if self.size.is_some() { "" } else { ", as far as the model was told" };
            tracing::warn!(
                streams,
                max_pool_size = size,
                "{streams} change streams are open on one client, whose max_pool_size is {size}{told}: each keeps a \
                 connection busy, and everything else may wait for one; give the client a max_pool_size of {better} or \
                 more, and name it with ChangeStreamModel::connection_pool"
            );
        }
        OpenStream(Arc::clone(&self.streams))
    }
}

/// The driver's own default, 10.
impl Default for ConnectionPool {
    fn default() -> Self {
        None.into()
    }
}

/// A client's pool of this `max_pool_size`.
impl From<u32> for ConnectionPool {
    fn from(max_pool_size: u32) -> Self {
        Self::of_size(max_pool_size)
    }
}

/// As `ClientOptions` has it: none is the driver's own default, 10.
impl From<Option<u32>> for ConnectionPool {
    fn from(max_pool_size: Option<u32>) -> Self {
        Self { size: max_pool_size, streams: Arc::default() }
    }
}

/// A stream that is counted.
#[derive(Debug)]
pub(super) struct OpenStream(Arc<AtomicU32>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_count_while_they_are_open_and_clones_count_together() {
        let pool = ConnectionPool::of_size(20);
        let (first, second) = (pool.open(), pool.clone().open());
        assert_eq!(pool.streams(), 2);
        drop(first);
        assert_eq!(pool.streams(), 1);
        drop(second);
        assert_eq!(pool.streams(), 0);
    }

    #[test]
    fn a_size_that_was_not_told_is_the_drivers_default() {
        assert_eq!(ConnectionPool::default().size(), 10);
        assert_eq!(ConnectionPool::from(None).size(), 10);
        assert_eq!(ConnectionPool::from(Some(216)).size(), 216);
        assert_eq!(ConnectionPool::from(30).size(), 30);
    }
}
