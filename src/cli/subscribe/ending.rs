//! The last word of `mongosub subscribe`: one sentence that says why it ends, at which position and what to do, and the
//! exit code. It decides nothing.

use crate::checkpoint::Checkpoint;
use crate::cli::stop::INTERRUPTED;
use crate::error::{SubscribeError, SubscriptionError};
use crate::reason::Reason;

/// The end.
#[derive(Debug, PartialEq)]
pub(super) struct Ending {
    pub(super) sentence: String,
    pub(super) exit_code: u8,
}

/// Why the command ends a subscription.
#[derive(Debug, Clone, Copy)]
pub(super) enum Why {
    /// It was asked to, by this signal.
    Signal(&'static str),
    /// Nobody reads its lines any more.
    ReaderGone,
}

impl Ending {
    /// What was typed cannot be used.
    pub(super) fn usage(why: impl Into<String>) -> Self {
        Self { sentence: why.into(), exit_code: 2 }
    }

    /// Something around it fails.
    pub(super) fn failed(why: impl Into<String>) -> Self {
        Self { sentence: why.into(), exit_code: 1 }
    }

    /// It has not started.
    pub(super) fn not_started(error: &SubscribeError) -> Self {
        let advice = error.reason().and_then(advice).unwrap_or_default();
        Self { sentence: format!("{error}{advice}"), exit_code: error.exit_code() }
    }

    /// It was ended before it had started.
    pub(super) fn before_start(id: &str, why: Why) -> Self {
        Self { sentence: format!("subscription {id}: {why} before it had started; nothing was written"), exit_code: 0 }
    }

    /// It has stalled or stopped by itself.
    pub(super) fn of_itself(id: &str, reason: &Reason, stored: Option<&Checkpoint>) -> Self {
        let advice = advice(reason).unwrap_or_default();
        let stored = stored.map_or_else(|| "no position is stored".into(), |at| format!("stored is {at}"));
        Self {
            sentence: format!("subscription {id} has ended: {reason}{advice} ({stored})"),
            exit_code: reason.exit_code(),
        }
    }

    /// It was shut down, with this answer.
    pub(super) fn shut_down(id: &str, why: Why, answer: Result<Option<Checkpoint>, SubscriptionError>) -> Self {
        match answer {
            Ok(Some(stored)) => Self {
                sentence: format!(
                    "subscription {id} has ended: {why}; what was written up to {stored} is stored, and the same \
                     command goes on behind it"
                ),
                exit_code: 0,
            },
            Ok(None) => Self {
                sentence: format!(
                    "subscription {id} has ended: {why}; no position is stored, and the same command begins where \
                     its --start says"
                ),
                exit_code: 0,
            },
            Err(SubscriptionError::Ended { reason, .. }) => Self::of_itself(id, &reason, None),
            Err(error) => Self {
                sentence: format!(
                    "{error} ({why}); nothing is lost: what lies behind the stored position is written again by the \
                     same command"
                ),
                exit_code: 1,
            },
        }
    }

    /// It was told to stop twice.
    pub(super) fn at_once(id: &str, signal: &str) -> Self {
        Self {
            sentence: format!(
                "subscription {id} was ended at once by a second signal ({signal}); the last line may be cut off, and \
                 what is not stored is written again by the same command"
            ),
            exit_code: INTERRUPTED,
        }
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Signal(name) => write!(f, "it was asked to stop ({name})"),
            Self::ReaderGone => f.write_str("whoever read its output has gone"),
        }
    }
}

/// What to do about it with this command, where the reason's own text speaks of the library or says nothing.
fn advice(reason: &Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::HistoryLost { .. } => "; with this command: --always --start now, once, or --always --start earliest",
        Reason::SourceChanged { .. } | Reason::BadPosition { .. } => {
            "; where that is meant: --always with a --start of your own, once"
        }
        Reason::EventTooLarge { .. } => "; a --pipeline whose $project leaves out its large fields gets past it",
        Reason::ImageMissing { .. } => "; with this command: when-available instead of required",
        Reason::Superseded { .. } => "; stop the other one, or give one of the two an --id of its own",
        Reason::NoStartPosition => "; with this command: --start, or --allow-unrecorded-start",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SubscriptionId;
    use bson::Timestamp;

    const ID: &str = "orders_v1";

    fn at() -> Checkpoint {
        Checkpoint::Time(Timestamp { time: 5, increment: 1 })
    }

    #[test]
    fn a_shutdown_says_what_is_stored_and_ends_with_0() {
        for why in [Why::Signal("SIGTERM"), Why::ReaderGone] {
            let ending = Ending::shut_down(ID, why, Ok(Some(at())));
            assert_eq!(ending.exit_code, 0);
            assert!(ending.sentence.contains("5.1") && ending.sentence.contains(&why.to_string()), "{ending:?}");
            let ending = Ending::shut_down(ID, why, Ok(None));
            assert!(ending.exit_code == 0 && ending.sentence.contains("no position is stored"), "{ending:?}");
        }
    }

    #[test]
    fn a_position_that_was_not_stored_is_no_clean_end() {
        let id = SubscriptionId::new(ID).unwrap();
        let last = Reason::StorageUnavailable { message: "gone".into() };
        let error = SubscriptionError::NotSaved { id: id.clone(), position: at(), last };
        let ending = Ending::shut_down(ID, Why::ReaderGone, Err(error));
        assert!(ending.exit_code == 1 && ending.sentence.contains("could not store 5.1"), "{ending:?}");
        let error = SubscriptionError::Ended { id, reason: Reason::Deleted };
        assert_eq!(Ending::shut_down(ID, Why::ReaderGone, Err(error)).exit_code, 3);
    }

    #[test]
    fn an_end_of_itself_has_the_exit_code_of_its_reason_and_says_what_to_do() {
        let lost = Reason::HistoryLost { position: at(), oldest: None };
        let ending = Ending::of_itself(ID, &lost, Some(&at()));
        assert_eq!(ending.exit_code, 3);
        assert!(
            ending.sentence.contains("--always --start now") && ending.sentence.contains("stored is 5.1"),
            "{ending:?}"
        );
        let id = SubscriptionId::new(ID).unwrap();
        let ending = Ending::not_started(&SubscribeError::Refused { id, reason: Reason::NoStartPosition });
        assert!(ending.exit_code == 3 && ending.sentence.contains("--allow-unrecorded-start"), "{ending:?}");
        assert_eq!(Ending::at_once(ID, "SIGINT").exit_code, 130);
    }
}
