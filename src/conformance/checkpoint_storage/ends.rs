//! How runs ended: what a claim counts, which event was in hand, and what is taken back.

use std::time::Duration;

use super::{EVENT, Failed, QUIET, claimed, fresh_id, not_ahead, saved, stored, time, token};
use crate::audit::{Gap, Note};
use crate::checkpoint::{Checkpoint, Kind};
use crate::conformance::report::same;
use crate::ids::{Epoch, Owner, Ownership, SubscriptionId};
use crate::model::{Fingerprint, Scope};
use crate::storage::{CheckpointStorage, Claim, Hand, InHand, Record, Save, SaveOutcome, Source, StartPosition};

/// The storage's clock moves on, and a save is behind the claim before it.
async fn later() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// A claim by a fresh owner, who expects nobody.
async fn next(storage: &impl CheckpointStorage, id: &SubscriptionId) -> Result<(Record, Ownership), Failed> {
    claimed(storage, &Claim::new(id.clone())).await
}

fn save(id: &SubscriptionId, own: &Ownership, at: u32) -> Save {
    Save::new(id.clone(), own.clone(), Epoch(1), time(at, 1))
}

fn clean(id: &SubscriptionId, own: &Ownership, at: u32) -> Save {
    Save { clean: true, ..save(id, own, at) }
}

/// A note of an event in hand, beside the position that is stored.
fn holds(id: &SubscriptionId, own: &Ownership, at: u32, in_hand: &InHand) -> Save {
    Save { hand: Hand::Holds(in_hand.clone()), ..save(id, own, at) }
}

fn in_hand(deaths: u32) -> Result<InHand, Failed> {
    Ok(InHand::new(token(20, 1, EVENT)?, deaths))
}

/// Unclean ends, and deaths of the event in hand, as they are stored.
async fn counts(storage: &impl CheckpointStorage, id: &SubscriptionId) -> Result<(u32, Option<u32>), Failed> {
    let record = stored(storage, id).await?;
    Ok((record.unclean_ends, record.in_hand.map(|in_hand| in_hand.deaths)))
}

pub(super) async fn an_end_without_a_word_and_without_progress_is_counted<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let mut claim = Claim::new(fresh_id("ends")?);
    claim.start = Some(StartPosition::new(time(10, 1)));
    let (record, _) = claimed(&storage, &claim).await?;
    same("the ends before the first claim", &record.unclean_ends, &0)?;
    // Time alone is no progress, and the start that a claim stores is none either.
    later().await;
    for ends in 1..=4 {
        let (record, _) = next(&storage, &claim.id).await?;
        same("the ends in the answer to a claim", &record.unclean_ends, &ends)?;
        same("the record read", &stored(&storage, &claim.id).await?, &record)?;
    }
    storage.delete(&claim.id, None).await?;
    let (record, _) = next(&storage, &claim.id).await?;
    same("the ends of a record that was deleted", &record.unclean_ends, &0)
}

pub(super) async fn an_end_behind_progress_begins_the_count_anew<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("progress")?;
    next(&storage, &id).await?;
    let (record, own) = next(&storage, &id).await?;
    same("the ends before", &record.unclean_ends, &1)?;
    later().await;
    saved(&storage, &save(&id, &own, 10)).await?;
    same("the ends after a save", &counts(&storage, &id).await?.0, &1)?;
    later().await;
    let (record, _) = next(&storage, &id).await?;
    same("the ends behind one that had stored something", &record.unclean_ends, &0)?;
    // What was stored before its claim is not its own.
    let (record, _) = next(&storage, &id).await?;
    same("the ends behind one that had stored nothing", &record.unclean_ends, &1)
}

pub(super) async fn a_clean_end_begins_the_count_anew<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("clean_end")?;
    next(&storage, &id).await?;
    let (_, own) = next(&storage, &id).await?;
    saved(&storage, &clean(&id, &own, 10)).await?;
    let (record, _) = next(&storage, &id).await?;
    same("the ends behind a clean one", &record.unclean_ends, &0)?;
    let (record, _) = next(&storage, &id).await?;
    same("the ends behind the one after it", &record.unclean_ends, &1)
}

