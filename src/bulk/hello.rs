//! The first frame of each side: who the client is, and what both can take.

use std::sync::Arc;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::{
    Bulk,
    body::{Hello, Welcome},
    frame::{Broken, Kind, VERSION},
    input::{Input, lost},
};
use crate::{
    auth::Bearer,
    id::SessionId,
    limits::{BULK_CREDIT_BYTES_MIN, BULK_PAYLOAD_BYTES_MAX, BULK_REQUESTS_MAX, HELLO_DEADLINE},
    metrics::Door,
    session::Session,
};

/// A client that has said who it is.
pub(super) struct Greeted {
    pub(super) bearer: Arc<Bearer>,
    pub(super) session: Option<Arc<Session>>,
    pub(super) credit: u32,
}

/// Waits for hello and answers it.
///
/// # Errors
/// `Timeout` if it does not come in time, `Invalid` if it is none of ours, `Unauthenticated` if it has
/// no valid token, `LeaseExpired` if it names a session that has ended or is another tenant's.
pub(super) async fn greet<R, W>(bulk: &Bulk, input: &mut Input<R>, to: &mut W) -> Result<Greeted>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let late = |_elapsed| Error::new(ErrorKind::Timeout, "hello: it did not come in time");
    let hello = timeout(HELLO_DEADLINE, hello(input)).await.map_err(late)??;
    let bearer = bulk.gate.admit_joined(Door::Bulk, &hello.token)?;
    if hello.version == 0 {
        return Err(Error::invalid("hello: version 0 given, 1 or above required"));
    }
    let least = BULK_CREDIT_BYTES_MIN;
    if hello.credit < least {
        let given = hello.credit;
        return Err(Error::invalid(format!(
            "hello: credit of {given} bytes given, {least} or above required"
        )));
    }
    let session = match hello.session {
        id if id == [0; 16] => None,
        id => Some(bulk.node.session(&bearer, SessionId::read("session_id", &id)?)?),
    };
    let welcome = Welcome {
        version: hello.version.min(VERSION),
        requests_max: u16::try_from(BULK_REQUESTS_MAX).unwrap_or(u16::MAX),
        payload_bytes_max: u32::try_from(BULK_PAYLOAD_BYTES_MAX).unwrap_or(u32::MAX),
        instance: bulk.instance,
    };
    let mut frame = Vec::new();
    welcome.push(&mut frame);
    let answer = async {
        to.write_all(&frame).await?;
        to.flush().await
    };
    timeout(HELLO_DEADLINE, answer).await.map_err(late)?.map_err(lost)?;
    Ok(Greeted { bearer, session, credit: hello.credit })
}

async fn hello<R: AsyncRead + Unpin>(input: &mut Input<R>) -> Result<Hello> {
    let header = input.header().await?;
    let header = header.ok_or_else(|| lost(std::io::ErrorKind::UnexpectedEof.into()))?;
    if header.kind != Kind::Hello {
        return Err(Broken::Unexpected(header.kind).into());
    }
    Ok(Hello::read(input.body(&header).await?)?)
}
