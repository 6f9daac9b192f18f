//! `--start`: where a subscription begins, as it is typed.

use bson::{Document, Timestamp};

use crate::checkpoint::{Checkpoint, Token};
use crate::start::{Start, StartAt};

/// What was typed.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum From {
    /// Go on from the stored position; a new subscription begins at the present.
    Stored,
    /// Somewhere of one's own.
    At(Start),
}

/// Reads `--start`.
pub(super) fn from(text: &str) -> Result<From, String> {
    Ok(From::At(match text {
        "stored" => return Ok(From::Stored),
        "now" => Start::Present,
        "earliest" => Start::Earliest,
        text if text.starts_with('{') => Start::After(Checkpoint::Token(token_document(text)?)),
        // The digits of a time are few, those of a token many.
        text if text.len() >= 18 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            Start::After(Checkpoint::Token(Token::new(text).map_err(|error| error.to_string())?))
        }
        text => Start::Time(time(text)?),
    }))
}

/// How it is weighed against what is stored.
pub(super) fn start_at(from: &From, always: bool) -> Result<StartAt, String> {
    match (from, always) {
        (From::Stored, false) => Ok(StartAt::StoredOr(Start::Present)),
        (From::At(start), false) => Ok(StartAt::StoredOr(start.clone())),
        (From::At(start), true) => Ok(StartAt::Always(start.clone())),
        (From::Stored, true) => {
            Err("--always needs a --start other than `stored`: it passes over what is stored".to_owned())
        }
    }
}

fn token_document(text: &str) -> Result<Token, String> {
    const EXPECTED: &str = "expected a resume token, {\"_data\": \"82..\"}";
    let document: Document = serde_json::from_str(text).map_err(|error| format!("{EXPECTED}: {error}"))?;
    let data = document.get_str("_data").map_err(|_| EXPECTED.to_owned())?;
    Token::new(data).map_err(|error| error.to_string())
}

fn time(text: &str) -> Result<Timestamp, String> {
    let seconds = |text: &str| text.parse::<u32>().ok().filter(|seconds| *seconds > 0);
    // `.` stands between them in the lines of the log.
    let (whole, increment) = text.split_once([':', '.']).map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    if let Some(time) = seconds(whole) {
        // An operation time's increment begins at 1.
        let increment = increment.map_or(Ok(1), str::parse);
        let increment = increment.map_err(|_| "the increment behind the seconds must be a whole number".to_owned())?;
        return Ok(Timestamp { time, increment });
    }
    let at = text.parse::<jiff::Timestamp>().map_err(|_| {
        "expected stored, now, earliest, a time (2026-01-31T12:00:00Z, or SECONDS[:INCREMENT] since 1970) or a resume \
         token (its hex, or {\"_data\": ..})"
    })?;
    // Down to the second: what is left out of it comes again, and nothing is lost.
    let time = u32::try_from(at.as_second()).ok().filter(|time| *time > 0);
    let time = time.ok_or_else(|| "operation times reach from 1970 to 2106".to_owned())?;
    Ok(Timestamp { time, increment: 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "826568B1F0000000032B022C0100296E5A1004";

    fn at(text: &str) -> Start {
        match from(text) {
            Ok(From::At(start)) => start,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn every_form_of_a_start_is_read() {
        assert_eq!(from("stored"), Ok(From::Stored));
        assert_eq!(at("now"), Start::Present);
        assert_eq!(at("earliest"), Start::Earliest);
        let time = |time, increment| Start::Time(Timestamp { time, increment });
        assert_eq!(at("1767225600"), time(1_767_225_600, 1));
        assert_eq!(at("1767225600:7"), time(1_767_225_600, 7));
        assert_eq!(at("1767225600.7"), time(1_767_225_600, 7));
        assert_eq!(at("2026-01-01T00:00:00Z"), time(1_767_225_600, 1));
        assert_eq!(at("2026-01-01T01:00:00.999+01:00"), time(1_767_225_600, 1));
        let after = Start::After(Checkpoint::Token(Token::new(TOKEN).unwrap()));
        assert_eq!(at(TOKEN), after);
        assert_eq!(at(&TOKEN.to_lowercase()), after);
        assert_eq!(at(&format!("{{\"_data\": \"{TOKEN}\"}}")), after);
    }

    #[test]
    fn what_is_no_start_is_refused() {
        for text in [
            "",
            "yesterday",
            "2026-01-01",
            "2026-01-01T00:00:00",
            "0",
            "-5",
            "4294967296",
            "5:",
            "5:x",
            "1969-01-01T00:00:00Z",
            "2107-01-01T00:00:00Z",
            "{\"_data\": 5}",
            "{}",
            "{",
            "8265",
            "716568B1F0000000032B022C0100296E5A1004",
            "826568B1F0000000032B022C0100296E5A100",
        ] {
            let read = from(text);
            // Few hex digits are seconds.
            assert!(read.is_err() || text == "8265", "{text}: {read:?}");
        }
    }

    #[test]
    fn only_always_passes_over_what_is_stored() {
        assert_eq!(start_at(&From::Stored, false), Ok(StartAt::default()));
        assert_eq!(start_at(&From::At(Start::Earliest), false), Ok(StartAt::StoredOr(Start::Earliest)));
        assert_eq!(start_at(&From::At(Start::Present), true), Ok(StartAt::Always(Start::Present)));
        assert!(start_at(&From::Stored, true).unwrap_err().contains("--always"));
    }
}
