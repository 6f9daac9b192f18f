//! Tokens: what is taken for one, what is read in it, and that positions sort and cover as their bytes do.

use super::plain;
use crate::checkpoint::{Checkpoint, Token};
use crate::mongo::fuzz::covers;

/// Lines of text, each perhaps a token.
///
/// # Panics
/// When a text is a token to one reader alone, when something else is read in it than stands there, and when two of them
/// do not sort as their bytes, or cover each other as they should not.
pub fn token(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let mut tokens = Vec::new();
    for line in text.split('\n').take(4) {
        let parsed: Result<Checkpoint, _> = line.parse();
        let Ok(checkpoint) = parsed;
        assert_eq!(checkpoint.to_string().parse(), Ok(checkpoint.clone()), "a checkpoint survives its text: {line:?}");
        let (token, plain) = (Token::new(line).ok(), Plain::read(line));
        assert_eq!(token.is_some(), plain.is_some(), "{line:?} is a token to one reader alone");
        let (Some(token), Some(plain)) = (token, plain) else { continue };
        assert_eq!(checkpoint, Checkpoint::Token(token.clone()));
        plain.agrees_with(&token);
        tokens.push((token, plain));
    }
    for (a, plain_a) in &tokens {
        for (b, plain_b) in &tokens {
            let order = plain_a.bytes.cmp(&plain_b.bytes);
            assert_eq!(a.cmp(b), order, "{a} and {b} sort as their bytes");
            let positions = Checkpoint::from(a.clone()).position_cmp(&Checkpoint::from(b.clone()));
            assert_eq!(positions, Some(order), "{a} and {b} as positions");
            check_covers((a, plain_a), (b, plain_b));
        }
    }
    !tokens.is_empty()
}

/// What a position may cover: of its own layout all that is not behind it, of another one never what is, be it behind it
/// in time or at the same time in the transaction.
fn check_covers((position, plain): (&Token, &Plain), (event, plain_event): (&Token, &Plain)) {
    let covered = covers(position, event);
    let names = format!("{position} covers {event}: {covered}");
    if plain.layout() == plain_event.layout() {
        assert_eq!(covered, plain_event.bytes <= plain.bytes, "{names}");
    } else if plain.time() == plain_event.time() {
        assert!(!covered || plain_event.bytes.get(11..) < plain.bytes.get(11..), "{names}");
        assert!(!covered || !covers(event, position), "{names}, and the other way round");
    } else {
        assert_eq!(covered, plain_event.time() < plain.time(), "{names}");
    }
}

/// A token read as bytes.
struct Plain {
    bytes: Vec<u8>,
}

impl Plain {
    fn read(text: &str) -> Option<Self> {
        let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
        let (pairs, []) = digits.as_ref()?.as_chunks::<2>() else { return None };
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
        (bytes.len() >= 9 && bytes[0] == 0x82).then_some(Self { bytes })
    }

    fn time(&self) -> (u32, u32) {
        let word = |at: usize| self.bytes[at..at + 4].iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
        (word(1), word(5))
    }

    fn layout(&self) -> Option<&[u8]> {
        self.bytes.get(9..11)
    }

    /// What follows the index in the transaction, of an event's token.
    fn behind_the_index(&self) -> Option<&[u8]> {
        let rest = self.bytes[9..].strip_prefix(&[0x2B])?;
        let rest = rest.strip_prefix(&[0x02]).or_else(|| rest.strip_prefix(&[0x04]))?;
        let (lead, rest) = rest.strip_prefix(&[0x2C, 0x01, 0x00])?.split_first()?;
        match lead {
            0x29 => Some(rest),
            0x2B..=0x32 => rest.get(usize::from(lead - 0x2A)..),
            _ => None,
        }
    }

    fn agrees_with(&self, token: &Token) {
        assert_eq!(token.as_str(), plain::hex(&self.bytes));
        let time = token.cluster_time();
        assert_eq!((time.time, time.increment), self.time(), "the time of {token}");
        let rest = self.behind_the_index();
        assert_eq!(token.is_invalidate(), rest.is_some_and(|rest| rest.first() == Some(&0x6F)), "{token}");
        let uuid = rest.and_then(|rest| match rest {
            [0x6E | 0x6F, 0x5A, 0x10, 0x04, uuid @ ..] => uuid.get(..16),
            _ => None,
        });
        let uuid = uuid.map(plain::hex);
        assert_eq!(token.collection_uuid(), uuid.as_deref(), "{token}");
    }
}
