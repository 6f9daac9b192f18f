//! The barrier: what a handler keeps back is flushed before anything is stored, or comes again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mongosub::{
    Checkpoint, CheckpointStorage, Claim, Delivery, Failure, Handler, Hold, Reason, State, SubscribeError,
    Subscription, SubscriptionError,
};
use tokio::time::Instant;

use crate::support::{
    Fault, Hold as Wait, ID, Recorder, World, id, millis, seconds, until, until_reason, until_settled,
};

/// What the handlers of one test have in common, and how they are to behave.
#[derive(Clone, Default)]
struct Store(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// What was flushed, as keys.
    durable: Vec<i32>,
    /// Each call beside deliveries, and when.
    calls: Vec<(String, Instant)>,
    /// The next flushes fail.
    fail_flushes: u32,
    /// The next `claimed` fail.
    fail_claims: u32,
    /// What flushes answer instead of what they are asked for.
    answer: Option<Checkpoint>,
    release: Option<Result<Checkpoint, String>>,
    panic_at: Option<i32>,
    wait: Option<Wait>,
    made: u32,
}

impl Store {
    fn set(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.0.lock().unwrap());
    }

    fn calls(&self) -> Vec<String> {
        self.0.lock().unwrap().calls.iter().map(|call| call.0.clone()).collect()
    }

    fn durable(&self) -> Vec<i32> {
        self.0.lock().unwrap().durable.clone()
    }

    fn handler(&self, seen: &Recorder) -> Buffered {
        self.set(|inner| inner.made += 1);
        Buffered { store: self.clone(), seen: seen.clone(), buffer: Vec::new() }
    }

    fn note(&self, call: impl Into<String>) {
        self.set(|inner| inner.calls.push((call.into(), Instant::now())));
    }
}

/// Keeps what it was given until it is asked to flush.
struct Buffered {
    store: Store,
    seen: Recorder,
    buffer: Vec<i32>,
}

impl Handler for Buffered {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        self.seen.note(&delivery);
        let key = delivery.event.document_id::<i32>()?.ok_or("no key")?;
        let panics = self.store.0.lock().unwrap().panic_at.take_if(|at| *at == key).is_some();
        assert!(!panics, "scripted");
        self.buffer.push(key);
        Ok(())
    }

    async fn claimed(&mut self, from: Option<Checkpoint>, hold: Hold) -> Result<(), Failure> {
        assert_eq!(hold.mark().position(), from.as_ref());
        self.store.note(format!("claimed {}", from.unwrap()));
        let mut inner = self.store.0.lock().unwrap();
        if inner.fail_claims > 0 {
            inner.fail_claims -= 1;
            return Err("not ready".into());
        }
        Ok(())
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        self.store.note(format!("flush {through}"));
        let wait = self.store.0.lock().unwrap().wait.clone();
        if let Some(wait) = wait {
            wait.wait().await;
        }
        let mut inner = self.store.0.lock().unwrap();
        if inner.fail_flushes > 0 {
            inner.fail_flushes -= 1;
            return Err("disk full".into());
        }
        inner.durable.append(&mut self.buffer);
        Ok(inner.answer.take().unwrap_or(through))
    }

    async fn released(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        self.store.note(format!("released {through}"));
        let release = self.store.0.lock().unwrap().release.take();
        Ok(release.unwrap_or(Ok(through))?)
    }
}

async fn subscribe(world: &World, store: &Store) -> Subscription {
    factory(world, store).await.unwrap()
}

fn factory(
    world: &World,
    store: &Store,
) -> mongosub::Subscribe<mongosub::memory::MemoryModel, crate::support::FaultyStorage> {
    let (store, seen) = (store.clone(), world.seen.clone());
    world.subscriptions.subscribe_with(ID, move || store.handler(&seen))
}

/// Settles so many more, each at rest before the next.
async fn one_by_one(
    world: &World,
    subscription: &Subscription,
    keys: std::ops::RangeInclusive<i32>,
) -> Vec<Checkpoint> {
    let mut at = Vec::new();
    for key in keys {
        let settled = subscription.status().settled;
        at.push(world.insert(key));
        until_settled(subscription, settled + 1).await;
        millis(50).await;
    }
    at
}

