//! Calls with hand-made bytes: what no generated client would send.

use bytes::{Buf as _, BufMut as _, Bytes};
use http::uri::PathAndQuery;
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint},
};
use tonic::{
    Request, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Channel,
};

/// Calls `method` of the lock service with `body` as the message, and decodes
/// the answer.
///
/// # Errors
///
/// The status that the server answers.
pub async fn unary<T: Message + Default>(
    channel: &Channel,
    method: &str,
    body: impl Into<Bytes>,
) -> Result<T, Status> {
    let path = format!("/{}/{method}", fencepost_proto::v1::LOCK_SERVICE);
    let path = PathAndQuery::try_from(path).expect("a method name makes a path");
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready()
        .await
        .map_err(|error| Status::unavailable(format!("no connection: {error}")))?;
    let answer = grpc
        .unary::<Bytes, Bytes, _>(Request::new(body.into()), path, BytesCodec)
        .await?;
    Ok(T::decode(answer.into_inner()).expect("the server answers with a valid message"))
}

/// A protobuf message written field by field.
#[derive(Clone, Debug, Default)]
pub struct Body(Vec<u8>);

impl Body {
    /// An empty message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a string, bytes or message field, whatever is in it.
    pub fn bytes(mut self, field: u32, value: impl AsRef<[u8]>) -> Self {
        encode_key(field, WireType::LengthDelimited, &mut self.0);
        encode_varint(value.as_ref().len() as u64, &mut self.0);
        self.0.extend_from_slice(value.as_ref());
        self
    }

    /// Adds an integer field.
    pub fn integer(mut self, field: u32, value: i64) -> Self {
        encode_key(field, WireType::Varint, &mut self.0);
        encode_varint(value.cast_unsigned(), &mut self.0);
        self
    }

    /// Adds a message field.
    pub fn message(self, field: u32, value: &impl Message) -> Self {
        self.bytes(field, value.encode_to_vec())
    }
}

impl From<Body> for Bytes {
    fn from(body: Body) -> Self {
        body.0.into()
    }
}

/// Hands bytes through as they are.
#[derive(Clone, Copy, Debug)]
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
