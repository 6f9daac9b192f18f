//! The texts in which the Occurrent library stores a change-stream position when it stores it as text: as JSON (a
//! token or an operation time, in a document or bare), as Java prints a timestamp, or as a token's bare hex.
//!
//! The language is small and regular on purpose: the server reads it too ([`PATTERN`]), since a
//! write must leave alone what the reader refuses. Whatever only *contains* a position, such as the catch-up positions
//! of Occurrent with the live start in them, is no position here: starting from it would skip the rest of a replay.
//! Called by `record.rs` and `record_pipeline.rs`.

use bson::Timestamp;

use crate::checkpoint::{Checkpoint, Token};

/// Matches what [`position`] reads. Its first group is the hex of a token, which must also have an even number of
/// digits; a time has none.
pub(super) const PATTERN: &str = concat!(
    r#"\A[ \t\r\n]*+(?|"#,
    r#"\{[ \t\r\n]*+"resumeToken"[ \t\r\n]*+:[ \t\r\n]*+"#,
    r#"\{[ \t\r\n]*+"_data"[ \t\r\n]*+:[ \t\r\n]*+"(82[0-9A-Fa-f]{16,}+)"[ \t\r\n]*+"#,
    r#"(?:,[ \t\r\n]*+"_typeBits"[ \t\r\n]*+:[ \t\r\n]*+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)?+\}[ \t\r\n]*+)?+\}"#,
    r#"[ \t\r\n]*+\}"#,
    r#"|\{[ \t\r\n]*+"_data"[ \t\r\n]*+:[ \t\r\n]*+"(82[0-9A-Fa-f]{16,}+)"[ \t\r\n]*+"#,
    r#"(?:,[ \t\r\n]*+"_typeBits"[ \t\r\n]*+:[ \t\r\n]*+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)?+\}[ \t\r\n]*+)?+\}"#,
    r#"|(82[0-9A-Fa-f]{16,}+)"#,
    r#"|\{[ \t\r\n]*+"operationTime"[ \t\r\n]*+:[ \t\r\n]*+"#,
    r#"\{[ \t\r\n]*+"\$timestamp"[ \t\r\n]*+:[ \t\r\n]*+"#,
    r#"\{[ \t\r\n]*+"t"[ \t\r\n]*+:[ \t\r\n]*+(?:[0-3][0-9]{9}|[0-9]{1,9})[ \t\r\n]*+,"#,
    r#"[ \t\r\n]*+"i"[ \t\r\n]*+:[ \t\r\n]*+(?:[0-3][0-9]{9}|[0-9]{1,9})[ \t\r\n]*+\}"#,
    r#"[ \t\r\n]*+\}[ \t\r\n]*+\}"#,
    r#"|\{[ \t\r\n]*+"\$timestamp"[ \t\r\n]*+:[ \t\r\n]*+"#,
    r#"\{[ \t\r\n]*+"t"[ \t\r\n]*+:[ \t\r\n]*+(?:[0-3][0-9]{9}|[0-9]{1,9})[ \t\r\n]*+,"#,
    r#"[ \t\r\n]*+"i"[ \t\r\n]*+:[ \t\r\n]*+(?:[0-3][0-9]{9}|[0-9]{1,9})[ \t\r\n]*+\}"#,
    r#"[ \t\r\n]*+\}"#,
    r#"|Timestamp\{value=-?[0-9]{1,20}, seconds=(?:[0-3][0-9]{9}|[0-9]{1,9}), inc=(?:[0-3][0-9]{9}|[0-9]{1,9})\}"#,
    r#")[ \t\r\n]*+\z"#,
);

/// The token or operation time that a text of Occurrent's holds; `None` when it holds neither.
pub(crate) fn position<'a>(text: &'a str) -> Option<Checkpoint> {
    let text = text.trim_matches(WHITE);
    if let Ok(token) = Token::new(text) {
        return Some(token.into());
    }
    let parsers: [fn(&mut Scanner<'a>) -> Option<Checkpoint>; 5] = [
        |scan| scan.member("resumeToken", Scanner::token),
        Scanner::token,
        |scan| scan.member("operationTime", Scanner::time),
        Scanner::time,
        Scanner::printed_time,
    ];
    parsers.into_iter().find_map(|parse| {
        let mut scan = Scanner { rest: text };
        parse(&mut scan).filter(|_| scan.rest.is_empty())
    })
}

/// JSON's white space, and no other.
const WHITE: [char; 4] = [' ', '\t', '\r', '\n'];

/// Reads a text from its beginning; `None` when something else stands there.
struct Scanner<'a> {
    rest: &'a str,
}

impl<'a> Scanner<'a> {
    /// White space and then exactly this.
    fn word(&mut self, word: &str) -> Option<()> {
        self.exactly_after(word, self.rest.trim_start_matches(WHITE))
    }

    /// Exactly this, here.
    fn exactly(&mut self, word: &str) -> Option<()> {
        self.exactly_after(word, self.rest)
    }

    fn exactly_after(&mut self, word: &str, rest: &'a str) -> Option<()> {
        self.rest = rest.strip_prefix(word)?;
        Some(())
    }

