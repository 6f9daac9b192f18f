//! What the demo prints: a few readable lines to stdout, and a progress bar where a terminal looks on.

use std::fmt::Arguments;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// The storyteller.
pub(super) struct Story {
    terminal: bool,
}

#[allow(clippy::unused_self, reason = "who tells the story is handed down, so that nobody else prints")]
impl Story {
    pub(super) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal() }
    }

    pub(super) fn title(&self, text: &str) {
        say(format_args!("{text}\n"));
    }

    pub(super) fn act(&self, text: &str) {
        say(format_args!("\n{text}"));
    }

    /// One line of an act: what it is about, and the figures.
    pub(super) fn line(&self, label: &str, text: &str) {
        say(format_args!("  {label:<10} {text}"));
    }

    /// The last line.
    pub(super) fn end(&self, text: &str) {
        say(format_args!("\n{text}"));
    }

    /// A bar of a known length; nothing without a terminal.
    pub(super) fn bar(&self, length: u64, text: &'static str) -> ProgressBar {
        if !self.terminal {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("  {msg:<10} {wide_bar} {pos}/{len}");
        let bar = ProgressBar::new(length).with_message(text).with_finish(ProgressFinish::AndClear);
        match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }

    /// A spinner for a wait of unknown length; nothing without a terminal.
    pub(super) fn wait(&self, text: &'static str) -> ProgressBar {
        if !self.terminal {
            return ProgressBar::hidden();
        }
        let spinner = ProgressBar::new_spinner().with_message(text).with_finish(ProgressFinish::AndClear);
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner
    }
}

/// Whoever reads may have gone (`mongosub demo | head`): the demo plays to its end and takes everything away all the same.
fn say(line: Arguments<'_>) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
