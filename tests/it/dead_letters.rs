//! Dead letters: events that are put out of the way, those parked behind them, and what is done about them by hand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::bson::doc;
use mongosub::memory::{self, MemoryDeadLetterStorage, MemoryModel};
use mongosub::{
    BatchLimits, Checkpoint, DeadLetterError, DeadLetterStorage, Delivery, Deployment, DocumentKey,
    DurableSubscriptions, Epoch, Failure, Filter, Handler, HoldOutcome, LetterKind, MAX_LETTERS, MAX_SEQUENCES,
    Namespace, NewLetter, OnFailure, Operation, Owner, Reason, Sequence, State, StorageError, SubscribeError,
    Subscription, Then,
};
use tracing::Level;

use crate::support::{
    Fault, FaultyLetters, FaultyStorage, Hold, ID, Log, Recorder, World, id, millis, seconds, unavailable, until,
    until_reason, until_saved, until_settled,
};

/// A world with a dead letter storage, and a handler that fails for the keys that are poisoned.
struct Lot {
    world: World,
    letters: FaultyLetters,
    subscriptions: DurableSubscriptions<MemoryModel, FaultyStorage>,
    poisoned: Arc<Mutex<Vec<i32>>>,
}

impl Lot {
    fn new() -> Self {
        Self::over(World::new(), MemoryDeadLetterStorage::new())
    }

    fn over(world: World, letters: MemoryDeadLetterStorage) -> Self {
        let letters = FaultyLetters::new(letters);
        let subscriptions = world.subscriptions.clone().dead_letters(letters.clone());
        let subscriptions = subscriptions.on_failure(OnFailure::retry(1).then(Then::DeadLetter));
        Self { world, letters, subscriptions, poisoned: Arc::new(Mutex::new(vec![1])) }
    }

    /// The next process over the same feed, records and letters.
    fn restarted(&self) -> Self {
        Self::over(self.world.restarted(), self.letters.inner().clone())
    }

    fn poison(&self, keys: impl IntoIterator<Item = i32>) {
        *self.poisoned.lock().unwrap() = keys.into_iter().collect();
    }

    fn handler(&self) -> impl Handler + use<> {
        let poisoned = self.poisoned.clone();
        self.world.seen.then(move |delivery| {
            let fails = poisoned.lock().unwrap().contains(&key_of(&delivery));
            async move { if fails { Err("poisoned".into()) } else { Ok(()) } }
        })
    }

    async fn subscribe(&self) -> Subscription {
        self.subscriptions.subscribe(ID, self.handler()).await.unwrap()
    }

    /// Fails for ever, whatever the policy keeps.
    async fn stuck(&self) -> Subscription {
        self.subscriptions.subscribe(ID, self.handler()).on_failure(OnFailure::retry_forever()).await.unwrap()
    }

    fn change(&self, key: i32, n: i32) -> Checkpoint {
        self.world.model.push(memory::update(key, doc! { "n": n }))
    }

    /// The positions of a document's letters.
    async fn letters_of(&self, document: i32) -> Vec<Checkpoint> {
        let letters = self.letters.inner().letters(&id(), &key(document)).await.unwrap();
        letters.into_iter().map(|letter| letter.position).collect()
    }

    async fn sequences(&self) -> Vec<Sequence> {
        self.subscriptions.dead_letter_sequences(ID).await.unwrap()
    }

    /// The storage has all the letters that there may be of a document, or of a subscription.
    async fn fill(&self, keys: impl IntoIterator<Item = DocumentKey>) {
        for (n, key) in keys.into_iter().enumerate() {
            let position = mongosub::bson::Timestamp { time: 1, increment: u32::try_from(n).unwrap() };
            let event = mongosub::ChangeEvent::from(memory::insert(1, doc! {})).bytes().clone();
            let letter = NewLetter::parked(id(), key, Epoch(1), position.into(), event);
            self.letters.inner().put(&letter).await.unwrap();
        }
    }
}

fn key_of(delivery: &Delivery) -> i32 {
    delivery.event.document_id::<i32>().unwrap().unwrap_or(-1)
}

fn key(id: i32) -> DocumentKey {
    DocumentKey::new(Namespace::new("test", "events"), id)
}

fn adds_up(status: &mongosub::Status) {
    assert_eq!(status.settled, status.handled + status.skipped + status.dead_lettered + status.parked, "{status:?}");
    assert!(status.delivered >= status.settled && status.events >= status.delivered, "{status:?}");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_holds_up_its_own_document_only_and_in_order() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let first = lot.world.insert(1);
    lot.world.insert(2);
    let later = [lot.change(1, 1), lot.change(1, 2)];
    let last = lot.change(2, 1);
    let status = until_saved(&subscription, &last).await;
    assert_eq!(lot.world.seen.keys(), [1, 1, 2, 2], "the later ones of 1 are not handed out");
    assert_eq!(lot.letters_of(1).await, [vec![first], later.to_vec()].concat());
    assert_eq!((status.settled, status.handled, status.dead_lettered, status.parked), (5, 2, 1, 2));
    adds_up(&status);
    assert_eq!(status.state, State::CaughtUp);
}

