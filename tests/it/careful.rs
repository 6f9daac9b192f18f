//! An event that kills its process: found by a careful run, and treated as the failure policy says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use mongosub::memory::MemoryDeadLetterStorage;
use mongosub::{BatchLimits, Checkpoint, Delivery, Hand, OnFailure, State, Subscribe, Subscription, Then};
use tracing::Level;

use crate::support::{
    Fault, FaultyLetters, FaultyStorage, Hold, ID, Log, Saved, World, id, millis, seconds, until, until_reason,
    until_seen, until_settled,
};

type Action = Subscribe<mongosub::memory::MemoryModel, FaultyStorage>;

/// Calls for the event that kills.
#[derive(Clone, Default)]
pub(crate) struct Killer(Arc<AtomicU32>);

impl Killer {
    /// Its handler is never done with event 3, which is how a process looks that dies in its middle.
    pub(crate) fn action(&self, world: &World) -> Action {
        let killed = self.0.clone();
        let handler = world.seen.then(move |delivery: Delivery| {
            let killed = killed.clone();
            async move {
                if delivery.event.document_id::<i32>()? == Some(3) {
                    killed.fetch_add(1, SeqCst);
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        });
        // Nothing is stored before it dies.
        world.subscriptions.subscribe(ID, handler).save_every(1000)
    }

    pub(crate) fn times(&self) -> u32 {
        self.0.load(SeqCst)
    }
}

/// Everything of a run is gone, as with its process.
async fn die(world: World, subscription: Subscription) -> World {
    let mut status = subscription.watch();
    let next = world.restarted();
    drop((world, subscription));
    status.wait_for(|status| matches!(status.state, State::Stopped(_))).await.unwrap();
    tokio::task::yield_now().await;
    next
}

/// Runs that die with event 3 in hand, so many times.
pub(crate) async fn deaths(mut world: World, killer: &Killer, times: u32) -> World {
    for _ in 0..times {
        let before = killer.times();
        let subscription = killer.action(&world).await.unwrap();
        for _ in 0..10_000 {
            if killer.times() > before {
                break;
            }
            millis(1).await;
        }
        assert_eq!(killer.times(), before + 1);
        world = die(world, subscription).await;
    }
    world
}

pub(crate) async fn world_with_a_killer() -> (World, Killer, Vec<Checkpoint>) {
    let world = World::new();
    world.subscribe().await.shutdown().await.unwrap();
    let at = world.inserts(1..=5);
    (world, Killer::default(), at)
}

#[tokio::test(start_paused = true)]
async fn three_ends_without_a_word_and_without_progress_make_the_next_run_careful() {
    let log = Log::default();
    let _logging = log.begin();
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 3).await;
    let record = world.record().await.unwrap();
    assert_eq!((record.unclean_ends, &record.in_hand), (2, &None), "the third end is counted by the next claim");
    let subscription = killer.action(&world).await.unwrap();
    until_seen(&world, 3).await;
    millis(100).await;
    assert_eq!(log.messages(Level::WARN, "is careful").len(), 1);
    // Each of the two before it was noted and then stored.
    let record = world.record().await.unwrap();
    assert_eq!(record.position.as_ref(), Some(&world.seen.all()[1].position));
    let in_hand = record.in_hand.unwrap();
    assert_eq!((&in_hand.position, in_hand.deaths), (&world.seen.all()[2].position, 0));
    let hands: Vec<bool> = world.storage.sent().iter().map(|save| matches!(save.hand, Hand::Holds(_))).collect();
    assert_eq!(hands, [true, false, true, false, true]);
    drop(die(world, subscription).await);
}

#[tokio::test(start_paused = true)]
async fn after_three_more_deaths_the_failure_policy_puts_the_event_by_and_the_run_gets_past_it() {
    for then in [Then::Skip, Then::DeadLetter] {
        let log = Log::default();
        let _logging = log.begin();
        let (world, killer, _) = world_with_a_killer().await;
        let world = deaths(world, &killer, 6).await;
        let letters = MemoryDeadLetterStorage::new();
        let action = killer.action(&world).on_failure(OnFailure::retry(5).then(then)).dead_letters(letters.clone());
        let subscription = action.await.unwrap();
        let status = until(&subscription, "past it", |status| status.settled == 3).await;
        assert_eq!(killer.times(), 6, "it is not handed out again");
        assert_eq!((status.skipped + status.dead_lettered, status.handled), (1, 2));
        assert_eq!(log.messages(Level::WARN, "the process died 3 times while handling this event").len(), 2);
        let last = subscription.shutdown().await.unwrap();
        assert_eq!(world.stored().await, last);
        let record = world.record().await.unwrap();
        assert_eq!((record.in_hand, record.clean), (None, true));
        if then == Then::DeadLetter {
            use mongosub::DeadLetterStorage;
            assert_eq!(letters.sequences(&id()).await.unwrap().len(), 1);
        }
        let next = world.restarted();
        let subscription = killer.action(&next).await.unwrap();
        assert_eq!(log.messages(Level::WARN, "is careful").len(), 4, "and this one is not");
        subscription.shutdown().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn with_stop_it_names_the_event_and_with_retry_for_ever_it_stalls() {
    let (world, killer, at) = world_with_a_killer().await;
    let world = deaths(world, &killer, 6).await;
    let subscription = killer.action(&world).on_failure(OnFailure::retry(9).then(Then::Stop)).await.unwrap();
    let reason = subscription.stopped().await;
    assert!(reason.to_string().contains("the process died 3 times while handling this event"), "{reason}");
    assert_eq!(reason.name(), "handler_failed");
    let mongosub::Reason::HandlerFailed { position, attempts, .. } = &reason else { panic!("{reason}") };
    assert_eq!((position, *attempts), (&at[2], 10));
    assert_eq!(killer.times(), 6);

    // It was said once; whoever starts it again wants it tried, and it is counted anew.
    let world = deaths(world.restarted(), &killer, 3).await;
    let subscription = killer.action(&world).await.unwrap();
    let status = until_reason(&subscription, "stalled", "handler_failing").await;
    assert!(status.state.reason().unwrap().to_string().contains("died 3 times"));
    assert_eq!(killer.times(), 9);
    // A resume is a person's word: it is handed out.
    subscription.resume().await.unwrap();
    for _ in 0..100 {
        millis(10).await;
    }
    assert_eq!(killer.times(), 10);
}

#[tokio::test(start_paused = true)]
async fn an_end_with_progress_and_an_end_with_a_word_begin_the_count_anew() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 2).await;
    let subscription = killer.action(&world).save_every(1).await.unwrap();
    // Behind the claim by the storage's clock, which counts milliseconds.
    tokio::time::advance(Duration::from_millis(2)).await;
    until_settled(&subscription, 2).await;
    millis(100).await;
    let world = die(world, subscription).await;
    let world = deaths(world, &killer, 1).await;
    assert_eq!(world.record().await.unwrap().unclean_ends, 0, "the one before had stored two events");
    let world = deaths(world, &killer, 1).await;
    assert_eq!(world.record().await.unwrap().unclean_ends, 1);
}

#[tokio::test(start_paused = true)]
async fn a_takeover_is_no_death() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 2).await;
    let mut subscriptions = Vec::new();
    let mut worlds = vec![world];
    for _ in 0..4 {
        let next = worlds.last().unwrap().restarted();
        subscriptions.push(killer.action(worlds.last().unwrap()).await.unwrap());
        // It looks whether it is still the owner, and says that it lives.
        worlds.push(next);
        seconds(15).await;
    }
    let record = worlds[0].record().await.unwrap();
    assert_eq!((record.unclean_ends, record.in_hand.map_or(0, |in_hand| in_hand.deaths)), (2, 0));
    // Each has its grace for the event in hand.
    seconds(60).await;
    let stopped = subscriptions.iter().filter(|subscription| subscription.is_stopped()).count();
    assert_eq!(stopped, 3);
}

