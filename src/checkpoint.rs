//! Checkpoints: places in one feed that can be stored and started from, and the order they stand in. No I/O.
//!
//! A token's layout is the server's `ResumeTokenData` in `KeyString` form: `82`, the cluster time (4 bytes seconds,
//! 4 bytes increment, big-endian), version, token type, index inside a transaction, whether it is of an
//! `invalidate`, then the collection's UUID. Only what stands here is read; the rest is opaque.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bson::{DateTime, Timestamp};
use serde::{Serialize, Serializer};

/// A resume token, as its hex text (`_data`). It means "everything up to and with this is done".
///
/// Within one stream the hex texts sort in stream order.
///
/// ```
/// # use mongosub::BadToken;
/// use mongosub::{Checkpoint, Token};
///
/// # fn main() -> Result<(), BadToken> {
/// let token = Token::new("826B0DE92E000000212B0229296E04")?; // as it stands in `_id._data` of an event
/// assert_eq!(token.cluster_time().time, 0x6B0D_E92E);
/// assert!(Checkpoint::Token(token.clone()).is_beyond(&token.cluster_time().into()));
/// assert!(Token::new("not one").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(Arc<str>);

/// Text that is no resume token of a replica set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a resume token: {why}")]
pub struct BadToken {
    why: &'static str,
}

/// Hex digits of the type byte and the cluster time every token begins with.
const TIME_DIGITS: usize = 18;

impl Token {
    /// Takes the `_data` text of a token.
    ///
    /// # Errors
    /// [`BadToken`] when the text is not hex, or does not begin with a cluster time.
    pub fn new(data: impl AsRef<str>) -> Result<Self, BadToken> {
        let data = data.as_ref();
        if !data.bytes().all(|b| b.is_ascii_hexdigit()) || data.len() % 2 != 0 {
            return Err(BadToken { why: "its `_data` is not hexadecimal" });
        }
        if data.len() < TIME_DIGITS || !data.starts_with("82") {
            return Err(BadToken { why: "its `_data` does not begin with a cluster time" });
        }
        // The server writes upper case, and positions are compared as text.
        Ok(Self(if data.bytes().any(|b| b.is_ascii_lowercase()) { data.to_uppercase().into() } else { data.into() }))
    }

    /// The hex text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The cluster time the token begins with.
    pub fn cluster_time(&self) -> Timestamp {
        let word = |at: usize| u32::from_str_radix(&self.0[at..at + 8], 16).unwrap_or(0);
        Timestamp { time: word(2), increment: word(10) }
    }

    /// Whether this is the token of an `invalidate`: the one kind that must be resumed with `startAfter`.
    pub fn is_invalidate(&self) -> bool {
        self.after_transaction_index().is_some_and(|rest| rest.starts_with("6F"))
    }

    /// The UUID of the collection the event was in, as 32 hex digits; none for a quiet token.
    pub fn collection_uuid(&self) -> Option<&str> {
        let rest = self.after_transaction_index()?;
        let rest = rest.strip_prefix("6E").or_else(|| rest.strip_prefix("6F"))?;
        rest.strip_prefix("5A1004")?.get(..32)
    }

    /// What follows the transaction index of an event's token (layout versions 1 and 2).
    fn after_transaction_index(&self) -> Option<&str> {
        let rest = &self.0[TIME_DIGITS..];
        let rest = rest.strip_prefix("2B02").or_else(|| rest.strip_prefix("2B04"))?;
        let rest = rest.strip_prefix("2C0100")?;
        // A non-negative integer: 29 is zero, 2B.. holds one byte, 2C.. two, and so on.
        let lead = u8::from_str_radix(rest.get(..2)?, 16).ok()?;
        let bytes = match lead {
            0x29 => 0,
            0x2B..=0x32 => usize::from(lead - 0x2A),
            _ => return None,
        };
        rest.get(2 + 2 * bytes..)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.0)
    }
}

/// A place in one feed that can be stored and started from.
///
/// Its text is for people, logs and command lines, and is read back by `parse`.
///
/// ```
/// use mongosub::{Checkpoint, bson::Timestamp};
///
/// let start = Checkpoint::Time(Timestamp { time: 1_767_225_600, increment: 1 });
/// assert_eq!(start.to_string(), "1767225600.1");
/// let Ok(same) = "1767225600.1".parse::<Checkpoint>();
/// assert_eq!(same, start);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Checkpoint {
    /// Everything up to and with this token is done.
    Token(Token),
    /// Everything before this operation time is done.
    Time(Timestamp),
    /// A position of a model of another kind; it has no order here.
    Text(Arc<str>),
}

impl Checkpoint {
    /// The cluster time of a token, the time itself, nothing for text.
    pub fn cluster_time(&self) -> Option<Timestamp> {
        match self {
            Self::Token(token) => Some(token.cluster_time()),
            Self::Time(time) => Some(*time),
            Self::Text(_) => None,
        }
    }

    /// The token, if this is one.
    pub fn token(&self) -> Option<&Token> {
        match self {
            Self::Token(token) => Some(token),
            _ => None,
        }
    }

