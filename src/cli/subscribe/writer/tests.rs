use super::*;

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};

use proptest::prelude::*;

/// What one call of `write` does.
#[derive(Debug, Clone)]
enum Turn {
    Takes(usize),
    Fails(ErrorKind),
}

/// A reader that does what it is told, turn by turn, then takes everything; and can be made to take nothing for a while.
#[derive(Clone, Default)]
struct Reader(Arc<(Mutex<Inside>, Condvar)>);

#[derive(Default)]
struct Inside {
    turns: VecDeque<Turn>,
    taken: Vec<u8>,
    blocked: bool,
    waiting: bool,
}

impl Reader {
    fn with(turns: impl IntoIterator<Item = Turn>) -> Self {
        let reader = Self::default();
        reader.inside().turns = turns.into_iter().collect();
        reader
    }

    fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.0.lock().unwrap()
    }

    fn taken(&self) -> String {
        String::from_utf8(self.inside().taken.clone()).unwrap()
    }

    fn block(&self) {
        self.inside().blocked = true;
    }

    fn unblock(&self) {
        self.inside().blocked = false;
        self.0.1.notify_all();
    }

    /// Returns when a write waits for it.
    fn is_waited_for(&self) {
        let mut inside = self.inside();
        while !inside.waiting {
            inside = self.0.1.wait(inside).unwrap();
        }
    }
}

