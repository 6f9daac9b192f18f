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
/// Within one layout version the hex decides, and the fragments of an event are done when the whole is. A stream that
/// splits events, or another server, gives the same event another hex (`2B02`, `2B04`); then what both layouts share
/// decides, and an event that cannot be told from the one at the position comes again: a repeat, where the hex would have
/// lost the rest of a transaction.
pub(crate) fn covers(position: &Token, event: &Token) -> bool {
    let (a, b) = (position.as_str(), event.as_str());
    if a.get(VERSION) == b.get(VERSION) {
        return b <= a || is_fragment_of(b, a);
    }
    match (a.get(..VERSION.start), b.get(..VERSION.start)) {
        (Some(time), Some(other)) if time == other => match (shared(a), shared(b)) {
            (Some(position), Some(event)) => event < position || is_same(a, b),
            _ => false,
        },
        _ => b < a,
    }
}

/// Whether two tokens are of the same event, as far as that can be told.
pub(super) fn is_same_event(a: &Token, b: &Token) -> bool {
    covers(a, b) && covers(b, a)
}

/// As [`is_same_event`], and also when the two cannot be told apart. A shard key that the collection has got, or one that
/// was refined, gives an insert another key when it is read again: the same place and the same `_id` must do.
pub(super) fn is_maybe_same_event(a: &Token, b: &Token) -> bool {
    if a.cluster_time() != b.cluster_time() {
        return false;
    }
    is_same_event(a, b)
        || match (place_and_key(a.as_str()), place_and_key(b.as_str())) {
            (Some((place, key)), Some((other_place, other_key))) => {
                place == other_place && may_have_one_id(key, other_key)
            }
            _ => true,
        }
}

/// Whether a token is that of a stream that splits events; one that does not may give it too.
pub(super) fn is_of_a_splitting_stream(token: &Token) -> bool {
    token.as_str().get(VERSION) == Some(SPLITTING)
}

/// Whether a post-batch token says that the scan got further than the position. At the same time and in another layout
/// that is not known.
pub(super) fn is_further(post_batch: &Token, position: &Token) -> bool {
    let same_layout = position.as_str().get(VERSION) == post_batch.as_str().get(VERSION);
    let later = post_batch.cluster_time() > position.cluster_time();
    post_batch > position && (later || same_layout && !covers(position, post_batch))
}

/// The token of a whole event, of that of its fragment with this number, counted from 1.
pub(super) fn of_whole(fragment: &Token, number: u32) -> Token {
    let number = number_in_token(number.saturating_sub(1));
    let whole = fragment.as_str().strip_suffix(END).and_then(|rest| rest.strip_suffix(number.as_str()));
    // What looks otherwise is kept: it is a position too.
    whole.and_then(|whole| Token::new(format!("{whole}{END}")).ok()).unwrap_or_else(|| fragment.clone())
}

/// What every token of an event ends with.
const END: &str = "04";
/// The version of the tokens of a stream that splits.
const SPLITTING: &str = "2B04";

/// A small number in the order-keeping form of tokens.
fn number_in_token(number: u32) -> String {
    match number {
        0 => "29".into(),
        1..=0x7F => format!("2B{:02X}", number << 1),
        _ => format!("2C{:04X}", number << 1),
    }
}

/// Whether a token is the whole's with the number of a fragment before its end.
fn is_fragment_of(fragment: &str, whole: &str) -> bool {
    let number = whole.strip_suffix(END).and_then(|whole| fragment.strip_prefix(whole)?.strip_suffix(END));
    number.is_some_and(|number| match number.get(..2) {
        Some("29") => number.len() == 2,
        Some("2B") => number.len() == 4,
        Some("2C") => number.len() == 6,
        _ => false,
    })
}

/// Whether tokens of two layouts are of the same event: the same place in the same transaction and in the same collection,
/// and the same document. In a sharded cluster two may share a place.
fn is_same(a: &str, b: &str) -> bool {
    let (Some((place, key)), Some((other_place, other_key))) = (place_and_key(a), place_and_key(b)) else {
        return false;
    };
    // The newer layout wraps the key in more.
    let (short, long) = if key.len() < other_key.len() { (key, other_key) } else { (other_key, key) };
    place == other_place && long.contains(short)
}

/// Whether the longer of two document keys has the `_id` of the shorter one, as far as there is one.
fn may_have_one_id(a: &str, b: &str) -> bool {
    const NAME: &str = "5F696400";
    let (short, long) = if a.len() < b.len() { (a, b) } else { (b, a) };
    // With the byte of its type before the name, and without the end of the key.
    let id = short.find(NAME).and_then(|at| short.get(at.checked_sub(2)?..short.len().checked_sub(2)?));
    id.is_none_or(|id| long.contains(id))
}

