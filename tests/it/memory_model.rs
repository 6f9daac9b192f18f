//! The scripted model does what it says, so that tests built on it test something.

use std::time::Duration;

use mongosub::bson::{Document, Timestamp, doc};
use mongosub::memory::{self, MemoryModel, MemoryReader};
use mongosub::{
    ChangeEvent, Checkpoint, Filter, Namespace, Operation, Plan, Read, Reader, Reason, SourceError, SubscriptionModel,
};
use tokio::time::timeout;

fn broken(message: &str) -> SourceError {
    SourceError::Unavailable { message: message.into() }
}

async fn open(model: &MemoryModel, from: &Checkpoint) -> MemoryReader {
    model.open(Some(from), &Plan::default()).await.unwrap()
}

/// The positions handed out until nothing more comes.
async fn positions(reader: &mut MemoryReader) -> Vec<Checkpoint> {
    let mut read = Vec::new();
    while let Ok(Some(Ok(next))) = timeout(Duration::from_secs(1), reader.next()).await {
        read.push(next.position().clone());
    }
    read
}

fn start() -> Checkpoint {
    Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 2 })
}

#[tokio::test(start_paused = true)]
async fn a_reader_hands_out_what_is_pushed_before_and_while_it_reads() {
    let model = MemoryModel::new();
    let first = model.push(memory::insert(1, doc! {}));
    let mut reader = open(&model, &start()).await;
    assert_eq!(positions(&mut reader).await, std::slice::from_ref(&first));
    let pushed = model.clone();
    let task = tokio::spawn(async move { (reader.next().await, reader) });
    tokio::task::yield_now().await;
    let second = pushed.push(memory::update(1, doc! { "status": "paid" }));
    let (read, _reader) = task.await.unwrap();
    let Some(Ok(Read::Event { event, position })) = read else { panic!("{read:?}") };
    assert_eq!((event.position().unwrap(), &position), (second.clone(), &second));
    assert_eq!(event.operation().unwrap(), Operation::Update);
    assert!(second.is_beyond(&first));
}

