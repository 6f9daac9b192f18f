//! An event that kills its process: a handler that aborts. The subscription gets past it, or names it, as the failure
//! policy says.

use libtest_mimic::Trial;
use mongodb::{Client, bson::doc};
use mongosub::{DeadLetterStorage, Delivery, MongoDeadLetterStorage, OnFailure, SubscriptionId, Then};
use serde::{Deserialize, Serialize};

use crate::{
    seen::{insert, record, subscriptions, things},
    support::{Child, Fixture, child, test},
};

const ID: &str = "aborting_v1";
/// The handler aborts its process at this one.
const KILLER: i32 = 3;
const LAST: i32 = 5;

#[derive(Debug, Serialize, Deserialize)]
struct Life {
    uri: String,
    database: String,
    stops: bool,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Word {
    Handling(i32),
    Stopped(String),
    Past { dead_lettered: u64, handled: u64 },
}

pub fn tests() -> Vec<Trial> {
    vec![
        test(
            "an event that aborts its process six times is a dead letter, and the subscription gets past it",
            |ctx| async move { aborts(ctx.plain().await, false).await },
        ),
        test("an event that aborts its process six times is named when the policy says stop", |ctx| async move {
            aborts(ctx.plain().await, true).await
        }),
    ]
}

/// The role.
pub fn play(input: serde_json::Value) -> anyhow::Result<()> {
    let life: Life = serde_json::from_value(input)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let database = Client::with_uri_str(&life.uri).await?.database(&life.database);
        let then = if life.stops { Then::Stop } else { Then::DeadLetter };
        let handler = |delivery: Delivery| async move {
            let id = delivery.event.document_id::<i32>()?.ok_or("no document")?;
            child::say(&Word::Handling(id)).map_err(|error| error.to_string())?;
            if id == KILLER {
                std::process::abort();
            }
            Ok(())
        };
        // Saves would come too late: nothing is stored before it dies.
        let action = subscriptions(&database).dead_letters(letters(&database)).subscribe(ID, handler);
        let policy = OnFailure::retry(0).then(then);
        let subscription = action.on_failure(policy).save_every(1000).await?;
        let mut status = subscription.watch();
        let all = u64::try_from(LAST)?;
        tokio::select! {
            // First, since nobody publishes a status of a run that has stopped.
            biased;
            reason = subscription.stopped() => child::say(&Word::Stopped(reason.to_string()))?,
            past = status.wait_for(|status| status.settled + 2 >= all && status.dead_lettered > 0) => {
                drop(past?);
                subscription.caught_up().await?;
                let status = subscription.status();
                subscription.shutdown().await?;
                child::say(&Word::Past { dead_lettered: status.dead_lettered, handled: status.handled })?;
            }
        }
        anyhow::Ok(())
    })
}

fn letters(database: &mongodb::Database) -> MongoDeadLetterStorage {
    MongoDeadLetterStorage::new(&database.collection::<mongodb::bson::Document>("letters"))
}

async fn aborts(fixture: Fixture, stops: bool) -> anyhow::Result<()> {
    let Fixture { server, database, .. } = fixture;
    let feed = things(&database);
    // So that its start is stored.
    subscriptions(&database).subscribe(ID, |_: Delivery| async { Ok(()) }).await?.shutdown().await?;
    insert(&feed, 1..=LAST).await?;
    let life = Life { uri: server.uri(), database: database.name().into(), stops };
    let (mut handed_out, mut deaths) = (Vec::new(), 0);
    let last_word = loop {
        let mut process = Child::start("aborting", &life);
        let word = loop {
            let Some(said) = process.line().await else { break None };
            match serde_json::from_str(&said)? {
                Word::Handling(id) => handed_out.push(id),
                word => break Some(word),
            }
        };
        let ended = process.wait().await;
        match word {
            None => {
                assert!(!ended.success());
                deaths += 1;
                assert!(deaths <= 6, "it dies for ever: {handed_out:?}");
            }
            Some(word) => break word,
        }
    };
    assert_eq!(deaths, 6);
    assert_eq!(handed_out.iter().filter(|id| **id == KILLER).count(), 6);
    let record = record(&database, ID).await?.expect("a record");
    let killer = feed.find_one(doc! { "_id": KILLER }).await?;
    assert!(killer.is_some());
    if stops {
        let Word::Stopped(reason) = last_word else { panic!("{last_word:?}") };
        assert!(reason.contains("the process died 3 times while handling this event"), "{reason}");
        assert!(!handed_out.contains(&4), "nothing behind it was handed out");
    } else {
        assert_eq!(last_word, Word::Past { dead_lettered: 1, handled: 2 });
        assert!(record.clean && record.in_hand.is_none());
        let letters = letters(&database).sequences(&SubscriptionId::new(ID)?).await?;
        assert_eq!(letters.len(), 1);
        // What came before it was stored by the first careful run, and is not handed out again.
        assert_eq!(handed_out.iter().filter(|id| **id == 1).count(), 4);
    }
    Ok(())
}
