//! Several handlers as one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use mongosub::{Checkpoint, Delivery, Failure, Handler, Hold, Reason, fan_out};

use crate::support::{ID, World, millis, until_reason, until_settled};

#[derive(Clone, Default)]
struct Member(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    seen: Vec<(i32, u32)>,
    fail: u32,
    flushes: Vec<Checkpoint>,
    /// What it answers to the next flushes; then what it is asked.
    answers: VecDeque<Checkpoint>,
    release: Option<Checkpoint>,
    hold: Option<Hold>,
}

impl Member {
    fn set(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.0.lock().unwrap());
    }

    fn seen(&self) -> Vec<(i32, u32)> {
        self.0.lock().unwrap().seen.clone()
    }

    fn flushes(&self) -> Vec<Checkpoint> {
        self.0.lock().unwrap().flushes.clone()
    }

    fn hold(&self) -> Hold {
        self.0.lock().unwrap().hold.clone().unwrap()
    }
}

impl Handler for Member {
    async fn handle(&mut self, delivery: Delivery) -> Result<(), Failure> {
        let key = delivery.event.document_id::<i32>()?.unwrap();
        let mut inner = self.0.lock().unwrap();
        inner.seen.push((key, delivery.attempt));
        if inner.fail > 0 {
            inner.fail -= 1;
            return Err("busy".into());
        }
        Ok(())
    }

    async fn claimed(&mut self, _: Option<Checkpoint>, hold: Hold) -> Result<(), Failure> {
        self.set(|inner| inner.hold = Some(hold));
        Ok(())
    }

    async fn flush(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        let mut inner = self.0.lock().unwrap();
        inner.flushes.push(through.clone());
        Ok(inner.answers.pop_front().unwrap_or(through))
    }

    async fn released(&mut self, through: Checkpoint) -> Result<Checkpoint, Failure> {
        Ok(self.0.lock().unwrap().release.clone().unwrap_or(through))
    }
}

#[tokio::test(start_paused = true)]
async fn each_event_goes_to_all_and_one_that_has_it_is_not_asked_again_while_another_fails() {
    let (world, a, b) = (World::new(), Member::default(), Member::default());
    let both = fan_out().with(a.clone()).with(b.clone()).with(world.seen.handler());
    let subscription = world.subscriptions.subscribe(ID, both).await.unwrap();
    b.set(|b| b.fail = 2);
    let last = world.inserts(1..=2).pop();
    until_settled(&subscription, 2).await;
    assert_eq!(a.seen(), [(1, 1), (2, 1)]);
    assert_eq!(b.seen(), [(1, 1), (1, 2), (1, 3), (2, 1)]);
    assert_eq!(world.seen.keys(), [1, 2]);
    assert_eq!(subscription.shutdown().await.unwrap(), last);
}

#[tokio::test(start_paused = true)]
async fn members_are_brought_to_the_highest_position_that_any_of_them_reports() {
    let (world, a, b) = (World::new(), Member::default(), Member::default());
    // A predicate that declines the second event: the save asked for lies before the last delivery.
    let both = fan_out().with(a.clone()).with(b.clone());
    let first_only = |delivery: &Delivery| delivery.event.document_id::<i32>().unwrap() == Some(1);
    let subscription = world.subscriptions.subscribe(ID, both).save_when(first_only).await.unwrap();
    let first = world.insert(1);
    until_settled(&subscription, 1).await;
    millis(50).await;
    assert_eq!((a.flushes(), b.flushes()), (vec![first.clone()], vec![first.clone()]));
    assert_eq!(world.stored().await, Some(first));
    world.insert(2);
    until_settled(&subscription, 2).await;
    millis(50).await;
    assert_eq!(a.flushes().len(), 1);

    let (world, a, b) = (World::new(), Member::default(), Member::default());
    let both = fan_out().with(a.clone()).with(b.clone());
    let subscription = world.subscriptions.subscribe(ID, both).save_every(2).await.unwrap();
    let at = world.inserts(1..=2);
    // What a reports lies beyond what it was asked: b is asked again, a is not.
    a.set(|a| a.answers = [at[1].clone()].into());
    until_settled(&subscription, 2).await;
    assert_eq!(subscription.drained().await.unwrap(), Some(at[1].clone()));
}

