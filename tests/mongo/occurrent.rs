//! A subscription that goes on where one of the Occurrent library stopped, and leaves a record that it can read.

use libtest_mimic::Trial;
use mongosub::{
    Checkpoint, Kind,
    bson::{Document, doc},
    mongodb::Database,
};

use crate::{
    seen::{Seen, insert, subscriptions, things},
    support::{Context, test},
};

pub fn tests() -> Vec<Trial> {
    vec![test(
        "a subscription goes on behind a record of Occurrent's, and leaves one that Occurrent reads",
        |ctx: Context| async move { taken_over(ctx.plain().await.database).await },
    )]
}

async fn taken_over(database: Database) -> anyhow::Result<()> {
    let written = things(&database);
    let records = database.collection::<Document>("checkpoints");
    // The positions come from a subscription of our own.
    let (before, seen) = (subscriptions(&database), Seen::default());
    before.subscribe("before", seen.handler()).await?;
    insert(&written, [1, 2]).await?;
    seen.sees(2).await;
    before.shutdown_all().await;
    let (position, time) = (seen.positions()[0].clone(), seen.all()[1].event.cluster_time()?);
    for (form, first) in [
        (doc! { "resumeToken": { "_data": position.to_string() } }, 2),
        (doc! { "operationTime": time }, 2),
        (doc! { "checkpoint": format!(r#"{{"resumeToken": {{"_data": "{position}"}}}}"#) }, 2),
        (doc! { "subscriptionPosition": position.to_string() }, 2),
    ] {
        let id = form.keys().next().expect("a field").clone();
        let mut theirs = doc! { "_id": &id, "version": 7_i64 };
        theirs.extend(form);
        records.insert_one(&theirs).await?;
        let (ours, seen) = (subscriptions(&database), Seen::default());
        let subscription = ours.subscribe(id.clone(), seen.handler()).await?;
        seen.sees(first).await;
        let stored = subscription.shutdown().await?.expect("a position");
        assert_eq!(seen.ids(), [2], "{id}");
        // What Occurrent looks at: exactly one position, and its own version as it was.
        let record = records.find_one(doc! { "_id": &id }).await?.expect("a record");
        let token = record.get_document("resumeToken")?.get_str("_data")?;
        assert_eq!(token.parse::<Checkpoint>()?, stored, "{id}");
        assert!(
            ["operationTime", "checkpoint", "subscriptionPosition"].iter().all(|field| !record.contains_key(field))
        );
        assert_eq!(record.get_i64("version")?, 7);
        let kind = record.get_document("mongosub")?.get_str("kind")?;
        assert!([Kind::Event.as_str(), Kind::Quiet.as_str()].contains(&kind), "{kind}");
    }
    Ok(())
}
