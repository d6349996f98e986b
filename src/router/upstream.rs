//! Requests to engines: HTTP/1.1 over connections that are kept, bodies as they come, nothing gathered.

use std::{fmt, time::Duration};

use axum::{
    body::{Body, Bytes, to_bytes},
    http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, header},
};
use hyper_util::{
    client::legacy::{Client, Error, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use tokio::time::timeout;

/// For a connection to an engine: it is on the same network, and another one can take the request.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Connections to one engine that wait for a next request, and how long: engines close theirs after 5 s, and
/// a request that meets that is lost.
const IDLE_CONNECTIONS_MAX: usize = 64;
const IDLE_MAX: Duration = Duration::from_secs(2);
/// The longest answer that is read here, and not passed on: tokens of a long prompt.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// What belongs to one connection, and is not passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// A client of engines; clones share its connections.
#[derive(Debug, Clone)]
pub(super) struct Upstream(Client<HttpConnector, Body>);

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// The engine was not reached: it has seen nothing of the request.
    Unreached(Error),
    /// The connection ended before the answer began.
    Broken(Error),
    /// It took too long.
    Late,
    /// The answer was not that of an engine that could do it.
    Refused(StatusCode),
    /// The answer could not be read.
    Unread(axum::Error),
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached(error) => write!(f, "engine not reached: {error}"),
            Self::Broken(error) => write!(f, "connection lost: {error}"),
            Self::Late => write!(f, "no answer in time"),
            Self::Refused(status) => write!(f, "answered {status}"),
            Self::Unread(error) => write!(f, "answer not read: {error}"),
        }
    }
}

impl Upstream {
    /// No connections yet.
    pub(super) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_DEADLINE));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_MAX)
            .build(connector);
        Self(client)
    }

    /// Sends a request and returns the answer as soon as it begins; an engine that computes may take any
    /// time until then.
    pub(super) async fn send(
        &self,
        authority: &str,
        mut request: Request<Body>,
    ) -> Result<Response<Body>, Unanswered> {
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let uri = format!("http://{authority}{path}").parse();
        // What has come in as a path goes out as one.
        *request.uri_mut() = uri.map_err(|_none| Unanswered::Refused(StatusCode::BAD_REQUEST))?;
        // The body is here already, and the host is another one.
        request.headers_mut().remove(header::EXPECT);
        request.headers_mut().remove(header::HOST);
        strip(request.headers_mut());
        let mut response =
            self.0.request(request).await.map_err(|error| match error.is_connect() {
                true => Unanswered::Unreached(error),
                false => Unanswered::Broken(error),
            })?;
        strip(response.headers_mut());
        Ok(response.map(Body::new))
    }

    /// Asks for a short answer, all of it, of an engine that can give it.
    pub(super) async fn ask(
        &self,
        authority: &str,
        (method, path): (Method, &str),
        body: Bytes,
        deadline: Duration,
    ) -> Result<Bytes, Unanswered> {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let request = request
            .body(Body::from(body))
            .map_err(|_bad| Unanswered::Refused(StatusCode::BAD_REQUEST))?;
        let asking = async {
            let response = self.send(authority, request).await?;
            let status = response.status();
            let body = to_bytes(response.into_body(), ANSWER_BYTES_MAX).await;
            let body = body.map_err(Unanswered::Unread)?;
            status.is_success().then_some(body).ok_or(Unanswered::Refused(status))
        };
        timeout(deadline, asking).await.unwrap_or(Err(Unanswered::Late))
    }
}

/// Takes away what belongs to one connection only.
fn strip(headers: &mut HeaderMap) {
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}
