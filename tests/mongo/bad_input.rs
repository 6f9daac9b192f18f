//! What cannot be used is refused with its name and leaves nothing behind; what is only odd works.

mod feed;

use libtest_mimic::Trial;
use mongosub::{
    ChangeStreamModel, Checkpoint, DurableSubscriptions, Filter, Reason, Start, StartAt, State, SubscribeError, Token,
    bson::{Document, RawDocumentBuf, doc},
    mongodb::Database,
};

use crate::{
    seen::{PATIENCE, Seen, Subscriptions, insert, record, storage, subscriptions, things},
    support::{Context, Options, Server, test, wait_until},
};

pub fn tests() -> Vec<Trial> {
    let here = vec![
        plain("an id that is none is refused, and an odd one works", ids),
        test("a server without change streams is refused in one sentence", |_| standalone()),
        plain("a malformed token is refused, as a start and where it is stored", malformed_token),
        plain("a token of another collection is refused, as a start and where it is stored", foreign_token),
        plain("a filter that the server refuses is refused with what the server says", refused_filter),
        plain("a pipeline that takes _id away is refused by name", without_id),
        plain("a pipeline that takes _id away unseen stalls and says so", without_id_unseen),
        plain("a collection with a dot in its name is read, and one that cannot exist is refused", names),
        plain("a record that cannot be read is refused with its field, and left byte for byte", unreadable),
    ];
    [here, feed::tests()].into_iter().flatten().collect()
}

/// A test on the shared server, in a database of its own.
fn plain<Fut>(name: &str, body: fn(Database) -> Fut) -> Trial
where
    Fut: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    test(name, move |ctx: Context| async move { body(ctx.plain().await.database).await })
}

