//! What is said about a connection, not about values: who the client is, which version it speaks, and
//! what client libraries ask by the way.

use kvstrata_tiers::error::Result;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    connection::{Connection, Next},
    reply::Version,
    space::Spaces,
};
use crate::{
    limits::{BULK_TOKEN_BYTES_MAX, CLIENT_NAME_BYTES_MAX},
    metrics::Door,
};

/// Words that are looked at; more have no meaning to any of these commands.
const WORDS_MAX: usize = 8;
/// What clients are told that ask for a version of Redis: that whose commands are meant.
const REDIS_VERSION: &str = "7.2.0";

/// Whether a command may be given before its client is known.
pub(super) fn is_open(name: &[u8]) -> bool {
    matches!(name, b"AUTH" | b"HELLO" | b"QUIT")
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Connection<R, W> {
    /// Answers a command that asks for no value.
    pub(super) async fn converse(&mut self, name: &[u8], arguments: usize) -> Result<Next> {
        let mut words = Vec::new();
        for _ in 0..arguments.min(WORDS_MAX) {
            words.push(self.input.word(BULK_TOKEN_BYTES_MAX).await?.into_bytes());
        }
        self.input.skip_words(arguments.saturating_sub(WORDS_MAX)).await?;
        let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
        match (name, words.as_slice()) {
            (b"AUTH", [token] | [_, token]) => return Ok(self.authenticate(token)),
            (b"HELLO", words) => return Ok(self.hello(words)),
            (b"QUIT", _) => {
                self.replies.simple("OK");
                return Ok(Next::Close);
            }
            // A page in a browser that speaks to this port: what it sends behind may look like commands.
            (b"POST" | b"HOST:", _) => return Ok(Next::Close),
            (b"PING", []) => self.replies.simple("PONG"),
            (b"PING" | b"ECHO", [text]) => self.replies.text(text),
            (b"SELECT", [b"0"]) => self.replies.simple("OK"),
            (b"SELECT", [_]) => self.replies.error("ERR DB index is out of range"),
            (b"CLIENT", [verb, words @ ..]) => self.client(&verb.to_ascii_uppercase(), words),
            (b"INFO", _) => self.info(),
            (b"COMMAND", words) => self.commands(words.first().copied().unwrap_or_default()),
            (b"CLUSTER", _) => {
                self.replies.error("ERR This instance has cluster support disabled");
            }
            (b"DBSIZE", []) => {
                let values = Spaces::values(&self.resp.node, self.tenant());
                self.replies.integer(i64::try_from(values).unwrap_or(i64::MAX));
            }
            (b"AUTH" | b"PING" | b"ECHO" | b"SELECT" | b"CLIENT" | b"DBSIZE", _) => {
                let name = String::from_utf8_lossy(name).to_lowercase();
                let text = format!("ERR wrong number of arguments for '{name}' command");
                self.replies.error(&text);
            }
            _ => {
                let text = format!("ERR unknown command '{}'", String::from_utf8_lossy(name));
                self.replies.error(&text);
            }
        }
        Ok(Next::GoOn)
    }

    fn authenticate(&mut self, token: &[u8]) -> Next {
        if self.prove(token) {
            self.replies.simple("OK");
            return Next::GoOn;
        }
        Next::Close
    }

    /// Takes a token; one that is not valid is answered with an error.
    fn prove(&mut self, token: &[u8]) -> bool {
        match self.resp.gate.admit(Door::Resp, Some(token)) {
            Ok(bearer) => {
                self.become_bearer(bearer);
                true
            }
            Err(_counted) => {
                let text = "WRONGPASS invalid username-password pair or user is disabled.";
                self.replies.error(text);
                false
            }
        }
    }

    fn hello(&mut self, words: &[&[u8]]) -> Next {
        let (asked, mut rest) = match words {
            [] => (None, words),
            [version, rest @ ..] => (Some(*version), rest),
        };
        let version = match asked {
            None => self.replies.version,
            Some(b"2") => Version::Two,
            Some(b"3") => Version::Three,
            Some(_) => {
                self.replies.error("NOPROTO unsupported protocol version");
                return Next::GoOn;
            }
        };
        while let [option, words @ ..] = rest {
            rest = match (option.to_ascii_uppercase().as_slice(), words) {
                (b"AUTH", [_user, token, words @ ..]) => {
                    if !self.prove(token) {
                        return Next::Close;
                    }
                    words
                }
                (b"SETNAME", [name, words @ ..]) if is_name(name) => {
                    self.name = String::from_utf8_lossy(name).into_owned();
                    words
                }
                _ => {
                    self.replies.error("ERR syntax error in HELLO");
                    return Next::GoOn;
                }
            };
        }
        if self.bearer.is_none() {
            self.replies
                .error("NOAUTH HELLO must be called with AUTH: this server asks for tokens");
            return Next::GoOn;
        }
        self.replies.version = version;
        self.greet();
        Next::GoOn
    }

    fn greet(&mut self) {
        let number = i64::try_from(self.number).unwrap_or(i64::MAX);
        let replies = &mut self.replies;
        replies.map(7);
        for (name, value) in [
            ("server", "kvstrata"),
            ("version", env!("CARGO_PKG_VERSION")),
            ("mode", "standalone"),
            ("role", "master"),
        ] {
            replies.text(name.as_bytes());
            replies.text(value.as_bytes());
        }
        replies.text(b"proto");
        replies.integer(match replies.version {
            Version::Two => 2,
            Version::Three => 3,
        });
        replies.text(b"id");
        replies.integer(number);
        replies.text(b"modules");
        replies.array(0);
    }

    fn client(&mut self, verb: &[u8], words: &[&[u8]]) {
        match (verb, words) {
            (b"SETNAME", [name]) if is_name(name) => {
                self.name = String::from_utf8_lossy(name).into_owned();
                self.replies.simple("OK");
            }
            (b"SETNAME", _) => {
                let text =
                    "ERR Client names cannot contain spaces, newlines or special characters.";
                self.replies.error(text);
            }
            // Name and version of the library: nobody asks for them.
            (b"SETINFO", [_, _]) => self.replies.simple("OK"),
            (b"GETNAME", []) if self.name.is_empty() => self.replies.nil(),
            (b"GETNAME", []) => self.replies.text(self.name.as_bytes()),
            (b"ID", []) => self.replies.integer(i64::try_from(self.number).unwrap_or(i64::MAX)),
            _ => self.replies.error("ERR unknown subcommand of 'client'"),
        }
    }

    fn info(&mut self) {
        let values = Spaces::values(&self.resp.node, self.tenant());
        let text = format!(
            "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\n\
             server_name:kvstrata\r\nkvstrata_version:{}\r\n\r\n# Replication\r\nrole:master\r\n\r\n\
             # Keyspace\r\ndb0:keys={values},expires=0,avg_ttl=0\r\n",
            env!("CARGO_PKG_VERSION"),
        );
        self.replies.text(text.as_bytes());
    }

    /// No command is described: clients then take what they know of each.
    fn commands(&mut self, verb: &[u8]) {
        match verb.to_ascii_uppercase().as_slice() {
            b"COUNT" => self.replies.integer(0),
            b"DOCS" => self.replies.map(0),
            _ => self.replies.array(0),
        }
    }
}

fn is_name(name: &[u8]) -> bool {
    name.len() <= CLIENT_NAME_BYTES_MAX && name.iter().all(u8::is_ascii_graphic)
}
