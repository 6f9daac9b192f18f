//! A subscriber is killed with SIGKILL again and again while its feed grows: nothing is lost, and what comes twice is bounded.

mod subscriber;

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
    time::Duration,
};

use libtest_mimic::Trial;
use mongosub::{
    bson::{Document, doc},
    mongodb::Collection,
};

pub use self::subscriber::play;
use self::subscriber::{Life, Point, Word};
use crate::{
    seen::PATIENCE,
    support::{Child, Fixture, LIMIT, test_within},
};

/// How often it is killed, unless `MONGOSUB_KILLS` says otherwise.
const KILLS: usize = 25;
/// A kill takes half a second.
const EACH_WITHIN: Duration = Duration::from_secs(5);

pub fn tests() -> Vec<Trial> {
    let kills = match env::var("MONGOSUB_KILLS") {
        Ok(kills) => kills.parse().unwrap_or_else(|_| panic!("MONGOSUB_KILLS={kills} is no number of kills")),
        Err(_) => KILLS,
    };
    let within = EACH_WITHIN * u32::try_from(kills).unwrap_or(u32::MAX);
    vec![test_within(
        within.max(LIMIT),
        "a subscriber killed again and again at every point loses nothing and repeats no more than it has not stored",
        move |ctx| async move { killed(ctx.plain().await, kills).await },
    )]
}

/// The points of a first start, in their order; then every point in turn, each at some occurrence of it.
fn schedule(kills: usize, random: &mut fastrand::Rng) -> Vec<(Point, u32)> {
    use Point::{
        Between, Claimed, Claiming, Handled, Handling, HeadAsked, Identified, Opened, Pinned, Read, RecordRead, Saved,
        Saving,
    };
    let first = [RecordRead, Pinned, Opened, Claiming, Claimed].map(|point| (point, 1));
    let mut points = vec![
        Between, RecordRead, Handling, Identified, Saving, Opened, Handled, Claiming, Saved, Claimed, Read, HeadAsked,
        Between, Handling, Saving, Handled, Saved, Read,
    ];
    let rest = kills.saturating_sub(first.len());
    let later = (0..rest).map(|number| {
        let turn = number % points.len();
        if turn == 0 && number > 0 {
            random.shuffle(&mut points);
        }
        let point = points[turn];
        let most = match point {
            RecordRead | Identified | Pinned | Opened | Claiming | Claimed => 1,
            // For the position that must not lie ahead, and for what may be a repeat.
            HeadAsked => 2,
            Saving | Saved => 12,
            Read | Handling | Handled | Between => 150,
        };
        (point, random.u32(1..=most))
    });
    first.into_iter().chain(later.collect::<Vec<_>>()).take(kills).collect()
}