    /// Its text, with the date of its cluster time: for people.
    pub(crate) fn dated(&self) -> String {
        let date = |time: Timestamp| DateTime::from_millis(i64::from(time.time) * 1000).to_string();
        self.cluster_time().map_or_else(|| self.to_string(), |time| format!("{self} ({})", date(time)))
    }

    /// Whether this is the position of an `invalidate`.
    pub fn is_invalidate(&self) -> bool {
        self.token().is_some_and(Token::is_invalidate)
    }

    /// Whether it is that of an event which a history can be asked for.
    pub(crate) fn names_event(&self) -> bool {
        self.token().is_some_and(|token| token.collection_uuid().is_some() && !token.is_invalidate())
    }

    /// The order of two positions of one epoch: by cluster time, a time before a token of that time, tokens by
    /// their hex. Text has no order: equal text is equal, everything else is `None`.
    pub fn position_cmp(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Token(a), Self::Token(b)) => Some(a.cmp(b)),
            (Self::Time(a), Self::Time(b)) => Some(a.cmp(b)),
            (Self::Time(a), Self::Token(b)) => Some(a.cmp(&b.cluster_time()).then(Ordering::Less)),
            (Self::Token(a), Self::Time(b)) => Some(a.cluster_time().cmp(b).then(Ordering::Greater)),
            (Self::Text(a), Self::Text(b)) if a == b => Some(Ordering::Equal),
            _ => None,
        }
    }

    /// Whether this position lies strictly beyond `other`; text lies beyond any other text.
    pub fn is_beyond(&self, other: &Self) -> bool {
        match self.position_cmp(other) {
            Some(order) => order == Ordering::Greater,
            None => self != other,
        }
    }
}

impl From<Token> for Checkpoint {
    fn from(token: Token) -> Self {
        Self::Token(token)
    }
}

impl From<Timestamp> for Checkpoint {
    fn from(time: Timestamp) -> Self {
        Self::Time(time)
    }
}

/// A token as its hex, a time as `seconds.increment`, text as it is. [`Checkpoint::from_str`] reads it back.
impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(token) => f.write_str(token.as_str()),
            Self::Time(Timestamp { time, increment }) => write!(f, "{time}.{increment}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl FromStr for Checkpoint {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(token) = Token::new(text) {
            return Ok(Self::Token(token));
        }
        let time = text.split_once('.').and_then(|(time, increment)| {
            Some(Timestamp { time: time.parse().ok()?, increment: increment.parse().ok()? })
        });
        Ok(time.map_or_else(|| Self::Text(text.into()), Self::Time))
    }
}

impl Serialize for Checkpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a stored position is the position of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Where a subscription began.
    Start,
    /// A settled event.
    Event,
    /// No event: the scan got this far.
    Quiet,
    /// The `invalidate` that ended the feed.
    Invalidate,
}

impl Kind {
    /// The kind of an event's position.
    pub(crate) fn of_event(position: &Checkpoint) -> Self {
        if position.is_invalidate() { Self::Invalidate } else { Self::Event }
    }

    /// The word that the stored record holds.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Event => "event",
            Self::Quiet => "quiet",
            Self::Invalidate => "invalidate",
        }
    }

    /// The kind of a stored word; `None` for a word this version does not know.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Start, Self::Event, Self::Quiet, Self::Invalidate].into_iter().find(|kind| kind.as_str() == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: &str = "826568B1F000000003";

    fn event(index: &str, invalidate: bool) -> Token {
        let flag = if invalidate { "6F" } else { "6E" };
        Token::new(format!("{TIME}2B022C0100{index}{flag}5A1004{}46645F696400", "AB".repeat(16))).unwrap()
    }

    #[test]
    fn a_token_tells_its_cluster_time_its_collection_and_whether_it_is_an_invalidate() {
        let token = event("29", false);
        assert_eq!(token.cluster_time(), Timestamp { time: 0x6568_B1F0, increment: 3 });
        assert_eq!(token.collection_uuid(), Some("AB".repeat(16).as_str()));
        assert!(!token.is_invalidate());
        for index in ["29", "2B0A", "2C03E8", "2D012345"] {
            assert!(event(index, true).is_invalidate(), "{index}");
            assert!(!event(index, false).is_invalidate(), "{index}");
        }
        let quiet = Token::new(format!("{TIME}2B0229296E04")).unwrap();
        assert!(!quiet.is_invalidate());
        assert_eq!(quiet.collection_uuid(), None);
    }

    #[test]
    fn what_is_no_token_is_refused() {
        for bad in [
            "",
            "82",
            "zz",
            "8265",
            "816568B1F00000000",
            "816568B1F000000003",
            "826568B1F00000000G",
            "826568B1F0000000030",
        ] {
            assert!(Token::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_checkpoint_survives_its_text() {
        for checkpoint in [
            Checkpoint::Token(event("29", false)),
            Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 7 }),
            Checkpoint::Text("line 17".into()),
        ] {
            assert_eq!(checkpoint.to_string().parse(), Ok(checkpoint));
        }
    }
}
