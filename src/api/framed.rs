//! Get responses framed by hand: the stored bytes go to the socket from where they lie.
//!
//! The stock encoder copies a message into one buffer that it grows step by step, two to three copies
//! of every payload. Here a message is its small fields as one piece of the HTTP/2 body and each large
//! payload as another, which is the same sequence of bytes on the wire (tested against the stock
//! encoder). Everything but the framing of `Get` and the codec of `Put` is the generated service's.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{FutureExt, StreamExt, future::BoxFuture};
use http_body::Frame;
use kvstrata_proto::v1::{
    self as wire,
    block_cache_server::{BlockCache, BlockCacheServer, SERVICE_NAME},
    get_response,
};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint},
};
use tonic::{
    Status,
    body::Body,
    codec::{BufferSettings, Streaming},
    codegen::{Service, http},
    metadata::MetadataMap,
    server::{Grpc, NamedService},
};
use tonic_prost::ProstCodec;

use super::{
    Calls, Node, Observed,
    blocks::BlockService,
    bounded::{PutCodec, Puts},
    status,
};
use crate::limits::MESSAGE_BYTES_MAX;

/// The path of the one call that is framed here.
const GET_PATH: &str = "/kvstrata.v1.BlockCache/Get";
/// The path of the call with a codec of ours.
const PUT_PATH: &str = "/kvstrata.v1.BlockCache/Put";
/// Payloads below this are copied into the piece around them: a frame of their own costs more.
const PIECE_BYTES_MIN: usize = 16 * 1024;
/// The gRPC prefix of a message: a flag and its length.
const PREFIX_BYTES: usize = 5;

/// The contract's service with its message limits.
#[derive(Debug, Clone)]
pub struct Framed {
    blocks: BlockService,
    stock: BlockCacheServer<BlockService>,
}

impl Framed {
    /// Serves `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, calls: Calls) -> Self {
        let blocks = BlockService::new(node, calls);
        let stock = BlockCacheServer::new(blocks.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { blocks, stock }
    }
}

impl NamedService for Framed {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<http::Request<Body>> for Framed {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.stock, cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let blocks = self.blocks.clone();
        match request.uri().path() {
            GET_PATH => {}
            PUT_PATH => return async move { Ok(put(blocks, request).await) }.boxed(),
            _ => return self.stock.call(request),
        }
        async move {
            Ok(match get(blocks, request).await {
                Ok(items) => response(items),
                Err(refused) => refused.into_http(),
            })
        }
        .boxed()
    }
}

async fn put(blocks: BlockService, request: http::Request<Body>) -> http::Response<Body> {
    let (most, codec) = (Some(MESSAGE_BYTES_MAX), PutCodec);
    let mut grpc = Grpc::new(codec).apply_max_message_size_config(most, most);
    grpc.streaming(Puts(blocks), request).await
}

async fn get(
    blocks: BlockService,
    request: http::Request<Body>,
) -> Result<Observed<wire::GetResponse>, Status> {
    let (head, body) = request.into_parts();
    let decoder =
        ProstCodec::<wire::GetResponse, wire::GetRequest>::raw_decoder(BufferSettings::default());
    let mut messages = Streaming::new_request(decoder, body, None, Some(MESSAGE_BYTES_MAX));
    let message = messages.message().await.map_err(|failed| {
        let code = status::of_unreadable(failed.code(), failed.message());
        Status::new(code, failed.message())
    })?;
    let Some(message) = message else {
        return Err(Status::invalid_argument("request: no message given, one required"));
    };
    let metadata = MetadataMap::from_headers(head.headers);
    let request = tonic::Request::from_parts(metadata, head.extensions, message);
    blocks.get(request).await.map(tonic::Response::into_inner)
}

fn response(items: Observed<wire::GetResponse>) -> http::Response<Body> {
    let body = Pieces { items: Some(items), ready: VecDeque::new() };
    let mut response = http::Response::new(Body::new(body));
    let grpc = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
    response
}

/// The body of a response: pieces of messages, then the status as trailers.
struct Pieces {
    /// None when the status has been sent.
    items: Option<Observed<wire::GetResponse>>,
    ready: VecDeque<Bytes>,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(piece) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(items) = &mut self.items else { return Poll::Ready(None) };
        let end = match items.poll_next_unpin(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Ok(message))) => {
                split(message, &mut self.ready);
                let piece = self.ready.pop_front().unwrap_or_default();
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            Poll::Ready(Some(Err(failed))) => failed,
            Poll::Ready(None) => Status::ok(""),
        };
        self.items = None;
        let mut trailers = http::HeaderMap::new();
        Poll::Ready(Some(end.add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }
}