pub(super) async fn the_same_claim_made_again_counts_nothing<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("end_again")?;
    let (_, first) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &first, 10)).await?;
    saved(&storage, &holds(&id, &first, 10, &in_hand(0)?)).await?;
    next(&storage, &id).await?;
    let claim = Claim::new(id.clone());
    claimed(&storage, &claim).await?;
    let before = counts(&storage, &id).await?;
    for _ in 0..2 {
        claimed(&storage, &claim).await?;
        same("the ends and deaths after the same claim again", &counts(&storage, &id).await?, &before)?;
    }
    Ok(())
}

pub(super) async fn a_claim_that_expects_its_predecessor_counts_nothing<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("end_expected")?;
    let (_, own) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &own, 10)).await?;
    saved(&storage, &holds(&id, &own, 10, &in_hand(0)?)).await?;
    next(&storage, &id).await?;
    let (_, mut own) = next(&storage, &id).await?;
    let before = counts(&storage, &id).await?;
    for _ in 0..2 {
        let mut claim = Claim::new(id.clone());
        claim.expect = Some(own);
        (_, own) = claimed(&storage, &claim).await?;
        same("the ends and deaths after a claim that expects", &counts(&storage, &id).await?, &before)?;
    }
    Ok(())
}

pub(super) async fn an_event_in_hand_is_noted_and_nothing_else_changes<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("in_hand")?;
    let (_, own) = next(&storage, &id).await?;
    let mut first = save(&id, &own, 10);
    (first.kind, first.pipeline) = (Kind::Quiet, Some(Fingerprint("abc".into())));
    first.source = Some(Source::new(Scope::Deployment, None, Some("rs0".into())));
    saved(&storage, &first).await?;
    let before = stored(&storage, &id).await?;
    later().await;
    let events = [(10, token(20, 1, EVENT)?), (10, Checkpoint::Text("$hand".into())), (11, time(20, 1))];
    for (deaths, (at, event)) in (0..).zip(events) {
        let in_hand = InHand::new(event, deaths);
        let mut save = holds(&id, &own, at, &in_hand);
        save.clean = true;
        save.note = Some(Note::Gap(Gap::new(time(9, 1), time(at, 1), Scope::Deployment)));
        let expected = Record { in_hand: Some(in_hand), ..before.clone() };
        // The same again, as after a lost answer.
        for _ in 0..2 {
            let answer = storage.save(&save).await?;
            same("the answer to a note of an event in hand", &answer, &SaveOutcome::Saved { at: before.saved_at })?;
            same("the record afterwards", &stored(&storage, &id).await?, &expected)?;
        }
    }
    Ok(())
}

pub(super) async fn an_event_in_hand_is_noted_by_the_owner_alone_and_never_behind<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("in_hand_fenced")?;
    let (_, old) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &old, 10)).await?;
    let (record, own) = next(&storage, &id).await?;
    let superseded = SaveOutcome::Superseded { owner: Some(own.owner.clone()), since: record.claimed_at };
    let same_fence = Ownership { fence: own.fence, owner: Owner::fresh() };
    for other in [&old, &same_fence] {
        for at in [9, 10, 11] {
            let answer = storage.save(&holds(&id, other, at, &in_hand(0)?)).await?;
            same("the answer to a note by another owner", &answer, &superseded)?;
            same("the record afterwards", &stored(&storage, &id).await?, &record)?;
        }
    }
    not_ahead(&storage, &holds(&id, &own, 9, &in_hand(0)?)).await?;
    let older = Save { epoch: Epoch(0), ..holds(&id, &own, 11, &in_hand(0)?) };
    not_ahead(&storage, &older).await?;
    same("the record after a note from behind", &stored(&storage, &id).await?, &record)?;
    let holding = holds(&id, &own, 10, &in_hand(0)?);
    saved(&storage, &holding).await?;
    storage.delete(&id, None).await?;
    same("the answer to a note in a deleted record", &storage.save(&holding).await?, &SaveOutcome::Gone)?;
    same("the record afterwards", &storage.read(&id).await?, &None)
}

pub(super) async fn an_event_in_hand_dies_once_with_each_end_without_a_word<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("deaths")?;
    let (_, own) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &own, 10)).await?;
    next(&storage, &id).await?;
    let (_, own) = next(&storage, &id).await?;
    saved(&storage, &holds(&id, &own, 10, &in_hand(5)?)).await?;
    let (record, _) = next(&storage, &id).await?;
    same("the event in hand after an end", &record.in_hand, &Some(in_hand(6)?))?;
    same("the record read", &stored(&storage, &id).await?, &record)?;
    let (record, own) = next(&storage, &id).await?;
    same("the event in hand after another one", &record.in_hand, &Some(in_hand(7)?))?;
    // What was stored says nothing of the event in hand.
    later().await;
    saved(&storage, &save(&id, &own, 11)).await?;
    let (record, own) = next(&storage, &id).await?;
    same("the ends behind one that had stored something", &record.unclean_ends, &0)?;
    same("the event it left in hand", &record.in_hand, &Some(in_hand(8)?))?;
    saved(&storage, &clean(&id, &own, 12)).await?;
    let (record, _) = next(&storage, &id).await?;
    same("the event in hand after a clean end", &record.in_hand, &Some(in_hand(8)?))
}

