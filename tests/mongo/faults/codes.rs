//! Every code that a change stream is known to end with, injected where it can come: at a reply of an open stream, at an
//! opening in between, and at the first opening. One table says what follows.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, DurableSubscriptions, OnInvalidate, Reason, State, SubscribeError, Subscription,
    bson::{Document, doc},
    mongodb::{Database, error::ErrorKind},
};

use super::{APP, Line, hit_by_faults, kill_cursors, stalls};
use crate::{
    seen::{PATIENCE, Seen, insert, record, storage, things},
    support::{FailMode, FailPoint, Fixture, Kind, Options, Server, server::code, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test("every code that heals is read across when it comes at a reply", |_| heals(Phase::GetMore)),
        test("every code that heals is read across when it comes at an opening", |_| heals(Phase::Open)),
        test("every code that does not heal stalls with its reason, and a resume loses nothing", |_| stops()),
        test("every code that speaks of a token stalls with it behind an invalidate", |ctx| async move {
            behind_an_invalidate(ctx.plain().await).await
        }),
        test("every code at the first opening is waited for, or is the start's error and leaves nothing", |_| first()),
        test("a refused right and a refused login are asked for again, slowly", |_| slowly()),
        test(
            "a code that the table of faults lacks is one that does not arrive when it is injected",
            |ctx| async move { not_injected(ctx.shared(Kind::Faulty).await).await },
        ),
    ]
}

/// Where an error comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    GetMore,
    Open,
}

impl Phase {
    fn fails(self, code: i32) -> Document {
        let command = match self {
            Self::GetMore => "getMore",
            Self::Open => "aggregate",
        };
        doc! { "failCommands": [command], "errorCode": code }
    }
}

/// What follows from an error.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// `Retrying(SourceUnavailable)` until it is over.
    Heals,
    /// Opened in another way at once.
    AtOnce,
    /// `Retrying(Unauthorized)`, every ten seconds.
    Slowly,
    /// `HistoryLost`, with both positions.
    Lost,
    /// `RefusedByServer` with the code.
    Refused,
    /// The same; behind an `invalidate`, the only position that is opened by its token, `BadPosition` with the code.
    Token,
    /// `EventTooLarge`, when it comes again with one event to a reply.
    TooLarge,
    /// `ImageMissing`, when it comes again with one event to a reply.
    Missing,
    /// `NotAReplicaSet`.
    Standalone,
}

/// The code, and what follows at a reply and at an opening.
type Row = (i32, Then, Then);

const TABLE: &[Row] = {
    use Then::{AtOnce, Heals, Lost, Missing, Refused, Slowly, Standalone, Token, TooLarge};
    &[
        // Network between members, and members that are not to be reached.
        (6, Heals, Heals),
        (7, Heals, Heals),
        (89, Heals, Heals),
        (9001, Heals, Heals),
        // Stepdown, shutdown, recovery.
        (91, Heals, Heals),
        (189, Heals, Heals),
        (10058, Heals, Heals),
        (10107, Heals, Heals),
        (11600, Heals, Heals),
        (11602, Heals, Heals),
        (13435, Heals, Heals),
        (13436, Heals, Heals),
        // Cursors and operations that were killed.
        (43, Heals, Heals),
        (175, Heals, Heals),
        (237, Heals, Heals),
        (11601, Heals, Heals),
        // Stale routing, as a router passes it on.
        (63, Heals, Heals),
        (133, Heals, Heals),
        (134, Heals, Heals),
        (150, Heals, Heals),
        (234, Heals, Heals),
        // Too busy, too late, in somebody's way.
        (24, Heals, Heals),
        (50, Heals, AtOnce),
        (112, Heals, Heals),
        (202, Heals, Heals),
        (246, Heals, Heals),
        (262, Heals, Heals),
        (365, Heals, Heals),
        (384, Heals, Heals),
        (402, Heals, Heals),
        (462, Heals, Heals),
        // The oplog has overtaken the scan: the next opening says whether the position is still there.
        (136, Heals, Heals),
        (286, Lost, Lost),
        // Rights.
        (13, Slowly, Slowly),
        (18, Slowly, Slowly),
        // Tokens.
        (9, Token, Token),
        (15, Token, Token),
        (260, Token, Token),
        (280, Token, Token),
        (40647, Token, Token),
        (40649, Token, Token),
        (50811, Token, Token),
        // Events.
        (47, Missing, Missing),
        (10334, TooLarge, TooLarge),
        // Pipelines, options, and what nobody has seen yet.
        (40324, Refused, Refused),
        (40415, Refused, Refused),
        (40573, Refused, Standalone),
        (40674, Refused, Refused),
        (50795, Refused, Refused),
        (8000, Refused, Refused),
        (999_999, Refused, Refused),
    ]
};

