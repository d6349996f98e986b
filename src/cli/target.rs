//! Which server and which namespace of foreign keys a command means.

use std::{convert::Infallible, fmt, path::PathBuf, str::FromStr};

use kvstrata_tiers::{block::BlockHash, error::Result, namespace::foreign_hash};

use crate::client::{
    Client, ClientOptions, Handle, HashList, NamespaceSpec, Path, TlsOptions, Token,
};

/// The server.
#[derive(Debug, Clone, clap::Args)]
pub struct Server {
    /// Address of the server; of several with commas between them, the first that answers
    #[arg(
        long,
        value_name = "[https://]HOST:PORT[,..]",
        env = "KVSTRATA_ENDPOINT",
        default_value = "127.0.0.1:9400"
    )]
    pub endpoint: String,

    /// Who this is, and how the server is made sure of.
    #[command(flatten)]
    pub access: Access,
}

/// Who a command is for a server, and how it makes sure of the server.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Access {
    /// Bearer token of the tenant; other users of this host may see flags, but not the environment
    #[arg(long, value_name = "TOKEN", env = "KVSTRATA_TOKEN", hide_env_values = true)]
    pub token: Option<TokenText>,

    /// PEM file with the CA of the server; turns TLS on, as https:// before HOST:PORT does
    #[arg(long, value_name = "FILE", env = "KVSTRATA_TLS_CA")]
    pub tls_ca: Option<PathBuf>,

    /// PEM file with a certificate of this client, if the server asks for one
    #[arg(long, value_name = "FILE", env = "KVSTRATA_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with its key
    #[arg(long, value_name = "FILE", env = "KVSTRATA_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Name that the server's certificate is for, if it is not HOST
    #[arg(long, value_name = "NAME", env = "KVSTRATA_TLS_SERVER_NAME")]
    pub tls_server_name: Option<String>,
}

/// A token as it was given, which is never shown: not even where it is no token.
#[derive(Clone)]
pub struct TokenText(String);

impl FromStr for TokenText {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl TokenText {
    /// The token; none if nothing was given.
    ///
    /// # Errors
    /// `Invalid` if it is none.
    pub(super) fn token(&self) -> Result<Option<Token>> {
        Some(self.0.as_str()).filter(|text| !text.is_empty()).map(Token::from_str).transpose()
    }
}

impl fmt::Debug for TokenText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenText")
    }
}

impl Access {
    /// The options of a client.
    ///
    /// # Errors
    /// `Invalid` if what was given as a token is none.
    pub(super) fn options(&self) -> Result<ClientOptions> {
        let token = self.token.as_ref().map(TokenText::token).transpose()?.flatten();
        let tls = TlsOptions {
            ca_file: self.tls_ca.clone(),
            client: self.tls_cert.clone().zip(self.tls_key.clone()),
            server_name: self.tls_server_name.clone(),
        };
        let tls = Some(tls).filter(|tls| *tls != TlsOptions::default());
        Ok(ClientOptions { token, tls, ..ClientOptions::default() })
    }
}

/// The server and a namespace in which keys are any text.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// The server.
    #[command(flatten)]
    pub server: Server,

    /// Namespace of the keys; equal keys of different namespaces do not meet
    #[arg(long, value_name = "NAME", default_value = "cli")]
    pub namespace: String,
}

impl Server {
    pub(super) async fn connect(&self) -> Result<Client> {
        Client::connect(&self.endpoint, self.access.options()?).await
    }

    /// As [`connect`](Self::connect), with blocks going this way and no other.
    pub(super) async fn connect_by(&self, path: Path) -> Result<Client> {
        let options = ClientOptions { path, ..self.access.options()? };
        Client::connect(&self.endpoint, options).await
    }
}

impl Target {
    pub(super) async fn open(&self) -> Result<Handle> {
        let client = self.server.connect().await?;
        client.open(NamespaceSpec::Opaque { name: self.namespace.clone(), bytes_max: 0 }).await
    }
}

/// The block hashes of foreign keys.
pub(super) fn hashes_of(keys: &[String]) -> HashList {
    let hashes: Vec<BlockHash> = keys.iter().map(|key| foreign_hash(key.as_bytes())).collect();
    HashList::of(&hashes)
}
