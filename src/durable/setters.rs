//! The setters of [`Options`](crate::Options), written once for the wrapper's defaults and the action's overrides.

macro_rules! option_setters {
    () => {
        /// Stores the position after every n settled events. Default: 1. After a kill, up to n events more come again.
        /// Quiet saves, pause, shutdown and `drained` store every settled event, whatever n is.
        pub fn save_every(mut self, events: u32) -> Self {
            self.options.save = Some(SavePolicy::Every(events));
            self
        }

        /// Stores the position when the predicate says so; it is asked once for each settled event, after the
        /// handler. No write of any kind passes an event for which it said no, until it says yes for a later one: after
        /// a kill, everything since it last said yes comes again. For handlers that buffer; [the guide](crate::guide)
        /// has one.
        pub fn save_when(mut self, accepts: impl Fn(&Delivery) -> bool + Send + Sync + 'static) -> Self {
            self.options.save = Some(SavePolicy::When(Arc::new(accepts)));
            self
        }

        /// Whether the next event waits for a wanted save. Default: [`SaveMode::WriteBehind`], in which what was
        /// settled during the last write comes again after a kill.
        pub fn save_mode(mut self, mode: SaveMode) -> Self {
            self.options.save_mode = Some(mode);
            self
        }

        /// How often the position is stored when no save of an event has stored it: quiet reads, and events that
        /// `save_every` has not counted out yet. Default: 60 s. It must be well below the time the oplog reaches back,
        /// or a filter that matches nothing for long loses its place, though nothing was missed.
        pub fn save_quiet_position_every(mut self, interval: Duration) -> Self {
            self.options.quiet_interval = Some(Some(interval));
            self
        }

        /// Stores positions of events alone, also at a pause and at the end. A subscription that is quiet for longer
        /// than the oplog reaches back then ends with `HistoryLost` at its next start.
        pub fn never_save_quiet_position(mut self) -> Self {
            self.options.quiet_interval = Some(None);
            self
        }

        /// Starts though no start position can be recorded, instead of refusing with `NoStartPosition`. Default:
        /// false. The start is then taken from the opening reply; from a server that sends no time nothing is stored
        /// until the first settled event is, and what changes before that is lost if it pauses or ends before.
        pub fn start_when_no_start_position_can_be_recorded(mut self, start: bool) -> Self {
            self.options.start_when_no_start_position_can_be_recorded = Some(start);
            self
        }

        /// How long `subscribe` retries what can heal before it gives up. Default: 60 s. A start that was stored by
        /// then stays stored, and the next `subscribe` goes on from it.
        pub fn start_timeout(mut self, timeout: Duration) -> Self {
            self.options.start_timeout = Some(timeout);
            self
        }

        /// How long one call of the handler may take. Default: for ever, with a warning every minute. A call that
        /// takes longer is a failed attempt: its future is dropped in the middle and the event is tried again.
        pub fn handler_timeout(mut self, timeout: Duration) -> Self {
            self.options.handler_timeout = Some(Some(timeout));
            self
        }

        /// How long a pause or shutdown waits for the event in hand. Default: 30 s. Then its call is dropped, and the
        /// event comes again.
        pub fn shutdown_grace(mut self, grace: Duration) -> Self {
            self.options.shutdown_grace = Some(grace);
            self
        }

        /// What follows when the handler fails for an event. Default: it is tried again for ever, 100 ms to 30 s apart,
        /// and everything behind it waits as long. [`OnFailure`] says what is lost otherwise.
        pub fn on_failure(mut self, policy: OnFailure) -> Self {
            self.options.on_failure = Some(policy);
            self
        }

        /// Where dead letters are kept: the events that [`Then::DeadLetter`](crate::Then) and
        /// [`Failure::dead_letter`](crate::Failure::dead_letter) take out of the way, and those parked behind them.
        /// Default: nowhere. A scope around the storage's collection leaves it out. Keep the storage as long as there
        /// are letters in it: without it a document's later events are no longer parked.
        pub fn dead_letters(mut self, storage: impl DeadLetterStorage) -> Self {
            self.options.dead_letters = Some(Arc::new(storage));
            self
        }

        /// Whether later events of a document wait behind its dead letters, in order, until these are retried or
        /// evicted. Default: true. Without it they are delivered, and a retry hands out an event that is older than
        /// what the handler has seen of the document.
        pub fn park_later_events(mut self, park: bool) -> Self {
            self.options.park_later_events = Some(park);
            self
        }

        /// What follows when what it watches was dropped or renamed, once everything up to the `invalidate` is
        /// delivered. Default: [`OnInvalidate::Continue`], which goes on with whatever bears the name afterwards.
        pub fn on_invalidate(mut self, on_invalidate: OnInvalidate) -> Self {
            self.options.on_invalidate = Some(on_invalidate);
            self
        }

        /// What follows when the source no longer has the changes behind the position, at a start and in a run. Default:
        /// [`OnHistoryLost::Stall`], which leaves it to a person.
        pub fn on_history_lost(mut self, on_history_lost: OnHistoryLost) -> Self {
            self.options.on_history_lost = Some(on_history_lost);
            self
        }
    };
}

pub(super) use option_setters;
