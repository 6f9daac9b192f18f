//! Tokens as they come in replies: read out of a raw event, and told whether a position covers them. No I/O.

use bson::RawDocument;

use super::classify::Fault;
use crate::checkpoint::Token;

/// Where a token's version begins, behind the cluster time, and how long it is.
const VERSION: std::ops::Range<usize> = 18..22;

/// The token of an event: its `_id`.
pub(super) fn of_event(event: &RawDocument) -> Result<Token, Fault> {
    let data = event.get_document("_id").and_then(|id| id.get_str("_data"));
    let data = data.map_err(|error| Fault::fatal(format!("an event has no resume token: {error}")))?;
    Token::new(data).map_err(|error| Fault::fatal(format!("the resume token of an event: {error}")))
}

/// Whether an event is done when everything up to and with `position` is done.
///
/// Within one layout version the hex decides. A server or a pipeline of another layout (`2B02`, `2B04`) gives the same
/// event another hex; then what both layouts share decides, and the event at the position itself comes again: a
/// repeat, where the hex would have lost the rest of a transaction.
pub(crate) fn covers(position: &Token, event: &Token) -> bool {
    let (position, event) = (position.as_str(), event.as_str());
    if position.get(VERSION) == event.get(VERSION) {
        return event <= position;
    }
    match (position.get(..VERSION.start), event.get(..VERSION.start)) {
        (Some(a), Some(b)) if a == b => match (shared(position), shared(event)) {
            (Some(position), Some(event)) => event < position,
            _ => false,
        },
        _ => event < position,
    }
}

/// What follows the version and is the same in every layout: kind of token, index in the transaction, invalidate flag.
fn shared(token: &str) -> Option<&str> {
    let rest = token.get(VERSION.end..)?;
    // Two integers (29 is zero, 2B.. holds one byte, 2C.. two, and so on), then 6E or 6F.
    let mut end = 0;
    for _ in 0..2 {
        let lead = u8::from_str_radix(rest.get(end..end + 2)?, 16).ok()?;
        let bytes = match lead {
            0x29 => 0,
            0x2B..=0x32 => usize::from(lead - 0x2A),
            _ => return None,
        };
        end += 2 + 2 * bytes;
    }
    rest.get(..end + 2)
}

/// Bytes as a token holds them: upper-case hex digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default().to_ascii_uppercase();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::rawdoc;

    fn token(time: u8, version: &str, rest: &str) -> Token {
        Token::new(format!("826568B1F0000000{time:02}{version}{rest}")).unwrap()
    }

    const FIRST: &str = "2C0100296E5A1004";
    const SECOND: &str = "2C01002B026E5A1004";
    const INVALIDATE: &str = "2C0100296F5A1004";
    const QUIET: &str = "29296E04";

    #[test]
    fn a_position_covers_itself_and_what_came_before_it() {
        let at = token(3, "2B02", SECOND);
        for (event, covered) in [
            (token(2, "2B02", SECOND), true),
            (token(3, "2B02", FIRST), true),
            (at.clone(), true),
            (token(3, "2B02", "2C01002B046E5A1004"), false),
            (token(4, "2B02", FIRST), false),
        ] {
            assert_eq!(covers(&at, &event), covered, "{event}");
        }
        assert!(!covers(&token(3, "2B02", QUIET), &token(3, "2B02", FIRST)));
        assert!(covers(&token(3, "2B02", INVALIDATE), &token(3, "2B02", FIRST)));
    }

    #[test]
    fn a_position_of_another_layout_repeats_its_own_event_and_loses_none() {
        for (own, other) in [("2B02", "2B04"), ("2B04", "2B02")] {
            let at = token(3, own, SECOND);
            for (event, covered) in [
                (token(2, other, SECOND), true),
                (token(3, other, FIRST), true),
                (token(3, other, SECOND), false),
                (token(3, other, "2C01002B046E5A1004"), false),
                (token(4, other, FIRST), false),
            ] {
                assert_eq!(covers(&at, &event), covered, "{own} {event}");
            }
            assert!(!covers(&token(3, own, QUIET), &token(3, other, FIRST)));
        }
    }

    #[test]
    fn an_event_without_a_token_is_refused() {
        assert!(of_event(&rawdoc! { "operationType": "insert" }).is_err());
        assert!(of_event(&rawdoc! { "_id": { "_data": 1 } }).is_err());
        assert!(of_event(&rawdoc! { "_id": { "_data": "zz" } }).is_err());
        let data = token(3, "2B02", FIRST);
        assert_eq!(of_event(&rawdoc! { "_id": { "_data": data.as_str() } }), Ok(data));
    }
}
