//! The settings of a subscription: what was set, what is defaulted, and what cannot be used.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use crate::dead_letter::DynDeadLetterStorage;
use crate::error::SubscribeError;
use crate::on_failure::{OnFailure, Then};
use crate::run::changes::{OnHistoryLost, OnInvalidate};
use crate::run::policy::{SaveMode, SavePolicy};

/// What was set of a subscription's settings; the rest is defaulted. `DurableSubscriptions` holds the defaults of its
/// subscriptions, and each `subscribe` can override them.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// When a storable position is stored. Default: after every event.
    pub save: Option<SavePolicy>,
    /// Whether the next event waits for a wanted save. Default: [`SaveMode::WriteBehind`].
    pub save_mode: Option<SaveMode>,
    /// How often reads without events are stored; `Some(None)` is never. Default: 60 s.
    #[allow(clippy::option_option, reason = "not set, and set to never, are two things")]
    pub quiet_interval: Option<Option<Duration>>,
    /// Whether to start though no start position can be recorded. Default: false.
    pub start_when_no_start_position_can_be_recorded: Option<bool>,
    /// How long `subscribe` retries what can heal. Default: 60 s.
    pub start_timeout: Option<Duration>,
    /// How long one call of the handler may take; `Some(None)` is for ever. Default: for ever.
    #[allow(clippy::option_option, reason = "not set, and set to never, are two things")]
    pub handler_timeout: Option<Option<Duration>>,
    /// How long a pause or shutdown waits for the event in hand. Default: 30 s.
    pub shutdown_grace: Option<Duration>,
    /// What follows when the handler fails. Default: retries for ever, 100 ms to 30 s apart.
    pub on_failure: Option<OnFailure>,
    /// Where dead letters are kept. Default: nowhere.
    pub dead_letters: Option<Arc<dyn DynDeadLetterStorage>>,
    /// Whether later events of a document are parked behind its dead letters. Default: true.
    pub park_later_events: Option<bool>,
    /// What follows when what it watches was dropped or renamed. Default: [`OnInvalidate::Continue`].
    pub on_invalidate: Option<OnInvalidate>,
    /// What follows when the source no longer has the changes behind the position. Default: [`OnHistoryLost::Stall`].
    pub on_history_lost: Option<OnHistoryLost>,
}

/// The settings in force.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) save: SavePolicy,
    pub(crate) save_mode: SaveMode,
    pub(crate) quiet_interval: Option<Duration>,
    pub(crate) start_unrecorded: bool,
    pub(crate) start_timeout: Duration,
    pub(crate) handler_timeout: Option<Duration>,
    pub(crate) shutdown_grace: Duration,
    pub(crate) on_failure: OnFailure,
    pub(crate) dead_letters: Option<Arc<dyn DynDeadLetterStorage>>,
    pub(crate) park_later_events: bool,
    pub(crate) on_invalidate: OnInvalidate,
    pub(crate) on_history_lost: OnHistoryLost,
}

/// As good as for ever: what is longer cannot be added to a clock.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Options {
    /// The settings in force, or the first one that cannot be used.
    pub(crate) fn settings(&self) -> Result<Settings, SubscribeError> {
        let time = |set: Option<Duration>, default| set.map_or(Duration::from_secs(default), |set| set.min(FOREVER));
        let settings = Settings {
            save: self.save.clone().unwrap_or(SavePolicy::Every(1)),
            save_mode: self.save_mode.unwrap_or_default(),
            quiet_interval: self.quiet_interval.map_or(Some(Duration::from_secs(60)), |set| Some(set?.min(FOREVER))),
            start_unrecorded: self.start_when_no_start_position_can_be_recorded.unwrap_or(false),
            start_timeout: time(self.start_timeout, 60),
            handler_timeout: self.handler_timeout.and_then(|set| Some(set?.min(FOREVER))),
            shutdown_grace: time(self.shutdown_grace, 30),
            on_failure: self.on_failure.clone().unwrap_or_default().at_most(FOREVER),
            dead_letters: self.dead_letters.clone(),
            park_later_events: self.park_later_events.unwrap_or(true),
            on_invalidate: self.on_invalidate.unwrap_or_default(),
            on_history_lost: self.on_history_lost.clone().unwrap_or_default(),
        };
        let refuse =
            |field: &'static str, message: &str| Err(SubscribeError::Config { field, message: message.into() });
        if matches!(settings.save, SavePolicy::Every(0)) {
            return refuse("save_every", "0 would never store an event's position; 1 stores every one");
        }
        if settings.quiet_interval == Some(Duration::ZERO) {
            return refuse(
                "save_quiet_position_every",
                "0 s is no interval; use never_save_quiet_position() to turn it off",
            );
        }
        if settings.handler_timeout == Some(Duration::ZERO) {
            return refuse("handler_timeout", "0 s would fail every attempt");
        }
        if settings.start_timeout.is_zero() {
            return refuse("start_timeout", "0 s leaves no time to open the cursor");
        }
        if let Some(wrong) = settings.on_failure.wrong() {
            return refuse("on_failure", wrong);
        }
        if settings.dead_letters.is_none()
            && let Some((_, Then::DeadLetter)) = settings.on_failure.cap()
        {
            return refuse("on_failure", "Then::DeadLetter needs a storage: set .dead_letters(storage)");
        }
        Ok(settings)
    }

    /// Every effective setting, and whether it was defaulted: for the one line at the start.
    pub(crate) fn describe(&self, settings: &Settings) -> String {
        let mut line = String::new();
        let mut say = |name: &str, value: &dyn fmt::Debug, set: bool| {
            let separator = if line.is_empty() { "" } else { ", " };
            let default = if set { "" } else { " (default)" };
            // Writing to a String cannot fail.
            let _ = write!(line, "{separator}{name}={value:?}{default}");
        };
        say("save", &settings.save, self.save.is_some());
        say("save_mode", &settings.save_mode, self.save_mode.is_some());
        match settings.quiet_interval {
            Some(interval) => say("quiet_interval", &interval, self.quiet_interval.is_some()),
            None => say("quiet_interval", &"never", true),
        }
        say(
            "start_when_no_start_position_can_be_recorded",
            &settings.start_unrecorded,
            self.start_when_no_start_position_can_be_recorded.is_some(),
        );
        say("start_timeout", &settings.start_timeout, self.start_timeout.is_some());
        match settings.handler_timeout {
            Some(limit) => say("handler_timeout", &limit, true),
            None => say("handler_timeout", &"never", self.handler_timeout.is_some()),
        }
        say("shutdown_grace", &settings.shutdown_grace, self.shutdown_grace.is_some());
        say("on_failure", &settings.on_failure, self.on_failure.is_some());
        match &settings.dead_letters {
            Some(storage) => say("dead_letters", storage, true),
            None => say("dead_letters", &"nowhere", false),
        }
        say("park_later_events", &settings.park_later_events, self.park_later_events.is_some());
        say("on_invalidate", &settings.on_invalidate, self.on_invalidate.is_some());
        say("on_history_lost", &settings.on_history_lost, self.on_history_lost.is_some());
        line
    }
}