#[tokio::test(start_paused = true)]
async fn the_handler_is_told_where_the_run_stands_before_anything_is_delivered() {
    let (world, store) = (World::new(), Store::default());
    let subscription = subscribe(&world, &store).await;
    let start = world.stored().await.unwrap();
    assert_eq!(store.calls(), [format!("claimed {start}")]);
    assert!(world.seen.all().is_empty());
    subscription.pause().await.unwrap();
    subscription.resume().await.unwrap();
    assert_eq!(store.calls().len(), 1, "a pause claims nothing");
}

#[tokio::test(start_paused = true)]
async fn a_flush_comes_when_the_save_policy_asks_for_a_save_and_the_save_waits_for_it() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(3).await.unwrap();
    let wait = Wait::default();
    store.set(|inner| inner.wait = Some(wait.clone()));
    let at = world.inserts(1..=7);
    until_settled(&subscription, 3).await;
    seconds(5).await;
    assert_eq!(store.calls()[1..], [format!("flush {}", at[2])]);
    assert_eq!(world.seen.keys(), [1, 2, 3], "nothing is handled meanwhile");
    assert!(world.storage.sent().is_empty());
    wait.let_go(1);
    millis(50).await;
    assert_eq!(world.storage.sent_positions(), [at[2].clone()]);
    assert_eq!(store.durable(), [1, 2, 3]);
    wait.let_go(1);
    until_settled(&subscription, 7).await;
    millis(50).await;
    assert_eq!(store.calls().len(), 3);
    assert_eq!(world.storage.sent_positions(), [at[2].clone(), at[5].clone()]);
}