#[tokio::test(start_paused = true)]
async fn a_letter_tells_everything_about_its_failure() {
    let lot = Lot::new();
    let world = &lot.world;
    let handler = world.seen.then(|_| async {
        let cause = std::io::Error::other("connection refused");
        seconds(10).await;
        Err(std::io::Error::other(cause).into())
    });
    let policy = OnFailure::retry(2).then(Then::DeadLetter).backoff(Duration::from_nanos(1), Duration::from_nanos(1));
    let subscription = lot.subscriptions.subscribe(ID, handler).on_failure(policy).await.unwrap();
    let position = world.insert(1);
    let parked = lot.change(1, 1);
    until_settled(&subscription, 2).await;
    let letters = lot.subscriptions.dead_letters_of(ID, &key(1)).await.unwrap();
    let failed = &letters[0];
    assert_eq!((&failed.position, failed.kind, failed.attempts), (&position, LetterKind::Failed, 3));
    assert_eq!(failed.error.last().unwrap(), "connection refused");
    assert_eq!(failed.epoch, world.record().await.unwrap().epoch.unwrap());
    let seconds = |at: Option<mongosub::bson::DateTime>| {
        (failed.stored_at.timestamp_millis() - at.unwrap().timestamp_millis()) / 1000
    };
    assert_eq!((seconds(failed.first_failed_at), seconds(failed.last_failed_at)), (20, 0));
    let event = lot.subscriptions.dead_letter_event(failed).await.unwrap().unwrap();
    assert_eq!((event.operation().unwrap(), event.position().unwrap()), (Operation::Insert, position));
    assert_eq!((&letters[1].position, letters[1].kind, letters[1].attempts), (&parked, LetterKind::Parked, 0));
    assert_eq!((letters[1].first_failed_at, letters[1].error.len()), (None, 0));
}

