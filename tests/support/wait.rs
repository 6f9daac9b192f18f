//! Waiting for conditions. No test sleeps and hopes.

use std::time::{Duration, Instant};

/// Asks again and again until the answer is `Some`, and panics with `what` once `limit` has passed.
pub async fn wait_for<T, F, Fut>(what: &str, limit: Duration, mut ask: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let started = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Asks again and again until the condition holds, and panics with `what` once `limit` has passed.
pub async fn wait_until<F, Fut>(what: &str, limit: Duration, mut holds: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    wait_for(what, limit, || {
        let holds = holds();
        async move { holds.await.then_some(()) }
    })
    .await;
}
