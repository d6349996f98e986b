//! The codec of the put stream: prost's, but a message is looked over before it is decoded.
//!
//! An empty part takes two bytes on the wire and over sixty in memory: a message within its limit of
//! bytes could ask for thirty times as much. So parts are counted first, which allocates nothing.

use bytes::Buf;
use kvstrata_proto::v1 as wire;
use prost::{
    DecodeError,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use tonic::{
    Request, Response, Status, Streaming,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder},
    codegen::BoxFuture,
    server::StreamingService,
};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use super::{Observed, blocks::BlockService};
use crate::limits::PUT_MESSAGE_PARTS_MAX;

/// `data` of a put request, and `parts` of that.
const DATA_FIELD: u32 = 2;
/// See [`DATA_FIELD`].
const PARTS_FIELD: u32 = 1;

/// Puts, as the stock server calls them.
#[derive(Debug)]
pub(super) struct Puts(pub(super) BlockService);

impl StreamingService<wire::PutRequest> for Puts {
    type Response = wire::PutResponse;
    type ResponseStream = Observed<wire::PutResponse>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;

    fn call(&mut self, request: Request<Streaming<wire::PutRequest>>) -> Self::Future {
        use wire::block_cache_server::BlockCache;
        let blocks = self.0.clone();
        Box::pin(async move { blocks.put(request).await })
    }
}

/// The codec.
#[derive(Debug, Default)]
pub(super) struct PutCodec;

/// See the module.
#[derive(Debug)]
pub(super) struct PutDecoder(ProstDecoder<wire::PutRequest>);

type Stock = ProstCodec<wire::PutResponse, wire::PutRequest>;

impl Codec for PutCodec {
    type Encode = wire::PutResponse;
    type Decode = wire::PutRequest;
    type Encoder = ProstEncoder<wire::PutResponse>;
    type Decoder = PutDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        Stock::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        PutDecoder(Stock::raw_decoder(BufferSettings::default()))
    }
}

impl Decoder for PutDecoder {
    type Item = wire::PutRequest;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        // What cannot be read is the decoder's to complain of.
        let parts = count_parts(message.chunk()).unwrap_or_default();
        if parts > PUT_MESSAGE_PARTS_MAX {
            return Err(Status::invalid_argument(format!(
                "data.parts: {parts} given, 0 to {PUT_MESSAGE_PARTS_MAX} allowed in one message"
            )));
        }
        self.0.decode(message)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// The number of parts in an encoded put request.
fn count_parts(mut message: &[u8]) -> Result<usize, DecodeError> {
    let mut count = 0_usize;
    while message.has_remaining() {
        let (field, kind) = decode_key(&mut message)?;
        if (field, kind) != (DATA_FIELD, WireType::LengthDelimited) {
            skip_field(kind, field, &mut message, DecodeContext::default())?;
            continue;
        }
        let length = usize::try_from(decode_varint(&mut message)?).unwrap_or(usize::MAX);
        let (mut data, rest) = message.split_at(length.min(message.len()));
        message = rest;
        while data.has_remaining() {
            let (field, kind) = decode_key(&mut data)?;
            count += usize::from(field == PARTS_FIELD);
            skip_field(kind, field, &mut data, DecodeContext::default())?;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn counted(message: Option<wire::put_request::Message>) -> usize {
        count_parts(&wire::PutRequest { message }.encode_to_vec()).unwrap()
    }

    #[test]
    fn parts_are_counted_and_nothing_else_is() {
        use wire::put_request::Message::{Data, Offer};
        let part =
            |index| wire::PartData { index, data: vec![10; 300].into(), ..Default::default() };
        for count in [0, 1, 7] {
            let data = wire::PutData { parts: (0..count).map(part).collect() };
            assert_eq!(counted(Some(Data(data))), usize::try_from(count).unwrap());
        }
        let offer = wire::PutOffer {
            hashes: vec![18; 320].into(),
            parts: vec![1, 2],
            ..Default::default()
        };
        assert_eq!((counted(Some(Offer(offer))), counted(None)), (0, 0));
    }

    #[test]
    fn data_in_several_fields_is_counted_together() {
        let data = wire::PutData { parts: vec![wire::PartData::default(); 3] };
        let message = Some(wire::put_request::Message::Data(data));
        let once = wire::PutRequest { message }.encode_to_vec();
        assert_eq!(count_parts(&[once.clone(), once].concat()).unwrap(), 6);
    }
}