#[tokio::test(start_paused = true)]
async fn an_orderly_end_of_a_careful_run_leaves_no_event_in_hand() {
    for paused in [false, true] {
        let (world, killer, at) = world_with_a_killer().await;
        let next = deaths(world, &killer, 3).await;
        let subscription = killer.action(&next).shutdown_grace(Duration::from_secs(1)).await.unwrap();
        until(&subscription, "in hand", |status| {
            status.in_hand_since.is_some() && status.position == Some(at[1].clone())
        })
        .await;
        millis(100).await;
        if paused {
            subscription.pause().await.unwrap();
        } else {
            drop(subscription.shutdown().await);
        }
        assert_eq!(next.record().await.unwrap().in_hand, None, "paused: {paused}");
        if paused {
            subscription.resume().await.unwrap();
            millis(100).await;
            assert!(next.record().await.unwrap().in_hand.is_some());
            subscription.shutdown().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_careful_run_hands_out_one_at_a_time_until_it_is_past_what_came_before() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 3).await;
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = {
        let seen = seen.clone();
        move |batch: Vec<Delivery>| {
            seen.lock().unwrap().push(batch.len());
            async { Ok(()) }
        }
    };
    let action = world.subscriptions.subscribe_batches(ID, BatchLimits::new(10), handler);
    let subscription = action.save_every(1000).await.unwrap();
    until_settled(&subscription, 5).await;
    assert_eq!(*seen.lock().unwrap(), [1, 1, 1, 1, 1]);
    subscription.pause().await.unwrap();
    world.inserts(6..=25);
    subscription.resume().await.unwrap();
    until_settled(&subscription, 25).await;
    let sizes = seen.lock().unwrap()[5..].to_vec();
    assert_eq!(sizes.iter().sum::<usize>(), 20);
    assert!(sizes.contains(&10), "{sizes:?}");
    let holds = |save: &&Saved| matches!(save.hand, Hand::Holds(_));
    assert_eq!(world.storage.sent().iter().filter(holds).count(), 5);
}

#[tokio::test(start_paused = true)]
async fn care_ends_behind_the_event_that_killed_and_behind_ten_thousand_that_did_not() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 4).await;
    world.inserts(6..=50);
    let subscription = world.action().save_every(1000).await.unwrap();
    until_settled(&subscription, 48).await;
    let holds = |world: &World| world.storage.sent().iter().filter(|save| matches!(save.hand, Hand::Holds(_))).count();
    assert_eq!(holds(&world), 1, "the one that killed, and nothing behind it");
    assert_eq!(world.record().await.unwrap().in_hand, None);
    drop(subscription);

    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 3).await;
    world.inserts(6..=10_100);
    let subscription = world.action().save_every(1000).await.unwrap();
    until_settled(&subscription, 10_100).await;
    assert_eq!(holds(&world), 10_000);
    assert_eq!(subscription.shutdown().await.unwrap(), world.stored().await);
    assert!(world.record().await.unwrap().in_hand.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_note_that_was_not_written_before_a_pause_is_not_written_after_it() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 3).await;
    world.storage.next_saves([Fault::FailLate(Duration::from_secs(1))]);
    let subscription = killer.action(&world).await.unwrap();
    millis(100).await;
    assert!(matches!(world.storage.sent()[..], [Saved { hand: Hand::Holds(_), .. }]));
    subscription.pause().await.unwrap();
    seconds(30).await;
    assert_eq!(world.record().await.unwrap().in_hand, None, "nothing is in hand");
    subscription.resume().await.unwrap();
    until_seen(&world, 3).await;
    assert!(world.record().await.unwrap().in_hand.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_skip_where_nothing_runs_is_no_death() {
    let (world, killer, at) = world_with_a_killer().await;
    let world = deaths(world, &killer, 5).await;
    let before = world.record().await.unwrap();
    assert_eq!(before.in_hand.as_ref().map(|in_hand| in_hand.deaths), Some(1));
    // One that cannot be done leaves the count as it was.
    let letters = FaultyLetters::new(MemoryDeadLetterStorage::new());
    letters.next_puts([Fault::Fail]);
    let skip = world.subscriptions.skip(ID, at[2].clone(), "INC-7").dead_letters(letters);
    assert!(skip.await.is_err());
    let after = world.record().await.unwrap();
    assert_eq!((after.unclean_ends, after.in_hand), (before.unclean_ends, before.in_hand));
    // What stands at the time of the third comes before it.
    let through = Checkpoint::Time(at[2].cluster_time().unwrap());
    world.subscriptions.skip(ID, through, "INC-7").await.unwrap();
    assert_eq!(world.record().await.unwrap().in_hand, None, "it is judged anew");
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_could_not_empty_the_hand_does_not_keep_a_resumed_run_saving() {
    let (world, killer, _) = world_with_a_killer().await;
    let world = deaths(world, &killer, 4).await;
    let hold = Hold::default();
    let subscription = world.held(&hold).shutdown_grace(Duration::from_secs(1)).await.unwrap();
    until_seen(&world, 1).await;
    world.storage.every_save(Fault::Fail);
    hold.let_go(1);
    assert!(subscription.pause().await.is_err(), "the event that killed is not stored");
    world.storage.heal();
    // The next event is in hand before a save is made.
    world.storage.next_saves([Fault::Fail]);
    subscription.resume().await.unwrap();
    until_seen(&world, 2).await;
    let before = world.storage.sent().len();
    for _ in 0..200 {
        // Not by sleeping: a run that never rests would not let the time pass.
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    let sent = world.storage.sent().split_off(before);
    assert_eq!(sent.len(), 1, "the third event is stored, once");
    hold.let_go(10);
    until_settled(&subscription, 3).await;
    subscription.pause().await.unwrap();
    assert_eq!(world.record().await.unwrap().in_hand, None);
}