/// The reason of a start that was refused.
fn refused(error: Option<SubscribeError>) -> Reason {
    match error {
        Some(SubscribeError::Refused { reason, .. }) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

/// Nothing runs and nothing is stored.
async fn assert_nothing_left(subscriptions: &Subscriptions, database: &Database, id: &str) -> anyhow::Result<()> {
    assert!(subscriptions.running().is_empty() && subscriptions.get(id).is_none());
    assert_eq!(record(database, id).await?, None);
    Ok(())
}

async fn ids(database: Database) -> anyhow::Result<()> {
    let subscriptions = subscriptions(&database);
    for id in [String::new(), "x".repeat(256), "ü".repeat(128), "a#b".into(), "a\nb".into(), "a\0b".into()] {
        let error = subscriptions.subscribe(id.clone(), Seen::default().handler()).await.err();
        assert!(matches!(error, Some(SubscribeError::Config { field: "id", .. })), "{id:?}: {error:?}");
    }
    assert!(subscriptions.running().is_empty());
    assert_eq!(database.list_collection_names().await?, Vec::<String>::new());
    let odd = [" ".to_owned(), "$set".into(), "a.b/c:{}\"'\\".into(), "漢字 ü 🦀".into(), "x".repeat(255)];
    let seen = Seen::default();
    for id in &odd {
        subscriptions.subscribe(id.clone(), seen.handler()).await?;
    }
    insert(&things(&database), [1]).await?;
    seen.counts(odd.len()).await;
    for (id, stored) in subscriptions.shutdown_all().await {
        let record = record(&database, id.as_str()).await?.expect("a record");
        assert_eq!((record.position, record.clean), (stored?, true), "{id}");
    }
    Ok(())
}

async fn standalone() -> anyhow::Result<()> {
    let server = Server::own(Options::standalone()).await;
    let database = server.fresh_database().await;
    let subscriptions = subscriptions(&database);
    let error = subscriptions.subscribe("alone", Seen::default().handler()).await.err();
    let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
    assert_eq!(refused(error), Reason::NotAReplicaSet);
    assert!(text.contains("--replSet") && !text.contains('\n') && !text.contains(". "), "{text}");
    assert_nothing_left(&subscriptions, &database, "alone").await
}

/// A token that begins like one and goes on like none.
fn made_up(time: &str, rest: &str) -> Checkpoint {
    Checkpoint::Token(Token::new(format!("82{time}{rest}")).expect("hex with a time"))
}

async fn malformed_token(database: Database) -> anyhow::Result<()> {
    let subscriptions = subscriptions(&database);
    let seen = Seen::default();
    let start = |position| {
        subscriptions.subscribe("malformed", seen.handler()).start_at(StartAt::StoredOr(Start::After(position)))
    };
    insert(&things(&database), [0, 1]).await?;
    assert!(Token::new("8").is_err());
    let text: Checkpoint = "not a token".parse()?;
    let reason = refused(start(text).await.err());
    assert!(matches!(reason, Reason::BadPosition { .. }), "{reason:?}");
    // What only its token can open is judged by the server.
    let time = "6900000000000001";
    let invalidate = made_up(time, &format!("2B022C0100296F5A1004{}FFFF", "AB".repeat(16)));
    assert!(invalidate.is_invalidate());
    let reason = refused(start(invalidate).await.err());
    assert!(matches!(reason, Reason::BadPosition { code, .. } if code > 0), "{reason:?}");
    assert_nothing_left(&subscriptions, &database, "malformed").await?;
    // What the text of a token hides, a position in the future: of another deployment, most likely.
    for stored in [doc! { "_data": "zz" }, doc! { "_data": "82" }, doc! { "_data": 7 }, doc! { "_typeBits": "82" }] {
        let record = doc! { "_id": "malformed", "resumeToken": stored };
        let reason = refused_where_stored(&database, record).await?;
        assert!(
            matches!(&reason, Reason::UnreadableRecord { field, .. } if field == "resumeToken._data"),
            "{reason:?}"
        );
    }
    assert_eq!(seen.ids(), [0; 0]);
    Ok(())
}

/// Subscribes where this record is stored, and finds it as it was.
async fn refused_where_stored(database: &Database, record: Document) -> anyhow::Result<Reason> {
    let records = database.collection::<Document>("checkpoints");
    let id = record.get_str("_id")?.to_owned();
    records.delete_one(doc! { "_id": &id }).await?;
    records.insert_one(&record).await?;
    let raw = database.collection::<RawDocumentBuf>("checkpoints");
    let before = raw.find_one(doc! { "_id": &id }).await?;
    let subscriptions = subscriptions(database);
    let error = subscriptions.subscribe(id.clone(), Seen::default().handler()).await.err();
    assert!(subscriptions.running().is_empty());
    assert_eq!(raw.find_one(doc! { "_id": &id }).await?, before, "{id} is left byte for byte");
    Ok(refused(error))
}

async fn foreign_token(database: Database) -> anyhow::Result<()> {
    let other = database.collection::<Document>("others");
    let (seen, seen_there) = (Seen::default(), Seen::default());
    let there = DurableSubscriptions::new(ChangeStreamModel::collection(&other), storage(&database));
    let subscription = there.subscribe("foreign", seen_there.handler()).await?;
    insert(&other, [1]).await?;
    insert(&things(&database), [1]).await?;
    seen_there.sees(1).await;
    subscription.shutdown().await?;
    let position = seen_there.positions()[0].clone();
    let uuid = position.token().and_then(Token::collection_uuid).expect("the token's collection").to_owned();

    let here = subscriptions(&database);
    let started = here.subscribe("new", seen.handler()).start_at(StartAt::StoredOr(Start::After(position))).await;
    let reason = refused(started.err());
    assert!(matches!(&reason, Reason::SourceChanged { was, .. } if was.contains(&uuid)), "{reason:?}");
    assert_nothing_left(&here, &database, "new").await?;
    let before = record(&database, "foreign").await?;
    let reason = refused(here.subscribe("foreign", seen.handler()).await.err());
    assert!(
        matches!(&reason, Reason::SourceChanged { was, is } if was.contains("others") && is.contains("things")),
        "{reason:?}"
    );
    assert_eq!(record(&database, "foreign").await?, before);
    Ok(())
}

async fn refused_filter(database: Database) -> anyhow::Result<()> {
    let subscriptions = subscriptions(&database);
    for (stage, named) in [
        (doc! { "$match": { "$nonsense": 1 } }, "$nonsense"),
        (doc! { "$nonsense": 1 }, "$nonsense"),
        (doc! { "$group": { "_id": "$ns" } }, "$group"),
    ] {
        let filter = Filter::pipeline([stage]);
        let reason = refused(subscriptions.subscribe("filter", Seen::default().handler()).filter(filter).await.err());
        let Reason::RefusedByServer { code, message } = &reason else { panic!("{reason:?}") };
        assert!(*code > 0 && message.contains(named), "{reason:?}");
    }
    assert_nothing_left(&subscriptions, &database, "filter").await
}

async fn without_id(database: Database) -> anyhow::Result<()> {
    let subscriptions = subscriptions(&database);
    for stage in [doc! { "$project": { "_id": 0 } }, doc! { "$unset": "_id" }, doc! { "$replaceWith": "$fullDocument" }]
    {
        let filter = Filter::pipeline([stage.clone()]);
        let error = subscriptions.subscribe("no_id", Seen::default().handler()).filter(filter).await.err();
        let Some(SubscribeError::Config { field: "filter", message }) = &error else { panic!("{stage}: {error:?}") };
        assert!(message.contains("_id") && message.contains(stage.keys().next().expect("a stage")), "{message}");
    }
    assert_nothing_left(&subscriptions, &database, "no_id").await
}

async fn without_id_unseen(database: Database) -> anyhow::Result<()> {
    let unseen = doc! { "$replaceWith": { "$arrayToObject": { "$filter": {
        "input": { "$objectToArray": "$$ROOT" }, "cond": { "$ne": ["$$this.k", "_id"] },
    } } } };
    let seen = Seen::default();
    let subscriptions = subscriptions(&database);
    let subscription = subscriptions.subscribe("unseen", seen.handler()).filter(Filter::pipeline([unseen])).await?;
    insert(&things(&database), [1]).await?;
    wait_until("it stalls", PATIENCE, || async { matches!(subscription.status().state, State::Stalled(_)) }).await;
    let State::Stalled(reason) = subscription.status().state else { panic!("no longer stalled") };
    assert!(matches!(&reason, Reason::RefusedByServer { message, .. } if message.contains("_id")), "{reason:?}");
    assert_eq!(seen.ids(), [0; 0]);
    subscription.cancel().await?;
    assert_nothing_left(&subscriptions, &database, "unseen").await
}

async fn names(database: Database) -> anyhow::Result<()> {
    let to = |name: &str| {
        let model = ChangeStreamModel::collection(&database.collection::<Document>(name));
        DurableSubscriptions::new(model, storage(&database))
    };
    for name in ["things.of.mine", "a.", "things/\u{fc} \"'"] {
        let seen = Seen::default();
        let subscriptions = to(name);
        subscriptions.subscribe(name, seen.handler()).await?;
        insert(&database.collection(name), [1]).await?;
        seen.sees(1).await;
        assert_eq!(seen.ids(), [1], "{name}");
    }
    let reason = refused(to("..").subscribe("dots", Seen::default().handler()).await.err());
    assert!(matches!(&reason, Reason::RefusedByServer { code: 73, .. }), "{reason:?}");
    // The server would open this stream, and has no such collection.
    let error = to("x.$y").subscribe("dollar", Seen::default().handler()).await.err();
    let Some(SubscribeError::Config { field: "model", message }) = &error else { panic!("{error:?}") };
    assert!(message.contains("x.$y"), "{message}");
    assert!(insert(&database.collection("x.$y"), [1]).await.is_err());
    for id in ["dots", "dollar"] {
        assert_nothing_left(&to("x.$y"), &database, id).await?;
    }
    Ok(())
}

async fn unreadable(database: Database) -> anyhow::Result<()> {
    let ours = |wrong: Document| {
        let mut ours = doc! { "schema": 1_i64, "fence": 1_i64, "owner": "x" };
        ours.extend(wrong);
        doc! { "_id": "unreadable", "mongosub": ours }
    };
    for (record, wrong) in [
        (
            doc! { "_id": "unreadable", "mongosub": { "schema": 2_i64, "fence": 1_i64, "owner": "x" } },
            "mongosub.schema",
        ),
        (doc! { "_id": "unreadable", "mongosub": "text" }, "mongosub"),
        (ours(doc! { "uncleanEnds": -1 }), "mongosub.uncleanEnds"),
        (ours(doc! { "over": "7" }), "mongosub.over"),
        (ours(doc! { "inHand": 7 }), "mongosub.inHand"),
        (ours(doc! { "inHand": { "at": "17.1", "deaths": 1.5 } }), "mongosub.inHand.deaths"),
        (doc! { "_id": "unreadable", "operationTime": 7 }, "operationTime"),
    ] {
        let reason = refused_where_stored(&database, record.clone()).await?;
        let Reason::UnreadableRecord { id, field, .. } = &reason else { panic!("{record}: {reason:?}") };
        assert_eq!((id.as_str(), field.as_str()), ("unreadable", wrong));
    }
    Ok(())
}