async fn killed(fixture: Fixture, kills: usize) -> anyhow::Result<()> {
    let seed = fastrand::u64(..);
    println!("kill: {kills} points, seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let writer = Writer::start(fixture.database.collection("feed"));
    let life = |point, nth| Life { uri: fixture.server.uri(), database: fixture.database.name().into(), point, nth };
    let mut account = Account::default();
    for (number, (point, nth)) in schedule(kills, &mut random).into_iter().enumerate() {
        let life = life(point, nth);
        let child = Child::start("killed-subscriber", &life);
        account.begin(format!("life {number} (seed {seed}), killed at {point:?} number {nth}"));
        let lived = live(child, &life, &mut account, &writer, &mut random);
        let lived = tokio::time::timeout(PATIENCE, lived).await;
        assert!(lived.is_ok(), "{}: not reached; handled up to {}", account.life, account.last);
    }
    let last = writer.stop().await?;
    // A life that nothing ends: everything that was acknowledged comes.
    let mut child = Child::start("killed-subscriber", &life(Point::Between, 0));
    account.begin(format!("the last life (seed {seed})"));
    while account.last < last {
        let word = tokio::time::timeout(PATIENCE, child.json()).await;
        account
            .take(word.unwrap_or_else(|_| panic!("{} of {last} handled, and nothing more comes", account.last)), last);
    }
    child.kill().await;
    account.check(last);
    let (median, most) =
        (account.median(), account.repeats.iter().map(|(events, _)| *events).max().unwrap_or_default());
    println!(
        "kill: {kills} kills over {last} writes, none lost; repeated after a kill: median {:.1} ms ({} events), at most {most} events",
        median.1, median.0
    );
    Ok(())
}

/// Until the child stands on its trap, or has come far enough; then it is killed, and what it had said is taken in.
async fn live(mut child: Child, life: &Life, account: &mut Account, writer: &Writer, random: &mut fastrand::Rng) {
    let mut handled = 0;
    loop {
        let word: Word = child.json().await;
        handled += u32::from(matches!(word, Word::Handled { .. }));
        let trapped = matches!(word, Word::Trapped);
        account.take(word, writer.acknowledged());
        if trapped || (life.point == Point::Between && handled == life.nth) {
            // At any moment after: the rest of the process goes on, and has time to do what it must not.
            tokio::time::sleep(Duration::from_micros(random.u64(..80_000))).await;
            break;
        }
    }
    child.kill().await;
    while let Some(line) = child.line().await {
        // The last line may be cut off.
        if let Ok(word) = serde_json::from_str(&line) {
            account.take(word, writer.acknowledged());
        }
    }
}

/// Writes one document after the other, each acknowledged by a majority before the next.
struct Writer {
    acknowledged: Arc<AtomicI32>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Writer {
    fn start(feed: Collection<Document>) -> Self {
        let (acknowledged, stop) = (Arc::new(AtomicI32::new(-1)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (acknowledged.clone(), stop.clone());
        let task = tokio::spawn(async move {
            for id in 0.. {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                feed.insert_one(doc! { "_id": id }).await?;
                count.store(id, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { acknowledged, stop, task }
    }

    fn acknowledged(&self) -> i32 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// The last acknowledged write.
    async fn stop(self) -> anyhow::Result<i32> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await??;
        Ok(self.acknowledged.load(Ordering::Relaxed))
    }
}

/// What all lives together have handled.
struct Account {
    life: String,
    /// Everything behind this write is owed: the start was stored before the next one was acknowledged.
    owed_behind: Option<i32>,
    first: Option<i32>,
    /// The greatest id handled; -1 before any.
    last: i32,
    /// When each id was first handled, in microseconds.
    at: Vec<u64>,
    /// The last event that had been handled when the last answered save was sent.
    covered: Option<i32>,
    /// The first event handled in this life, and the last one.
    began: Option<i32>,
    previous: Option<i32>,
    /// After each kill: events that came again, and the milliseconds of work they had been.
    repeats: Vec<(i32, f64)>,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            life: String::new(),
            owed_behind: None,
            first: None,
            last: -1,
            at: Vec::new(),
            covered: None,
            began: None,
            previous: None,
            repeats: Vec::new(),
        }
    }
}

impl Account {
    fn begin(&mut self, life: String) {
        self.life = life;
        self.began = None;
        self.previous = None;
    }

    fn take(&mut self, word: Word, written: i32) {
        match word {
            Word::Claimed => {
                self.owed_behind.get_or_insert(written);
            }
            Word::Handled { id, at } => self.handled(id, at),
            Word::Saved { handled: 0 } | Word::Trapped => {}
            Word::Saved { handled } => self.covered = self.began.map(|began| began + handled - 1),
            Word::Ended(reason) => panic!("{}: it ended by itself: {reason}", self.life),
        }
    }

    fn handled(&mut self, id: i32, at: u64) {
        let life = &self.life;
        match (self.previous, self.first) {
            (Some(previous), _) => assert_eq!(id, previous + 1, "{life}: out of order"),
            (None, Some(_)) => self.resumed(id),
            (None, None) => {
                let owed = self.owed_behind.expect("the start is stored before anything is delivered");
                assert!(
                    id <= owed + 1,
                    "{life}: {} was written after the start was stored, and the feed begins at {id}",
                    owed + 1
                );
                self.first = Some(id);
            }
        }
        self.began.get_or_insert(id);
        self.previous = Some(id);
        if id > self.last {
            self.last = id;
            self.at.resize(usize::try_from(id).unwrap_or_default() + 1, at);
        }
    }

    fn resumed(&mut self, id: i32) {
        let (life, last) = (&self.life, self.last);
        assert!(id <= last + 1, "{life}: {} to {} are lost", last + 1, id - 1);
        let repeated = last + 1 - id;
        let unsaved = self.covered.map_or(repeated, |covered| last - covered);
        assert!(
            repeated <= unsaved + 1,
            "{life}: {repeated} events came again, and only {unsaved} were handled since the last answered save was sent"
        );
        let at = |id: i32| usize::try_from(id).ok().and_then(|id| self.at.get(id)).copied();
        let work = at(last).zip(at(id - 1).or(at(id))).map_or(0, |(last, before)| last.saturating_sub(before));
        let work = if repeated == 0 { 0.0 } else { Duration::from_micros(work).as_secs_f64() * 1000.0 };
        self.repeats.push((repeated, work));
    }

    fn check(&self, last: i32) {
        assert_eq!(self.last, last, "the last acknowledged write is among what was handled");
        assert!(self.first.is_some(), "something was handled");
    }

    /// Of the repeats after a kill: events, and milliseconds.
    fn median(&self) -> (i32, f64) {
        let mut repeats = self.repeats.clone();
        repeats.sort_by(|a, b| a.1.total_cmp(&b.1));
        repeats.get(repeats.len() / 2).copied().unwrap_or_default()
    }
}
