//! What happens at once.

use super::{Failed, at, filled, first, fresh_id, held, key, letter, positions, same};
use crate::conformance::report::that;
use crate::dead_letter::DeadLetterStorage;
use crate::ids::Owner;
use crate::letter::{HoldOutcome, PutOutcome, RemoveOutcome};

const ROUNDS: u32 = 20;

/// Whichever is first: no letter is stored behind the end of its sequence, and none is lost with it.
pub(super) async fn an_append_is_behind_the_last_letter_or_finds_no_sequence(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    for _ in 0..ROUNDS {
        let (id, key) = (fresh_id("race")?, key(1));
        filled(&storage, &id, &key, [1]).await?;
        let owner = held(&storage, &id, &key).await?;
        let last = first(&storage, &id, &key).await?;
        let next = letter(&id, &key, 2);
        let (appending, removing) = (storage.clone(), storage.clone());
        let (appended, removed) = tokio::join!(
            tokio::spawn(async move { appending.append(&next).await }),
            tokio::spawn(async move { removing.remove(&last, &owner).await }),
        );
        let panicked = |error| Failed(format!("a call panicked: {error}"));
        let (appended, removed) = (appended.map_err(panicked)??, removed.map_err(panicked)??);
        let left = positions(&storage, &id, &key).await?;
        let fits = match (appended, removed) {
            (PutOutcome::Stored, RemoveOutcome::Removed) => left == [at(2)],
            (PutOutcome::NoSequence, RemoveOutcome::Ended) => left.is_empty(),
            _ => false,
        };
        that(fits, || format!("appended: {appended:?}, removed: {removed:?}, and left is {left:?}"))?;
    }
    Ok(())
}

pub(super) async fn one_of_many_holds_it(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("holders")?, key(1));
    filled(&storage, &id, &key, [1]).await?;
    let racers: Vec<_> = (0..8)
        .map(|_| {
            let (storage, id, key) = (storage.clone(), id.clone(), key.clone());
            tokio::spawn(
                async move { storage.hold(&id, &key, &Owner::fresh(), std::time::Duration::from_secs(60)).await },
            )
        })
        .collect();
    let mut holders = 0;
    for racer in racers {
        let outcome = racer.await.map_err(|error| Failed(format!("a hold panicked: {error}")))??;
        holders += u32::from(outcome == HoldOutcome::Held);
    }
    same("holders", &holders, &1)
}

pub(super) async fn the_same_letter_from_many_sides_is_stored_once(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("same")?, key(1));
    for n in 1..=5 {
        let racers: Vec<_> = (0..8)
            .map(|_| {
                // Each with a name of its own, as two processes that read the same event have.
                let (storage, letter) = (storage.clone(), letter(&id, &key, n));
                tokio::spawn(async move { storage.put(&letter).await })
            })
            .collect();
        let mut stored = 0;
        for racer in racers {
            match racer.await.map_err(|error| Failed(format!("a put panicked: {error}")))?? {
                PutOutcome::Stored => stored += 1,
                PutOutcome::AlreadyStored => {}
                outcome => return Err(Failed(format!("a put answered {outcome:?}"))),
            }
        }
        same("puts that stored it", &stored, &1)?;
    }
    same("positions", &positions(&storage, &id, &key).await?, &(1..=5).map(at).collect())
}

pub(super) async fn many_sequences_begin_at_once(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let id = fresh_id("begin")?;
    let racers: Vec<_> = (0..32)
        .map(|n| {
            let (storage, letter) = (storage.clone(), letter(&id, &key(n), 1));
            tokio::spawn(async move { storage.put(&letter).await })
        })
        .collect();
    for racer in racers {
        let outcome = racer.await.map_err(|error| Failed(format!("a put panicked: {error}")))??;
        same("a put", &outcome, &PutOutcome::Stored)?;
    }
    let mut found: Vec<_> = storage.sequences(&id).await?.into_iter().map(|sequence| sequence.key).collect();
    let mut expected: Vec<_> = (0..32).map(key).collect();
    found.sort();
    expected.sort();
    same("keys", &found, &expected)
}
