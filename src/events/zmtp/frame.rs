//! The bytes: greeting, commands, frames.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::Kind;
use crate::limits::EVENT_FRAME_BYTES_MAX;

/// A frame is given memory in steps of this.
const STEP_BYTES: usize = 64 * 1024;
pub(super) const GREETING_BYTES: usize = 64;

pub(super) const MORE: u8 = 1;
pub(super) const LONG: u8 = 2;
pub(super) const COMMAND: u8 = 4;

const SOCKET_TYPE: &[u8] = b"Socket-Type";

pub(super) fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Appends a frame.
pub(super) fn push(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => bytes.extend([flags, short]),
        Err(_long) => {
            bytes.push(flags | LONG);
            bytes.extend(u64::try_from(body.len()).unwrap_or(u64::MAX).to_be_bytes());
        }
    }
    bytes.extend_from_slice(body);
}

/// The bytes of a message.
pub(in crate::events) fn message(frames: &[&[u8]]) -> Vec<u8> {
    // A flag and a length each.
    let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (number, frame) in (1..).zip(frames) {
        push(&mut bytes, if number < frames.len() { MORE } else { 0 }, frame);
    }
    bytes
}

/// The bytes of the answer to a peer that asks whether we live.
pub(in crate::events) fn pong(context: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push(&mut bytes, COMMAND, &[b"\x04PONG", context].concat());
    bytes
}

pub(super) fn greeting() -> Vec<u8> {
    let mut greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec();
    greeting.resize(GREETING_BYTES, 0);
    greeting
}

pub(super) fn ready(kind: Kind) -> Vec<u8> {
    let value = kind.name();
    let mut body = b"\x05READY\x0b".to_vec();
    body.extend(SOCKET_TYPE);
    body.extend(u32::try_from(value.len()).unwrap_or(0).to_be_bytes());
    body.extend(value);
    let mut frame = Vec::new();
    push(&mut frame, COMMAND, &body);
    frame
}

/// What kind of socket a peer says it has, in the command behind its greeting.
pub(super) fn socket_type(command: &[u8]) -> Option<&[u8]> {
    let mut rest = command.strip_prefix(b"\x05READY")?;
    loop {
        let (name, behind) = split(rest.split_first().map(|(len, rest)| (u64::from(*len), rest))?)?;
        let (len, behind) = behind.split_first_chunk::<4>()?;
        let (value, behind) = split((u64::from(u32::from_be_bytes(*len)), behind))?;
        if name.eq_ignore_ascii_case(SOCKET_TYPE) {
            return Some(value);
        }
        rest = behind;
    }
}

fn split((length, rest): (u64, &[u8])) -> Option<(&[u8], &[u8])> {
    rest.split_at_checked(usize::try_from(length).ok()?)
}

/// Reads a frame: its flags and its body.
pub(super) async fn read(io: &mut (impl AsyncRead + Unpin)) -> io::Result<(u8, Vec<u8>)> {
    let flags = io.read_u8().await?;
    let bytes =
        if flags & LONG == 0 { u64::from(io.read_u8().await?) } else { io.read_u64().await? };
    if flags & !(MORE | LONG | COMMAND) != 0 || bytes > EVENT_FRAME_BYTES_MAX {
        return Err(broken("a frame that is too long, or none"));
    }
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut body = Vec::with_capacity(bytes.min(STEP_BYTES));
    while body.len() < bytes {
        let start = body.len();
        body.resize(start + (bytes - start).min(STEP_BYTES), 0);
        io.read_exact(body.get_mut(start..).unwrap_or_default()).await?;
    }
    Ok((flags, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_peer_is_found_among_what_it_says() {
        let said = |bytes: &[u8]| socket_type(bytes).map(<[u8]>::to_vec);
        assert_eq!(said(&ready(Kind::Router)[2..]), Some(b"ROUTER".to_vec()));
        let more = b"\x05READY\x08Identity\0\0\0\x02me\x0bsocket-TYPE\0\0\0\x04XSUB\x01X\0\0\0\0";
        assert_eq!(said(more), Some(b"XSUB".to_vec()));
        for bad in [
            &b"\x05READY"[..],
            b"\x05ERROR\x0bSocket-Type\0\0\0\x03SUB",
            b"\x05READY\x0bSocket-Type\0\0\0\xffSUB",
            b"\x05READY\x0bSocket-Typ",
            b"\x05READY\xffx",
        ] {
            assert_eq!(said(bad), None, "{bad:x?}");
        }
    }
}
