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

        /// The first and the longest wait between attempts of a failing handler; it doubles, with full jitter.
        /// Default: 100 ms and 30 s, for ever. The events behind the failing one wait as long.
        pub fn retry_backoff(mut self, first: Duration, longest: Duration) -> Self {
            self.options.retry_backoff = Some((first, longest));
            self
        }

        /// What follows when what it watches was dropped or renamed, once everything up to the `invalidate` is
        /// delivered. Default: [`OnInvalidate::Continue`], which goes on with whatever bears the name afterwards.
        pub fn on_invalidate(mut self, on_invalidate: OnInvalidate) -> Self {
            self.options.on_invalidate = Some(on_invalidate);
            self
        }
    };
}

pub(super) use option_setters;
