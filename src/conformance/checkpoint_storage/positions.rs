//! The order of positions, as saves see it.

use super::{EVENT, Failed, LATER_EVENT, QUIET, claimed, fresh_id, not_ahead, saved, stored, time, token};
use crate::checkpoint::Checkpoint;
use crate::conformance::report::same;
use crate::ids::Epoch;
use crate::storage::{CheckpointStorage, Claim, Save};

pub(super) async fn positions_of_one_epoch_are_in_order<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let ascending = [
        time(9, u32::MAX),
        token(9, u32::MAX, EVENT)?,
        time(10, 1),
        token(10, 1, QUIET)?,
        token(10, 1, EVENT)?,
        token(10, 1, LATER_EVENT)?,
        time(10, 2),
        token(10, 2, EVENT)?,
        time(10, 16),
        time(0x8000_0000, 1),
        token(0x8000_0000, 0x8000_0000, QUIET)?,
    ];
    let id = fresh_id("order")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let mut epoch = 0;
    for (place, later) in ascending.iter().enumerate() {
        for earlier in &ascending[..place] {
            epoch += 1;
            let save = |position: &Checkpoint| Save::new(id.clone(), own.clone(), Epoch(epoch), position.clone());
            saved(&storage, &save(earlier)).await?;
            saved(&storage, &save(later)).await?;
            not_ahead(&storage, &save(earlier)).await?;
            same("the position", &stored(&storage, &id).await?.position.as_ref(), &Some(later))?;
        }
    }
    Ok(())
}

pub(super) async fn an_epoch_beats_every_position_of_an_older_one<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("epochs")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let late = [time(20, 1), token(20, 1, EVENT)?, Checkpoint::Text("late".into())];
    let early = [time(10, 1), token(10, 1, EVENT)?, Checkpoint::Text("early".into())];
    let mut epoch = 0;
    for later in &late {
        for earlier in &early {
            epoch += 2;
            let save =
                |epoch, position: &Checkpoint| Save::new(id.clone(), own.clone(), Epoch(epoch), position.clone());
            saved(&storage, &save(epoch, later)).await?;
            saved(&storage, &save(epoch + 1, earlier)).await?;
            let record = stored(&storage, &id).await?;
            same("the position", &record.position.as_ref(), &Some(earlier))?;
            same("the epoch", &record.epoch, &Some(Epoch(epoch + 1)))?;
            not_ahead(&storage, &save(epoch, later)).await?;
            same("the record afterwards", &stored(&storage, &id).await?, &record)?;
        }
    }
    Ok(())
}

pub(super) async fn text_has_no_order<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("text")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    // Also such text as another program might mean a token by.
    let hex = format!("82{:08X}{:08X}{QUIET}", 10, 1);
    for text in ["b", "a", "a", "b", "", &hex, "position:42"] {
        let position = Checkpoint::Text(text.into());
        saved(&storage, &Save::new(id.clone(), own.clone(), Epoch(1), position.clone())).await?;
        same("the position", &stored(&storage, &id).await?.position, &Some(position))?;
    }
    Ok(())
}
