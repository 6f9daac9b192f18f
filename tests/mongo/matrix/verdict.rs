//! The comparison: what was acknowledged, what the server has, what was delivered.
//!
//! A write whose acknowledgement was lost may or may not be there. So the measure is the server's own oplog: exactly its
//! inserts are to be delivered, in its order, each once; and what was acknowledged must be among them.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use futures::TryStreamExt;
use libtest_mimic::Trial;
use mongosub::{
    bson::{Document, doc},
    mongodb::{
        Collection,
        options::{ReadConcern, ReadPreference, SelectionCriteria},
    },
};

use super::writer::Written;
use crate::support::test;

/// What a majority has, when nobody writes any more.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    /// The ids in the order of the oplog.
    pub inserted: Vec<i32>,
    /// The ids in the collection.
    pub there: BTreeSet<i32>,
}

impl Truth {
    /// Of a collection that documents with small numbers as `_id` were inserted into, and nothing else.
    pub async fn of(things: &Collection<Document>) -> anyhow::Result<Self> {
        let primary = || SelectionCriteria::ReadPreference(ReadPreference::Primary);
        let found = things.find(doc! {}).read_concern(ReadConcern::majority()).selection_criteria(primary());
        let found: Vec<Document> = found.await?.try_collect().await?;
        let there = found.iter().map(|thing| thing.get_i32("_id")).collect::<Result<_, _>>()?;
        let oplog = things.client().database("local").collection::<Document>("oplog.rs");
        let inserts = oplog
            .find(doc! { "ns": things.namespace().to_string(), "op": "i" })
            .sort(doc! { "$natural": 1 })
            .projection(doc! { "o._id": 1 })
            .read_concern(ReadConcern::majority())
            .selection_criteria(primary());
        let inserts: Vec<Document> = inserts.await?.try_collect().await?;
        let id = |entry: &Document| anyhow::Ok(entry.get_document("o")?.get_i32("_id")?);
        Ok(Self { inserted: inserts.iter().map(id).collect::<Result<_, _>>()?, there })
    }
}

/// Nothing lost, order kept, nothing twice.
///
/// # Errors
///
/// What is wrong with it.
pub fn judge(written: &Written, truth: &Truth, delivered: &[i32]) -> anyhow::Result<()> {
    let newest = written.acknowledged.last().context("nothing was acknowledged")?;
    let inserted: BTreeSet<i32> = truth.inserted.iter().copied().collect();
    ensure!(
        inserted == truth.there && inserted.len() == truth.inserted.len(),
        "oplog and collection differ: {:?}",
        inserted.symmetric_difference(&truth.there).collect::<Vec<_>>()
    );
    let unkept: Vec<_> = written.acknowledged.iter().filter(|id| !inserted.contains(id)).collect();
    ensure!(unkept.is_empty(), "acknowledged, and the server does not have it: {unkept:?}");
    let mut once = BTreeSet::new();
    let twice: Vec<_> = delivered.iter().filter(|id| !once.insert(**id)).collect();
    ensure!(twice.is_empty(), "delivered twice: {twice:?}");
    let lost: Vec<_> = inserted.difference(&once).collect();
    ensure!(lost.is_empty(), "lost: {lost:?}");
    let made_up: Vec<_> = once.difference(&inserted).collect();
    ensure!(made_up.is_empty(), "delivered, and the server does not have it: {made_up:?}");
    ensure!(delivered == truth.inserted, "delivered in another order than that of the oplog: {delivered:?}");
    ensure!(delivered.contains(newest), "the last acknowledged write, {newest}, is not among what was delivered");
    Ok(())
}

pub fn tests() -> Vec<Trial> {
    vec![test("in the fault matrix, the comparison finds what is lost, made up, twice or out of order", |_| async {
        let written = Written { acknowledged: vec![0, 1, 3], doubtful: vec![2], ..Written::default() };
        let truth = |ids: &[i32]| Truth { inserted: ids.to_vec(), there: ids.iter().copied().collect() };
        let with = truth(&[0, 1, 2, 3]);
        judge(&written, &with, &[0, 1, 2, 3])?;
        judge(&written, &truth(&[0, 1, 3]), &[0, 1, 3])?;
        let says = |truth: &Truth, delivered: &[i32], what: &str| {
            let error = judge(&written, truth, delivered).expect_err(what).to_string();
            assert!(error.starts_with(what), "{error}");
        };
        says(&with, &[0, 1, 3], "lost: [2]");
        says(&with, &[0, 1, 2], "lost: [3]");
        says(&truth(&[0, 1, 3]), &[0, 1, 2, 3], "delivered, and the server does not have it: [2]");
        says(&with, &[0, 1, 1, 2, 3], "delivered twice: [1]");
        says(&with, &[0, 2, 1, 3], "delivered in another order");
        says(&truth(&[0, 1, 2]), &[0, 1, 2], "acknowledged, and the server does not have it: [3]");
        let differ = Truth { inserted: vec![0, 1, 3], there: with.there.clone() };
        says(&differ, &[0, 1, 3], "oplog and collection differ: [2]");
        anyhow::Ok(())
    })]
}
