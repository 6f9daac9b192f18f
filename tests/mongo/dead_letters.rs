//! Dead letters in a real collection: the suite, what stands in it, and what survives a kill.

use std::sync::Arc;

use libtest_mimic::Trial;
use mongosub::{DynDeadLetterStorage, MongoDeadLetterStorage, bson::Document, conformance, mongodb::Database};

use crate::support::test;

pub fn tests() -> Vec<Trial> {
    vec![
        test("the dead letters in MongoDB pass the suite", |ctx| async move {
            let storage = letters(&ctx.plain().await.database);
            conformance::dead_letter_storage(|| async { storage.clone() }).await.assert_passed();
        }),
        test("dead letters in MongoDB behind a dyn handle pass the suite", |ctx| async move {
            let storage: Arc<dyn DynDeadLetterStorage> = Arc::new(letters(&ctx.plain().await.database));
            conformance::dead_letter_storage(|| async { storage.clone() }).await.assert_passed();
        }),
    ]
}

pub fn letters(database: &Database) -> MongoDeadLetterStorage {
    MongoDeadLetterStorage::new(&database.collection::<Document>("dead_letters"))
}
