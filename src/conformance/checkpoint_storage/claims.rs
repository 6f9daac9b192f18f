//! Claims, deletes and lists.

use std::collections::BTreeSet;
use std::time::Duration;

use bson::Timestamp;

use super::{EVENT, Failed, claimed, fresh_id, id, saved, stored, time, token};
use crate::checkpoint::Kind;
use crate::conformance::report::{same, that};
use crate::ids::{Epoch, Fence, Owner, Ownership};
use crate::model::Fingerprint;
use crate::storage::{CheckpointStorage, Claim, ClaimOutcome, Save, StartPosition};

pub(super) async fn an_unknown_id_has_no_record<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("unknown")?;
    same("a record that was never made", &storage.read(&id).await?, &None)?;
    same("deleting it", &storage.delete(&id, None).await?, &false)?;
    let mut claim = Claim::new(id.clone());
    claim.expect = Some(Ownership { fence: Fence(1), owner: Owner::fresh() });
    claim.start = Some(StartPosition::new(time(10, 1)));
    same("a claim that expects an owner", &storage.claim(&claim).await?, &ClaimOutcome::Gone)?;
    same("the record afterwards", &storage.read(&id).await?, &None)
}

pub(super) async fn a_claim_makes_a_record_without_a_position<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("new")?;
    let (record, ownership) = claimed(&storage, &Claim::new(id.clone())).await?;
    same("the id", &record.id, &id)?;
    same("the position", &record.position, &None)?;
    same("the kind", &record.kind, &None)?;
    same("the epoch", &record.epoch, &None)?;
    same("clean", &record.clean, &false)?;
    that(record.claimed_at.is_some(), || "the record does not say when it was claimed".into())?;
    that(ownership.fence.0 > 0, || format!("the fence is {}", ownership.fence))?;
    same("the record read", &stored(&storage, &id).await?, &record)
}

pub(super) async fn the_first_start_is_stored_and_no_later_one<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let mut claim = Claim::new(fresh_id("start")?);
    let mut start = StartPosition::new(time(10, 1));
    start.pipeline = Some(Fingerprint("abc".into()));
    claim.start = Some(start);
    let (first, _) = claimed(&storage, &claim).await?;
    same("the position", &first.position, &Some(time(10, 1)))?;
    same("the kind", &first.kind, &Some(Kind::Start))?;
    same("the pipeline", &first.pipeline, &Some(Fingerprint("abc".into())))?;
    same("the cluster time", &first.cluster_time, &Some(Timestamp { time: 10, increment: 1 }))?;
    that(first.saved_at.is_some(), || "the record does not say when the start was stored".into())?;
    let Some(Epoch(epoch)) = first.epoch else { return Err(Failed("a stored start has no epoch".into())) };
    that(epoch > 0, || format!("the epoch is {epoch}"))?;

    for later in [time(9, 1), time(11, 1)] {
        let mut claim = Claim::new(claim.id.clone());
        claim.start = Some(StartPosition::new(later));
        let (second, _) = claimed(&storage, &claim).await?;
        same("the position", &second.position, &first.position)?;
        same("the epoch", &second.epoch, &first.epoch)?;
        same("the pipeline", &second.pipeline, &first.pipeline)?;
    }
    Ok(())
}

pub(super) async fn a_start_is_stored_later_if_nothing_is_stored<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let mut claim = Claim::new(fresh_id("later_start")?);
    claimed(&storage, &claim).await?;
    claim.start = Some(StartPosition::new(token(10, 1, EVENT)?));
    let (record, _) = claimed(&storage, &claim).await?;
    same("the position", &record.position, &Some(token(10, 1, EVENT)?))?;
    same("the kind", &record.kind, &Some(Kind::Start))?;
    that(record.epoch.is_some(), || "a stored start has no epoch".into())
}

pub(super) async fn a_claim_leaves_the_position_and_what_stands_beside_it<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("kept")?;
    let (_, first) = claimed(&storage, &Claim::new(id.clone())).await?;
    let mut save = Save::new(id.clone(), first.clone(), Epoch(7), token(10, 1, EVENT)?);
    save.pipeline = Some(Fingerprint("abc".into()));
    saved(&storage, &save).await?;
    let before = stored(&storage, &id).await?;
    let (after, second) = claimed(&storage, &Claim::new(id.clone())).await?;
    that(second.fence > first.fence, || format!("fence {} follows {}", second.fence, first.fence))?;
    let mut expected = before;
    expected.ownership = Some(second);
    expected.claimed_at = after.claimed_at;
    // Whether the save came behind the claim by the storage's clock is not this check's to say.
    expected.unclean_ends = after.unclean_ends;
    same("the record after the second claim", &after, &expected)?;
    same("the record read", &stored(&storage, &id).await?, &expected)
}

pub(super) async fn racing_claims_get_a_fence_each_and_one_start<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    const TASKS: u32 = 8;
    const CLAIMS: usize = 10;
    let id = fresh_id("race")?;
    let racers: Vec<_> = (1..=TASKS)
        .map(|racer| {
            let (storage, id) = (storage.clone(), id.clone());
            tokio::spawn(async move {
                let mut records = Vec::new();
                for _ in 0..CLAIMS {
                    let mut claim = Claim::new(id.clone());
                    claim.start = Some(StartPosition::new(time(racer, 1)));
                    records.push(claimed(&storage, &claim).await?);
                }
                Ok::<_, Failed>(records)
            })
        })
        .collect();
    let mut fences = BTreeSet::new();
    let mut starts = Vec::new();
    let mut last = None;
    for racer in racers {
        let records = racer.await.map_err(|error| Failed(format!("a claim panicked: {error}")))??;
        for (record, ownership) in records {
            let fence = ownership.fence;
            that(fences.insert(fence), || format!("fence {fence} was given twice"))?;
            if fences.last() == Some(&fence) {
                last = Some(ownership);
            }
            starts.push((record.position, record.epoch));
        }
    }
    that(starts.windows(2).all(|pair| pair[0] == pair[1]), || format!("the starts differ: {starts:?}"))?;
    let record = stored(&storage, &id).await?;
    same("the owner in the end", &record.ownership, &last)?;
    same("the start in the end", &Some(&(record.position, record.epoch)), &starts.first())
}

