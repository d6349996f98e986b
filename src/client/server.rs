//! The channel to one server: frame and window sizes, keepalive, message limits, and what is known of it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use kvstrata_proto::v1::{self, block_cache_client::BlockCacheClient};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::{RwLock, RwLockReadGuard};
use tokio::time::{Instant, timeout};
use tonic::{Code, Response, Status, transport::Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::{
    ClientOptions,
    access::{Access, Carrier, dialled},
    breaker::Breaker,
    bulk::Pool,
    connect::{MESSAGE_BYTES_MAX, timed_out, within},
    endpoints::Target,
    status::{error_of, root},
};
use crate::members::Members;

/// HTTP/2 frames: the default of 16 KiB costs a third of the throughput.
const FRAME_BYTES_MAX: u32 = 2 << 20;
/// What one stream may have in flight, in bytes: a few messages of 1 MiB.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// What one connection may have in flight, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// How long a silent connection is trusted before it is probed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a probe may stay unanswered.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A server, connected to; the channel connects again by itself.
pub(super) struct Server {
    pub(super) target: Target,
    wire: BlockCacheClient<Carrier>,
    channel: Carrier,
    pub(super) access: Access,
    members: RwLock<Members>,
    /// It has told a session that it will go away.
    drains: AtomicBool,
    pub(super) bulk: Pool,
    /// Whether it answers.
    pub(super) breaker: Breaker,
}

impl Server {
    /// The first of `targets` that answers, each within its share of the time; of those that answer but do
    /// not want to be asked, because they start or drain, the first one if there are no others.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), the last one's.
    pub(super) async fn first(targets: &[Target], options: &ClientOptions) -> Result<Self> {
        for target in targets {
            configure(target, options.connect_deadline)?;
        }
        let secure = targets.iter().any(|target| target.secure);
        let access = Access::new(options, secure)?;
        if let [only] = targets {
            return Self::connect(only.clone(), access, options.connect_deadline).await;
        }
        let until = Instant::now() + options.connect_deadline;
        let (mut unwilling, mut failed) = (None, None);
        for (left, target) in (1..=u32::try_from(targets.len()).unwrap_or(1)).rev().zip(targets) {
            let share = until.saturating_duration_since(Instant::now()) / left;
            let asked = Instant::now();
            let answered = match Self::connect(target.clone(), access.clone(), share).await {
                Ok(server) => {
                    let share = share.saturating_sub(asked.elapsed());
                    server.is_willing(share).await.map(|willing| (server, willing))
                }
                Err(error) => Err(error),
            };
            match answered {
                Ok((server, true)) => return Ok(server),
                Ok((server, false)) => unwilling = unwilling.or(Some(server)),
                Err(error) => {
                    tracing::debug!(endpoint = %target, %error, "endpoint not reached");
                    failed = Some(error);
                }
            }
        }
        let failed = failed.unwrap_or_else(|| Error::invalid("endpoint: none given"));
        unwilling.ok_or(failed)
    }

    /// Connects within `deadline`.
    ///
    /// # Errors
    /// `Unavailable` or `Timeout` if it is not reached, `Unauthenticated` if it is not the one meant.
    pub(super) async fn connect(
        target: Target,
        access: Access,
        deadline: Duration,
    ) -> Result<Self> {
        let channel = configure(&target, deadline)?;
        let connecting = timeout(deadline, access.connect(&channel, &target.address));
        let channel = connecting
            .await
            .map_err(|_elapsed| cannot_connect(ErrorKind::Timeout, &target))?
            .map_err(|error| match dialled(&error) {
                Some((ErrorKind::Unavailable, why)) => {
                    cannot_connect(ErrorKind::Unavailable, &target).because(why)
                }
                Some((kind, why)) => Error::new(kind, why),
                None => cannot_connect(ErrorKind::Unavailable, &target).because(root(&error)),
            })?;
        let channel = Carrier::new(channel, access.bearing()?);
        let wire = BlockCacheClient::new(channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self {
            target,
            wire,
            channel,
            access,
            members: RwLock::default(),
            drains: AtomicBool::new(false),
            bulk: Pool::default(),
            breaker: Breaker::default(),
        })
    }

    /// Runs one call that moves no blocks, under its deadline.
    pub(super) async fn call<T, F>(&self, doing: &str, deadline: Duration, call: F) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.breaker.admit(doing)?;
        let answered = within(doing, deadline, call).await;
        self.breaker.note(answered).map(Response::into_inner)
    }

    /// Whether it wants to be asked: a kernel takes connections for a process that stands still.
    async fn is_willing(&self, share: Duration) -> Result<bool> {
        const DOING: &str = "ask whether the server is well";
        let mut health = HealthClient::new(self.channel());
        let asking = health.check(HealthCheckRequest::default());
        match timeout(share, asking).await {
            Ok(Ok(answer)) => Ok(answer.into_inner().status() == ServingStatus::Serving),
            // One that knows no such question may be well.
            Ok(Err(status)) if status.code() == Code::Unimplemented => Ok(true),
            Ok(Err(status)) => Err(error_of(DOING, &status)),
            Err(_elapsed) => Err(timed_out(DOING, share)),
        }
    }

    pub(super) fn wire(&self) -> BlockCacheClient<Carrier> {
        self.wire.clone()
    }

    pub(super) fn channel(&self) -> Carrier {
        self.channel.clone()
    }

    /// The newest member list that it has told.
    pub(super) fn members(&self) -> RwLockReadGuard<'_, Members> {
        self.members.read()
    }

    /// Keeps `list` unless it is older than the one known.
    pub(super) fn learn_members(&self, list: Option<v1::MemberList>) {
        let Some(list) = list.map(Members::from) else { return };
        let mut known = self.members.write();
        // A node that was started again begins anew: what it says last holds.
        if known.list.is_empty() || list.epoch >= known.epoch {
            *known = list;
        }
    }

    /// Takes what another node says of this one, until it says more itself.
    pub(super) fn introduce(&self, members: Members) {
        *self.members.write() = members;
    }

    /// It has told a session that it will go away.
    pub(super) fn note_drain(&self) {
        self.drains.store(true, Ordering::Relaxed);
    }

    /// Whether it has said that it will go away.
    pub(super) fn is_draining(&self) -> bool {
        self.drains.load(Ordering::Relaxed) || self.members().own().is_some_and(|own| own.draining)
    }
}

fn configure(target: &Target, deadline: Duration) -> Result<Endpoint> {
    let uri = format!("http://{}", target.address);
    let endpoint = Endpoint::from_shared(uri.clone()).map_err(|error| {
        Error::invalid(format!(
            "endpoint: `{uri}` is not host:port, http://host:port or https://host:port"
        ))
        .because(error)
    })?;
    Ok(endpoint
        .connect_timeout(deadline)
        .tcp_nodelay(true)
        .max_frame_size(FRAME_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

fn cannot_connect(kind: ErrorKind, target: &Target) -> Error {
    Error::new(
        kind,
        format!(
            "cannot connect to {target}: is the server running? start it with `kvstrata serve`"
        ),
    )
}
