//! GET and MGET: values go to the socket from where they lie, verified, and what is not there is nil.

use std::sync::Arc;

use kvstrata_tiers::{error::Result, namespace::Namespace};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    connection::{Connection, Next},
    space::Place,
};
use crate::{
    auth::Bearer,
    costs::Via,
    flow::{GetAsk, GetFlow, Step, millis},
    limits::RESP_GET_DEADLINE,
    metrics::Op,
};

/// Reads the keys and answers with their values.
pub(super) async fn run<R, W>(
    connection: &mut Connection<R, W>,
    keys: usize,
    is_list: bool,
) -> Result<Next>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut places = Vec::new();
    for _ in 0..keys {
        let place = match connection.place().await? {
            Some((place, key)) => connection.is_whole(&place, &key).then_some(place),
            None => None,
        };
        places.push(place);
    }
    if is_list {
        connection.replies.array(keys);
    }
    let together = |a: &Option<Place>, b: &Option<Place>| match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(&a.namespace, &b.namespace),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    };
    for run in places.chunk_by(together) {
        let known: Vec<&Place> = run.iter().flatten().collect();
        match known.first() {
            Some(first) => answer(connection, &first.namespace, &known).await?,
            None => run.iter().for_each(|_unknown| connection.replies.nil()),
        }
    }
    Ok(Next::GoOn)
}

/// Answers with values of one namespace.
async fn answer<R, W>(
    connection: &mut Connection<R, W>,
    namespace: &Namespace,
    places: &[&Place],
) -> Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut left = places.len();
    let call = connection.resp.calls.begin(Op::Get);
    let ask = GetAsk {
        namespace_id: namespace.id().as_bytes(),
        hashes: places.iter().flat_map(|place| *place.hash.as_bytes()).collect(),
        parts: Vec::new(),
        lease: None,
        deadline_ms: millis(RESP_GET_DEADLINE),
        stop_at_miss: false,
        via: Via::Network,
    };
    let mut failure = None;
    let bearer = connection.bearer.clone().unwrap_or_else(|| Arc::new(Bearer::anyone()));
    match GetFlow::begin(&connection.resp.node, &bearer, ask) {
        Ok(mut flow) => loop {
            match flow.next().await {
                Ok(Some(step)) => left = left.saturating_sub(push(connection, step)),
                Ok(None) => break,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
            if connection.replies.is_full() {
                flow.hand();
                connection.replies.flush(&mut connection.to).await?;
                flow.resume();
            }
        },
        Err(error) => failure = Some(error),
    }
    (0..left).for_each(|_missing| connection.replies.nil());
    call.finish(failure.as_ref());
    Ok(())
}

/// Answers with what has come; returns of how many keys.
fn push<R, W>(connection: &mut Connection<R, W>, step: Step) -> usize {
    match step {
        Step::Block(ready) => {
            match ready.block.part(0) {
                Some(value) => connection.replies.value(value),
                None => connection.replies.nil(),
            }
            1
        }
        Step::Miss(start, end, _why) => {
            (start..end).for_each(|_missing| connection.replies.nil());
            usize::try_from(end.saturating_sub(start)).unwrap_or(0)
        }
    }
}