#[tokio::test(start_paused = true)]
async fn quiet_saves_pauses_drains_and_requests_flush_what_is_not_flushed() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(1000).await.unwrap();
    let mut flushed = 0;
    for round in 0..4 {
        let at = one_by_one(&world, &subscription, round..=round).await.pop().unwrap();
        assert_eq!(store.durable().len(), flushed, "kept until somebody asks");
        match round {
            0 => seconds(61).await,
            1 => {
                subscription.pause().await.unwrap();
                subscription.resume().await.unwrap();
            }
            2 => assert_eq!(subscription.drained().await.unwrap(), Some(at.clone())),
            _ => {
                subscription.hold().request_save();
                millis(50).await;
            }
        }
        flushed += 1;
        assert_eq!(store.durable().len(), flushed, "round {round}");
        assert_eq!(world.stored().await, Some(at), "round {round}");
    }
    let calls = store.calls().len();
    subscription.pause().await.unwrap();
    assert_eq!(store.calls().len(), calls, "nothing is unflushed");
    assert!(subscription.shutdown().await.unwrap().is_some());
    assert!(world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_failing_handler_flushes_what_went_before_while_it_is_tried_again() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(1000).await.unwrap();
    let first = one_by_one(&world, &subscription, 1..=1).await.pop();
    // Without a key every attempt fails.
    world.model.push(mongosub::memory::event(mongosub::Operation::Drop));
    until_reason(&subscription, "retrying", "handler_failing").await;
    seconds(61).await;
    assert_eq!(world.stored().await, first);
    assert_eq!(store.durable(), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_flush_that_fails_stores_nothing_and_the_run_begins_anew_at_the_stored_checkpoint() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(3).await.unwrap();
    let at = one_by_one(&world, &subscription, 1..=3).await;
    let (fence, failed_at) = (subscription.status().fence, Instant::now());
    store.set(|inner| inner.fail_flushes = 2);
    world.inserts(4..=6);
    let status = until_reason(&subscription, "retrying", "handler_failing").await;
    assert!(status.state.reason().unwrap().to_string().contains("disk full"));
    assert_eq!(world.storage.sent_positions(), [at[2].clone()]);
    until(&subscription, "6 flushed", |_| store.durable().len() == 6).await;
    until_settled(&subscription, 6).await;
    // 1 s, then 2 s.
    assert_eq!((Instant::now() - failed_at).as_secs(), 3);
    assert_eq!(world.seen.keys(), [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]);
    assert!(world.seen.all()[6..].iter().all(|seen| seen.may_be_repeat && seen.attempt == 1));
    assert_eq!(store.durable(), [1, 2, 3, 4, 5, 6], "what the lost handlers kept is gone");
    assert_eq!(store.0.lock().unwrap().made, 3);
    let told = store.calls().into_iter().filter(|call| call.starts_with("claimed")).skip(1).collect::<Vec<_>>();
    assert_eq!(told, [format!("claimed {}", at[2]), format!("claimed {}", at[2])]);
    let status = subscription.status();
    assert!(status.fence > fence);
    assert_eq!((status.events, status.delivered, status.settled), (6, 6, 6));
    let last = subscription.drained().await.unwrap();
    assert_eq!(world.stored().await, last);
}

#[tokio::test(start_paused = true)]
async fn the_wait_doubles_to_a_minute_and_begins_anew_with_progress() {
    let (world, store) = (World::new(), Store::default());
    let subscription = subscribe(&world, &store).await;
    store.set(|inner| inner.fail_flushes = 9);
    world.insert(1);
    until(&subscription, "flushed", |_| store.durable().len() == 1).await;
    let at = |call: &str| -> Vec<Instant> {
        let inner = store.0.lock().unwrap();
        inner.calls.iter().filter(|(name, _)| name.starts_with(call)).map(|call| call.1).collect()
    };
    let waits: Vec<u64> = at("flush").windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    millis(100).await;
    store.set(|inner| inner.fail_flushes = 1);
    world.insert(2);
    until(&subscription, "flushed", |_| store.durable().len() == 2).await;
    let flushes = at("flush");
    assert_eq!((flushes[flushes.len() - 1] - flushes[flushes.len() - 2]).as_secs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_does_not_cover_or_lies_beyond_the_last_delivery_is_a_failure() {
    let (world, store) = (World::new(), Store::default());
    let subscription = subscribe(&world, &store).await;
    let at = one_by_one(&world, &subscription, 1..=2).await;
    for (answer, says) in
        [(at[0].clone(), "does not cover"), ("1800000000.1".parse().unwrap(), "beyond the last delivery")]
    {
        store.set(|inner| inner.answer = Some(answer));
        let settled = subscription.status().settled;
        world.insert(10);
        let status = until_reason(&subscription, "retrying", "handler_failing").await;
        assert!(status.state.reason().unwrap().to_string().contains(says), "{:?}", status.state);
        assert_eq!(world.stored().await, if settled == 2 { Some(at[1].clone()) } else { world.stored().await });
        until_settled(&subscription, settled + 1).await;
        until(&subscription, "well", |status| status.state.reason().is_none()).await;
        subscription.drained().await.unwrap();
    }
    assert_eq!(world.seen.keys(), [1, 2, 10, 10, 10, 10]);
}

#[tokio::test(start_paused = true)]
async fn without_a_factory_a_flush_that_fails_ends_the_run() {
    let (world, store) = (World::new(), Store::default());
    let handler = store.handler(&world.seen);
    let subscription = world.subscriptions.subscribe(ID, handler).await.unwrap();
    let first = one_by_one(&world, &subscription, 1..=1).await.pop();
    store.set(|inner| inner.fail_flushes = 1);
    let second = world.insert(2);
    let reason = subscription.stopped().await;
    assert!(matches!(&reason, Reason::HandlerFailed { position, .. } if *position == second), "{reason:?}");
    assert_eq!(world.stored().await, first);
    let next = world.restarted();
    let subscription = subscribe(&next, &store).await;
    until_settled(&subscription, 1).await;
    assert_eq!(next.seen.keys(), [2]);
}

#[tokio::test(start_paused = true)]
async fn the_first_claimed_that_fails_is_the_error_of_subscribe_and_a_later_one_begins_anew() {
    let (world, store) = (World::new(), Store::default());
    store.set(|inner| inner.fail_claims = 1);
    let Err(SubscribeError::Refused { reason, .. }) = factory(&world, &store).await else { panic!("it began") };
    assert!(matches!(&reason, Reason::HandlerFailed { error, .. } if error == "not ready"), "{reason:?}");
    assert!(world.subscriptions.get(ID).is_none());
    let subscription = subscribe(&world, &store).await;
    store.set(|inner| (inner.fail_flushes, inner.fail_claims) = (1, 2));
    world.insert(1);
    let status = until(&subscription, "refused", |status| {
        status.state.reason().is_some_and(|reason| reason.to_string().contains("not ready"))
    });
    drop(status.await);
    until(&subscription, "flushed", |_| store.durable() == [1]).await;
    until_settled(&subscription, 1).await;
    assert_eq!(world.seen.keys(), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_takes_back_what_it_had_not_flushed_and_nothing_else() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(2).await.unwrap();
    store.set(|inner| inner.panic_at = Some(4));
    world.inserts(1..=5);
    until(&subscription, "flushed", |_| store.durable().len() == 4).await;
    until_settled(&subscription, 5).await;
    assert_eq!(world.seen.keys(), [1, 2, 3, 4, 3, 4, 5]);
    assert_eq!(subscription.status().settled, 5);
    // With everything flushed only the event itself comes again, in the same run.
    let fence = subscription.status().fence;
    subscription.drained().await.unwrap();
    store.set(|inner| inner.panic_at = Some(6));
    world.insert(6);
    until_settled(&subscription, 6).await;
    assert_eq!(world.seen.keys()[7..], [6, 6]);
    assert_eq!(subscription.status().fence, fence);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_begins_anew_claims_only_what_is_its_own() {
    for taken in [true, false] {
        let (world, store) = (World::new(), Store::default());
        let subscription = subscribe(&world, &store).await;
        store.set(|inner| inner.fail_flushes = 1);
        world.insert(1);
        until_reason(&subscription, "retrying", "handler_failing").await;
        if taken {
            drop(world.storage.inner().claim(&Claim::new(id())).await.unwrap());
        } else {
            assert!(world.storage.inner().delete(&id(), None).await.unwrap());
        }
        let reason = subscription.stopped().await;
        assert_eq!(reason.name(), if taken { "superseded" } else { "deleted" });
        assert_eq!(world.seen.keys(), [1]);
        assert!(world.record().await.is_none() != taken);
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_drain_waits_through_a_new_beginning() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(1000).await.unwrap();
    let at = world.inserts(1..=5);
    until_settled(&subscription, 5).await;
    store.set(|inner| inner.fail_flushes = 1);
    assert_eq!(subscription.drained().await.unwrap(), Some(at[4].clone()));
    assert_eq!(store.durable(), [1, 2, 3, 4, 5]);
    assert_eq!(world.seen.keys(), [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn a_flush_over_half_a_minute_shows_and_is_waited_for() {
    let (world, store) = (World::new(), Store::default());
    let subscription = subscribe(&world, &store).await;
    let wait = Wait::default();
    store.set(|inner| inner.wait = Some(wait.clone()));
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    seconds(29).await;
    assert!(subscription.status().state.reason().is_none());
    until_reason(&subscription, "retrying", "flushing").await;
    seconds(600).await;
    wait.let_go(1);
    until(&subscription, "well", |status| status.state.reason().is_none()).await;
    assert_eq!(subscription.drained().await.unwrap(), Some(first));
}

#[tokio::test(start_paused = true)]
async fn a_released_handler_may_let_more_come_again_but_not_less_than_is_stored() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(2).await.unwrap();
    let at = one_by_one(&world, &subscription, 1..=5).await;
    store.set(|inner| inner.release = Some(Ok(at[3].clone())));
    // Four are stored, five are flushed.
    assert_eq!(subscription.shutdown().await.unwrap(), Some(at[3].clone()));
    let calls = store.calls();
    assert_eq!(calls[calls.len() - 2..], [format!("flush {}", at[4]), format!("released {}", at[4])]);
    assert!(!world.record().await.unwrap().clean);

    let next = world.restarted();
    let subscription = factory(&next, &store).save_every(1000).await.unwrap();
    let more = one_by_one(&next, &subscription, 6..=8).await;
    assert_eq!(next.seen.keys(), [5, 6, 7, 8]);
    store.set(|inner| inner.release = Some(Ok(more[1].clone())));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(more[1].clone()));

    let next = next.restarted();
    let subscription = factory(&next, &store).save_every(1000).await.unwrap();
    until_settled(&subscription, 1).await;
    store.set(|inner| inner.release = Some(Ok(at[0].clone())));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(more[1].clone()), "never less than is stored");

    let next = next.restarted();
    let subscription = factory(&next, &store).save_every(1000).await.unwrap();
    until_settled(&subscription, 1).await;
    store.set(|inner| inner.release = Some(Err("in use".into())));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(more[1].clone()), "a failure stores nothing");
    assert!(matches!(subscription.status().state, State::Stopped(Reason::Requested)));

    let next = next.restarted();
    let subscription = factory(&next, &store).save_every(1000).await.unwrap();
    until_settled(&subscription, 1).await;
    store.set(|inner| inner.release = Some(Ok("1800000000.1".parse().unwrap())));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(more[2].clone()), "never more than was delivered");
    assert!(next.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_whose_flush_fails_says_what_is_not_saved() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(1000).await.unwrap();
    let start = world.stored().await;
    let first = one_by_one(&world, &subscription, 1..=1).await.pop().unwrap();
    store.set(|inner| inner.fail_flushes = 1);
    let before = Instant::now();
    let Err(SubscriptionError::NotSaved { position, last, .. }) = subscription.shutdown().await else { panic!() };
    assert_eq!(position, first);
    assert!(last.to_string().contains("disk full"));
    assert!(Instant::now() - before < Duration::from_secs(1), "there is nothing to wait for");
    assert_eq!(world.stored().await, start);
    assert!(!world.record().await.unwrap().clean);
}

#[tokio::test(start_paused = true)]
async fn a_pause_whose_flush_fails_begins_anew_at_the_resume() {
    let (world, store) = (World::new(), Store::default());
    let subscription = factory(&world, &store).save_every(1000).await.unwrap();
    one_by_one(&world, &subscription, 1..=2).await;
    store.set(|inner| inner.fail_flushes = 1);
    assert!(matches!(subscription.pause().await, Err(SubscriptionError::NotSaved { .. })));
    assert_eq!(subscription.status().state, State::Paused);
    subscription.resume().await.unwrap();
    until_settled(&subscription, 2).await;
    assert_eq!(world.seen.keys(), [1, 2, 1, 2]);
    subscription.drained().await.unwrap();
    assert_eq!(store.durable(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_save_whose_answer_was_lost_is_where_the_new_beginning_stands() {
    let (world, store) = (World::new(), Store::default());
    let subscription = subscribe(&world, &store).await;
    world.storage.next_saves([Fault::LoseReply, Fault::Fail, Fault::Fail, Fault::Fail, Fault::Fail]);
    world.insert(1);
    until_settled(&subscription, 1).await;
    millis(20).await;
    store.set(|inner| inner.fail_flushes = 1);
    world.insert(2);
    until(&subscription, "both flushed", |_| store.durable().len() == 2).await;
    assert_eq!(world.seen.keys(), [1, 2, 2], "the first one was stored, whatever the storage said");
    subscription.drained().await.unwrap();
    let status = subscription.status();
    assert_eq!((status.events, status.delivered, status.settled, status.handled), (2, 2, 2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_closure_is_asked_nothing_and_goes_on_after_a_panic_where_it_was() {
    let world = World::new();
    let seen = world.seen.clone();
    let factory = move || {
        seen.then(|delivery: Delivery| async move {
            assert!(delivery.event.document_id::<i32>()? != Some(2) || delivery.attempt > 1, "scripted");
            Ok(())
        })
    };
    let subscription = world.subscriptions.subscribe_with(ID, factory).save_every(1000).await.unwrap();
    let fence = subscription.status().fence;
    world.inserts(1..=3);
    until_settled(&subscription, 3).await;
    assert_eq!(world.seen.keys(), [1, 2, 2, 3]);
    assert_eq!(subscription.status().fence, fence);
}
