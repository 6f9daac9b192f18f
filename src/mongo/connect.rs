//! A client for the command, by what somebody typed. Whatever goes wrong, nothing of a password is in the message. The
//! demo and `mongosub subscribe` call it.

use std::time::Duration;

use mongodb::Client;
use mongodb::error::{Error, ErrorKind};
use mongodb::options::ClientOptions;

use super::classify::describe;

/// A URI that leads to no client.
#[derive(Debug)]
pub(crate) struct Unusable {
    /// In one sentence.
    pub(crate) text: String,
    /// Whether what was typed is wrong, and not what it leads to.
    pub(crate) usage: bool,
}

/// What a client is made with unless the URI says otherwise.
#[derive(Debug, Default)]
pub(crate) struct Unless {
    /// How long a server may take to be found; else the driver's 30 s.
    pub(crate) found_within: Option<Duration>,
    /// What the server's logs and `currentOp` call it.
    pub(crate) app_name: Option<&'static str>,
}

/// A client; it connects on its own from then on. A `mongodb+srv` name is looked up before.
pub(crate) async fn connect(uri: &str, unless: Unless) -> Result<Client, Unusable> {
    let mut options = ClientOptions::parse(uri).await.map_err(|error| unusable(uri, &error))?;
    options.server_selection_timeout = options.server_selection_timeout.or(unless.found_within);
    options.app_name = options.app_name.or(unless.app_name.map(Into::into));
    Client::with_options(options).map_err(|error| unusable(uri, &error))
}

/// Ends a client: its cursors are closed at the server. Nothing waits longer than this, and what is not done by then is
/// done by the server's own timeouts.
pub(crate) async fn disconnect(client: Client, within: Duration) {
    let ending = tokio::spawn(async move { client.shutdown().await });
    let _ = tokio::time::timeout(within, ending).await;
}

/// The driver's message may hold what it took for a host or an option: with a password that is not percent-encoded, a
/// part of that.
fn unusable(uri: &str, error: &Error) -> Unusable {
    let why = match error.kind.as_ref() {
        ErrorKind::InvalidArgument { .. } if uri.contains('@') => {
            "its user name and password must be percent-encoded, its hosts and options well-formed".into()
        }
        _ => short(error),
    };
    let usage = matches!(error.kind.as_ref(), ErrorKind::InvalidArgument { .. });
    Unusable { text: format!("the URI cannot be used: {why}"), usage }
}

/// A driver's error without the server's whole reply.
pub(crate) fn short(error: &Error) -> String {
    match describe(error) {
        (Some(code), text) => format!("{text} (code {code})"),
        (None, text) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_password_that_breaks_the_uri_is_not_printed() {
        for password in ["s3cret", "s3/cret", "s3?cret", "s3@cret", "s3%cret", "s3:cret", "cret&s3"] {
            for uri in [
                format!("mongodb://user:{password}@host:99999/"),
                format!("mongodb://user:{password}@host/?x"),
                format!("mongodb://user:{password}@"),
                format!("mongodb+srv://user:{password}@a,b/"),
            ] {
                let Err(failed) = connect(&uri, Unless::default()).await else { continue };
                assert!(!failed.text.contains("cret") && !failed.text.contains("s3"), "{uri}: {}", failed.text);
                assert!(failed.usage, "{uri}");
            }
        }
    }

    #[tokio::test]
    async fn what_the_uri_says_is_not_overridden() {
        let unless = || Unless { found_within: Some(Duration::from_secs(7)), app_name: Some("ours") };
        let typed = "mongodb://localhost:1/?appName=theirs&serverSelectionTimeoutMS=9000";
        for (uri, app_name, seconds) in [("mongodb://localhost:1/", "ours", 7), (typed, "theirs", 9)] {
            let client = connect(uri, unless()).await.unwrap();
            let options = format!("{client:?}");
            assert!(options.contains(app_name), "{options}");
            assert!(options.contains(&format!("server_selection_timeout: Some({seconds}s)")), "{options}");
        }
    }
}
