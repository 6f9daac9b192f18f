//! Notes: what is kept beside a position of the events that were not delivered.

use super::{Failed, claimed, fresh_id, not_ahead, saved, stored, time};
use crate::audit::{AUDITED, Gap, Note, Skipped};
use crate::checkpoint::Checkpoint;
use crate::conformance::report::{same, that};
use crate::ids::{Epoch, Namespace, Owner, Ownership, SubscriptionId};
use crate::model::Scope;
use crate::storage::{CheckpointStorage, Claim, Record, Save};

fn gap(from: u32, to: u32) -> Note {
    let scope = Scope::Collection(Namespace::new("shop", "$orders.paid"));
    Note::Gap(Gap::new(time(from, 1), time(to, 1), scope))
}

fn skipped(from: Option<u32>, through: u32) -> Note {
    let from = from.map(|from| time(from, 1));
    Note::Skipped(Skipped::new(from, time(through, 1), "$reason: a \"bad\" one", Owner::new("$owner")))
}

fn save(id: &SubscriptionId, own: &Ownership, at: u32, note: Option<Note>) -> Save {
    Save { note, ..Save::new(id.clone(), own.clone(), Epoch(1), time(at, 1)) }
}

/// The notes of a record, without their times; all have one.
fn notes(record: &Record) -> Result<Vec<Note>, Failed> {
    let mut notes = Vec::new();
    for gap in &record.gaps {
        that(gap.at >= record.claimed_at, || format!("{gap:?} was recorded before the claim"))?;
        notes.push(Note::Gap(Gap { at: None, ..gap.clone() }));
    }
    for skipped in &record.skips {
        that(skipped.at >= record.claimed_at, || format!("{skipped:?} was recorded before the claim"))?;
        notes.push(Note::Skipped(Skipped { at: None, ..skipped.clone() }));
    }
    Ok(notes)
}

pub(super) async fn a_note_is_stored_with_its_position_and_kept<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("noted")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    saved(&storage, &save(&id, &own, 10, Some(gap(5, 10)))).await?;
    saved(&storage, &save(&id, &own, 11, Some(skipped(Some(10), 11)))).await?;
    saved(&storage, &save(&id, &own, 12, Some(skipped(None, 12)))).await?;
    let expected = vec![gap(5, 10), skipped(Some(10), 11), skipped(None, 12)];
    let record = stored(&storage, &id).await?;
    same("the notes", &notes(&record)?, &expected)?;
    same("the position", &record.position, &Some(time(12, 1)))?;

    // Later saves, of every kind, and claims.
    saved(&storage, &save(&id, &own, 13, None)).await?;
    let bare = Save::new(id.clone(), own.clone(), Epoch(2), Checkpoint::Text("line 17".into()));
    saved(&storage, &bare).await?;
    let (record, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    same("how many notes the answer to a claim has", &(record.gaps.len() + record.skips.len()), &3)?;
    saved(&storage, &Save::new(id.clone(), own, Epoch(3), time(1, 1))).await?;
    let record = stored(&storage, &id).await?;
    let kept: Vec<_> = record.gaps.iter().map(|gap| (gap.from.clone(), gap.to.clone())).collect();
    same("the gaps later", &kept, &vec![(time(5, 1), time(10, 1))])?;
    same("how many skips there are later", &record.skips.len(), &2)
}

pub(super) async fn a_note_of_a_save_that_is_made_again_is_kept_once<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("noted_again")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    for note in [gap(5, 10), skipped(None, 10), skipped(Some(5), 10)] {
        for _ in 0..3 {
            saved(&storage, &save(&id, &own, 10, Some(note.clone()))).await?;
        }
    }
    let record = stored(&storage, &id).await?;
    same("the notes", &notes(&record)?, &vec![gap(5, 10), skipped(None, 10), skipped(Some(5), 10)])
}

pub(super) async fn a_note_of_a_save_that_is_refused_is_not_kept<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("noted_in_vain")?;
    let (_, old) = claimed(&storage, &Claim::new(id.clone())).await?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    saved(&storage, &save(&id, &own, 10, None)).await?;
    let before = stored(&storage, &id).await?;
    for note in [gap(5, 9), skipped(None, 9)] {
        not_ahead(&storage, &save(&id, &own, 9, Some(note.clone()))).await?;
        storage.save(&save(&id, &old, 11, Some(note))).await?;
        same("the record afterwards", &stored(&storage, &id).await?, &before)?;
    }
    Ok(())
}

pub(super) async fn the_newest_notes_are_kept<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("noted_often")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let many = u32::try_from(AUDITED).unwrap_or(u32::MAX) + 3;
    for at in 1..=many {
        saved(&storage, &save(&id, &own, 2 * at, Some(gap(2 * at - 1, 2 * at)))).await?;
        saved(&storage, &save(&id, &own, 2 * at + 1, Some(skipped(None, 2 * at + 1)))).await?;
    }
    let record = stored(&storage, &id).await?;
    let mut expected: Vec<_> = (4..=many).map(|at| gap(2 * at - 1, 2 * at)).collect();
    expected.extend((4..=many).map(|at| skipped(None, 2 * at + 1)));
    same("the notes", &notes(&record)?, &expected)
}
