//! A request for the next reply that hangs: nothing is lost, the status does not claim what is not so, and a shutdown does
//! not wait for it.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use mongosub::{State, bson::doc};

use super::{APP, hit_by_faults};
use crate::{
    seen::{PATIENCE, Seen, insert, things},
    support::{FailMode, Options, Server, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![test(
        "a request that hangs for 48 s loses nothing, its status says that it is behind, and a shutdown does not wait for it",
        |_| hung(),
    )]
}

/// The head is asked for every ten seconds, and what lies more than thirty behind it is no longer caught up: 42 s at most.
const HANG: Duration = Duration::from_secs(48);

async fn hung() -> anyhow::Result<()> {
    let server = Server::own(Options::default()).await;
    let database = server.fresh_database().await;
    let written = things(&database);
    let subscriptions = hit_by_faults(&server, &database).await;
    let (seen, seen_by_other) = (Seen::default(), Seen::default());
    let subscription = subscriptions.subscribe("hung", seen.handler()).await?;
    let other = subscriptions.subscribe("other", seen_by_other.handler()).await?;
    insert(&written, 0..5).await?;
    seen.sees(4).await;
    seen_by_other.sees(4).await;
    for subscription in [&subscription, &other] {
        wait_until("it is caught up", PATIENCE, || async { subscription.status().state == State::CaughtUp }).await;
    }
    let hang = doc! {
        "failCommands": ["getMore"],
        "blockConnection": true,
        "blockTimeMS": i32::try_from(HANG.as_millis())?,
    };
    let point = server.fail_command(APP, FailMode::Times(2), hang).await;
    point.entered(2).await;
    let began = Instant::now();
    insert(&written, 5..10).await?;
    let caught_up = tokio::spawn({
        let subscription = subscription.clone();
        async move { subscription.caught_up().await }
    });

    let asked = Instant::now();
    let stored = other.shutdown().await?;
    let ended = asked.elapsed();
    assert!(ended < Duration::from_secs(5), "shut down after {ended:?}");
    assert!(seen_by_other.is_covered_by(stored.as_ref()), "{stored:?}");
    // The next one is not hung.
    subscriptions.subscribe("other", seen_by_other.handler()).await?;
    seen_by_other.sees(9).await;
    assert_eq!(seen_by_other.ids(), (0..10).collect::<Vec<_>>());

    wait_until("it says that it is behind", HANG, || async { subscription.status().state == State::CatchingUp }).await;
    let behind = began.elapsed();
    let status = subscription.status();
    assert!(behind < HANG && !caught_up.is_finished(), "{status:?}");
    assert!(status.lag.is_some_and(|lag| lag > Duration::from_secs(30)), "{status:?}");
    assert_eq!((status.events - status.filtered, seen.ids()), (5, (0..5).collect()), "what hangs has brought nothing");
    insert(&written, 10..15).await?;
    wait_until("the last write is delivered", HANG, || async { seen.ids().contains(&14) }).await;
    let after = began.elapsed();
    assert!(after >= Duration::from_secs(40), "it hung for {after:?} only");
    assert_eq!(seen.ids(), (0..15).collect::<Vec<_>>());
    caught_up.await??;
    wait_until("it is caught up", PATIENCE, || async { subscription.status().state == State::CaughtUp }).await;
    assert!(seen.is_covered_by(subscription.shutdown().await?.as_ref()));
    println!(
        "faults: a request hung for {:.1} s: 15 writes, none lost, none twice; behind after {:.1} s, a shutdown in {} ms",
        after.as_secs_f64(),
        behind.as_secs_f64(),
        ended.as_millis()
    );
    Ok(())
}