/// Codes that do not arrive when they are injected. What they mean is tested where codes become classes, in
/// `src/mongo/classify.rs`.
const NOT_INJECTED: &[(i32, Instead)] = &[(13388, Instead::Other(40671)), (391, Instead::Driver)];

/// What comes instead.
#[derive(Clone, Copy, Debug)]
enum Instead {
    /// Another code: an error of this kind carries routing details, and the server refuses to make one without them.
    Other(i32),
    /// The driver logs in again by itself and repeats the command; without a login it says that there is none.
    Driver,
}

/// The rows that something follows from, where an error comes.
fn rows(phase: Phase, wanted: impl Fn(Then) -> bool) -> Vec<(i32, Then)> {
    let then = |(code, get_more, open): &Row| (*code, if phase == Phase::GetMore { *get_more } else { *open });
    TABLE.iter().map(then).filter(|(_, then)| wanted(*then)).collect()
}

/// The server's word for an injected error.
fn is_injected(reason: &Reason) -> bool {
    matches!(reason, Reason::SourceUnavailable { message } if message.contains("failCommand"))
}

async fn fail(server: &Server, mode: FailMode, data: Document) -> FailPoint {
    server.fail_command(APP, mode, data).await
}

async fn heals(phase: Phase) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut line = Line::start(Server::own(Options::default()).await, "healing").await?;
    line.write(1).await?;
    line.has_all().await;
    let rows = rows(phase, |then| matches!(then, Then::Heals | Then::AtOnce));
    // What no table has is known by the server's own label.
    let labelled = doc! { "errorLabels": ["ResumableChangeStreamError"] };
    let rows = rows.into_iter().map(|(code, then)| (code, then, doc! {})).chain([(999_998, Then::Heals, labelled)]);
    let mut counted = 0;
    for (code, then, label) in rows {
        let before = line.subscription.status().reconnects;
        let mut data = phase.fails(code);
        data.extend(label);
        let mode = if then == Then::AtOnce { FailMode::Times(1) } else { FailMode::Always };
        let point = fail(&line.server, mode, data).await;
        if phase == Phase::Open {
            line.kill_cursor().await?;
        }
        line.write(1).await?;
        if then == Then::Heals {
            line.retries(&format!("{phase:?} {code}"), is_injected).await;
        }
        line.write(1).await?;
        point.entered(1).await;
        point.off().await;
        line.write(1).await?;
        line.has_all().await;
        line.reconnected(before + 1).await;
        let state = line.subscription.status().state;
        assert!(!matches!(state, State::Retrying(_)), "{code}: {state:?}");
        counted += 1;
    }
    let status = line.subscription.status();
    println!(
        "faults: {counted} codes that heal at {phase:?}: {} writes, none lost, none twice, {} openings again, in {:.1} s",
        line.next,
        status.reconnects,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Whether the reason is the one that is to follow.
fn is_expected(reason: &Reason, then: Then, injected: i32, read: Option<&Checkpoint>) -> bool {
    // A quiet position may have been read behind the last event.
    let stands = |position: &Checkpoint| read.is_none_or(|read| position == read || position.is_beyond(read));
    match (then, reason) {
        (Then::Lost, Reason::HistoryLost { position, oldest: Some(_) })
        | (Then::TooLarge, Reason::EventTooLarge { position })
        | (Then::Missing, Reason::ImageMissing { position, .. }) => stands(position),
        (Then::Refused | Then::Token, Reason::RefusedByServer { code, message }) => {
            *code == injected && message.contains("failCommand")
        }
        (Then::Standalone, Reason::NotAReplicaSet) => true,
        _ => false,
    }
}

fn does_not_heal(then: Then) -> bool {
    matches!(then, Then::Lost | Then::Refused | Then::Token | Then::TooLarge | Then::Missing | Then::Standalone)
}

/// Where history is said to be lost the oldest position is looked for, by openings that must not fail as well.
fn mode_of(then: Then) -> FailMode {
    if then == Then::Lost { FailMode::Times(1) } else { FailMode::Always }
}

async fn stops() -> anyhow::Result<()> {
    let began = Instant::now();
    let mut line = Line::start(Server::own(Options::default()).await, "stalling").await?;
    let mut counted = 0;
    for phase in [Phase::GetMore, Phase::Open] {
        for (code, then) in rows(phase, does_not_heal) {
            let what = format!("{phase:?} {code}");
            line.write(1).await?;
            line.has_all().await;
            let read = line.seen.positions().pop();
            let point = fail(&line.server, mode_of(then), phase.fails(code)).await;
            if phase == Phase::Open {
                line.kill_cursor().await?;
            }
            let reason = line.stalls(&what).await;
            assert!(is_expected(&reason, then, code, read.as_ref()), "{what}: {reason:?}");
            line.write(2).await?;
            if phase == Phase::Open && then != Then::Lost {
                let still = line.subscription.resume().await;
                assert!(still.is_err(), "{what}: resumed, though nothing has changed");
                line.stalls(&what).await;
            }
            point.off().await;
            assert_eq!(line.subscription.status().state, State::Stalled(reason), "{what}: it tries nothing by itself");
            assert_eq!(line.seen.ids().len(), usize::try_from(line.next - 2)?, "{what}: nothing is delivered");
            line.subscription.resume().await?;
            line.write(1).await?;
            line.has_all().await;
            counted += 1;
        }
    }
    let stored = line.subscription.drained().await?;
    assert!(line.seen.is_covered_by(stored.as_ref()), "{stored:?}");
    println!(
        "faults: {counted} stalls and resumes over {} writes, none lost, none twice, in {:.1} s",
        line.next,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

async fn behind_an_invalidate(keeper: Fixture) -> anyhow::Result<()> {
    // Nothing but the test may move this oplog, or a quiet position is read and the token is not opened by any more.
    let server = Server::own(Options::default().parameter("writePeriodicNoops", "false")).await;
    let database = server.fresh_database().await;
    let stream = hit_by_faults(&server, &database).await;
    let subscriptions = DurableSubscriptions::new(stream.model().clone(), storage(&keeper.database));
    let subscriptions = subscriptions.on_invalidate(OnInvalidate::Stop);
    let is_refused = |reason: Option<&Reason>, injected: i32| matches!(reason, Some(Reason::BadPosition { code, .. }) if *code == injected);
    let mut counted = 0;
    for phase in [Phase::GetMore, Phase::Open] {
        for (code, _) in rows(phase, |then| then == Then::Token) {
            let what = format!("{phase:?} {code} behind an invalidate");
            let (id, seen) = (format!("{phase:?}_{code}"), Seen::default());
            let ended = subscriptions.subscribe(&id, seen.handler()).await?;
            insert(&things(&database), [1]).await?;
            things(&database).drop().await?;
            let reason = ended.stopped().await;
            let Reason::Invalidated { position } = reason else { panic!("{what}: {reason:?}") };
            let before = record(&keeper.database, &id).await?;
            let point = fail(&server, FailMode::Always, phase.fails(code)).await;
            let (subscription, point) = if phase == Phase::GetMore {
                (subscriptions.subscribe(&id, seen.handler()).await?, point)
            } else {
                let error = subscriptions.subscribe(&id, seen.handler()).await.err();
                assert!(is_refused(error.as_ref().and_then(SubscribeError::reason), code), "{what}: {error:?}");
                assert_eq!(record(&keeper.database, &id).await?, before, "{what}: the record is left as it was");
                assert!(subscriptions.get(&id).is_none());
                counted += 1;
                point.off().await;
                let subscription = subscriptions.subscribe(&id, seen.handler()).await?;
                let point = fail(&server, FailMode::Always, phase.fails(code)).await;
                kill_cursors(&server, &database).await?;
                (subscription, point)
            };
            let reason = stalls(&subscription, &what).await;
            assert!(is_refused(Some(&reason), code), "{what}: {reason:?}");
            counted += 1;
            point.off().await;
            goes_on(&database, &subscription, &seen, &position).await?;
        }
    }
    println!("faults: {counted} refusals of the token of an invalidate, none lost, none twice");
    Ok(())
}

/// A stalled subscription goes on behind the `invalidate`.
async fn goes_on(
    database: &Database,
    subscription: &Subscription,
    seen: &Seen,
    invalidate: &Checkpoint,
) -> anyhow::Result<()> {
    assert_eq!(subscription.status().position.as_ref(), Some(invalidate));
    insert(&things(database), [2]).await?;
    subscription.resume().await?;
    insert(&things(database), [3]).await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), [1, -1, -1, 2, 3]);
    things(database).drop().await?;
    subscription.stopped().await;
    Ok(())
}

async fn first() -> anyhow::Result<()> {
    let began = Instant::now();
    let server = Server::own(Options::default()).await;
    let database = server.fresh_database().await;
    let subscriptions = hit_by_faults(&server, &database).await;
    let (mut waited, mut refused) = (0, 0);
    for (number, (code, then)) in (0..).zip(rows(Phase::Open, |_| true)) {
        let id = format!("first_{code}");
        let seen = Seen::default();
        let mode = match then {
            Then::Heals => FailMode::Times(2),
            Then::AtOnce | Then::Lost => FailMode::Times(1),
            _ => FailMode::Always,
        };
        let point = fail(&server, mode, Phase::Open.fails(code)).await;
        let started = subscriptions.subscribe(&id, seen.handler()).await;
        let subscription = match then {
            Then::Heals | Then::AtOnce => {
                let started = started.map_err(|error| anyhow::anyhow!("{code}: {error}"))?;
                point.entered(if then == Then::Heals { 2 } else { 1 }).await;
                waited += 1;
                started
            }
            _ => {
                let error = started.err();
                let reason = error.as_ref().and_then(SubscribeError::reason);
                let is_it = match then {
                    Then::Slowly => reason.is_some_and(|reason| is_unauthorized(reason, code, &database)),
                    then => reason.is_some_and(|reason| is_expected(reason, then, code, None)),
                };
                assert!(is_it && matches!(error, Some(SubscribeError::Refused { .. })), "{code}: {error:?}");
                assert_eq!(record(&database, &id).await?, None, "{code}: nothing is stored");
                assert!(subscriptions.running().is_empty(), "{code}: nothing is registered");
                point.off().await;
                refused += 1;
                // The id is free.
                subscriptions.subscribe(&id, seen.handler()).await?
            }
        };
        insert(&things(&database), [number]).await?;
        seen.sees(number).await;
        assert_eq!(seen.ids(), [number], "{code}");
        subscription.shutdown().await?;
    }
    println!(
        "faults: {} codes at the first opening: {waited} waited for, {refused} refused, in {:.1} s",
        waited + refused,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The right is named; where it is the login that was refused, what the server said.
fn is_unauthorized(reason: &Reason, code: i32, database: &Database) -> bool {
    let Reason::Unauthorized { action, resource } = reason else { return false };
    if code == 13 {
        action == "find, changeStream" && *resource == format!("collection {}.things", database.name())
    } else {
        action.contains("failCommand") && resource == "the deployment"
    }
}

async fn slowly() -> anyhow::Result<()> {
    // One at a reply and the other at the opening that follows ten seconds later; and the other way round.
    tokio::try_join!(one_slowly(13, 18), one_slowly(18, 13))?;
    println!("faults: 4 missing rights and logins, at a reply and at an opening, none lost, none twice");
    Ok(())
}

async fn one_slowly(at_reply: i32, at_opening: i32) -> anyhow::Result<()> {
    for code in [at_reply, at_opening] {
        assert!(TABLE.contains(&(code, Then::Slowly, Then::Slowly)));
    }
    let mut line = Line::start(Server::own(Options::default()).await, "slowly").await?;
    line.write(1).await?;
    line.has_all().await;
    let mut point = fail(&line.server, FailMode::Times(1), Phase::GetMore.fails(at_reply)).await;
    line.write(1).await?;
    line.retries("a reply is refused", |reason| is_unauthorized(reason, at_reply, &line.database)).await;
    let refused = Instant::now();
    let mut data = Phase::Open.fails(at_opening);
    data.insert("appName", APP);
    point.again(FailMode::Times(1), data).await;
    line.write(1).await?;
    line.retries("an opening is refused", |reason| is_unauthorized(reason, at_opening, &line.database)).await;
    assert!(refused.elapsed() > Duration::from_secs(9), "asked again after {:?}", refused.elapsed());
    line.write(1).await?;
    line.has_all().await;
    wait_until("the state says so", PATIENCE, || async {
        !matches!(line.subscription.status().state, State::Retrying(_))
    })
    .await;
    assert!(refused.elapsed() > Duration::from_secs(18), "asked again after {:?}", refused.elapsed());
    Ok(())
}

async fn not_injected(fixture: Fixture) -> anyhow::Result<()> {
    for (injected, instead) in NOT_INJECTED {
        let client = fixture.server.client_named("not_injected").await;
        let data = Phase::Open.fails(*injected);
        let _point = fixture.server.fail_command("not_injected", FailMode::Times(1), data).await;
        let open = doc! { "aggregate": "things", "pipeline": [{ "$changeStream": {} }], "cursor": {} };
        let error = client.database(fixture.database.name()).run_command(open).await.expect_err("injected");
        let as_expected = match instead {
            Instead::Other(other) => code(&error) == Some(*other),
            Instead::Driver => matches!(*error.kind, ErrorKind::Authentication { .. }),
        };
        assert!(as_expected, "{injected} has come as something else, or as itself: {error}");
        assert!(TABLE.iter().all(|(code, ..)| code != injected));
    }
    println!("faults: {} codes that cannot be injected", NOT_INJECTED.len());
    Ok(())
}