impl Write for Reader {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut inside = self.inside();
        while inside.blocked {
            inside.waiting = true;
            self.0.1.notify_all();
            inside = self.0.1.wait(inside).unwrap();
        }
        inside.waiting = false;
        let number = match inside.turns.pop_front() {
            Some(Turn::Fails(kind)) => return Err(kind.into()),
            Some(Turn::Takes(most)) => most.clamp(1, bytes.len()),
            None => bytes.len(),
        };
        inside.taken.extend_from_slice(&bytes[..number]);
        Ok(number)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn done(writing: &mut Writing) -> io::Result<()> {
    (&mut writing.done).await.unwrap().result
}

#[tokio::test]
async fn lines_come_out_as_they_went_in_whatever_a_write_takes() {
    let reader = Reader::with([1, 2, 3, 4, 5].map(Turn::Takes));
    let writer = Writer::start(reader.clone(), 0).unwrap();
    for lines in ["one\ntwo\n", "three\n"] {
        let mut writing = writer.write(lines.into());
        done(&mut writing).await.unwrap();
        assert_eq!(writing.written(), lines.lines().count());
    }
    assert_eq!(reader.taken(), "one\ntwo\nthree\n");
    assert!(!writer.is_midway());
}

#[tokio::test]
async fn a_line_cut_off_by_an_error_is_finished_before_anything_else() {
    let reader =
        Reader::with([Turn::Takes(6), Turn::Fails(ErrorKind::StorageFull), Turn::Fails(ErrorKind::StorageFull)]);
    let writer = Writer::start(reader.clone(), 0).unwrap();
    let mut writing = writer.write("one\ntwo\nthree\n".into());
    assert_eq!(done(&mut writing).await.unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(writing.written(), 1, "only whole lines are counted");
    // What was not written whole comes again, and fails again.
    let mut writing = writer.write("two\nthree\n".into());
    assert_eq!(done(&mut writing).await.unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(writing.written(), 0);
    let mut writing = writer.write("two\nthree\n".into());
    done(&mut writing).await.unwrap();
    assert_eq!(reader.taken(), "one\ntwo\ntwo\nthree\n");
}

#[tokio::test]
async fn a_reader_that_has_gone_is_told_at_once() {
    let reader = Reader::with([Turn::Takes(4), Turn::Fails(ErrorKind::BrokenPipe)]);
    let writer = Writer::start(reader.clone(), 4).unwrap();
    let mut writing = writer.write("one\ntwo\n".into());
    assert_eq!(done(&mut writing).await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(writing.written(), 1);
    assert!(!writer.is_midway());
}

#[tokio::test]
async fn a_pipe_made_non_blocking_by_another_is_tried_again() {
    let reader =
        Reader::with([Turn::Fails(ErrorKind::WouldBlock), Turn::Takes(2), Turn::Fails(ErrorKind::Interrupted)]);
    let writer = Writer::start(reader.clone(), 0).unwrap();
    done(&mut writer.write("one\n".into())).await.unwrap();
    assert_eq!(reader.taken(), "one\n");
}

/// A pipe takes writes of some size as a whole or not at all: blocked in one, no line is half written.
#[tokio::test]
async fn a_blocked_write_of_whole_lines_is_not_waited_for() {
    let reader = Reader::default();
    reader.block();
    let writer = Writer::start(reader.clone(), 8).unwrap();
    let mut writing = writer.write("one\ntwo\nthree\n".into());
    reader.is_waited_for();
    assert!(!writer.is_midway());
    writer.stop();
    writer.between_lines().await;
    // Taken after all, it stops before the third line.
    reader.unblock();
    done(&mut writing).await.unwrap_err();
    assert_eq!((reader.taken().as_str(), writing.written()), ("one\ntwo\n", 2));
}

#[tokio::test]
async fn a_half_written_line_is_waited_for_and_nothing_is_begun_behind_it() {
    for takes in [1, 3, 5] {
        let reader = Reader::with([Turn::Takes(takes), Turn::Takes(1)]);
        let writer = Arc::new(Writer::start(reader.clone(), 0).unwrap());
        reader.block();
        let mut writing = writer.write("one\ntwo\nthree\n".into());
        reader.is_waited_for();
        assert!(writer.is_midway());
        writer.stop();
        let between = tokio::spawn({
            let writer = writer.clone();
            async move { writer.between_lines().await }
        });
        tokio::task::yield_now().await;
        assert!(!between.is_finished());
        reader.unblock();
        between.await.unwrap();
        done(&mut writing).await.unwrap_err();
        let expected = if takes < 4 { "one\n" } else { "one\ntwo\n" };
        assert_eq!(reader.taken(), expected);
        assert_eq!(writing.written(), expected.lines().count());
    }
}

#[tokio::test]
async fn after_a_stop_nothing_is_written() {
    let reader = Reader::default();
    let writer = Writer::start(reader.clone(), 0).unwrap();
    writer.stop();
    let mut writing = writer.write("one\n".into());
    done(&mut writing).await.unwrap_err();
    assert_eq!((reader.taken().as_str(), writing.written()), ("", 0));
}

#[test]
fn a_piece_is_whole_lines_and_no_longer_than_is_taken_whole_unless_one_line_is() {
    let thread = |whole| Thread { out: io::sink(), whole, state: Arc::default(), torn: Vec::new() };
    for (whole, lines, piece) in [
        (8, "one\ntwo\nthree\n", 8),
        (9, "one\ntwo\nthree\n", 8),
        (3, "one\ntwo\n", 4),
        (100, "one\ntwo\n", 8),
        (0, "one\ntwo\n", 8),
        (4, "one\n", 4),
    ] {
        assert_eq!(thread(whole).piece(lines.as_bytes()), piece, "{whole} {lines:?}");
    }
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let fails = prop::sample::select(vec![ErrorKind::StorageFull, ErrorKind::Interrupted, ErrorKind::BrokenPipe]);
    prop::collection::vec(
        prop_oneof![3 => (1_usize..12).prop_map(Turn::Takes), 1 => fails.prop_map(Turn::Fails)],
        0..30,
    )
}

proptest! {
    /// Whoever tries again from the first line that was not counted leaves whole lines alone, each at least once and in
    /// order.
    #[test]
    fn whatever_fails_every_line_comes_out_whole_and_in_order(turns in turns(), whole in 0_usize..10, lengths in prop::collection::vec(0_usize..9, 1..12)) {
        let lines: Vec<String> = lengths.iter().enumerate().map(|(n, length)| format!("{n}{}\n", "x".repeat(*length))).collect();
        let reader = Reader::with(turns);
        let mut thread = Thread { out: reader.clone(), whole, state: Arc::default(), torn: Vec::new() };
        let mut from = 0;
        loop {
            let written = AtomicUsize::new(0);
            let result = thread.write(lines[from..].concat().as_bytes(), &written);
            from += written.into_inner();
            prop_assert!(!thread.state.borrow().midway);
            if result.is_ok() { break }
        }
        prop_assert_eq!(from, lines.len());
        let taken = reader.taken();
        let numbers: Vec<usize> = taken.split_inclusive('\n').map(|line| lines.iter().position(|known| known == line).expect("a whole line")).collect();
        let mut first_time = numbers.clone();
        first_time.dedup();
        prop_assert_eq!(first_time, (0..lines.len()).collect::<Vec<_>>(), "{}", taken);
    }
}
