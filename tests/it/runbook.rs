//! The runbook has a section for every reason and no other, each says the same things, and texts that people see name it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mongosub::{
    CheckpointStorage, Delivery, Reason, SourceError, Start, StartAt, SubscribeError, SubscriptionError, SubscriptionId,
};

use crate::careful::{deaths, world_with_a_killer};
use crate::support::{ID, Logs, World, id, until_reason, until_saved, until_settled};

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// The names of all reasons: of the `match` in `Reason::name`, which the compiler keeps complete.
fn names() -> BTreeSet<String> {
    let source = read("src/reason.rs");
    let body = source.split_once("pub fn name(&self)").unwrap().1.split_once("\n    }\n").unwrap().0;
    let names: Vec<String> =
        body.lines().filter_map(|line| Some(line.split_once("=> \"")?.1.split_once('"')?.0.to_owned())).collect();
    assert_eq!(names.len(), body.matches("Self::").count(), "a name was not read: {body}");
    let unique: BTreeSet<String> = names.iter().cloned().collect();
    assert_eq!(unique.len(), names.len(), "two reasons have one name");
    unique
}

/// The sections that are a reason's: all behind the introduction, by heading.
fn sections() -> Vec<(String, String)> {
    let text = read("docs/runbook.md");
    let sections = text.split("\n## ").skip(1).map(|section| section.split_once('\n').unwrap());
    let sections: Vec<_> = sections.map(|(heading, body)| (heading.to_owned(), body.to_owned())).collect();
    assert_eq!(sections[0].0, "What to have at hand");
    sections[1..].to_vec()
}

#[test]
fn every_reason_has_its_section_in_the_runbook_and_every_section_its_reason() {
    let sections = sections();
    let headings: BTreeSet<String> = sections.iter().map(|(heading, _)| heading.clone()).collect();
    assert_eq!(headings, names());
    assert_eq!(headings.len(), sections.len(), "a heading stands there twice");
    assert!(headings.len() >= 18, "the reasons were not found: {headings:?}");
    for (heading, body) in &sections {
        for part in ["\n* **Lost**: ", "\n* **Look at**: ", "\n* **Type**: "] {
            assert_eq!(body.matches(part).count(), 1, "{heading} says {part:?} once");
        }
        assert!(body.lines().count() <= 22, "{heading} is too long for the night");
    }
}

#[test]
fn a_reason_names_its_section_and_errors_that_need_a_person_do_so_at_their_end() {
    let id = SubscriptionId::new("a").unwrap();
    let reason = Reason::RefusedByServer { code: 47, message: "no".into() };
    assert_eq!(reason.runbook(), "docs/runbook.md#refused_by_server");
    let refused = SubscribeError::Refused { id: id.clone(), reason: reason.clone() };
    let late = SubscribeError::TimedOut { id: id.clone(), last: reason.clone() };
    let ended = SubscriptionError::Ended { id: id.clone(), reason };
    for text in [refused.to_string(), late.to_string(), ended.to_string()] {
        assert!(text.ends_with("(runbook: refused_by_server)") && text.matches("runbook").count() == 1, "{text}");
    }
    let asked = SubscriptionError::Ended { id, reason: Reason::Requested };
    assert_eq!(asked.to_string(), "subscription a does not run: it was asked to stop");
}

#[tokio::test(start_paused = true)]
async fn a_log_line_that_needs_a_person_names_the_section_of_the_runbook() {
    let logs = Logs::capture();
    let world = World::new();
    let subscription = world.subscribe().await;
    world.model.set_reopening(Some(Reason::SourceUnavailable { message: "down".into() }));
    until_reason(&subscription, "retrying", "source_unavailable").await;
    world.model.set_reopening(None);
    let reason = Reason::RefusedByServer { code: 47, message: "no".into() };
    world.model.break_reader(SourceError::Refused(reason));
    until_reason(&subscription, "stalled", "refused_by_server").await;
    let names = |level: &str, what: &str, section: &str| {
        let lines = logs.lines(level, what);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_eq!(lines[0].matches(&format!("(runbook: {section})")).count(), 1, "{lines:?}");
    };
    names("WARN", "is retrying", "source_unavailable");
    names("ERROR", "has stalled", "refused_by_server");
    subscription.shutdown().await.unwrap();
    assert!(logs.lines("INFO", "has stopped").iter().all(|line| !line.contains("runbook")));
    // Deleted under a run, it stops at its next save.
    let subscription = world.subscribe().await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    world.insert(1);
    until_reason(&subscription, "stopped", "deleted").await;
    names("ERROR", "has stopped", "deleted");
}

#[tokio::test(start_paused = true)]
async fn with_its_record_deleted_a_subscription_that_lost_history_starts_with_all_there_still_is() {
    let world = World::new();
    let subscription = world.subscribe().await;
    let last = world.insert(1);
    until_saved(&subscription, &last).await;
    subscription.shutdown().await.unwrap();
    world.insert(2);
    let oldest = world.insert(3);
    let last = world.insert(4);
    world.model.drop_history_before(&oldest);
    let earliest = || StartAt::StoredOr(Start::Earliest);
    let refused = world.action().start_at(earliest()).await.unwrap_err();
    assert!(matches!(refused.reason(), Some(Reason::HistoryLost { .. })), "as long as it is there: {refused}");
    world.storage.inner().delete(&id(), None).await.unwrap();
    let subscription = world.action().start_at(earliest()).await.unwrap();
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 3, 4]);
    assert_eq!(world.stored().await, Some(last));
}

#[tokio::test(start_paused = true)]
async fn a_position_from_the_log_is_where_a_subscription_goes_on_whose_record_was_deleted() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.insert(1);
    let stood = world.insert(2);
    until_saved(&subscription, &stood).await;
    world.storage.inner().delete(&id(), None).await.unwrap();
    subscription.shutdown().await.unwrap_err();
    world.insert(3);
    let Ok(logged) = stood.to_string().parse();
    let subscription = world.action().start_at(StartAt::StoredOr(Start::After(logged))).await.unwrap();
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.keys(), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_fails_is_stepped_over_at_the_position_of_the_log_line() {
    let logs = Logs::capture();
    let world = World::new();
    let failing = world.seen.then(|delivery: Delivery| async move {
        if delivery.event.document_id::<i32>()? == Some(1) { Err("no such field".into()) } else { Ok(()) }
    });
    let subscription = world.subscriptions.subscribe(ID, failing).await.unwrap();
    world.inserts(1..=2);
    until_reason(&subscription, "retrying", "handler_failing").await;
    let line = logs.lines("WARN", "(runbook: handler_failing)").pop().unwrap();
    let logged = line.split_once("for the event at ").unwrap().1.split_once(' ').unwrap().0;
    let Ok(position) = logged.parse();
    subscription.skip(position, "why").await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!((subscription.status().handled, subscription.status().skipped), (1, 1));
    assert_eq!(world.record().await.unwrap().skips[0].reason, "why");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_kills_its_process_is_stepped_over_by_what_the_record_says_of_it() {
    let (world, killer, at) = world_with_a_killer().await;
    let world = deaths(world, &killer, 4).await;
    let in_hand = world.record().await.unwrap().in_hand.unwrap();
    assert_eq!(in_hand.position, at[2]);
    world.subscriptions.skip(ID, in_hand.position, "why").await.unwrap();
    let subscription = killer.action(&world).await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(killer.times(), 4, "it is not handed out again");
    assert_eq!(subscription.shutdown().await.unwrap().as_ref(), Some(&at[4]));
    let record = world.record().await.unwrap();
    assert_eq!((record.in_hand, record.clean, record.skips.len()), (None, true, 1));
}
