//! Saves: who may, and what is stored.

use bson::Timestamp;

use super::{EVENT, Failed, QUIET, claimed, fresh_id, id, not_ahead, saved, stored, time, token};
use crate::checkpoint::{Checkpoint, Kind};
use crate::conformance::report::{same, that};
use crate::ids::{Epoch, Fence, Namespace, Owner, Ownership};
use crate::model::{Fingerprint, Scope};
use crate::storage::{CheckpointStorage, Claim, Save, SaveOutcome, Source, StartPosition};

pub(super) async fn a_save_without_a_claim_is_gone_and_makes_nothing<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("unclaimed")?;
    let nobody = Ownership { fence: Fence(1), owner: Owner::fresh() };
    let save = Save::new(id.clone(), nobody, Epoch(1), time(10, 1));
    same("the answer", &storage.save(&save).await?, &SaveOutcome::Gone)?;
    same("the record afterwards", &storage.read(&id).await?, &None)?;
    that(!storage.list().await?.contains(&id.to_string()), || "the id is listed".into())
}

pub(super) async fn a_save_after_a_delete_is_gone_and_makes_nothing<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("deleted")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let save = Save::new(id.clone(), own, Epoch(1), time(10, 1));
    saved(&storage, &save).await?;
    storage.delete(&id, None).await?;
    same("the answer", &storage.save(&save).await?, &SaveOutcome::Gone)?;
    same("the record afterwards", &storage.read(&id).await?, &None)
}

pub(super) async fn a_save_needs_the_fence_and_the_owner<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("fenced")?;
    let (_, old) = claimed(&storage, &Claim::new(id.clone())).await?;
    saved(&storage, &Save::new(id.clone(), old.clone(), Epoch(1), time(10, 1))).await?;
    let (record, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let superseded = SaveOutcome::Superseded { owner: Some(own.owner.clone()), since: record.claimed_at };
    let others = [
        ("the owner before", old.clone()),
        ("another owner at the same fence", Ownership { fence: own.fence, owner: Owner::fresh() }),
        ("the same owner at an older fence", Ownership { fence: old.fence, owner: own.owner.clone() }),
        ("the same owner at a newer fence", Ownership { fence: Fence(own.fence.0 + 1), owner: own.owner.clone() }),
    ];
    for (who, other) in others {
        // Ahead, the same, and behind: who may not save is told so, whatever it is.
        for position in [time(11, 1), time(10, 1), time(9, 1)] {
            let save = Save::new(id.clone(), other.clone(), Epoch(2), position);
            same(&format!("a save by {who}"), &storage.save(&save).await?, &superseded)?;
            same("the record afterwards", &stored(&storage, &id).await?, &record)?;
        }
    }
    saved(&storage, &Save::new(id.clone(), own, Epoch(1), time(11, 1))).await?;
    same("the position", &stored(&storage, &id).await?.position, &Some(time(11, 1)))
}

pub(super) async fn a_save_goes_forward_and_repeats_but_never_back<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let mut claim = Claim::new(fresh_id("forward")?);
    claim.start = Some(StartPosition::new(time(10, 1)));
    let (record, own) = claimed(&storage, &claim).await?;
    let Some(epoch) = record.epoch else { return Err(Failed("a stored start has no epoch".into())) };
    let save = |position: &Checkpoint| Save::new(claim.id.clone(), own.clone(), epoch, position.clone());
    not_ahead(&storage, &save(&time(9, 1))).await?;
    same("the record afterwards", &stored(&storage, &claim.id).await?, &record)?;
    let positions = [time(10, 1), token(10, 1, EVENT)?, token(10, 2, EVENT)?, token(12, 1, QUIET)?];
    for (place, position) in positions.iter().enumerate() {
        saved(&storage, &save(position)).await?;
        saved(&storage, &save(position)).await?;
        let record = stored(&storage, &claim.id).await?;
        same("the position", &record.position.as_ref(), &Some(position))?;
        same("the epoch", &record.epoch, &Some(epoch))?;
        for earlier in &positions[..place] {
            not_ahead(&storage, &save(earlier)).await?;
            same("the record afterwards", &stored(&storage, &claim.id).await?, &record)?;
        }
    }
    Ok(())
}