/// Splits a message into pieces that are, one after the other, its bytes with their gRPC prefix.
fn split(message: wire::GetResponse, pieces: &mut VecDeque<Bytes>) {
    let message_bytes = message.encoded_len();
    let apart: usize = payloads(&message).filter(|length| *length >= PIECE_BYTES_MIN).sum();
    let mut around = BytesMut::with_capacity(PREFIX_BYTES + message_bytes.saturating_sub(apart));
    around.put_u8(0);
    // Messages are far below 4 GiB: the packer bounds them.
    around.put_u32(u32::try_from(message_bytes).unwrap_or(u32::MAX));
    let Some(get_response::Message::Data(mut data)) = message.message else {
        write(&message, &mut around);
        pieces.push_back(around.freeze());
        return;
    };
    encode_key(1, WireType::LengthDelimited, &mut around);
    encode_varint(length(data.encoded_len()), &mut around);
    for part in std::mem::take(&mut data.parts) {
        encode_key(1, WireType::LengthDelimited, &mut around);
        encode_varint(length(part.encoded_len()), &mut around);
        split_part(part, &mut around, pieces);
    }
    // What is left of the message is its tier.
    write(&data, &mut around);
    if !around.is_empty() {
        pieces.push_back(around.freeze());
    }
}

/// The fields before the payload, the payload, and the fields after it.
fn split_part(part: wire::PartData, around: &mut BytesMut, pieces: &mut VecDeque<Bytes>) {
    let wire::PartData { index, part, offset, data, checksum, part_bytes } = part;
    let before = wire::PartData { index, part, offset, ..wire::PartData::default() };
    let after = wire::PartData { checksum, part_bytes, ..wire::PartData::default() };
    write(&before, around);
    if !data.is_empty() {
        encode_key(4, WireType::LengthDelimited, around);
        encode_varint(length(data.len()), around);
        if data.len() < PIECE_BYTES_MIN {
            around.extend_from_slice(&data);
        } else {
            pieces.push_back(around.split().freeze());
            pieces.push_back(data);
        }
    }
    write(&after, around);
}

/// The lengths of the payloads in a message.
fn payloads(message: &wire::GetResponse) -> impl Iterator<Item = usize> {
    let parts = match &message.message {
        Some(get_response::Message::Data(data)) => data.parts.as_slice(),
        Some(get_response::Message::Miss(_)) | None => &[],
    };
    parts.iter().map(|part| part.data.len())
}

fn write(message: &impl Message, around: &mut BytesMut) {
    // A buffer that grows has room for every message.
    message.encode(around).unwrap_or_default();
}

fn length(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part() -> impl Strategy<Value = wire::PartData> {
        let length = prop_oneof![
            0..100_usize,
            PIECE_BYTES_MIN - 2..PIECE_BYTES_MIN + 2,
            Just(3 * PIECE_BYTES_MIN)
        ];
        let numbers = (any::<u32>(), 0..3_u32, any::<u32>(), any::<u64>(), any::<u32>());
        (numbers, length).prop_map(|((index, part, offset, checksum, part_bytes), length)| {
            let data = vec![u8::try_from(index % 251).unwrap(); length].into();
            wire::PartData { index, part, offset, data, checksum, part_bytes }
        })
    }

    fn message() -> impl Strategy<Value = wire::GetResponse> {
        let data = (prop::collection::vec(part(), 0..5), 0..4)
            .prop_map(|(parts, tier)| get_response::Message::Data(wire::GetData { parts, tier }));
        let miss = (any::<u32>(), any::<u32>(), 0..6).prop_map(|(start, end, reason)| {
            get_response::Message::Miss(wire::GetMiss { start, end, reason })
        });
        prop::option::of(prop_oneof![data, miss]).prop_map(|message| wire::GetResponse { message })
    }

    proptest! {
        #[test]
        fn the_pieces_are_what_the_stock_encoder_writes(message in message()) {
            let encoded = message.encode_to_vec();
            let mut expected = vec![0];
            expected.extend(u32::try_from(encoded.len()).unwrap().to_be_bytes());
            expected.extend(encoded);
            let mut pieces = VecDeque::new();
            split(message, &mut pieces);
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty()));
            prop_assert_eq!(pieces.into_iter().flatten().collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_large_payload_is_a_piece_of_its_own_without_a_copy() {
        let payload = Bytes::from(vec![7; PIECE_BYTES_MIN]);
        let part = wire::PartData { data: payload.clone(), ..wire::PartData::default() };
        let data = wire::GetData { parts: vec![part], tier: 1 };
        let mut pieces = VecDeque::new();
        split(wire::GetResponse { message: Some(get_response::Message::Data(data)) }, &mut pieces);
        assert!(pieces.iter().any(|piece| piece.as_ptr() == payload.as_ptr()));
    }
}