    /// As much as consists of these characters.
    fn run(&mut self, allowed: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !allowed(c)).unwrap_or(self.rest.len());
        let (run, rest) = self.rest.split_at(end);
        self.rest = rest;
        run
    }

    /// `{"name": value`, without what follows the value.
    fn open(&mut self, name: &str) -> Option<()> {
        self.word("{")?;
        self.key(name)
    }

    fn key(&mut self, name: &str) -> Option<()> {
        self.word("\"")?;
        self.exactly(name)?;
        self.exactly("\"")?;
        self.word(":")
    }

    /// `{"name": value}`
    fn member<T>(&mut self, name: &str, value: impl Fn(&mut Self) -> Option<T>) -> Option<T> {
        self.open(name)?;
        let value = value(self)?;
        self.word("}")?;
        Some(value)
    }

    /// `{"_data": "82.."}`, with or without type bits.
    fn token(&mut self) -> Option<Checkpoint> {
        self.open("_data")?;
        self.word("\"")?;
        let token = Token::new(self.run(|c| c.is_ascii_hexdigit())).ok()?;
        self.exactly("\"")?;
        if self.word(",").is_some() {
            self.key("_typeBits")?;
            self.word("{")?;
            self.run(|c| !matches!(c, '{' | '}'));
            if self.exactly("{").is_some() {
                self.run(|c| !matches!(c, '{' | '}'));
                self.exactly("}")?;
                self.run(|c| !matches!(c, '{' | '}'));
            }
            self.exactly("}")?;
        }
        self.word("}")?;
        Some(token.into())
    }

    /// `{"$timestamp": {"t": 1700000000, "i": 7}}`
    fn time(&mut self) -> Option<Checkpoint> {
        self.member("$timestamp", |scan| {
            scan.open("t")?;
            scan.run(|c| WHITE.contains(&c));
            let time = scan.number()?;
            scan.word(",")?;
            scan.key("i")?;
            scan.run(|c| WHITE.contains(&c));
            let increment = scan.number()?;
            scan.word("}")?;
            Some(Timestamp { time, increment }.into())
        })
    }

    /// `Timestamp{value=7301444403200000007, seconds=1700000000, inc=7}`
    fn printed_time(&mut self) -> Option<Checkpoint> {
        self.exactly("Timestamp{value=")?;
        let _ = self.exactly("-");
        let value = self.run(|c| c.is_ascii_digit());
        if !(1..=20).contains(&value.len()) {
            return None;
        }
        self.exactly(", seconds=")?;
        let time = self.number()?;
        self.exactly(", inc=")?;
        let increment = self.number()?;
        self.exactly("}")?;
        Some(Timestamp { time, increment }.into())
    }

    /// Up to ten digits, below four thousand million: what a pattern can tell, and enough until 2096.
    fn number(&mut self) -> Option<u32> {
        let digits = self.run(|c| c.is_ascii_digit());
        let fits = digits.len() < 10 || digits.len() == 10 && digits < "4";
        fits.then(|| digits.parse().ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "826568B1F0000000032B0229296E04";

    #[test]
    fn every_form_of_a_token_and_of_a_time_is_read() {
        let token = Checkpoint::Token(Token::new(HEX).unwrap());
        for text in [
            format!(r#"{{"resumeToken": {{"_data": "{HEX}"}}}}"#),
            format!(r#"{{"resumeToken":{{"_data":"{}"}}}}"#, HEX.to_lowercase()),
            format!("\n{{ \"resumeToken\" : {{ \"_data\" : \"{HEX}\" }} }} "),
            format!(
                r#"{{"resumeToken": {{"_data": "{HEX}", "_typeBits": {{"$binary": {{"base64": "gkAB", "subType": "00"}}}}}}}}"#
            ),
            format!(r#"{{"_data": "{HEX}", "_typeBits": {{"$binary": "gkAB", "$type": "00"}}}}"#),
            format!(r#"{{"_data": "{HEX}"}}"#),
            HEX.to_owned(),
        ] {
            assert_eq!(position(&text).as_ref(), Some(&token), "{text}");
        }
        let time = Checkpoint::Time(Timestamp { time: 1_700_000_000, increment: 7 });
        for text in [
            r#"{"operationTime": {"$timestamp": {"t": 1700000000, "i": 7}}}"#,
            r#"{"operationTime":{"$timestamp":{"t":1700000000,"i":7}}}"#,
            r#"{"$timestamp": {"t": 1700000000, "i": 7}}"#,
            "Timestamp{value=7301444403200000007, seconds=1700000000, inc=7}",
        ] {
            assert_eq!(position(text).as_ref(), Some(&time), "{text}");
        }
    }

    #[test]
    fn text_that_holds_neither_or_more_than_that_is_not_guessed_at() {
        for text in [
            "",
            "position:42",
            "2026-01-01T10:00:05.123Z",
            r#"position:42|{"operationTime": {"$timestamp": {"t": 1700000000, "i": 7}}}"#,
            r#"{"operationTime": {"$timestamp": {"t": 4294967296, "i": 7}}}"#,
            r#"{"operationTime": {"$timestamp": {"t": -1, "i": 7}}}"#,
            r#"{"operationTime": {"$timestamp": {"t": 00000000001, "i": 7}}}"#,
            r#"{"operationTime": {"$timestamp": {"t": 1700000000, "i": 7}}} x"#,
            r#"{"operationTime": 1700000000}"#,
            r#"{"resumeToken": {"_data": "82"}}"#,
            r#"{"resumeToken": {"_data": "826568B1F0000000032B0229296E0"}}"#,
            r#"{"resumeToken": {}}"#,
            r#"{"liveFrom": {"resumeToken": {"_data": "826568B1F0000000032B0229296E04"}}}"#,
            "1700000000.7",
        ] {
            assert_eq!(position(text), None, "{text}");
        }
    }
}
