//! Events stepped over by hand, on a server.

use libtest_mimic::Trial;
use mongosub::{
    Delivery, DocumentKey, Failure, Filter, MongoDeadLetterStorage, Namespace, Operation, SubscribeError,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{PATIENCE, Seen, id_of, insert, record, subscriptions, things},
    support::{Context, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "a skip steps over exactly one failing event, and the record says who, when and why",
            |ctx: Context| async move { running(&ctx.plain().await.database).await },
        ),
        test(
            "a skip where nothing runs keeps dead letters, moves the record, and the next start reads behind it",
            |ctx: Context| async move { by_id(&ctx.plain().await.database).await },
        ),
    ]
}

/// Of one transaction, so that they share their time.
async fn together(database: &Database, ids: [i32; 3]) -> anyhow::Result<()> {
    let mut session = database.client().start_session().await?;
    session.start_transaction().await?;
    for id in ids {
        things(database).insert_one(doc! { "_id": id }).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    Ok(())
}

async fn audit(database: &Database) -> anyhow::Result<Document> {
    let raw = database.collection::<Document>("checkpoints").find_one(doc! { "_id": "skips" }).await?.expect("it");
    Ok(raw.get_document("mongosub")?.get_array("skips")?[0].as_document().expect("a document").clone())
}

async fn running(database: &Database) -> anyhow::Result<()> {
    let (seen, subscriptions) = (Seen::default(), subscriptions(database));
    let noted = seen.clone();
    let handler = move |delivery: Delivery| {
        let noted = noted.clone();
        async move {
            if id_of(&delivery) == 2 {
                return Err(Failure::from("never"));
            }
            noted.note(delivery);
            Ok(())
        }
    };
    things(database).insert_one(doc! { "_id": 0 }).await?;
    let subscription = subscriptions.subscribe("skips", handler).await?;
    together(database, [1, 2, 3]).await?;
    wait_until("the second fails", PATIENCE, || async { subscription.status().state.name() == "retrying" }).await;
    let mongosub::State::Retrying(mongosub::Reason::HandlerFailing { position, .. }) = subscription.status().state
    else {
        panic!("{:?}", subscription.status())
    };
    subscription.skip(position.clone(), "INC-7: $reason").await?;
    seen.sees(3).await;
    assert_eq!(seen.ids(), [1, 3]);
    assert_eq!(subscription.status().skipped, 1);
    let skipped = audit(database).await?;
    assert_eq!(skipped.get_str("through")?, position.to_string());
    assert_eq!(skipped.get_str("reason")?, "INC-7: $reason");
    assert!(skipped.get_datetime("at").is_ok());
    let owner = record(database, "skips").await?.and_then(|record| record.ownership).expect("an owner").owner;
    assert_eq!(skipped.get_str("by")?, owner.as_str());
    subscription.shutdown().await?;
    Ok(())
}

async fn by_id(database: &Database) -> anyhow::Result<()> {
    let (seen, subscriptions) = (Seen::default(), subscriptions(database));
    things(database).insert_one(doc! { "_id": 0 }).await?;
    let subscription = subscriptions.subscribe("skips", seen.handler()).await?;
    insert(&things(database), [1]).await?;
    seen.sees(1).await;
    let stored = subscription.shutdown().await?;
    together(database, [2, 3, 4]).await?;
    // Where the second of them is, another subscription tells.
    let other = Seen::default();
    let start = mongosub::StartAt::Always(mongosub::Start::After(stored.expect("a position")));
    let telling = subscriptions.subscribe("telling", other.handler()).start_at(start).await?;
    other.sees(4).await;
    telling.cancel().await?;
    let through = other.all().iter().find(|delivery| id_of(delivery) == 3).expect("it came").position.clone();
    let letters = MongoDeadLetterStorage::new(&database.collection::<Document>("dead_letters"));
    let keeping = subscriptions.clone().dead_letters(letters);
    // What another filter leaves out cannot be told from what the subscription's does.
    let updates = Filter::operations([Operation::Update]);
    let refused = keeping.skip("skips", through.clone(), "INC-8").filter(updates).await;
    assert!(matches!(refused, Err(SubscribeError::Config { field: "filter", .. })), "{refused:?}");
    keeping.skip("skips", through.clone(), "INC-8").await?;
    let sequences = keeping.dead_letter_sequences("skips").await?;
    let key = |id: i32| DocumentKey::new(Namespace::new(database.name(), "things"), id);
    let has = |id| sequences.iter().any(|sequence| sequence.key == key(id));
    assert!(sequences.len() == 2 && has(2) && has(3), "{sequences:?}");
    assert_eq!(record(database, "skips").await?.and_then(|record| record.position), Some(through));
    assert_eq!(audit(database).await?.get_str("reason")?, "INC-8");
    let again = subscriptions.subscribe("skips", seen.handler()).await?;
    seen.sees(4).await;
    assert_eq!(seen.ids(), [1, 4]);
    again.shutdown().await?;
    Ok(())
}
