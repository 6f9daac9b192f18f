//! The network in front of the nodes of a set, as far as it can be cut: a proxy per node, whose address the members and the
//! clients know it by.
//!
//! A cut link is a black hole, not a refusal: nothing that is sent arrives, nobody is told, and connections stay open on both
//! sides. When it is healed, what was under way arrives, as TCP sends again what nobody has confirmed. A new connection over
//! a cut link is accepted and never answered.
//!
//! Who opens a connection says so in its first message: a member its own port, in a field that `mongod` sends when it has
//! test commands, a client its `appName`. So one proxy in front of each node is enough to cut any pair.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::ensure;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use super::background;

/// A first message is a `hello`, and far smaller.
const LONGEST_HELLO: usize = 1 << 20;

/// What is cut now; shared by the proxies of a set.
#[derive(Clone, Debug, Default)]
pub struct Links(watch::Sender<Vec<Cut>>);

/// Nodes are named by the port that they listen on themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Everything between this node and anybody else.
    Node(u16),
    /// Everything between this node and other nodes.
    Peers(u16),
    /// What goes between this node and the clients of that `appName`.
    Client { app_name: String, node: u16 },
}

#[derive(Debug, PartialEq, Eq)]
enum Party {
    Node(u16),
    Client(String),
}

impl Links {
    pub fn cut(&self, cut: Cut) {
        self.0.send_modify(|cuts| cuts.push(cut));
    }

    pub fn heal(&self) {
        self.0.send_modify(Vec::clear);
    }
}

impl Cut {
    fn is_between(&self, from: &Party, to: u16) -> bool {
        match self {
            Self::Node(node) => (*from == Party::Node(*node)) != (to == *node),
            Self::Peers(node) => matches!(from, Party::Node(from) if (from == node) != (to == *node)),
            Self::Client { app_name, node } => to == *node && matches!(from, Party::Client(name) if name == app_name),
        }
    }
}

/// The way to one node; closed when dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    serving: AbortHandle,
}

impl Proxy {
    /// In front of the node on that port, which need not listen yet, and may come and go.
    pub async fn start(node: u16, links: &Links) -> anyhow::Result<Self> {
        let links = links.0.subscribe();
        background::run(async move {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let port = listener.local_addr()?.port();
            let serving = tokio::spawn(serve(listener, node, links)).abort_handle();
            Ok(Self { port, serving })
        })
        .await
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: TcpListener, node: u16, links: watch::Receiver<Vec<Cut>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(carry(stream, node, links.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// One connection, until one of its ends closes it; the other end is told. An error is such an end.
async fn carry(mut stream: TcpStream, node: u16, links: watch::Receiver<Vec<Cut>>) -> anyhow::Result<()> {
    let hello = first_message(&mut stream).await?;
    let mut link = Link { from: party(&hello), to: node, links };
    link.is_open().await?;
    // Refused while the node is down: then this end is closed as well.
    let mut onward = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, node))).await?;
    stream.set_nodelay(true)?;
    onward.set_nodelay(true)?;
    onward.write_all(&hello).await?;
    let (answers, requested) = onward.into_split();
    let (requests, answered) = stream.into_split();
    let mut back = Link { from: party(&hello), to: node, links: link.links.clone() };
    tokio::select! {
        ended = pump(requests, requested, &mut link) => ended,
        ended = pump(answers, answered, &mut back) => ended,
    }
}

struct Link {
    from: Party,
    to: u16,
    links: watch::Receiver<Vec<Cut>>,
}

impl Link {
    async fn is_open(&mut self) -> anyhow::Result<()> {
        self.is(true).await
    }

    async fn is(&mut self, open: bool) -> anyhow::Result<()> {
        let (from, to) = (&self.from, self.to);
        self.links.wait_for(|cuts| open != cuts.iter().any(|cut| cut.is_between(from, to))).await?;
        Ok(())
    }
}

/// While the link is cut nothing is read, so neither data nor an end gets through.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, link: &mut Link) -> anyhow::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        link.is_open().await?;
        let length = tokio::select! {
            biased;
            cut = link.is(false) => {
                cut?;
                continue;
            }
            length = from.read(&mut buffer) => length?,
        };
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
    }
}

/// Four bytes of length, which count themselves, and the rest.
async fn first_message(stream: &mut TcpStream) -> anyhow::Result<Vec<u8>> {
    let mut message = vec![0; 4];
    stream.read_exact(&mut message).await?;
    let length = usize::try_from(u32::from_le_bytes([message[0], message[1], message[2], message[3]]))?;
    ensure!((4..LONGEST_HELLO).contains(&length), "a first message of {length} bytes");
    message.resize(length, 0);
    stream.read_exact(&mut message[4..]).await?;
    Ok(message)
}

/// Who says hello, found in the bytes of the BSON: the field stands at the top level, the name in the client's metadata.
fn party(hello: &[u8]) -> Party {
    let node = text_after(hello, b"\x02hostInfo\0").and_then(|host| host.rsplit_once(':')?.1.parse().ok());
    let application = || {
        let metadata = behind(hello, b"\x03application\0")?;
        text_after(metadata, b"\x02name\0")
    };
    node.map_or_else(|| Party::Client(application().unwrap_or_default().to_owned()), Party::Node)
}

fn behind<'a>(bytes: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let at = bytes.windows(key.len()).position(|window| window == key)?;
    Some(&bytes[at + key.len()..])
}

/// The string that is the value of a key.
fn text_after<'a>(bytes: &'a [u8], key: &[u8]) -> Option<&'a str> {
    let (length, text) = behind(bytes, key)?.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    std::str::from_utf8(text.get(..length.checked_sub(1)?)?).ok()
}