/// What follows the version up to and with the collection, and what stands behind that.
fn place_and_key(token: &str) -> Option<(&str, &str)> {
    const COLLECTION: &str = "5A1004";
    let shared = shared(token)?.len();
    let event = token.get(VERSION.end..)?;
    event.get(shared..)?.strip_prefix(COLLECTION)?;
    let end = shared + COLLECTION.len() + 32;
    Some((event.get(..end)?, event.get(end..)?.strip_suffix(END)?))
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

    // As a server 6.0.27 gave them for one event, with and without the stage that splits.
    const REST: &str = "2C0100296E5A10046C0D8089845C471E828547765CDE532146";
    const KEY: &str = "1E5F6964002B1200";
    const WRAPPED: &str = "3C6F7065726174696F6E54797065003C7570646174650046646F63756D656E744B65790046";

    #[test]
    fn an_event_that_is_read_again_may_have_another_shard_key_and_no_other_id() {
        let plain = token(3, "2B02", &format!("{REST}{KEY}04"));
        let sharded = token(3, "2B02", &format!("{REST}1E78002B02{KEY}04"));
        let sharded_by_id_and_more = token(3, "2B02", &format!("{REST}1E5F6964002B121E78002B020004"));
        let splitting = token(3, "2B04", &format!("{REST}{WRAPPED}{KEY}002904"));
        // Of what is no event of a document, or in no known form, it cannot be told.
        let (dropped, unknown) = (token(3, "2B02", &format!("{REST}04")), token(3, "2B08", "2C0100296E5A1004"));
        for other in [&plain, &sharded, &sharded_by_id_and_more, &splitting, &dropped, &unknown] {
            assert!(is_maybe_same_event(&plain, other) && is_maybe_same_event(other, &plain), "{other}");
        }
        for other in [
            token(4, "2B02", &format!("{REST}{KEY}04")),
            token(4, "2B08", "2C0100296E5A1004"),
            token(3, "2B02", &format!("{REST}1E5F6964002B140004")),
            token(3, "2B02", &format!("{REST}1E78002B021E5F6964002B140004")),
            token(3, "2B04", &format!("{REST}{WRAPPED}1E5F6964002B1400002904")),
            token(3, "2B02", &format!("{}{KEY}04", REST.replacen("2C010029", "2C01002B02", 1))),
            token(3, "2B02", &format!("{}{KEY}04", REST.replacen("6C0D", "6C0E", 1))),
        ] {
            assert!(!is_maybe_same_event(&plain, &other) && !is_maybe_same_event(&other, &plain), "{other}");
        }
    }

    #[test]
    fn an_event_is_known_in_either_layout_and_its_fragments_belong_to_it() {
        let plain = token(3, "2B02", &format!("{REST}{KEY}04"));
        let splitting = |rest: &str| token(3, "2B04", &format!("{REST}{WRAPPED}{KEY}00{rest}"));
        let (whole, fragments) = (splitting("04"), [splitting("2904"), splitting("2B0204"), splitting("2C010004")]);
        for (number, fragment) in [1, 2, 129].into_iter().zip(&fragments) {
            assert_eq!(of_whole(fragment, number), whole);
            assert!(covers(&whole, fragment) && covers(fragment, &whole), "{fragment}");
            assert!(covers(&plain, fragment) && covers(fragment, &plain), "{fragment}");
        }
        assert!(covers(&whole, &plain) && covers(&plain, &whole));
        assert_eq!(of_whole(&fragments[0], 2), fragments[0], "not its number");
        let another = token(3, "2B02", &format!("{REST}1E5F6964002B140004"));
        assert!(!covers(&whole, &another) && !covers(&another, &whole), "in a sharded cluster");
        let next = token(3, "2B04", &format!("{}{WRAPPED}{KEY}0004", REST.replacen("2C010029", "2C01002B02", 1)));
        assert!(!covers(&plain, &next) && !covers(&whole, &next) && covers(&next, &plain));
    }

    #[test]
    fn a_post_batch_token_is_further_when_it_is_that_in_its_own_layout_or_later() {
        let whole = token(3, "2B04", &format!("{REST}{WRAPPED}{KEY}0004"));
        let fragment = token(3, "2B04", &format!("{REST}{WRAPPED}{KEY}002B0204"));
        assert!(!is_further(&fragment, &whole) && !is_further(&whole, &whole));
        assert!(is_further(&token(4, "2B04", QUIET), &whole) && is_further(&token(4, "2B02", QUIET), &whole));
        let plain = token(3, "2B02", FIRST);
        assert!(!is_further(&token(3, "2B04", QUIET), &plain), "it stands before the events of its time");
        assert!(is_further(&token(3, "2B02", SECOND), &plain));
        assert!(!is_further(&token(3, "2B02", QUIET), &plain));
    }

    #[test]
    fn a_position_of_another_layout_repeats_what_it_cannot_tell_from_its_own_event_and_loses_none() {
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