impl Settings {
    /// Refuses what cannot be had where positions are stored in transactions with the handler's effects.
    pub(crate) fn fit_for_transactions(&self, held: bool) -> Result<(), SubscribeError> {
        let refuse = |field, message: &str| Err(SubscribeError::Config { field, message: message.into() });
        if let SavePolicy::When(_) = self.save {
            return refuse(
                "save_when",
                "in a transaction the position is stored with the effects; save_every(n) says how many events go together",
            );
        }
        if held {
            return refuse(
                "hold",
                "in a transaction the position is stored with the effects, and nothing is held back",
            );
        }
        Ok(())
    }

    /// How many events go into one transaction.
    pub(crate) fn events_in_a_transaction(&self) -> usize {
        match self.save {
            SavePolicy::Every(events) => usize::try_from(events).unwrap_or(usize::MAX),
            SavePolicy::When(_) => 1,
        }
    }

    /// Settings that can be used and are likely a mistake.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(interval) = self.quiet_interval
            && interval > DAY
        {
            warnings.push(format!(
                "save_quiet_position_every is {} h: a quiet subscription can lose its place in the oplog meanwhile",
                interval.as_secs() / 3600
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(options: &Options) -> &'static str {
        match options.settings() {
            Err(SubscribeError::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_setting_that_cannot_be_used_is_refused_by_name() {
        let zero = Some(Duration::ZERO);
        assert_eq!(refused(&Options { save: Some(SavePolicy::Every(0)), ..Options::default() }), "save_every");
        assert_eq!(refused(&Options { quiet_interval: Some(zero), ..Options::default() }), "save_quiet_position_every");
        assert_eq!(refused(&Options { handler_timeout: Some(zero), ..Options::default() }), "handler_timeout");
        assert_eq!(refused(&Options { start_timeout: zero, ..Options::default() }), "start_timeout");
        let backoff = OnFailure::default().backoff(Duration::from_secs(2), Duration::from_secs(1));
        assert_eq!(refused(&Options { on_failure: Some(backoff), ..Options::default() }), "on_failure");
    }

    #[test]
    fn the_line_names_every_setting_and_what_was_defaulted() {
        let options = Options { save: Some(SavePolicy::Every(10)), quiet_interval: Some(None), ..Options::default() };
        let line = options.describe(&options.settings().unwrap());
        insta::assert_snapshot!(line, @r#"save=every 10 events, save_mode=WriteBehind (default), quiet_interval="never", start_when_no_start_position_can_be_recorded=false (default), start_timeout=60s (default), handler_timeout="never" (default), shutdown_grace=30s (default), on_failure=retry for ever after 100ms to 30s (default), dead_letters="nowhere" (default), park_later_events=true (default), on_invalidate=Continue (default), on_history_lost=Stall (default)"#);
    }

    #[test]
    fn an_interval_above_a_day_is_warned_about() {
        let options = Options { quiet_interval: Some(Some(DAY * 2)), ..Options::default() };
        assert_eq!(options.settings().unwrap().warnings().len(), 1);
        assert!(Options::default().settings().unwrap().warnings().is_empty());
    }
}