#[tokio::test(start_paused = true)]
async fn a_token_is_resumed_strictly_behind_and_a_time_with_everything_of_that_time() {
    let model = MemoryModel::new();
    let mut all = vec![model.push(memory::insert(1, doc! {}))];
    all.extend(model.push_transaction([memory::delete(1), memory::delete(2), memory::delete(3)]));
    all.push(model.push_quiet());
    all.push(model.push(memory::delete(4)));
    for (index, position) in all.iter().enumerate() {
        assert_eq!(positions(&mut open(&model, position).await).await, all[index + 1..]);
    }
    let time = Checkpoint::Time(all[2].cluster_time().unwrap());
    assert_eq!(all[1].cluster_time(), all[3].cluster_time());
    assert_eq!(positions(&mut open(&model, &time).await).await, all[1..]);
    assert!(all.windows(2).all(|pair| pair[1].is_beyond(&pair[0])));
    assert_eq!(model.opens(), all.len() + 1);
    assert_eq!(model.opened_from()[0], Some(all[0].clone()));
    assert_eq!(model.active_readers(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_global_checkpoint_and_an_open_at_now_miss_what_was_pushed_before_and_nothing_after() {
    let model = MemoryModel::new();
    let before = model.push(memory::insert(1, doc! {}));
    let present = model.global_checkpoint().await.unwrap().unwrap();
    let mut now = model.open(None, &Plan::default()).await.unwrap();
    assert_eq!(now.opened_at(), Some(present.clone()));
    let after = model.push(memory::insert(2, doc! {}));
    let after = [after];
    assert_eq!(positions(&mut now).await, after);
    assert_eq!(positions(&mut open(&model, &present).await).await, after);
    let head = model.head().await.unwrap();
    assert_eq!((head.cluster_time(), before.is_beyond(&head)), (after[0].cluster_time(), false));
    model.set_head(Timestamp { time: 1_800_000_000, increment: 1 });
    assert_eq!(model.head().await.unwrap().to_string(), "1800000000.1");
    assert_eq!(model.global_checkpoint().await.unwrap().unwrap().to_string(), "1800000000.2");
    model.set_head(None);
    model.refuse_global_checkpoint();
    assert_eq!(model.global_checkpoint().await, Ok(None));
    model.send_no_time();
    assert_eq!(model.open(None, &Plan::default()).await.unwrap().opened_at(), None);
}

#[tokio::test(start_paused = true)]
async fn history_that_was_dropped_is_lost_to_opens_and_to_readers_that_had_not_read_it() {
    let model = MemoryModel::new();
    let all: Vec<_> = (0..4).map(|id| model.push(memory::insert(id, doc! {}))).collect();
    let mut behind = open(&model, &start()).await;
    let mut done = open(&model, &start()).await;
    positions(&mut done).await;
    model.drop_history_before(&all[2]);
    let lost = model.open(Some(&all[1]), &Plan::default()).await.unwrap_err();
    let oldest = model.earliest().await.unwrap();
    assert_eq!(oldest.cluster_time(), all[2].cluster_time());
    let reason = Reason::HistoryLost { position: all[1].clone(), oldest: Some(oldest.clone()) };
    assert_eq!(lost, SourceError::Refused(reason));
    let item = behind.next().await;
    assert!(matches!(item, Some(Err(SourceError::Refused(Reason::HistoryLost { .. })))), "{item:?}");
    assert!(behind.next().await.is_none());
    assert_eq!(positions(&mut open(&model, &oldest).await).await, all[2..]);
    assert_eq!(positions(&mut open(&model, &all[2]).await).await, all[3..]);
    let next = model.push(memory::insert(9, doc! {}));
    assert_eq!(positions(&mut done).await, [next]);
}

#[tokio::test(start_paused = true)]
async fn an_invalidate_ends_readers_before_it_and_its_position_opens_behind_it() {
    let model = MemoryModel::new();
    let event = model.push(memory::event(Operation::Drop));
    let end = model.invalidate();
    assert!(end.is_invalidate());
    let plan = Plan::new(Filter::default());
    let mut reader = model.open(Some(&start()), &plan).await.unwrap();
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &event);
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &end);
    assert!(reader.next().await.is_none());
    let mut behind = open(&model, &end).await;
    let next = model.push(memory::insert(1, doc! {}));
    assert_eq!(positions(&mut behind).await, [next]);
}

#[tokio::test(start_paused = true)]
async fn faults_come_when_they_are_set_and_no_longer() {
    let model = MemoryModel::new();
    model.fail_opens(broken("twice"), 2);
    model.fail_next_open(broken("once"));
    for message in ["twice", "twice", "once"] {
        assert_eq!(model.open(None, &Plan::default()).await.unwrap_err(), broken(message));
    }
    let first = model.push(memory::insert(1, doc! {}));
    let mut reader = open(&model, &start()).await;
    model.break_reader(broken("cut"));
    let second = model.push(memory::insert(2, doc! {}));
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &first);
    assert_eq!(reader.next().await.unwrap().unwrap_err(), broken("cut"));
    assert!(reader.next().await.is_none());
    assert_eq!(positions(&mut open(&model, &start()).await).await, [first, second]);
    model.fail_global_checkpoint(broken("asked"));
    assert_eq!(model.global_checkpoint().await, Err(broken("asked")));
    assert!(model.global_checkpoint().await.is_ok());
    let text = Checkpoint::Text("line 7".into());
    assert!(matches!(model.open(Some(&text), &Plan::default()).await, Err(SourceError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn an_open_hangs_until_it_is_released() {
    let model = MemoryModel::new();
    model.hang_opens();
    let opening = tokio::spawn({
        let model = model.clone();
        async move { model.open(None, &Plan::default()).await.is_ok() }
    });
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((model.opens(), model.active_readers(), opening.is_finished()), (1, 0, false));
    model.release_opens();
    assert!(opening.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_reopening_reader_says_so_at_once_and_hands_out_nothing_meanwhile() {
    let model = MemoryModel::new();
    let mut reader = open(&model, &start()).await;
    let state = reader.state();
    let reason = Reason::SourceUnavailable { message: "election".into() };
    model.set_reopening(Some(reason.clone()));
    assert_eq!(state.borrow().reopening.as_ref().unwrap().reason, reason);
    let event = model.push(memory::insert(1, doc! {}));
    assert!(positions(&mut reader).await.is_empty());
    model.set_reopening(None);
    assert_eq!((state.borrow().reopening.is_none(), state.borrow().reconnects), (true, 1));
    assert_eq!(positions(&mut reader).await, [event]);
}

#[tokio::test(start_paused = true)]
async fn the_state_says_where_the_end_was_last_reached() {
    let model = MemoryModel::new();
    let mut reader = open(&model, &start()).await;
    let state = reader.state();
    assert_eq!((state.borrow().at_end, state.borrow().end_at.clone()), (true, Some(start())));
    let first = model.push(memory::insert(1, doc! {}));
    let second = model.push(memory::insert(2, doc! {}));
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &first);
    assert_eq!((state.borrow().at_end, state.borrow().end_at.clone()), (false, Some(start())));
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &second);
    assert_eq!((state.borrow().at_end, state.borrow().end_at.clone()), (true, Some(second)));
    model.end();
    assert!(reader.next().await.is_none());
    assert_eq!(model.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_a_plan_leaves_out_becomes_one_quiet_position_at_the_end() {
    let model = MemoryModel::new();
    let own = Namespace::new("test", "checkpoints");
    let mut plan = Plan::default();
    plan.leave_out = vec![own.clone()];
    let mut reader = model.open(Some(&start()), &plan).await.unwrap();
    model.push(memory::insert(1, doc! {}).namespace(&own));
    let event = model.push(memory::insert(2, doc! {}));
    model.push(memory::insert(3, doc! {}).namespace(&own));
    let last = model.push(memory::insert(4, doc! {}).namespace(&own));
    let read = positions(&mut reader).await;
    assert_eq!((read.len(), &read[0]), (2, &event));
    assert_eq!(read[1].cluster_time(), last.cluster_time());
    assert!(last.is_beyond(&read[1]));
    assert_eq!(reader.state().borrow().end_at, Some(read[1].clone()));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_next_loses_nothing() {
    let model = MemoryModel::new();
    let mut reader = open(&model, &start()).await;
    let mut read = Vec::new();
    let mut pushed = Vec::new();
    for id in 0..100 {
        assert!(timeout(Duration::from_millis(1), reader.next()).await.is_err());
        pushed.push(model.push(memory::insert(id, doc! {})));
        // Polled once, with nothing waited for.
        if let Some(Some(Ok(next))) = futures::FutureExt::now_or_never(reader.next()) {
            read.push(next.position().clone());
        }
    }
    read.extend(positions(&mut reader).await);
    assert_eq!(read, pushed);
}

#[tokio::test(start_paused = true)]
async fn a_filter_is_evaluated_where_it_is_read_and_the_end_of_the_feed_is_passed_over() {
    let model = MemoryModel::new();
    let plan = Plan::new(Filter::operations([Operation::Insert]));
    let mut reader = model.open(Some(&start()), &plan).await.unwrap();
    model.push(memory::delete(1));
    let insert = model.push(memory::insert(2, doc! {}));
    let deletes = model.push_transaction([memory::delete(3), memory::delete(4)]);
    let read = positions(&mut reader).await;
    assert_eq!((read.len(), &read[0], read[1].cluster_time()), (2, &insert, deletes[1].cluster_time()));
    // In one transaction behind an event that passed there is no later quiet position.
    let mixed = model.push_transaction([memory::insert(5, doc! {}), memory::delete(6)]);
    assert_eq!(positions(&mut reader).await, mixed[..1]);
    assert!(reader.state().borrow().at_end);
    let end = model.invalidate();
    assert_eq!(reader.next().await.unwrap().unwrap().position(), &end);
    assert!(reader.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_event_that_the_filter_cannot_decode_is_handed_out() {
    let model = MemoryModel::new();
    let plan = Plan::new(Filter::field("status").eq("paid"));
    let mut reader = model.open(Some(&start()), &plan).await.unwrap();
    let mut raw = ChangeEvent::from(memory::insert(1, doc! { "status": "open" })).bytes().to_vec();
    let at = raw.windows(4).position(|bytes| bytes == b"open").unwrap();
    raw[at] = 0xFF;
    let position = model.push_raw(ChangeEvent::new(raw.into()).unwrap());
    assert_eq!(positions(&mut reader).await, [position]);
}

#[tokio::test(start_paused = true)]
async fn a_pushed_event_looks_like_a_servers() {
    let model = MemoryModel::new();
    let namespace = Namespace::new("shop", "orders");
    let position = model.push_at(
        Timestamp { time: 1_700_000_100, increment: 3 },
        memory::update(7, doc! { "status": "paid" })
            .namespace(&namespace)
            .full_document(doc! { "_id": 7, "status": "paid" })
            .full_document_before_change(doc! { "_id": 7, "status": "open" }),
    );
    let Some(Ok(Read::Event { event, .. })) = open(&model, &start()).await.next().await else { panic!("no event") };
    assert_eq!(event.position().unwrap(), position);
    assert_eq!(event.cluster_time().unwrap(), Timestamp { time: 1_700_000_100, increment: 3 });
    assert_eq!(event.wall_time().unwrap().unwrap().timestamp_millis(), 1_700_000_100_000);
    assert_eq!((event.namespace().unwrap(), event.document_id::<i32>().unwrap()), (Some(namespace), Some(7)));
    assert_eq!(event.full_document::<Document>().unwrap().unwrap().get_str("status").unwrap(), "paid");
    assert_eq!(event.full_document_before_change::<Document>().unwrap().unwrap().get_str("status").unwrap(), "open");
    let description = event.update_description().unwrap().unwrap();
    assert_eq!(description.updated_fields.get_str("status").unwrap(), "paid");
    let identity = model.identity().await.unwrap();
    assert_eq!(position.token().unwrap().collection_uuid(), identity.collection_uuid.as_deref());
    let delivery = memory::delivery(event);
    assert_eq!((delivery.position, delivery.attempt, delivery.may_be_repeat), (position, 1, false));
}

#[test]
#[should_panic(expected = "a feed only grows")]
fn a_push_into_the_past_is_a_mistake_of_the_test() {
    MemoryModel::new().push_at(Timestamp { time: 1, increment: 1 }, memory::delete(1));
}
