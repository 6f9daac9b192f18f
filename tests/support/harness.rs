//! From async bodies to the tests of a binary, and such a binary's `main`.

use std::{
    any::Any,
    collections::HashSet,
    env, panic,
    process::ExitCode,
    sync::{LazyLock, Mutex, PoisonError},
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Builder;

use super::{
    child::{self, Role},
    choice::choice,
    guard,
    pool::{self, Fixture, Kind},
    run,
};

/// Without `--test-threads`. Tests wait for servers more than they compute, so this is not the number of cores; more would
/// let the servers that tests start for themselves pile up.
const THREADS: usize = 4;

/// Longer than any wait in a test. What hangs fails, with its name.
pub const LIMIT: Duration = Duration::from_secs(180);

/// What a test is given.
pub struct Context {
    name: String,
}

impl Context {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A shared replica set of one node, which the test must not break, and a database of its own.
    pub async fn plain(&self) -> Fixture {
        pool::shared(Kind::Plain).await
    }

    /// A shared server of another kind.
    pub async fn shared(&self, kind: Kind) -> Fixture {
        pool::shared(kind).await
    }
}

/// What the body of a test may return.
pub trait Outcome {
    fn outcome(self) -> Result<(), Failed>;
}

impl Outcome for () {
    fn outcome(self) -> Result<(), Failed> {
        Ok(())
    }
}

impl Outcome for anyhow::Result<()> {
    fn outcome(self) -> Result<(), Failed> {
        self.map_err(|error| format!("{error:?}").into())
    }
}

/// A test on a thread and a runtime of its own. Its name is a sentence.
pub fn test<F, Fut>(name: &str, body: F) -> Trial
where
    F: FnOnce(Context) -> Fut + Send + 'static,
    Fut: Future<Output: Outcome>,
{
    test_within(LIMIT, name, body)
}

/// The same, with a limit of its own: for a test that can be asked to go on for long.
pub fn test_within<F, Fut>(limit: Duration, name: &str, body: F) -> Trial
where
    F: FnOnce(Context) -> Fut + Send + 'static,
    Fut: Future<Output: Outcome>,
{
    let context = Context { name: name.to_owned() };
    Trial::test(name, move || {
        // The thread bears the test's name, so that the message of a panic does.
        let thread = thread::Builder::new().name(context.name.clone()).spawn(move || perform(context, limit, body))?;
        thread.join().unwrap_or_else(|panic| Err(message(&*panic).into()))
    })
}

/// Marks tests of what a server's version may bear on. They hold on every version, and where versions differ the test asks
/// the server which one it is. `.ci/run` runs them against older servers too: `-- '[any server]'`.
pub fn on_any_server(tests: Vec<Trial>) -> Vec<Trial> {
    tests.into_iter().map(|test| test.with_kind("any server")).collect()
}

fn perform<F, Fut>(context: Context, limit: Duration, body: F) -> Result<(), Failed>
where
    F: FnOnce(Context) -> Fut,
    Fut: Future<Output: Outcome>,
{
    let runtime = Builder::new_multi_thread().worker_threads(2).thread_name(context.name()).enable_all().build()?;
    let name = context.name.clone();
    let outcome = runtime.block_on(async { tokio::time::timeout(limit, body(context)).await });
    ENDED.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
    runtime.shutdown_timeout(Duration::from_secs(5));
    outcome.map_or_else(|_| Err(format!("not finished within {limit:?}").into()), Outcome::outcome)
}

/// The tests whose runtime is being taken down.
static ENDED: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// Tasks of the driver can panic when their runtime goes away under them. That says nothing about the test that has ended.
fn hush_the_driver() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let driver = panic.location().is_some_and(|place| place.file().contains("/mongodb-"));
        let ended = |name| ENDED.lock().unwrap_or_else(PoisonError::into_inner).contains(name);
        if !(driver && thread::current().name().is_some_and(ended)) {
            usual(panic);
        }
    }));
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

/// The `main` of a test binary, and of its guard and its children, which build no tests.
pub fn main(tests: fn() -> Vec<Trial>, roles: &[Role]) -> ExitCode {
    if let Some(ended) = other_role(roles) {
        return ended;
    }
    let mut arguments = Arguments::from_args();
    if arguments.list {
        return libtest_mimic::run(&arguments, tests()).exit_code();
    }
    arguments.test_threads.get_or_insert(THREADS);
    println!("{}", choice().announcement());
    hush_the_driver();
    let run = run::begin();
    let conclusion = libtest_mimic::run(&arguments, tests());
    run.end();
    conclusion.exit_code()
}

/// The `main` of a program that needs the servers of the tests, and of its guard and its children.
pub fn program<Fut: Future<Output = anyhow::Result<()>>>(body: impl FnOnce() -> Fut, roles: &[Role]) -> ExitCode {
    if let Some(ended) = other_role(roles) {
        return ended;
    }
    eprintln!("{}", choice().announcement());
    let run = run::begin();
    let runtime = Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let outcome = runtime.block_on(body());
    runtime.shutdown_timeout(Duration::from_secs(5));
    run.end();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:?}");
            ExitCode::FAILURE
        }
    }
}

/// Whether this process is a guard or a child; then it has played its role to the end.
fn other_role(roles: &[Role]) -> Option<ExitCode> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [guard::ARGUMENT, run] => {
            guard::main(run);
            Some(ExitCode::SUCCESS)
        }
        [child::ARGUMENT, role, input] => {
            let Err(error) = child::main(roles, role, input) else { return Some(ExitCode::SUCCESS) };
            eprintln!("child {role}: {error:?}");
            Some(ExitCode::FAILURE)
        }
        _ => None,
    }
}
