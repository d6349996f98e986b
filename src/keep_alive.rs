//! Peers that are silent by right: the kernel asks whether they live.

use std::io;

use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::net::TcpStream;

use crate::limits::{KEEPALIVE_PROBES, KEEPALIVE_SILENCE};

/// Ends a connection whose peer is gone without a word.
pub(crate) fn keep_alive(io: &TcpStream) -> io::Result<()> {
    set_socket_keepalive(io, true)?;
    set_tcp_keepidle(io, KEEPALIVE_SILENCE)?;
    set_tcp_keepintvl(io, KEEPALIVE_SILENCE)?;
    Ok(set_tcp_keepcnt(io, KEEPALIVE_PROBES)?)
}
