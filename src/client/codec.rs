//! The codec of the put stream: prost's, with room made before a message is written.
//!
//! The stock encoder starts each message in a buffer of 8 KiB and doubles it, which copies a message
//! of 1 MiB twice more than needed.

use std::marker::PhantomData;

use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, EncodeBuf, Encoder},
};
use tonic_prost::{ProstCodec, ProstDecoder};

/// Encodes `T` into a buffer of the right size and decodes `U` as prost does.
#[derive(Debug)]
pub(super) struct RoomyCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for RoomyCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for RoomyCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = RoomyEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        RoomyEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::default())
    }
}

/// See [`RoomyCodec`].
#[derive(Debug)]
pub(super) struct RoomyEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for RoomyEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.encoded_len());
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}