#[tokio::test(start_paused = true)]
async fn a_handler_makes_a_dead_letter_at_once() {
    let lot = Lot::new();
    let handler = lot.world.seen.then(|_| async { Err(Failure::dead_letter("of no use")) });
    let action = lot.subscriptions.subscribe(ID, handler).on_failure(OnFailure::retry_forever());
    let subscription = action.await.unwrap();
    lot.world.insert(1);
    let status = until_settled(&subscription, 1).await;
    assert_eq!((lot.world.seen.keys().len(), status.dead_lettered), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn events_of_parked_documents_are_taken_out_of_a_batch_in_feed_order() {
    let lot = Lot::new();
    let calls: Arc<Mutex<Vec<Vec<i32>>>> = Arc::default();
    let notes = calls.clone();
    let handler = move |batch: Vec<Delivery>| {
        let keys: Vec<i32> = batch.iter().map(key_of).collect();
        notes.lock().unwrap().push(keys.clone());
        async move {
            match keys.iter().position(|key| *key == 1) {
                Some(at) => Err(mongosub::BatchFailure::after(at, Failure::dead_letter("poisoned"))),
                None => Ok(()),
            }
        }
    };
    let limits = BatchLimits::new(100).max_wait(Duration::from_millis(10));
    let subscription = lot.subscriptions.subscribe_batches(ID, limits, handler).await.unwrap();
    lot.world.inserts(1..=2);
    lot.change(1, 1);
    lot.world.inserts(3..=4);
    lot.change(1, 2);
    lot.world.insert(5);
    let status = until_settled(&subscription, 7).await;
    assert_eq!(*calls.lock().unwrap(), [vec![1, 2, 1, 3, 4, 1, 5], vec![2], vec![3, 4], vec![5]]);
    assert_eq!((status.handled, status.dead_lettered, status.parked), (4, 1, 2));
    adds_up(&status);
}

#[tokio::test(start_paused = true)]
async fn parking_can_be_turned_off() {
    let lot = Lot::new();
    let action = lot.subscriptions.subscribe(ID, lot.handler()).park_later_events(false);
    let subscription = action.await.unwrap();
    let first = lot.world.insert(1);
    until_settled(&subscription, 1).await;
    lot.poison([]);
    lot.change(1, 1);
    let status = until_settled(&subscription, 2).await;
    assert_eq!((status.handled, status.dead_lettered, status.parked), (1, 1, 0));
    assert_eq!((lot.letters_of(1).await, lot.letters.appends()), (vec![first], 0));
}

#[tokio::test(start_paused = true)]
async fn an_event_of_no_document_is_a_dead_letter_that_parks_nothing() {
    let lot = Lot::new();
    lot.poison([-1]);
    let subscription = lot.subscribe().await;
    let drop = |n| lot.world.model.push(memory::event(Operation::Drop).field("n", n));
    let dropped = [drop(1), drop(2)];
    lot.world.insert(1);
    let status = until_settled(&subscription, 3).await;
    assert_eq!((status.dead_lettered, status.parked, status.handled), (2, 0, 1));
    let key = DocumentKey::without_document(Some(Namespace::new("test", "events")));
    let letters = lot.letters.inner().letters(&id(), &key).await.unwrap();
    assert_eq!(letters.into_iter().map(|letter| letter.position).collect::<Vec<_>>(), dropped);
}

#[tokio::test(start_paused = true)]
async fn the_storage_is_asked_about_documents_with_letters_only() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.inserts(2..=100);
    until_settled(&subscription, 99).await;
    assert_eq!(lot.letters.appends(), 0);
    lot.world.insert(1);
    lot.change(1, 1);
    lot.world.inserts(102..=110);
    until_settled(&subscription, 110).await;
    assert_eq!((lot.letters.sent(), lot.letters.appends()), (2, 1));
    // Gone by another's doing: the next event finds out, and is delivered, and those behind it are not asked about.
    lot.poison([]);
    lot.subscriptions.evict(ID, &key(1), "a test").await.unwrap();
    lot.change(1, 2);
    lot.change(1, 3);
    let status = until_settled(&subscription, 112).await;
    assert_eq!((status.parked, lot.letters.appends()), (1, 2));
    assert_eq!(lot.world.seen.keys()[lot.world.seen.keys().len() - 2..], [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_letter_is_stored_before_its_event_is_settled() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let before = lot.world.insert(2);
    until_saved(&subscription, &before).await;
    lot.letters.next_puts([Fault::Hang]);
    lot.world.insert(1);
    lot.world.insert(3);
    seconds(120).await;
    assert_eq!((lot.world.seen.keys(), lot.world.stored().await), (vec![2, 1, 1], Some(before.clone())));
    assert_eq!(subscription.status().settled, 1);
    subscription.shutdown().await.unwrap();
    assert_eq!(lot.world.stored().await, Some(before), "abandoned behind the grace, unsettled");
    let next = lot.restarted();
    let subscription = next.subscribe().await;
    until_settled(&subscription, 2).await;
    assert_eq!((next.world.seen.keys(), next.letters_of(1).await.len()), (vec![1, 1, 3], 1));
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_cannot_be_stored_is_tried_again_alone_and_shows() {
    for fault in [Fault::Fail, Fault::LoseReply, Fault::FailLate(Duration::from_secs(9))] {
        let lot = Lot::new();
        let subscription = lot.subscribe().await;
        lot.letters.next_puts(vec![fault; 5]);
        lot.world.insert(1);
        let shown = until_reason(&subscription, "retrying", "storage_unavailable").await;
        assert!(shown.state.reason().unwrap().to_string().contains("dead letters"), "{:?}", shown.state);
        assert_eq!(shown.settled, 0);
        let status = until_settled(&subscription, 1).await;
        assert_eq!((lot.world.seen.keys(), lot.letters_of(1).await.len()), (vec![1, 1], 1));
        assert_eq!((status.dead_lettered, status.state), (1, State::CaughtUp));
        // The same for one that is parked.
        lot.letters.next_puts([Fault::Fail, Fault::LoseReply]);
        lot.change(1, 1);
        until_settled(&subscription, 2).await;
        assert_eq!((lot.world.seen.keys().len(), lot.letters_of(1).await.len()), (2, 2));
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_privilege_is_waited_for_and_a_refusal_stalls() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let unauthorized = StorageError::Unauthorized { action: "insert".into(), resource: "dead_letters".into() };
    lot.letters.next_puts([Fault::Error(unauthorized)]);
    lot.world.insert(1);
    until_reason(&subscription, "retrying", "unauthorized").await;
    until_settled(&subscription, 1).await;

    let refused = StorageError::Refused { code: 121, message: "validation".into() };
    lot.letters.next_puts([Fault::Error(refused)]);
    let parked = lot.change(1, 1);
    let stalled = until_reason(&subscription, "stalled", "refused_by_server").await;
    assert_eq!((stalled.settled, lot.world.seen.keys().len()), (1, 2));
    subscription.resume().await.unwrap();
    until_saved(&subscription, &parked).await;
    assert_eq!(lot.letters_of(1).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_handed_out_before_it_is_known_what_is_parked() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let first = lot.world.insert(1);
    until_saved(&subscription, &first).await;
    subscription.shutdown().await.unwrap();
    let next = lot.restarted();
    next.letters.next_lists_fail([unavailable(), unavailable()]);
    next.poison([]);
    let subscription = next.subscribe().await;
    next.change(1, 1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    assert!(next.world.seen.keys().is_empty());
    let status = until_settled(&subscription, 1).await;
    assert_eq!((status.parked, next.world.seen.keys().len(), next.letters_of(1).await.len()), (1, 0, 2));
}

#[tokio::test(start_paused = true)]
async fn what_comes_again_after_a_crash_is_not_stored_twice() {
    let lot = Lot::new();
    // Nothing but the start is ever stored.
    let action = lot.subscriptions.subscribe(ID, lot.handler()).save_when(|_| false);
    let subscription = action.await.unwrap();
    let positions = [lot.world.insert(1), lot.change(1, 1), lot.change(1, 2)];
    until_settled(&subscription, 3).await;
    subscription.shutdown().await.unwrap();
    // One of them is done by hand before the feed repeats it.
    let mut left = 1;
    let handler = move |_: Delivery| {
        left -= 1;
        async move { if left >= 0 { Ok(()) } else { Err("one is enough".into()) } }
    };
    lot.subscriptions.retry(ID, &key(1), handler).await.unwrap();
    let next = lot.restarted();
    let subscription = next.subscribe().await;
    let last = next.change(1, 3);
    let status = until_saved(&subscription, &last).await;
    assert_eq!((status.parked, status.dead_lettered, next.world.seen.keys().len()), (4, 0, 0));
    assert_eq!(next.letters_of(1).await, [positions[1].clone(), positions[2].clone(), last]);
}

#[tokio::test(start_paused = true)]
async fn a_full_sequence_stalls_and_goes_on_when_there_is_room() {
    let lot = Lot::new();
    lot.fill(vec![key(1); MAX_LETTERS]).await;
    let subscription = lot.subscribe().await;
    let before = lot.world.insert(2);
    until_saved(&subscription, &before).await;
    let position = lot.change(1, 1);
    lot.world.insert(3);
    let stalled = until_reason(&subscription, "stalled", "parking_full").await;
    let State::Stalled(Reason::ParkingFull { position: at, document, limit }) = &stalled.state else { panic!() };
    assert_eq!((at, document.as_str()), (&position, r#"test.events { "_id": 1 }"#));
    assert!(limit.contains("1024"), "{limit}");
    assert_eq!((lot.world.seen.keys(), lot.world.stored().await), (vec![2], Some(before)));
    subscription.resume().await.unwrap();
    until_reason(&subscription, "stalled", "parking_full").await;
    let mut left = 1;
    let handler = move |_: Delivery| {
        left -= 1;
        async move { if left >= 0 { Ok(()) } else { Err("one is enough".into()) } }
    };
    lot.subscriptions.retry(ID, &key(1), handler).await.unwrap();
    subscription.resume().await.unwrap();
    let status = until_settled(&subscription, 3).await;
    assert_eq!((status.parked, lot.world.seen.keys()), (1, vec![2, 3]));
    assert_eq!(lot.letters_of(1).await.last(), Some(&position));
}

#[tokio::test(start_paused = true)]
async fn a_subscription_with_too_many_documents_stalls_and_goes_on_when_there_is_room() {
    let lot = Lot::new();
    lot.fill((1000..).map(key).take(MAX_SEQUENCES)).await;
    let subscription = lot.subscribe().await;
    let position = lot.world.insert(1);
    let stalled = until_reason(&subscription, "stalled", "parking_full").await;
    let State::Stalled(Reason::ParkingFull { limit, .. }) = &stalled.state else { panic!() };
    assert!(limit.contains("1024 documents"), "{limit}");
    assert_eq!(stalled.settled, 0);
    lot.subscriptions.evict(ID, &key(1000), "making room").await.unwrap();
    subscription.resume().await.unwrap();
    until_saved(&subscription, &position).await;
    assert_eq!(lot.letters_of(1).await, [position]);
}

#[tokio::test(start_paused = true)]
async fn a_retry_hands_the_letters_out_in_order_and_frees_the_document() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let positions = [lot.world.insert(1), lot.change(1, 1), lot.change(1, 2)];
    until_saved(&subscription, &positions[2]).await;
    let stored = lot.world.record().await;
    let seen = Recorder::default();
    let fence = subscription.status().fence;
    let handler = seen.then(move |delivery: Delivery| async move {
        assert_eq!((delivery.subscription().as_str(), delivery.fence()), (ID, fence));
        Ok(())
    });
    let retried = lot.subscriptions.retry(ID, &key(1), handler).await.unwrap();
    assert_eq!((retried.handled, retried.skipped, retried.failed), (3, 0, None));
    let got = seen.all();
    assert_eq!(got.iter().map(|seen| seen.position.clone()).collect::<Vec<_>>(), positions);
    assert_eq!(got.iter().map(|seen| seen.attempt).collect::<Vec<_>>(), [3, 1, 1]);
    assert!(got.iter().all(|seen| seen.may_be_repeat));
    assert_eq!(lot.sequences().await, []);
    assert_eq!(lot.world.record().await, stored, "the position is the run's");
    lot.poison([]);
    lot.change(1, 3);
    until_settled(&subscription, 4).await;
    assert_eq!(lot.world.seen.keys(), [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn what_comes_during_a_retry_is_parked_and_handed_out_by_it() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    until_settled(&subscription, 1).await;
    let (seen, hold) = (Recorder::default(), Hold::default());
    let waits = hold.clone();
    let handler = seen.then(move |_| {
        let waits = waits.clone();
        async move {
            waits.wait().await;
            Ok(())
        }
    });
    let (subscriptions, document) = (lot.subscriptions.clone(), key(1));
    let retry = tokio::spawn(async move { subscriptions.retry(ID, &document, handler).await });
    millis(1).await;
    let meanwhile = lot.change(1, 1);
    until_settled(&subscription, 2).await;
    assert_eq!(lot.world.seen.keys(), [1, 1], "not delivered by the run");
    hold.let_go(2);
    assert_eq!(retry.await.unwrap().unwrap().handled, 2);
    assert_eq!(seen.all()[1].position, meanwhile);
    assert_eq!(lot.sequences().await, []);
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_fails_says_where_and_leaves_the_rest_as_it_is() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    let positions = [lot.world.insert(1), lot.change(1, 1), lot.change(1, 2)];
    until_saved(&subscription, &positions[2]).await;
    seconds(60).await;
    for (round, verdict) in [Failure::retry, Failure::dead_letter, Failure::stop].into_iter().enumerate() {
        let mut calls = 0;
        let handler = move |_: Delivery| {
            calls += 1;
            // The first one is handled in the first round.
            async move { if round == 0 && calls == 1 { Ok(()) } else { Err(verdict("still not")) } }
        };
        let retried = lot.subscriptions.retry(ID, &key(1), handler).await.unwrap();
        let failed = retried.failed.unwrap();
        assert_eq!((retried.handled, &failed.position), (u64::from(round == 0), &positions[1]));
        let letters = lot.subscriptions.dead_letters_of(ID, &key(1)).await.unwrap();
        assert_eq!(letters.len(), 2);
        assert_eq!(
            (letters[0].attempts, &letters[0].error[..]),
            (u32::try_from(round).unwrap() + 1, &["still not".to_owned()][..])
        );
        assert!(letters[0].last_failed_at.unwrap() > letters[0].stored_at);
    }
    let panics = |_: Delivery| async { panic!("it panics") };
    let retried = lot.subscriptions.retry(ID, &key(1), panics).await.unwrap();
    assert!(retried.failed.unwrap().error[0].contains("it panics"));
    let retried = lot.subscriptions.retry(ID, &key(1), |_: Delivery| async { Ok(()) }).await.unwrap();
    assert_eq!((retried.handled, retried.failed), (2, None));
}

#[tokio::test(start_paused = true)]
async fn a_retry_may_skip_a_letter_which_is_logged() {
    let log = Log::default();
    let _guard = log.begin();
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    lot.change(1, 1);
    until_settled(&subscription, 2).await;
    let handler =
        |delivery: Delivery| async move { if delivery.attempt > 1 { Err(Failure::skip("of no use")) } else { Ok(()) } };
    let retried = lot.subscriptions.retry(ID, &key(1), handler).await.unwrap();
    assert_eq!((retried.handled, retried.skipped, retried.failed), (1, 1, None));
    assert_eq!(log.messages(Level::WARN, "skips the dead letter").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_retry_of_a_document_at_a_time_for_as_long_as_it_takes() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    until_settled(&subscription, 1).await;
    let slow = |_: Delivery| async {
        seconds(300).await;
        Ok(())
    };
    let (subscriptions, document) = (lot.subscriptions.clone(), key(1));
    let retry = tokio::spawn(async move { subscriptions.retry(ID, &document, slow).await });
    for _ in 0..29 {
        seconds(10).await;
        let second = lot.subscriptions.retry(ID, &key(1), |_: Delivery| async { Ok(()) }).await;
        assert!(matches!(second, Err(DeadLetterError::HeldBy { .. })), "{second:?}");
        let evicted = lot.subscriptions.evict(ID, &key(1), "in the way").await;
        assert!(matches!(evicted, Err(DeadLetterError::HeldBy { .. })), "{evicted:?}");
        assert!(lot.sequences().await[0].held.is_some());
    }
    assert_eq!(retry.await.unwrap().unwrap().handled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_retrier_that_has_died_is_waited_for_half_a_minute() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    until_settled(&subscription, 1).await;
    let (subscriptions, document) = (lot.subscriptions.clone(), key(1));
    let hangs = |_: Delivery| std::future::pending::<Result<(), Failure>>();
    let retry = tokio::spawn(async move { subscriptions.retry(ID, &document, hangs).await });
    seconds(1).await;
    retry.abort();
    seconds(28).await;
    let second = lot.subscriptions.retry(ID, &key(1), |_: Delivery| async { Ok(()) }).await;
    assert!(matches!(second, Err(DeadLetterError::HeldBy { .. })), "{second:?}");
    seconds(2).await;
    let second = lot.subscriptions.retry(ID, &key(1), |_: Delivery| async { Ok(()) }).await;
    assert_eq!(second.unwrap().handled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_was_overtaken_removes_nothing() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    until_settled(&subscription, 1).await;
    let letters = lot.letters.clone();
    let handler = move |_: Delivery| {
        let letters = letters.clone();
        async move {
            // As if this process had been stopped for longer than its hold lasts.
            let held = letters.inner().sequences(&id()).await.unwrap()[0].held.clone().unwrap().0;
            letters.inner().release(&id(), &key(1), &held).await.unwrap();
            let taken = letters.inner().hold(&id(), &key(1), &Owner::fresh(), Duration::from_secs(60)).await;
            assert_eq!(taken.unwrap(), HoldOutcome::Held);
            Ok(())
        }
    };
    let retried = lot.subscriptions.retry(ID, &key(1), handler).await;
    assert!(matches!(retried, Err(DeadLetterError::HoldLost { .. })), "{retried:?}");
    assert_eq!(lot.letters_of(1).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_fails_is_tried_again_without_another_call_of_the_handler() {
    for fault in [Fault::Fail, Fault::LoseReply] {
        let lot = Lot::new();
        let subscription = lot.subscribe().await;
        lot.world.insert(1);
        lot.change(1, 1);
        until_settled(&subscription, 2).await;
        lot.letters.next_removals([fault.clone(), fault.clone(), fault]);
        let seen = Recorder::default();
        let retried = lot.subscriptions.retry(ID, &key(1), seen.handler()).await.unwrap();
        assert_eq!((retried.handled, seen.keys()), (2, vec![1, 1]));
        assert_eq!(lot.sequences().await, []);
    }
}

#[tokio::test(start_paused = true)]
async fn an_eviction_needs_a_reason_and_is_logged_with_what_it_deleted() {
    let log = Log::default();
    let _guard = log.begin();
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    lot.change(1, 1);
    until_settled(&subscription, 2).await;
    for reason in ["", "  "] {
        let refused = lot.subscriptions.evict(ID, &key(1), reason).await;
        assert!(matches!(refused, Err(DeadLetterError::NoReason)), "{refused:?}");
    }
    assert_eq!(lot.letters_of(1).await.len(), 2);
    assert_eq!(lot.subscriptions.evict(ID, &key(1), "the order was a test").await.unwrap(), 2);
    let lines = log.messages(Level::WARN, "are deleted");
    assert!(lines.len() == 1 && lines[0].contains("2 dead letters") && lines[0].contains("the order was a test"));
    lot.poison([]);
    lot.change(1, 2);
    until_settled(&subscription, 3).await;
    assert_eq!(lot.world.seen.keys(), [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_done_by_hand_says_why() {
    let lot = Lot::new();
    let handler = || |_: Delivery| async { Ok(()) };
    let retried = lot.subscriptions.retry(ID, &key(1), handler()).await;
    assert!(matches!(retried, Err(DeadLetterError::NoLetters { .. })), "{retried:?}");
    assert!(retried.unwrap_err().to_string().contains(r#"test.events { "_id": 1 } of subscription orders_v1"#));
    let evicted = lot.subscriptions.evict(ID, &key(1), "a test").await;
    assert!(matches!(evicted, Err(DeadLetterError::NoLetters { .. })), "{evicted:?}");
    let retried = lot.subscriptions.retry("a#b", &key(1), handler()).await;
    assert!(matches!(retried, Err(DeadLetterError::Id(_))), "{retried:?}");
    let retried = lot.world.subscriptions.retry(ID, &key(1), handler()).await;
    assert!(matches!(retried, Err(DeadLetterError::NoStorage)), "{retried:?}");
}

#[tokio::test(start_paused = true)]
async fn a_skipped_letter_is_kept_to_be_looked_at_and_no_retry_hands_it_out() {
    let lot = Lot::new();
    let key = DocumentKey::without_document(Some(Namespace::new("test", "events")));
    let event = mongosub::ChangeEvent::from(memory::insert(1, doc! {})).bytes().clone();
    let mut letter = NewLetter::parked(id(), key.clone(), Epoch(1), Checkpoint::Text("1".into()), event);
    letter.kind = LetterKind::Skipped;
    lot.letters.put(&letter).await.unwrap();
    let retried = lot.subscriptions.retry(ID, &key, |_: Delivery| async { panic!("handed out") }).await.unwrap();
    assert_eq!((retried.handled, retried.failed), (0, None));
    assert_eq!((lot.sequences().await[0].letters, &lot.sequences().await[0].held), (1, &None));
}

#[tokio::test(start_paused = true)]
async fn a_scope_around_the_dead_letters_leaves_them_out_and_a_subscription_to_them_is_refused() {
    let log = Log::default();
    let _guard = log.begin();
    let lot = Lot::new();
    let deployment = Deployment { set_name: "memory".into(), hosts: vec!["memory:1".into()] };
    let identity = |scope| {
        let mut identity = mongosub::Identity::new(scope);
        identity.deployment = Some(deployment.clone());
        identity
    };
    let letters = Namespace::new("test", "letters");
    lot.letters.lives_in(deployment.clone(), letters.clone());
    lot.world.model.set_identity(identity(mongosub::Scope::Database { db: "test".into() }));
    lot.subscribe().await.shutdown().await.unwrap();
    assert_eq!(log.messages(Level::INFO, "left out: test.letters").len(), 1);
    lot.world.model.set_identity(identity(mongosub::Scope::Collection(letters)));
    let refused = lot.subscriptions.subscribe("to_letters", lot.handler()).await;
    assert!(matches!(refused, Err(SubscribeError::Config { field: "model", .. })), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pause_during_a_failing_write_leaves_the_event_for_the_resume() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.letters.next_puts(vec![Fault::Fail; 3]);
    lot.world.insert(1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    subscription.pause().await.unwrap();
    assert_eq!((lot.letters_of(1).await.len(), subscription.status().settled), (0, 0));
    until(&subscription, "paused", |status| status.state == State::Paused).await;
    subscription.resume().await.unwrap();
    until_settled(&subscription, 1).await;
    assert_eq!(lot.letters_of(1).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_letter_whose_answer_never_came_holds_its_document_up_behind_a_pause_too() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.letters.next_puts([Fault::LoseReply, Fault::Fail]);
    lot.world.insert(1);
    until_reason(&subscription, "retrying", "storage_unavailable").await;
    subscription.pause().await.unwrap();
    assert_eq!(lot.letters_of(1).await.len(), 1, "stored, as nobody knows");
    lot.poison([]);
    lot.change(1, 1);
    subscription.resume().await.unwrap();
    let status = until_settled(&subscription, 2).await;
    assert_eq!((lot.world.seen.keys(), status.parked, lot.letters_of(1).await.len()), (vec![1, 1], 2, 2));
}

/// Keeps handled events back until it flushes, and panics for key 1.
struct Keeping {
    kept: Vec<i32>,
    flushed: Arc<Mutex<Vec<i32>>>,
}

impl Handler for Keeping {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        assert!(key_of(&delivery) != 1, "it panics");
        self.kept.push(key_of(&delivery));
        Ok(())
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        self.flushed.lock().unwrap().append(&mut self.kept);
        Ok(through)
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_lost_with_each_failure_gets_past_it_and_what_it_kept_comes_again() {
    for (then, counts) in [(Then::DeadLetter, (0, 1)), (Then::Skip, (1, 0))] {
        let lot = Lot::new();
        let flushed = Arc::<Mutex<Vec<i32>>>::default();
        let notes = flushed.clone();
        let factory = move || Keeping { kept: Vec::new(), flushed: notes.clone() };
        let action = lot.subscriptions.subscribe_with(ID, factory).save_every(100);
        let subscription = action.on_failure(OnFailure::retry(2).then(then)).await.unwrap();
        lot.world.inserts(5..=7);
        lot.world.insert(1);
        lot.world.inserts(8..=9);
        let later = lot.change(1, 1);
        let ends = |status: &mongosub::Status| status.position.as_ref() == Some(&later) && status.settled >= 7;
        let status = if then == Then::DeadLetter {
            until(&subscription, "all are settled", ends).await
        } else {
            // The later one fails too.
            until(&subscription, "both are skipped", |status| ends(status) && status.skipped == 2).await
        };
        adds_up(&status);
        subscription.shutdown().await.unwrap();
        // What was lost was never flushed; what was flushed and not stored comes again with the second loss.
        let again = if then == Then::DeadLetter { vec![] } else { vec![5, 6, 7] };
        assert_eq!(*flushed.lock().unwrap(), [again, vec![5, 6, 7, 8, 9]].concat());
        let status = subscription.status();
        assert_eq!((status.skipped.min(1), status.dead_lettered + status.parked.min(1)), (counts.0, counts.1 * 2));
        assert_eq!(lot.world.stored().await, Some(later));
        assert_eq!(lot.letters_of(1).await.len(), if then == Then::DeadLetter { 2 } else { 0 });
    }
}

struct Refusing(Keeping, Arc<Mutex<bool>>);

impl Handler for Refusing {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        match key_of(&delivery) {
            1 => Err(Failure::dead_letter("poisoned")),
            2 => Err(Failure::skip("not wanted")),
            _ => self.0.handle(delivery).await,
        }
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        if std::mem::take(&mut *self.1.lock().unwrap()) {
            return Err("not now".into());
        }
        self.0.flush(through).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_that_begins_anew_counts_what_comes_again_once() {
    let lot = Lot::new();
    let refuse = Arc::new(Mutex::new(false));
    let flushed = Arc::<Mutex<Vec<i32>>>::default();
    let (notes, refuses) = (flushed.clone(), refuse.clone());
    let factory = move || Refusing(Keeping { kept: Vec::new(), flushed: notes.clone() }, refuses.clone());
    let subscription = lot.subscriptions.subscribe_with(ID, factory).save_every(8).await.unwrap();
    *refuse.lock().unwrap() = true;
    lot.world.inserts(1..=3);
    lot.change(1, 1);
    lot.world.inserts(4..=6);
    // The eighth asks for the save, and so for the flush that is refused.
    let last = lot.change(1, 2);
    let status = until_saved(&subscription, &last).await;
    adds_up(&status);
    assert_eq!((status.settled, status.handled, status.skipped), (8, 4, 1));
    assert_eq!((status.dead_lettered, status.parked), (0, 3), "the letters were there already when they came again");
    assert_eq!(*flushed.lock().unwrap(), [3, 4, 5, 6]);
    assert_eq!(lot.letters_of(1).await.len(), 3);
}

struct Flushing(Arc<Mutex<Vec<&'static str>>>, bool);

impl Handler for Flushing {
    async fn claimed(&mut self, _: Option<Checkpoint>, _: mongosub::Hold) -> Result<(), Failure> {
        self.0.lock().unwrap().push("claimed");
        Ok(())
    }
    async fn handle(&mut self, _: Delivery) -> Result<(), Failure> {
        self.0.lock().unwrap().push("handled");
        Ok(())
    }
    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        self.0.lock().unwrap().push("flushed");
        if self.1 { Ok(through) } else { Err("not now".into()) }
    }
}

#[tokio::test(start_paused = true)]
async fn a_letter_is_removed_when_a_handler_that_keeps_effects_back_has_flushed_it() {
    let lot = Lot::new();
    let subscription = lot.subscribe().await;
    lot.world.insert(1);
    until_settled(&subscription, 1).await;
    let calls = Arc::<Mutex<Vec<_>>>::default();
    let retried = lot.subscriptions.retry(ID, &key(1), Flushing(calls.clone(), false)).await.unwrap();
    assert_eq!((retried.handled, &retried.failed.unwrap().error[..]), (0, &["not now".to_owned()][..]));
    assert_eq!(lot.letters_of(1).await.len(), 1);
    let retried = lot.subscriptions.retry(ID, &key(1), Flushing(calls.clone(), true)).await.unwrap();
    assert_eq!((retried.handled, retried.failed), (1, None));
    assert_eq!(*calls.lock().unwrap(), ["claimed", "handled", "flushed", "claimed", "handled", "flushed"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_skipped_by_hand_is_kept_as_dead_letters_and_later_events_of_its_documents_wait_behind_it() {
    let lot = Lot::new();
    let subscription = lot.stuck().await;
    let skipped = [lot.change(1, 0), lot.change(2, 0), lot.change(1, 1)];
    until(&subscription, "it fails", |status| status.state.name() == "retrying").await;
    subscription.skip(skipped[2].clone(), "INC-7").await.unwrap();
    assert_eq!(lot.letters_of(1).await, [skipped[0].clone(), skipped[2].clone()]);
    assert_eq!(lot.letters_of(2).await, [skipped[1].clone()]);
    let letters = lot.subscriptions.dead_letters_of(ID, &key(2)).await.unwrap();
    assert_eq!(letters[0].error, ["skipped by hand: INC-7"]);
    // Behind them.
    let parked = lot.change(1, 2);
    let free = lot.change(3, 0);
    until_saved(&subscription, &free).await;
    assert_eq!(lot.letters_of(1).await.last(), Some(&parked));
    assert!(lot.world.seen.all().iter().all(|seen| seen.position != parked), "{:?}", lot.world.seen.keys());
}

#[tokio::test(start_paused = true)]
async fn what_is_skipped_where_nothing_runs_is_kept_as_far_as_the_subscriptions_filter_passes_it() {
    let lot = Lot::new();
    let updates = || Filter::operations([Operation::Update]);
    let action = || lot.subscriptions.subscribe(ID, lot.handler()).filter(updates());
    action().await.unwrap().shutdown().await.unwrap();
    let first = lot.change(1, 0);
    lot.world.insert(2);
    let last = lot.change(2, 1);
    let skip = || lot.subscriptions.skip(ID, last.clone(), "INC-7");

    // What the filter leaves out would be kept too, so it has to be told.
    let before = lot.world.record().await;
    for answer in [skip().await, skip().filter(Filter::operations([Operation::Delete])).await] {
        assert!(matches!(answer, Err(SubscribeError::Config { field: "filter", .. })), "{answer:?}");
    }
    assert_eq!((lot.world.record().await, lot.letters.sent()), (before, 0), "nothing is touched");

    // Asked for again, each is kept once.
    lot.letters.next_puts([Fault::Late(Duration::ZERO), Fault::LoseReply]);
    let answer = skip().filter(updates()).await;
    assert!(answer.unwrap_err().to_string().contains("could not be kept as a dead letter"));
    assert!(lot.world.record().await.unwrap().skips.is_empty());
    skip().filter(updates()).await.unwrap();
    assert_eq!(lot.letters_of(1).await, [first]);
    assert_eq!(lot.letters_of(2).await, std::slice::from_ref(&last), "not the insert, which the filter leaves out");
    assert_eq!(lot.subscriptions.dead_letters_of(ID, &key(2)).await.unwrap()[0].error, ["skipped by hand: INC-7"]);
    assert_eq!(lot.world.stored().await, Some(last));

    // The next run goes on behind them: with their documents in order, with others at once.
    let subscription = action().await.unwrap();
    let (parked, free) = (lot.change(2, 2), lot.change(3, 0));
    until_saved(&subscription, &free).await;
    assert_eq!(lot.letters_of(2).await.last(), Some(&parked));
    assert_eq!(lot.world.seen.keys(), [3]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_skipped_where_nothing_runs_when_it_cannot_be_kept_within_a_minute() {
    let lot = Lot::new();
    lot.stuck().await.shutdown().await.unwrap();
    let (first, before) = (lot.change(1, 0), lot.world.stored().await);
    lot.letters.next_puts([Fault::Hang]);
    let began = tokio::time::Instant::now();
    let error = lot.subscriptions.skip(ID, first, "INC-7").await.unwrap_err();
    assert_eq!((error.reason().map(Reason::name), began.elapsed().as_secs()), (Some("source_unavailable"), 60));
    assert_eq!(lot.world.stored().await, before);
    assert!(lot.world.record().await.unwrap().skips.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_skipped_where_nothing_runs_is_kept_where_the_skip_says_or_nowhere() {
    let lot = Lot::new();
    lot.stuck().await.shutdown().await.unwrap();
    let [first, second] = [lot.change(1, 0), lot.change(2, 0)];
    lot.subscriptions.skip(ID, first, "INC-7").without_dead_letters().await.unwrap();
    let elsewhere = MemoryDeadLetterStorage::new();
    let skip = lot.subscriptions.skip(ID, second, "INC-7").dead_letters(elsewhere.clone());
    skip.await.unwrap();
    assert_eq!(lot.letters.sent(), 0);
    assert_eq!(elsewhere.sequences(&id()).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_skipped_when_it_cannot_be_kept() {
    let lot = Lot::new();
    let subscription = lot.stuck().await;
    let first = lot.change(1, 0);
    until(&subscription, "it fails", |status| status.state.name() == "retrying").await;
    lot.letters.next_puts([Fault::Fail]);
    assert!(subscription.skip(first.clone(), "INC-7").await.is_err());
    assert!(lot.world.record().await.unwrap().skips.is_empty());
    until(&subscription, "it goes on failing", |status| status.state.name() == "retrying").await;
}
