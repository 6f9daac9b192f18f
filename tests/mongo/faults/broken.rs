//! Cursors that are killed, connections that are closed, and a server that is started again and again, all while it is
//! written to.

use std::time::Instant;

use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, Start, StartAt, State,
    bson::{Document, doc},
    mongodb::Collection,
};

use super::{APP, Line, hit_by_faults};
use crate::{
    matrix::{
        verdict::{Truth, judge},
        writer::Writer,
    },
    seen::{PATIENCE, Seen, insert, subscriptions, things},
    support::{FailMode, Options, Server, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a cursor killed again and again under writes loses nothing and repeats nothing", |_| cursor_killed()),
        test(
            "a connection closed at a reply and at three openings in a row loses and repeats nothing, nor do three at \
             the first opening",
            |_| connection_closed(),
        ),
        test("a server ended and started ten times under writes loses nothing and repeats nothing", |_| restarted()),
        test("a start of one's own at an event that is not there outlives a reconnect", |_| started_elsewhere()),
    ]
}

/// Waits until so many more are acknowledged, and delivered.
async fn written_and_seen(writer: &Writer, more: i32, seen: &Seen) {
    let id = writer.last() + more;
    writer.reaches(id).await;
    seen.sees(id).await;
}

/// Stops the writer, finds everything delivered that the server has, and gives the last write.
async fn all_seen(writer: Writer, seen: &Seen, things: &Collection<Document>) -> anyhow::Result<i32> {
    let written = writer.stop().await;
    let truth = Truth::of(things).await?;
    // On one node nothing is rolled back: it is all there, in order.
    let last = truth.inserted.last().copied().expect("a write");
    assert_eq!(truth.inserted, (0..=last).collect::<Vec<_>>());
    seen.sees(last).await;
    judge(&written, &truth, &seen.ids())?;
    Ok(last)
}

async fn cursor_killed() -> anyhow::Result<()> {
    const KILLS: u64 = 10;
    let line = Line::start(Server::own(Options::default()).await, "killed").await?;
    let writer = Writer::start(line.written());
    for kill in 0..KILLS {
        written_and_seen(&writer, 10, &line.seen).await;
        line.kill_cursor().await?;
        line.reconnected(kill + 1).await;
    }
    let last = all_seen(writer, &line.seen, &line.written()).await?;
    println!("faults: {KILLS} cursors killed over {} writes, none lost, none twice", last + 1);
    Ok(())
}

/// Who starts so has said that it knows better: the history is not asked for that event, neither then nor later.
async fn started_elsewhere() -> anyhow::Result<()> {
    let mut line = Line::start(Server::own(Options::default()).await, "first").await?;
    line.write(1).await?;
    line.has_all().await;
    let position = line.subscription.status().position.expect("a position").to_string();
    // Behind it at the same time, so that nothing is read of this history.
    let (head, tail) = position.split_at(position.len() - 6);
    let other: Checkpoint = format!("{head}7B{}", &tail[2..]).parse()?;
    assert!(other.is_beyond(&line.subscription.status().position.expect("a position")));
    let (seen, subscriptions) = (Seen::default(), hit_by_faults(&line.server, &line.database).await);
    let action = subscriptions.subscribe("elsewhere", seen.handler());
    let subscription = action.start_at(StartAt::Always(Start::After(other))).await?;
    line.server.restart().await;
    wait_until("the stream is open again", PATIENCE, || async { subscription.status().reconnects > 0 }).await;
    line.write(1).await?;
    seen.sees(1).await;
    assert_eq!(seen.ids(), [1]);
    Ok(())
}

async fn connection_closed() -> anyhow::Result<()> {
    let mut line = Line::start(Server::own(Options::default()).await, "closed").await?;
    line.write(5).await?;
    line.has_all().await;
    let close = |commands: &[&str]| doc! { "failCommands": commands, "closeConnection": true };
    let point = line.server.fail_command(APP, FailMode::Times(4), close(&["getMore", "aggregate"])).await;
    // While there is no cursor, and after it.
    line.write(5).await?;
    point.entered(4).await;
    line.write(5).await?;
    line.has_all().await;
    line.reconnected(1).await;
    assert_eq!(line.subscription.status().reconnects, 1);
    drop(point);
    let point = line.server.fail_command(APP, FailMode::Times(3), close(&["aggregate"])).await;
    let seen = Seen::default();
    let first = hit_by_faults(&line.server, &line.database).await;
    let _running = first.subscribe("first", seen.handler()).await?;
    point.entered(3).await;
    line.write(5).await?;
    line.has_all().await;
    seen.sees(line.next - 1).await;
    assert_eq!(seen.ids(), (line.next - 5..line.next).collect::<Vec<_>>());
    println!("faults: 1 reply and 6 openings cut off over {} writes, none lost, none twice", line.next);
    Ok(())
}

async fn restarted() -> anyhow::Result<()> {
    const RESTARTS: u64 = 10;
    let began = Instant::now();
    let server = Server::own(Options::default()).await;
    let database = server.fresh_database().await;
    let (subscriptions, seen) = (subscriptions(&database), Seen::default());
    let subscription = subscriptions.subscribe("restarted", seen.handler()).await?;
    let writer = Writer::start(things(&server.client().await.database(database.name())));
    for restart in 0..RESTARTS {
        written_and_seen(&writer, 20, &seen).await;
        if restart % 2 == 0 {
            server.kill().await;
            server.start().await;
        } else {
            server.restart().await;
        }
    }
    written_and_seen(&writer, 20, &seen).await;
    let last = all_seen(writer, &seen, &things(&database)).await?;
    let stored = subscription.drained().await?;
    assert!(seen.is_covered_by(stored.as_ref()), "{stored:?}");
    wait_until("it is caught up", PATIENCE, || async { subscription.status().state == State::CaughtUp }).await;
    let status = subscription.status();
    assert!(status.reconnects >= RESTARTS, "{status:?}");
    // It has settled each once, and the next start goes on behind it.
    assert_eq!((status.settled, status.replayed), (u64::try_from(last)? + 1, 0));
    subscription.shutdown().await?;
    insert(&things(&database), [last + 1]).await?;
    subscriptions.subscribe("restarted", seen.handler()).await?;
    seen.sees(last + 1).await;
    assert_eq!(seen.ids(), (0..=last + 1).collect::<Vec<_>>());
    println!(
        "faults: {RESTARTS} restarts, half of them after SIGKILL, over {} writes, none lost, none twice; {} openings \
         again, in {:.1} s",
        last + 1,
        status.reconnects,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}