pub(super) async fn a_fence_is_never_given_twice_not_even_after_a_delete<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("fences")?;
    let mut last = Fence(0);
    for round in 0..3 {
        for _ in 0..3 {
            let (_, Ownership { fence, .. }) = claimed(&storage, &Claim::new(id.clone())).await?;
            that(fence > last, || format!("fence {fence} follows {last}, {round} deletes before it"))?;
            last = fence;
        }
        same("deleting the record", &storage.delete(&id, None).await?, &true)?;
        // More than one for each claim: a storage may count from its clock, in milliseconds.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

pub(super) async fn a_claim_may_expect_its_predecessor<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let id = fresh_id("expect")?;
    let (_, first) = claimed(&storage, &Claim::new(id.clone())).await?;
    saved(&storage, &Save::new(id.clone(), first.clone(), Epoch(7), time(10, 1))).await?;
    let expecting = |ownership: &Ownership| {
        let mut claim = Claim::new(id.clone());
        claim.expect = Some(ownership.clone());
        claim
    };
    let (now, second) = claimed(&storage, &expecting(&first)).await?;
    that(second.fence > first.fence, || format!("fence {} follows {}", second.fence, first.fence))?;
    same("the position", &now.position, &Some(time(10, 1)))?;

    let superseded = ClaimOutcome::Superseded { owner: Some(second.owner.clone()), since: now.claimed_at };
    let same_fence = Ownership { fence: second.fence, owner: first.owner.clone() };
    let same_owner = Ownership { fence: first.fence, owner: second.owner.clone() };
    for (what, ownership) in
        [("the owner before", &first), ("another owner's fence", &same_fence), ("an older fence", &same_owner)]
    {
        let answer = storage.claim(&expecting(ownership)).await?;
        same(&format!("a claim that expects {what}"), &answer, &superseded)?;
        same("the record afterwards", &stored(&storage, &id).await?, &now)?;
    }
    storage.delete(&id, None).await?;
    let answer = storage.claim(&expecting(&second)).await?;
    same("a claim that expects the owner of a deleted record", &answer, &ClaimOutcome::Gone)?;
    same("the record afterwards", &storage.read(&id).await?, &None)
}

pub(super) async fn a_claim_whose_answer_was_lost_can_be_made_again<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("again")?;
    let (_, first) = claimed(&storage, &Claim::new(id.clone())).await?;
    let mut claim = Claim::new(id.clone());
    claim.expect = Some(first);
    claimed(&storage, &claim).await?;
    let (record, _) = claimed(&storage, &claim).await?;
    same("the record read", &stored(&storage, &id).await?, &record)
}

pub(super) async fn an_owner_deletes_its_own_record_only_and_a_hand_any<S: CheckpointStorage>(
    storage: S,
) -> Result<(), Failed> {
    let id = fresh_id("delete")?;
    let (_, old) = claimed(&storage, &Claim::new(id.clone())).await?;
    let (record, own) = claimed(&storage, &Claim::new(id.clone())).await?;
    let same_fence = Ownership { fence: own.fence, owner: Owner::fresh() };
    let same_owner = Ownership { fence: old.fence, owner: own.owner.clone() };
    for other in [&old, &same_fence, &same_owner] {
        same(&format!("deleting it as {other:?}"), &storage.delete(&id, Some(other)).await?, &false)?;
        same("the record afterwards", &stored(&storage, &id).await?, &record)?;
    }
    same("deleting it as its owner", &storage.delete(&id, Some(&own)).await?, &true)?;
    same("the record afterwards", &storage.read(&id).await?, &None)?;
    same("deleting it again", &storage.delete(&id, Some(&own)).await?, &false)?;
    claimed(&storage, &Claim::new(id.clone())).await?;
    same("deleting it by hand", &storage.delete(&id, None).await?, &true)?;
    same("the record afterwards", &storage.read(&id).await?, &None)
}

pub(super) async fn ids_are_listed_in_order<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let prefix = fresh_id("list")?;
    let ids: Vec<_> = ["b", "ä", "Z", "a", "a_1", "1"].iter().map(|name| format!("{prefix}_{name}")).collect();
    for name in &ids {
        claimed(&storage, &Claim::new(id(name)?)).await?;
    }
    storage.delete(&id(&ids[3])?, None).await?;
    let mut expected = ids.clone();
    expected.remove(3);
    expected.sort();
    let mut found = storage.list().await?;
    found.retain(|name| name.starts_with(prefix.as_str()));
    same("the ids", &found, &expected)
}

pub(super) async fn ids_are_compared_exactly<S: CheckpointStorage>(storage: S) -> Result<(), Failed> {
    let prefix = fresh_id("exact")?;
    for (place, name) in ["$a", "$A", "a.b", "a", "A", "a "].into_iter().enumerate() {
        let id = id(&format!("{name}{prefix}"))?;
        let mut claim = Claim::new(id.clone());
        let start = time(10, u32::try_from(place).unwrap_or_default());
        claim.start = Some(StartPosition::new(start.clone()));
        claimed(&storage, &claim).await?;
        same(&format!("the start of {id}"), &stored(&storage, &id).await?.position, &Some(start))?;
    }
    Ok(())
}
