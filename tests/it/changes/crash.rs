//! A new start behind lost history, cut between any two of its steps: the next process begins there as well, once, with
//! one gap in the record and nothing read before it was stored.

use std::time::Duration;

use mongosub::{Checkpoint, OnHistoryLost, Start, Subscription};
use tokio::time::timeout;

use crate::support::{Cut, ID, Stepped, World, left_at, seconds, until_saved};

fn restart() -> OnHistoryLost {
    OnHistoryLost::RestartAt(Start::Earliest)
}

/// The process is gone; another one starts.
async fn survives(world: &World, events: &[Checkpoint], what: &str) {
    let seen = world.seen.keys();
    let record = world.record().await.unwrap();
    let is_stored = record.gaps.len() == 1;
    assert!(is_stored || seen.iter().all(|key| *key == 1), "{what}: {seen:?} was read before the gap was stored");
    let next = world.restarted();
    let last = next.insert(6);
    let subscription = next.action().on_history_lost(restart()).await.unwrap();
    until_saved(&subscription, &last).await;
    let all: Vec<i32> = seen.into_iter().chain(next.seen.keys()).filter(|key| *key != 1).collect();
    let mut firsts = all.clone();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts, [4, 5, 6], "{what}: {all:?}");
    let record = next.record().await.unwrap();
    let [gap] = &record.gaps[..] else { panic!("{what}: {:?}", record.gaps) };
    let to = Checkpoint::Time(events[3].cluster_time().unwrap());
    assert_eq!((&gap.from, &gap.to), (&events[0], &to), "{what}");
}

#[tokio::test(start_paused = true)]
async fn a_start_behind_lost_history_that_is_cut_anywhere_is_made_by_the_next_process() {
    let mut whole = 0;
    for cut in [Cut::Before, Cut::After] {
        for call in 0.. {
            let world = World::new();
            let events = world.inserts(1..=5);
            world.storage.inner().put(left_at(&events[0]));
            world.model.drop_history_before(&events[3]);
            let process = world.stepped();
            process.steps.cut(call, cut);
            let action = process.subscriptions.subscribe(ID, world.seen.handler()).on_history_lost(restart());
            let started = timeout(Duration::from_secs(30), action.into_future()).await;
            seconds(1).await;
            let calls = process.steps.calls();
            let is_cut = calls.len() <= call + 1 && calls.len() > call;
            drop((started, process));
            survives(&world, &events, &format!("{cut:?} call {call} of {calls:?}")).await;
            if !is_cut {
                assert!(
                    ["read", "identity", "head", "open", "earliest", "claim", "save"]
                        .iter()
                        .all(|it| calls.contains(it)),
                    "{calls:?}"
                );
                whole += 1;
                break;
            }
        }
    }
    assert_eq!(whole, 2);
}

/// A run paused behind its first event, whose history is lost behind that.
async fn lost_in_a_run(world: &World) -> (Stepped, Subscription, Vec<Checkpoint>) {
    let process = world.stepped();
    let action = process.subscriptions.subscribe(ID, world.seen.handler()).on_history_lost(restart());
    let subscription = action.await.unwrap();
    let mut events = vec![world.insert(1)];
    until_saved(&subscription, &events[0]).await;
    subscription.pause().await.unwrap();
    events.extend(world.inserts(2..=5));
    world.model.drop_history_before(&events[3]);
    (process, subscription, events)
}

#[tokio::test(start_paused = true)]
async fn a_run_that_begins_again_behind_lost_history_and_is_cut_anywhere_is_followed_by_the_next_process() {
    for cut in [Cut::Before, Cut::After] {
        for call in 0..25 {
            let world = World::new();
            let (process, subscription, events) = lost_in_a_run(&world).await;
            process.steps.cut(process.steps.calls().len() + call, cut);
            let _ = timeout(Duration::from_secs(8), subscription.resume()).await;
            seconds(1).await;
            let calls = process.steps.calls();
            drop((subscription, process));
            survives(&world, &events, &format!("{cut:?} call {call} of {calls:?}")).await;
        }
    }
}