pub(super) async fn a_save_says_whether_the_run_ended_cleanly_and_a_claim_forgets_it<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("clean")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let mut save = Save::new(id.clone(), own, Epoch(1), time(10, 1));
    saved(&storage, &save).await?;
    same("clean after a save", &stored(&storage, &id).await?.clean, &false)?;
    save.clean = true;
    saved(&storage, &save).await?;
    same("clean after a clean end, at the same position", &stored(&storage, &id).await?.clean, &true)?;
    save.position = time(11, 1);
    save.clean = false;
    saved(&storage, &save).await?;
    same("clean after a further save", &stored(&storage, &id).await?.clean, &false)?;
    save.clean = true;
    saved(&storage, &save).await?;
    same("clean after a clean end", &stored(&storage, &id).await?.clean, &true)?;
    let (record, _) = claimed(&storage, &Claim::new(id.clone())).await?;
    same("clean in the answer to a claim", &record.clean, &false)?;
    same("clean after a claim", &stored(&storage, &id).await?.clean, &false)
}

pub(super) async fn what_stands_beside_a_position_is_stored_with_it<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("beside")?;
    let (claim, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let scopes = [
        Scope::Collection(Namespace::new("shop", "orders.paid")),
        Scope::Database { db: "shop".into() },
        Scope::Deployment,
    ];
    let mut second = 10;
    for kind in [Kind::Start, Kind::Event, Kind::Quiet, Kind::Invalidate] {
        for scope in &scopes {
            second += 1;
            let mut save = Save::new(id.clone(), own.clone(), Epoch(1), token(second, 1, EVENT)?);
            save.kind = kind;
            save.pipeline = Some(Fingerprint(format!("{second:064x}")));
            let mut source = Source::new(scope.clone(), Some("AB".repeat(16)), Some("rs0".into()));
            source.last_event = (kind == Kind::Quiet).then(|| token(5, 1, EVENT)).transpose()?;
            save.source = Some(source);
            let SaveOutcome::Saved { at } = storage.save(&save).await? else {
                return Err(Failed(format!("{} should be stored", save.position)));
            };
            let record = stored(&storage, &id).await?;
            same("the kind", &record.kind, &Some(kind))?;
            same("the pipeline", &record.pipeline, &save.pipeline)?;
            same("the source", &record.source, &save.source)?;
            same("the cluster time", &record.cluster_time, &Some(Timestamp { time: second, increment: 1 }))?;
            that(at.is_some(), || "the answer does not say when it was stored".into())?;
            same("when it was stored", &record.saved_at, &at)?;
            that(record.saved_at >= claim.claimed_at, || "it was stored before it was claimed".into())?;
        }
    }
    // What is not known of a new position must not be left over from the old one.
    saved(&storage, &Save::new(id.clone(), own.clone(), Epoch(2), Checkpoint::Text("line 17".into()))).await?;
    let record = stored(&storage, &id).await?;
    same("the pipeline", &record.pipeline, &None)?;
    same("the source", &record.source, &None)?;
    same("the cluster time", &record.cluster_time, &None)?;
    same("the owner", &record.ownership, &Some(own))?;
    same("when it was claimed", &record.claimed_at, &claim.claimed_at)
}

pub(super) async fn a_write_is_read_at_once<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("at_once")?;
    let (_, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let other = storage.clone();
    for increment in 1..=30 {
        let position = token(10, increment, EVENT)?;
        saved(&storage, &Save::new(id.clone(), own.clone(), Epoch(1), position.clone())).await?;
        same("the position read", &stored(&other, &id).await?.position, &Some(position))?;
    }
    Ok(())
}

pub(super) async fn values_are_taken_literally<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let mut claim = Claim::new(id(&format!("$$ROOT{}", fresh_id("literal")?))?);
    claim.owner = Owner::new(format!("$owner.{}", Owner::fresh()));
    let mut start = StartPosition::new(Checkpoint::Text("$start".into()));
    start.pipeline = Some(Fingerprint("$$NOW".into()));
    claim.start = Some(start);
    let (record, own) = claimed(&storage, &claim).await?;
    same("the start", &record.position, &Some(Checkpoint::Text("$start".into())))?;
    same("the pipeline", &record.pipeline, &Some(Fingerprint("$$NOW".into())))?;

    let mut save = Save::new(claim.id.clone(), own.clone(), Epoch(i64::MAX >> 2), Checkpoint::Text("$_id".into()));
    save.pipeline = Some(Fingerprint("$pipeline".into()));
    save.source = Some(Source::new(Scope::Collection(Namespace::new("$db", "$coll")), None, Some("$set".into())));
    saved(&storage, &save).await?;
    let record = stored(&storage, &claim.id).await?;
    same("the position", &record.position, &Some(save.position))?;
    same("the pipeline", &record.pipeline, &save.pipeline)?;
    same("the source", &record.source, &save.source)?;
    same("the owner", &record.ownership, &Some(own))
}
