//! The main path: subscribe, deliver, stop in every way, resume; nothing lost.

use mongosub::bson::doc;
use mongosub::memory;
use mongosub::{Kind, SaveMode, State};

use crate::support::{ID, World, is_running, until, until_saved, until_settled};

#[tokio::test(start_paused = true)]
async fn a_new_subscription_gets_every_change_after_subscribe_in_order_and_stores_its_place() {
    let world = World::new();
    world.model.push(memory::insert(0, doc! {}));
    let subscription = world.subscribe().await;
    assert!(world.stored().await.is_some(), "the start is stored before subscribe returns");
    let mut last = None;
    for key in 1..=5 {
        last = Some(world.model.push(memory::insert(key, doc! {})));
    }
    let last = last.unwrap();
    until_saved(&subscription, &last).await;
    assert_eq!(world.seen.keys(), [1, 2, 3, 4, 5]);
    let record = world.record().await.unwrap();
    assert_eq!(record.position.as_ref(), Some(&last));
    assert_eq!(record.kind, Some(Kind::Event));
    assert!(!record.clean);

    let stored = subscription.shutdown().await.unwrap();
    assert_eq!(stored.as_ref(), Some(&last));
    assert!(world.record().await.unwrap().clean);
    assert!(matches!(subscription.status().state, State::Stopped(_)));
}

#[tokio::test(start_paused = true)]
async fn the_next_run_goes_on_behind_the_stored_position_and_repeats_nothing_after_a_clean_end() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.model.push(memory::insert(1, doc! {}));
    until_settled(&subscription, 1).await;
    subscription.shutdown().await.unwrap();
    world.model.push(memory::insert(2, doc! {}));

    let next = world.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 1).await;
    next.model.push(memory::insert(3, doc! {}));
    until_settled(&subscription, 2).await;
    assert_eq!(next.seen.keys(), [2, 3]);
    assert!(next.seen.all().iter().all(|seen| !seen.may_be_repeat));
}

#[tokio::test(start_paused = true)]
async fn pause_closes_the_cursor_and_resume_goes_on_where_it_stood() {
    let world = World::new();
    let subscription = world.subscribe().await;
    world.model.push(memory::insert(1, doc! {}));
    until_settled(&subscription, 1).await;
    subscription.pause().await.unwrap();
    assert_eq!(subscription.status().state, State::Paused);
    assert_eq!(world.model.active_readers(), 0);
    world.model.push(memory::insert(2, doc! {}));
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2]);
    until(&subscription, "running", |status| is_running(&status.state)).await;
}

#[tokio::test(start_paused = true)]
async fn cancel_deletes_the_checkpoint_and_frees_the_id() {
    let world = World::new();
    let subscription = world.subscribe().await;
    subscription.cancel().await.unwrap();
    assert!(world.record().await.is_none());
    assert!(world.subscriptions.get(ID).is_none());
    world.subscribe().await;
}

#[tokio::test(start_paused = true)]
async fn caught_up_and_drained_answer_when_their_place_is_reached() {
    let world = World::new();
    let subscription = world
        .subscriptions
        .subscribe(ID, world.seen.handler())
        .save_every(1000)
        .save_mode(SaveMode::WriteThrough)
        .await;
    let subscription = subscription.unwrap();
    let last = world.inserts(1..=10).pop().unwrap();
    subscription.caught_up().await.unwrap();
    assert_eq!(world.seen.keys().len(), 10);
    assert_ne!(world.stored().await.as_ref(), Some(&last));
    assert_eq!(subscription.drained().await.unwrap().as_ref(), Some(&last));
    assert_eq!(world.stored().await.as_ref(), Some(&last));
}