#[tokio::test]
async fn laggards_are_asked_again_and_one_that_cannot_follow_is_an_error() {
    let at = |n| Checkpoint::Time(mongosub::bson::Timestamp { time: 1, increment: n });
    let (a, b) = (Member::default(), Member::default());
    let mut both = fan_out().with(a.clone()).with(b.clone()).with(|_: Delivery| async { Ok(()) });
    a.set(|a| a.answers = [at(7)].into());
    assert_eq!(both.flush(at(5)).await.unwrap(), at(7));
    assert_eq!((a.flushes(), b.flushes()), (vec![at(5)], vec![at(5), at(7)]));

    a.set(|a| a.answers = [at(9)].into());
    b.set(|b| b.answers = [at(8), at(8)].into());
    let failure = both.flush(at(8)).await.unwrap_err();
    assert!(failure.to_string().contains("cannot follow"), "{failure}");
}

#[tokio::test(start_paused = true)]
async fn a_member_that_cannot_follow_fails_the_save_and_does_not_drop_out() {
    let (world, a, b) = (World::new(), Member::default(), Member::default());
    let at = world.stored().await;
    let made = {
        let (a, b) = (a.clone(), b.clone());
        move || fan_out().with(a.clone()).with(b.clone())
    };
    let subscription = world.subscriptions.subscribe_with(ID, made).await.unwrap();
    assert_eq!(at, None);
    let start = world.stored().await.unwrap();
    b.set(|b| b.answers = [start.clone()].into());
    let first = world.insert(1);
    let status = until_reason(&subscription, "retrying", "handler_failing").await;
    assert!(matches!(status.state.reason(), Some(Reason::HandlerFailing { .. })));
    assert_eq!(world.stored().await, Some(start));
    assert_eq!(subscription.drained().await.unwrap(), Some(first));
    assert_eq!((a.seen(), b.seen()), (vec![(1, 1), (1, 1)], vec![(1, 1), (1, 1)]), "both begin anew");
}

#[tokio::test(start_paused = true)]
async fn at_the_end_the_lowest_that_members_let_go_of_is_stored() {
    let (world, a, b) = (World::new(), Member::default(), Member::default());
    let both = fan_out().with(a.clone()).with(b.clone());
    let subscription = world.subscriptions.subscribe(ID, both).save_every(100).await.unwrap();
    let at = world.inserts(1..=4);
    until_settled(&subscription, 4).await;
    a.set(|a| a.release = Some(at[2].clone()));
    b.set(|b| b.release = Some(at[1].clone()));
    assert_eq!(subscription.shutdown().await.unwrap(), Some(at[1].clone()));
}

#[tokio::test(start_paused = true)]
async fn under_a_hold_a_position_is_durable_when_every_member_has_declared_it() {
    let (world, a, b) = (World::new(), Member::default(), Member::default());
    let both = fan_out().with(a.clone()).with(b.clone());
    let subscription = world.subscriptions.subscribe(ID, both).hold().await.unwrap();
    let start = world.stored().await;
    let mut at = world.inserts(1..=2);
    until_settled(&subscription, 2).await;
    let second = a.hold().mark();
    at.push(world.insert(3));
    until_settled(&subscription, 3).await;
    let _ = a.hold().durable_through(&a.hold().mark());
    millis(50).await;
    assert_eq!(world.stored().await, start);
    let _ = b.hold().durable_through(&second);
    millis(50).await;
    assert_eq!(world.stored().await, Some(at[1].clone()));
    b.hold().resume_auto();
    millis(50).await;
    assert_eq!(world.stored().await, Some(at[2].clone()), "only a declares from now on");
    at.push(world.insert(4));
    until_settled(&subscription, 4).await;
    assert_eq!(world.stored().await, Some(at[2].clone()));
    a.hold().resume_auto();
    millis(50).await;
    assert_eq!(world.stored().await, Some(at[3].clone()));
}
