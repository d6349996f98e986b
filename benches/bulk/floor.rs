//! What the machine gives: plain blocking connections, two threads for each, and plain copies.

use std::{
    hint::black_box,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
};

/// The two ends of a connection.
pub(crate) type Pair = (Box<dyn Write + Send>, Box<dyn Read + Send>);

pub(crate) fn tcp_pair() -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Box::new(to), Box::new(listener.accept().unwrap().0))
}

pub(crate) fn unix_pair() -> Pair {
    let (to, from) = UnixStream::pair().unwrap();
    (Box::new(to), Box::new(from))
}

/// Moves `stored`, `times` over, in writes of one block through plain blocking connections, an equal
/// share through each. Sent is either what is stored, as a server does, or one block again and again,
/// which never leaves the cache.
pub(crate) fn run(
    stored: &[u8],
    (block_bytes, clients, times): (usize, usize, usize),
    is_cached: bool,
    pair: fn() -> Pair,
) {
    std::thread::scope(|scope| {
        for share in stored.chunks(stored.len() / clients) {
            let (mut to, mut from) = pair();
            scope.spawn(move || {
                let first = &share[..block_bytes];
                for _ in 0..times {
                    for block in share.chunks(block_bytes) {
                        to.write_all(if is_cached { first } else { block }).unwrap();
                    }
                }
            });
            scope.spawn(move || {
                let mut block = vec![0; block_bytes];
                for _ in 0..times * share.len() / block_bytes {
                    from.read_exact(&mut block).unwrap();
                    black_box(&block);
                }
            });
        }
    });
}

/// Copies `stored`, `times` over, block by block into one block, an equal share by each of so many threads.
pub(crate) fn copy(stored: &[u8], (block_bytes, clients, times): (usize, usize, usize)) {
    std::thread::scope(|scope| {
        for share in stored.chunks(stored.len() / clients) {
            scope.spawn(move || {
                let mut block = vec![0; block_bytes];
                for _ in 0..times {
                    for from in share.chunks(block_bytes) {
                        block[..from.len()].copy_from_slice(from);
                        black_box(&block);
                    }
                }
            });
        }
    });
}