pub(super) async fn a_save_empties_the_hand_if_it_says_so_and_leaves_it_otherwise<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("emptied")?;
    let (_, own) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &own, 10)).await?;
    saved(&storage, &holds(&id, &own, 10, &in_hand(2)?)).await?;
    for position in [time(10, 1), token(11, 1, EVENT)?, token(12, 1, QUIET)?, Checkpoint::Text("line 17".into())] {
        saved(&storage, &Save { position, ..save(&id, &own, 0) }).await?;
        let record = stored(&storage, &id).await?;
        same("the event in hand after a save that says nothing of it", &record.in_hand, &Some(in_hand(2)?))?;
    }
    let empty = Save { epoch: Epoch(2), hand: Hand::Empty, ..save(&id, &own, 13) };
    for _ in 0..2 {
        saved(&storage, &empty).await?;
        let record = stored(&storage, &id).await?;
        same("the event in hand after a save that empties it", &record.in_hand, &None)?;
        same("the position it stored", &record.position, &Some(time(13, 1)))?;
    }
    Ok(())
}

pub(super) async fn the_end_of_one_who_lives_is_taken_back_once<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("not_dead")?;
    let (_, first) = next(&storage, &id).await?;
    saved(&storage, &save(&id, &first, 10)).await?;
    next(&storage, &id).await?;
    let (_, before) = next(&storage, &id).await?;
    saved(&storage, &holds(&id, &before, 10, &in_hand(0)?)).await?;
    let (_, last) = next(&storage, &id).await?;
    let (record, own) = next(&storage, &id).await?;
    same("the deaths before", &record.in_hand, &Some(in_hand(2)?))?;
    for other in [&first, &before, &own] {
        storage.not_dead(&id, other).await?;
        same("the record after the word of another one", &stored(&storage, &id).await?, &record)?;
    }
    let expected = Record { unclean_ends: record.unclean_ends.saturating_sub(1), in_hand: Some(in_hand(1)?), ..record };
    for _ in 0..2 {
        storage.not_dead(&id, &last).await?;
        same("the record after the last one's word", &stored(&storage, &id).await?, &expected)?;
    }
    // What is counted later is no longer about the last one.
    let (record, _) = next(&storage, &id).await?;
    storage.not_dead(&id, &last).await?;
    same("the record after its word much later", &stored(&storage, &id).await?, &record)
}

pub(super) async fn nothing_is_taken_back_below_none_nor_of_a_clean_end<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("below_none")?;
    let (_, first) = next(&storage, &id).await?;
    later().await;
    saved(&storage, &save(&id, &first, 10)).await?;
    let (_, second) = next(&storage, &id).await?;
    saved(&storage, &holds(&id, &second, 10, &in_hand(0)?)).await?;
    storage.not_dead(&id, &first).await?;
    same("the ends and deaths", &counts(&storage, &id).await?, &(0, Some(0)))?;

    saved(&storage, &clean(&id, &second, 11)).await?;
    let (_, third) = next(&storage, &id).await?;
    saved(&storage, &holds(&id, &third, 11, &in_hand(3)?)).await?;
    storage.not_dead(&id, &second).await?;
    same("the ends and deaths behind a clean end", &counts(&storage, &id).await?, &(0, Some(3)))
}

pub(super) async fn what_is_taken_back_of_a_record_that_is_gone_makes_nothing<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("gone_alive")?;
    let (_, own) = next(&storage, &id).await?;
    next(&storage, &id).await?;
    storage.delete(&id, None).await?;
    storage.not_dead(&id, &own).await?;
    same("the record afterwards", &storage.read(&id).await?, &None)?;
    next(&storage, &id).await?;
    let before = stored(&storage, &id).await?;
    storage.not_dead(&id, &own).await?;
    same("the record made anew", &stored(&storage, &id).await?, &before)
}
