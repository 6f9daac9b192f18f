//! Who holds a sequence, and what it may do.

use std::time::Duration;

use super::{Failed, at, filled, first, fresh_id, held, key, letter, positions, put, same};
use crate::conformance::report::that;
use crate::dead_letter::DeadLetterStorage;
use crate::ids::Owner;
use crate::letter::{EvictOutcome, HoldOutcome, PutOutcome, RemoveOutcome};

const MINUTE: Duration = Duration::from_secs(60);

pub(super) async fn one_owner_at_a_time_until_it_lets_go_or_its_time_is_over(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("hold")?, key(1));
    filled(&storage, &id, &key, [1]).await?;
    let owner = held(&storage, &id, &key).await?;
    same("its own again", &storage.hold(&id, &key, &owner, MINUTE).await?, &HoldOutcome::Held)?;
    let other = Owner::fresh();
    match storage.hold(&id, &key, &other, MINUTE).await? {
        HoldOutcome::HeldBy { owner: holder, .. } => same("the holder", &holder, &owner)?,
        outcome => return Err(Failed(format!("another's hold should be named, the answer was {outcome:?}"))),
    }
    let shown = storage.sequences(&id).await?.pop().and_then(|sequence| sequence.held).map(|(holder, _)| holder);
    same("the holder shown", &shown, &Some(owner.clone()))?;
    storage.release(&id, &key, &other).await?;
    that(storage.hold(&id, &key, &other, MINUTE).await? != HoldOutcome::Held, || "another let it go".into())?;
    storage.release(&id, &key, &owner).await?;
    let brief = Duration::from_millis(100);
    same("a hold when it is free", &storage.hold(&id, &key, &other, brief).await?, &HoldOutcome::Held)?;
    tokio::time::sleep(3 * brief).await;
    same("holders when the time is over", &storage.sequences(&id).await?[0].held, &None)?;
    same("a hold when the time is over", &storage.hold(&id, &key, &owner, MINUTE).await?, &HoldOutcome::Held)?;
    let removed = storage.remove(&first(&storage, &id, &key).await?, &other).await?;
    same("a removal by the one before", &removed, &RemoveOutcome::NotHeld)
}

pub(super) async fn only_the_holder_removes_and_writes_down(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("holder")?, key(1));
    filled(&storage, &id, &key, 1..=2).await?;
    let (letter, error) = (first(&storage, &id, &key).await?, ["no".to_owned()]);
    let nobody = Owner::fresh();
    same("a removal by nobody", &storage.remove(&letter, &nobody).await?, &RemoveOutcome::NotHeld)?;
    same("a failure of nobody", &storage.note_failure(&letter, &nobody, &error).await?, &false)?;
    let owner = held(&storage, &id, &key).await?;
    same("a removal by another", &storage.remove(&letter, &nobody).await?, &RemoveOutcome::NotHeld)?;
    same("a failure of another", &storage.note_failure(&letter, &nobody, &error).await?, &false)?;
    same("nothing has changed", &storage.letters(&id, &key).await?[0], &letter)?;
    same("a failure", &storage.note_failure(&letter, &owner, &error).await?, &true)?;
    same("attempts", &first(&storage, &id, &key).await?.attempts, &1)?;
    same("a removal", &storage.remove(&letter, &owner).await?, &RemoveOutcome::Removed)?;
    same("positions", &positions(&storage, &id, &key).await?, &vec![at(2)])
}

pub(super) async fn a_sequence_ends_with_its_last_letter_and_begins_anew(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("end")?, key(1));
    filled(&storage, &id, &key, 1..=2).await?;
    let owner = held(&storage, &id, &key).await?;
    let one = first(&storage, &id, &key).await?;
    same("the first", &storage.remove(&one, &owner).await?, &RemoveOutcome::Removed)?;
    let two = first(&storage, &id, &key).await?;
    same("one meanwhile", &storage.append(&letter(&id, &key, 3)).await?, &PutOutcome::Stored)?;
    same("the second", &storage.remove(&two, &owner).await?, &RemoveOutcome::Removed)?;
    let three = first(&storage, &id, &key).await?;
    same("the last", &storage.remove(&three, &owner).await?, &RemoveOutcome::Ended)?;
    same("sequences", &storage.sequences(&id).await?, &Vec::new())?;
    same("an append", &storage.append(&letter(&id, &key, 4)).await?, &PutOutcome::NoSequence)?;
    // What it has had is forgotten with it, and so is who held it.
    put(&storage, &letter(&id, &key, 1)).await?;
    same("positions", &positions(&storage, &id, &key).await?, &vec![at(1)])?;
    held(&storage, &id, &key).await?;
    Ok(())
}

pub(super) async fn a_removal_can_be_asked_for_again(storage: impl DeadLetterStorage) -> Result<(), Failed> {
    let (id, key) = (fresh_id("again")?, key(1));
    filled(&storage, &id, &key, 1..=2).await?;
    let owner = held(&storage, &id, &key).await?;
    let letters = storage.letters(&id, &key).await?;
    for _ in 0..2 {
        same("the first", &storage.remove(&letters[0], &owner).await?, &RemoveOutcome::Removed)?;
    }
    same("the last", &storage.remove(&letters[1], &owner).await?, &RemoveOutcome::Ended)?;
    same("the last again", &storage.remove(&letters[1], &owner).await?, &RemoveOutcome::NoSequence)
}

pub(super) async fn a_held_sequence_is_not_evicted_and_a_free_one_goes_as_a_whole(
    storage: impl DeadLetterStorage,
) -> Result<(), Failed> {
    let (id, key) = (fresh_id("evict")?, key(1));
    filled(&storage, &id, &key, 1..=3).await?;
    let letter = first(&storage, &id, &key).await?;
    let owner = held(&storage, &id, &key).await?;
    match storage.evict(&id, &key).await? {
        EvictOutcome::HeldBy { owner: holder, .. } => same("the holder", &holder, &owner)?,
        outcome => return Err(Failed(format!("a held sequence should stay, the answer was {outcome:?}"))),
    }
    same("letters", &storage.letters(&id, &key).await?.len(), &3)?;
    storage.release(&id, &key, &owner).await?;
    same("an eviction", &storage.evict(&id, &key).await?, &EvictOutcome::Evicted(3))?;
    same("sequences", &storage.sequences(&id).await?, &Vec::new())?;
    same("the event of a letter", &storage.event(&letter).await?, &None)
}
