//! The scripted feed: what was pushed, in order, and the tokens it stands at. No waiting, no reader.

use std::collections::VecDeque;

use bson::Timestamp;

use crate::checkpoint::{Checkpoint, Token};
use crate::error::SourceError;
use crate::event::ChangeEvent;

/// Where every feed begins: the cluster time before anything was pushed.
pub(super) const BEGINNING: Timestamp = Timestamp { time: 1_700_000_000, increment: 1 };

/// The UUID of the collection, as the tokens of events carry it.
pub(super) const UUID: &str = "5EED5EED5EED4EED8EED5EED5EED5EED";

/// The token of an event as a server builds it: time, index in its transaction, collection, key.
pub(super) fn event_token(time: Timestamp, index: u32, uuid: &str, key: u64) -> Token {
    token(time, &format!("2C0100{}6E5A1004{uuid}46645F696400{key:024X}0004", key_string(index)))
}

/// The token of an `invalidate`.
pub(super) fn invalidate_token(time: Timestamp, uuid: &str) -> Token {
    token(time, &format!("2C0100296F5A1004{uuid}04"))
}

/// A quiet token: it stands before every event of its time.
pub(super) fn quiet_token(time: Timestamp) -> Token {
    token(time, "29296E04")
}

fn token(time: Timestamp, rest: &str) -> Token {
    Token::new(format!("82{:08X}{:08X}2B02{rest}", time.time, time.increment)).expect("a well-formed token")
}

/// A non-negative integer in the server's order-keeping form.
fn key_string(number: u32) -> String {
    match number {
        0 => "29".into(),
        1..=0x7F => format!("2B{:02X}", number << 1),
        0x80..=0x7FFF => format!("2C{:04X}", number << 1),
        _ => format!("2E{:08X}", u64::from(number) << 1),
    }
}

/// The smallest time after this one.
pub(super) fn next_time(time: Timestamp) -> Timestamp {
    Timestamp { time: time.time, increment: time.increment + 1 }
}

/// One thing that was pushed.
#[derive(Debug)]
pub(super) enum Entry {
    Event {
        event: ChangeEvent,
        position: Token,
    },
    Quiet(Token),
    /// The last item of every reader up to this number.
    Break {
        error: SourceError,
        upto: u64,
    },
}

impl Entry {
    fn position(&self) -> Option<&Token> {
        match self {
            Self::Event { position, .. } | Self::Quiet(position) => Some(position),
            Self::Break { .. } => None,
        }
    }
}

/// What was pushed and can still be read. Entries are numbered from the first one pushed.
#[derive(Debug)]
pub(super) struct Feed {
    entries: VecDeque<Entry>,
    /// The number of the first entry that is still there.
    first: u64,
    /// The cluster time of the last thing pushed.
    pub(super) time: Timestamp,
    /// The oldest time that can be opened.
    pub(super) oldest: Timestamp,
    /// Whether the feed ends behind the last entry.
    pub(super) ended: bool,
    keys: u64,
}

impl Feed {
    pub(super) fn new() -> Self {
        Self { entries: VecDeque::new(), first: 0, time: BEGINNING, oldest: BEGINNING, ended: false, keys: 0 }
    }

    /// Moves the cluster time on; a feed only grows.
    pub(super) fn advance_to(&mut self, time: Timestamp) {
        assert!(time > self.time, "a feed only grows: {time} is not after {}", self.time);
        self.time = time;
    }

    /// The token of the next event of the present time.
    pub(super) fn token_now(&mut self, index: u32, uuid: &str) -> Token {
        self.keys += 1;
        event_token(self.time, index, uuid, self.keys)
    }

    pub(super) fn push(&mut self, entry: Entry) {
        self.entries.push_back(entry);
    }

    /// The number of the entry after the last.
    pub(super) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// The entry of this number; an error when it has been dropped.
    pub(super) fn get(&self, number: u64) -> Result<Option<&Entry>, Dropped> {
        let index = number.checked_sub(self.first).ok_or(Dropped)?;
        Ok(usize::try_from(index).ok().and_then(|index| self.entries.get(index)))
    }

    /// The event at this very position.
    pub(super) fn at(&self, position: &Checkpoint) -> Option<&ChangeEvent> {
        self.entries.iter().find_map(|entry| match entry {
            Entry::Event { event, position: at } if position.token() == Some(at) => Some(event),
            _ => None,
        })
    }

    /// The number of the first entry beyond a position; an error when the history behind it has been dropped.
    pub(super) fn after(&self, from: &Checkpoint) -> Result<u64, Dropped> {
        if from.cluster_time().is_some_and(|time| time < self.oldest) {
            return Err(Dropped);
        }
        let beyond = |entry: &Entry| {
            entry.position().is_some_and(|position| Checkpoint::Token(position.clone()).is_beyond(from))
        };
        // A break carries no position and only concerns readers that were there: the entries after it decide.
        let index = self.entries.iter().position(beyond).unwrap_or(self.entries.len());
        Ok(self.first + index as u64)
    }

    /// Whether an `invalidate` of a collection lies beyond a position.
    pub(super) fn shows_end_of(&self, from: &Checkpoint, uuid: &str) -> Result<bool, Dropped> {
        let behind = usize::try_from(self.after(from)? - self.first).unwrap_or(usize::MAX);
        let mut positions = self.entries.iter().skip(behind).filter_map(Entry::position);
        Ok(positions.any(|position| position.is_invalidate() && position.collection_uuid() == Some(uuid)))
    }

    /// Whether a position can be opened; a feed that has dropped nothing can from any time on.
    pub(super) fn is_readable(&self, position: &Checkpoint) -> bool {
        self.oldest == BEGINNING || position.cluster_time().is_some_and(|time| time >= self.oldest)
    }

    /// Forgets everything before a time.
    pub(super) fn drop_before(&mut self, oldest: Timestamp) {
        self.oldest = self.oldest.max(oldest);
        while let Some(entry) = self.entries.front() {
            if entry.position().is_some_and(|position| position.cluster_time() >= self.oldest) {
                break;
            }
            self.entries.pop_front();
            self.first += 1;
        }
    }
}

/// The entry asked for is no longer there.
#[derive(Debug)]
pub(super) struct Dropped;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_built_like_the_servers_and_sort_in_feed_order() {
        let later = next_time(BEGINNING);
        let mut tokens = vec![quiet_token(BEGINNING)];
        for index in [0, 1, 2, 127, 128, 129, 32_767, 32_768, 70_000] {
            tokens.push(event_token(BEGINNING, index, UUID, 1_000_000 - u64::from(index)));
        }
        tokens.push(quiet_token(later));
        tokens.push(event_token(later, 0, UUID, 1));
        tokens.push(invalidate_token(later, UUID));
        assert!(tokens.is_sorted());
        for token in &tokens[1..10] {
            assert_eq!((token.cluster_time(), token.collection_uuid()), (BEGINNING, Some(UUID)));
        }
        assert_eq!(tokens.iter().filter(|token| token.is_invalidate()).count(), 1);
        assert!(tokens[12].is_invalidate());
        assert_eq!(tokens[0].collection_uuid(), None);
    }
}
