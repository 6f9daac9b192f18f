//! The ledgers beside the truth.

use std::fmt::Write;

use super::books::Book;
use super::play::{Outcome, Total, sum};

pub fn of(outcome: &Outcome) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write_to(&mut text, outcome);
    text
}

fn write_to(text: &mut String, outcome: &Outcome) -> std::fmt::Result {
    let Outcome { kills, truth, books } = outcome;
    let all = sum(truth);
    writeln!(text, "\n{} transfers, entered by a process that was killed {kills} times with SIGKILL\n", all.transfers)?;
    write!(text, "  {:<8}{:>10}", "account", "truth")?;
    for (book, _) in books {
        write!(text, "{:>28}", title(*book))?;
    }
    writeln!(text)?;
    for (account, right) in truth {
        line(text, account, *right, books.iter().map(|(_, totals)| totals.get(account).copied().unwrap_or_default()))?;
    }
    line(text, "all", all, books.iter().map(|(_, totals)| sum(totals)))?;
    writeln!(text)?;
    for (book, totals) in books {
        let twice = sum(totals).transfers - all.transfers;
        let verdict = match twice {
            0 if totals == truth => "exact".to_owned(),
            1.. => format!("too high, {twice} transfers were entered again"),
            _ => "WRONG".to_owned(),
        };
        writeln!(text, "  {}: {verdict}", title(*book))?;
    }
    Ok(())
}

fn line(text: &mut String, name: &str, right: Total, totals: impl Iterator<Item = Total>) -> std::fmt::Result {
    write!(text, "  {name:<8}{:>10}", right.total)?;
    for total in totals {
        let off = match total.total - right.total {
            0 => String::new(),
            off => format!("{off:+}"),
        };
        write!(text, "{:>18} {off:<9}", total.total)?;
    }
    writeln!(text)
}

fn title(book: Book) -> &'static str {
    match book {
        Book::Plain => "(a) $inc alone",
        Book::Kept => "(b) position kept beside",
        Book::InTransaction => "(c) in a transaction",
    }
}
