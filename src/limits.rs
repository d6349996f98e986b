//! Every constant limit of the server, with the reason for its value.
//!
//! All are checked before memory is taken for what they limit. What an operator would change is in
//! [`config`](crate::config) instead; the store has its own in [`kvstrata_tiers::limits`].

use std::{ops::RangeInclusive, time::Duration};

/// Bytes in one mebibyte.
const MIB: usize = 1 << 20;

/// Hashes in one lookup, touch, describe, prefetch or remove: 2 M tokens at 16 to a block, four
/// times the longest prompt met.
pub const LOOKUP_HASHES_MAX: usize = 131_072;
/// Blocks in one put offer: with their checksums the offer stays below the message limit.
pub const PUT_BLOCKS_MAX: usize = 65_536;
/// Parts in one message of a put: packed for 1 MiB, even parts of one byte are fewer. Decoded they
/// take 5 MiB.
pub const PUT_MESSAGE_PARTS_MAX: usize = 65_536;
/// Blocks in one get.
pub const GET_BLOCKS_MAX: usize = 65_536;
/// The largest message read or written. The largest lookup (32-byte hashes) takes half of it.
pub const MESSAGE_BYTES_MAX: usize = 8 * MIB;
/// Payload packed into one message of a get: large enough that framing does not matter, small enough
/// that the first bytes leave early.
pub const GET_MESSAGE_BYTES: usize = MIB;
/// Parts packed into it: with their numbers and checksums, parts of one byte take thirty.
pub const GET_MESSAGE_PARTS_MAX: usize = 65_536;
/// Bytes of one get that load ahead of the reader, which is what a reader that stalls holds: enough to
/// keep a disk busy, and to have neighbours in an object store come in one request.
pub const GET_BYTES_AHEAD: u64 = 8 * MIB as u64;
/// The most blocks of one get that load ahead of the reader, and the fewest.
pub const GET_BLOCKS_AHEAD: RangeInclusive<u64> = 4..=64;

/// The largest HTTP/2 frame: with the default of 16 KiB, framing costs more than copying.
pub const HTTP2_FRAME_BYTES: u32 = 1 << 20;
/// Bytes in flight on one stream: 1 ms at 8 GB/s.
pub const HTTP2_STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// Bytes in flight on one connection.
pub const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Streams of one connection: one session, its puts and gets, and many lookups.
pub const HTTP2_STREAMS_MAX: u32 = 1024;
/// How often a silent connection is asked whether it lives.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long it may take to answer. A client that is gone without a word is noticed within both.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections of all clients: engines open a few each, a cluster has hundreds of them.
pub const CONNECTIONS_MAX: usize = 4096;
/// Files that are open besides connections: arena, listeners, runtime, logs.
pub const FILES_BESIDES_CONNECTIONS: usize = 1024;
/// Longest time from a connection to the first bytes of HTTP/2; keepalive begins after them. What
/// says less is a port scanner, or a peer that is gone.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// Connections for pages: kubelet, some Prometheus servers, people.
pub const HTTP_CONNECTIONS_MAX: usize = 512;
/// Longest silence of such a connection: below the minute after which kubelet gives a node up, so
/// that idle ones cannot keep probes out.
pub const HTTP_SILENCE_MAX: Duration = Duration::from_secs(30);
/// How often a stream of lines that has nothing to say says so: often enough that nobody on its way takes
/// it for dead.
pub const HTTP_BEAT_INTERVAL: Duration = Duration::from_secs(10);

/// How often the store is asked what has changed while anybody follows: what is told of a block is this
/// late at most, and 64 locks taken so often cost nothing.
pub const CHANGES_INTERVAL: Duration = Duration::from_millis(10);
/// Keys that wait for one follower before it is told all again instead: 10 MiB, and a quarter of what the
/// shards keep for the hub.
pub const FOLLOWER_QUEUE_KEYS_MAX: usize = 262_144;

/// Changes of what loading costs are told of at most this often: as often as routers decide anew.
pub const COSTS_INTERVAL: Duration = Duration::from_millis(100);
/// And at least this often: some change with time alone.
pub const COSTS_SILENCE: Duration = Duration::from_secs(1);
/// Reservations of all tenants: 200 B each.
pub const RESERVATIONS_MAX: usize = 65_536;
/// Reservations of one tenant: four seconds of a thousand prompts a second from several nodes.
pub const RESERVATIONS_PER_TENANT_MAX: usize = 16_384;
/// Bytes that one tenant may have reserved on a node: a minute of a few fast drives.
pub const RESERVED_BYTES_MAX: u64 = 1 << 38;
/// Time that a reservation stands which does not say: an engine has begun to load by then, or never will.
pub const RESERVATION_TTL_DEFAULT: Duration = Duration::from_secs(5);
/// The longest time: prompts wait in engines.
pub const RESERVATION_TTL_MAX: Duration = Duration::from_secs(60);

/// Sessions of all clients.
pub const SESSIONS_MAX: usize = 16_384;
/// Puts of one session at a time. Each claims room in dram.
pub const PUTS_PER_SESSION_MAX: usize = 64;
/// Leases of one session at a time.
pub const LEASES_PER_SESSION_MAX: usize = 65_536;
/// Leases of all sessions: about 200 B each besides their pins.
pub const LEASES_MAX: usize = 262_144;
/// Events waiting in one session's stream: there is no more than one of each kind.
pub const SESSION_EVENTS_MAX: usize = 4;
/// The longest client name kept for logs and stats; longer ones are refused.
pub const CLIENT_NAME_BYTES_MAX: usize = 256;
/// All sessions together may lease 1 / this x 3 of dram, so that puts always find room.
pub const LEASED_SHARE_DIVISOR: u64 = 4;

/// Longest time for a call that is answered with one message.
pub const UNARY_DEADLINE: Duration = Duration::from_secs(30);
/// Time for a get that does not say: a context of 100 GB at 1 GB/s.
pub const GET_DEADLINE_DEFAULT: Duration = Duration::from_secs(120);
/// Longest time that a get may ask for.
pub const GET_DEADLINE_MAX: Duration = Duration::from_secs(600);
/// Time after its deadline that a get leaves a reader for what is packed already.
pub const GET_STALL_MAX: Duration = Duration::from_secs(10);
/// Longest silence within a put, so that a client that hangs holds no staging for ever.
pub const PUT_IDLE_MAX: Duration = Duration::from_secs(30);
/// Longest time for one block of a durable put to get to nvme, from when its turn came: writes and
/// their sync take milliseconds, and tens of them behind a reclaim or a drive that is busy.
pub const DURABLE_DEADLINE: Duration = Duration::from_secs(30);
/// Blocks of one durable put that are copied to nvme at a time. While more wait, no data is read.
pub const DURABLE_BLOCKS_AHEAD: usize = 32;
/// Connections of the bulk port: engines open a few each.
pub const BULK_CONNECTIONS_MAX: usize = 4096;
/// Requests under way on one connection: enough that it never waits for the next one.
pub const BULK_REQUESTS_MAX: usize = 16;
/// The longest payload of one frame: large enough that frames cost nothing, small enough to pass
/// within their deadline over a slow network.
pub const BULK_PAYLOAD_BYTES_MAX: usize = 4 * MIB;
/// Payload after which what is ready is written: what was verified is then still in a core's cache.
pub const BULK_BATCH_BYTES: usize = 512 * 1024;
/// Payload that a server sends in one frame: verified, then written, while it is in a core's cache.
pub const BULK_PIECE_BYTES: usize = 512 * 1024;
/// Bytes that wait in a Unix socket: two such pieces, so that neither side waits for each part of one. The
/// system may allow less.
pub const BULK_UNIX_SEND_BYTES: usize = 1024 * 1024;
/// Bytes that a client is told the places of at a time: it begins to copy meanwhile.
pub const BULK_TOLD_BYTES: usize = 4 * MIB;
/// The least credit to begin with, and the least that a large part is cut for.
pub const BULK_CREDIT_BYTES_MIN: u32 = 256 * 1024;
/// The longest token.
pub const BULK_TOKEN_BYTES_MAX: usize = 4096;
/// The shortest token: half as long as what `openssl rand -hex 32` makes, and still 128 random bits.
pub const TOKEN_BYTES_MIN: usize = 32;
/// Tokens in the file: a few for each tenant.
pub const TOKENS_MAX: usize = 65_536;
/// The longest name of a tenant: that of a DNS name.
pub const TENANT_BYTES_MAX: usize = 253;
/// What a tenant may do at once of what it may do in a second: all of it.
pub const RATE_BURST: Duration = Duration::from_secs(1);
/// The shortest time that a tenant over its rate is asked to wait: what a client can sleep for.
pub const RATE_WAIT_MIN: Duration = Duration::from_millis(1);
/// The longest: its limit may have been raised meanwhile.
pub const RATE_WAIT_MAX: Duration = Duration::from_secs(60);
/// The longest text of a refusal.
pub const BULK_TEXT_BYTES_MAX: usize = 4096;
/// Longest time for a frame, from its first byte to its last, in either direction: 140 kB/s.
pub const BULK_FRAME_DEADLINE: Duration = Duration::from_secs(30);
/// Longest time without a request. Clients give up connections that they have not used for half of it.
pub const BULK_IDLE_MAX: Duration = Duration::from_secs(300);
/// Requests up to this length take no room of their own: 500 blocks.
pub const BULK_BODY_SMALL_BYTES: usize = 16 * 1024;
/// Clients that share memory at a time: engines of one host, with a few connections each.
pub const SHM_CLIENTS_MAX: usize = 256;
/// Bytes that one of them may have pinned: two milliseconds of copying ahead of it.
pub const SHM_PINNED_BYTES_MAX: usize = 64 * MIB;
/// All of them together may have 1 / this of dram pinned, and each half of that, so that puts find room.
pub const SHM_PINNED_SHARE_DIVISOR: usize = 4;
/// Regions of the arena: 4 TiB.
pub const SHM_REGIONS_MAX: usize = 4096;
/// The longest staging of a client.
pub const SHM_STAGING_BYTES_MAX: u64 = 64 << 20;
/// Connections of the RESP listener: LMCache opens up to 150 for each worker.
pub const RESP_CONNECTIONS_MAX: usize = 4096;
/// The longest key: LMCache's are of the length of a model's name and a hash.
pub const RESP_KEY_BYTES_MAX: usize = 1024;
/// Keys of one command; each of them takes 100 bytes until it is answered.
pub const RESP_KEYS_MAX: usize = 512;
/// The longest value that is read, to be dropped if it is longer than a block may be.
pub const RESP_VALUE_BYTES_MAX: usize = 512 * MIB;
/// The longest line: lengths, and commands that people type.
pub const RESP_LINE_BYTES_MAX: usize = 4096;
/// Bytes of a value that must come within a second, on top of [`BULK_FRAME_DEADLINE`] for its command.
pub const RESP_BYTES_PER_SECOND_MIN: usize = MIB;
/// Bytes of short answers after which they are written although there are more commands.
pub const RESP_ANSWERS_BYTES: usize = 64 * 1024;
/// Longest time to get values, after which what has not come is nil.
pub const RESP_GET_DEADLINE: Duration = Duration::from_secs(30);
/// Namespaces that keys of foreign forms may open; then all further ones share one.
pub const RESP_NAMESPACES_MAX: usize = 4096;
/// Pairs of values that are remembered, to take away what is left of those that are none any more: 100
/// bytes each.
pub const RESP_PAIRS_MAX: usize = 262_144;
/// Time without a word after which the kernel asks a peer that is silent by right whether it lives, and
/// between two questions.
pub const KEEPALIVE_SILENCE: Duration = Duration::from_secs(60);
/// Questions without an answer after which it is gone.
pub const KEEPALIVE_PROBES: u32 = 3;
/// Engines that events are taken from.
pub const EVENT_SOURCES_MAX: usize = 256;
/// Blocks that engines have told of and that may be put later, or the reverse: 1 M tokens at 16 to a
/// block, which take up to 26 MB with their tokens.
pub const EVENT_BLOCKS_MAX: usize = 65_536;
/// The longest frame of an event: a batch of 1 M tokens.
pub const EVENT_FRAME_BYTES_MAX: u64 = 16 << 20;
/// Longest time for a connection to an engine to be ready, and for what is sent to it.
pub const EVENT_HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Longest time for a replay.
pub const EVENT_REPLAY_DEADLINE: Duration = Duration::from_secs(10);
/// Between two attempts to reach an engine, the first and the longest.
pub const EVENT_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Routers that are told where blocks are: each worker of each router is one.
pub const PUBLISH_TARGETS_MAX: usize = 256;
/// Those who listen to one publisher: the replicas of a router, and somebody who looks on.
pub const PUBLISH_PEERS_MAX: usize = 32;
/// Topics that one of them asks for, and the longest of these: all ask for one, or for everything.
pub const PUBLISH_PREFIXES_MAX: usize = 16;
/// See [`PUBLISH_PREFIXES_MAX`].
pub const PUBLISH_PREFIX_BYTES_MAX: usize = 1024;
/// Bytes that wait for one of them: more than this, and it is cut off, and told all again.
pub const PUBLISH_QUEUE_BYTES_MAX: usize = 16 * MIB;
/// Bytes that wait for the slowest of them before nothing more is made.
pub const PUBLISH_BACKLOG_BYTES: usize = 4 * MIB;
/// Longest time for one of them to take a batch: 100 kB/s. One that takes longer is cut off.
pub const PUBLISH_WRITE_DEADLINE: Duration = Duration::from_secs(5);
/// How long what was withdrawn is kept, once and once more, to be withdrawn again if a connection is lost: twice
/// as long as one lasts that does not take what is sent ([`PUBLISH_SILENCE_MAX`]).
pub const PUBLISH_SETTLE_AFTER: Duration = Duration::from_secs(20);
/// How long a connection lasts whose peer does not say that it has what was sent.
pub const PUBLISH_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Batches that are kept to be sent again, as engines keep them.
pub const PUBLISH_KEPT_BATCHES: usize = 10_000;
/// All that is kept together may take 1 / this of what is there for events.
pub const PUBLISH_KEPT_SHARE_DIVISOR: u64 = 4;
/// And what is known of blocks another 1 / this of it: 80 bytes each.
pub const PUBLISH_WORLD_SHARE_DIVISOR: u64 = 4;
/// Bytes for each block that one target was told of: its entry, and its places in lists now and then.
pub const PUBLISH_ENTRY_BYTES: u64 = 128;
/// Workers that are expected where they are not named: more of them are told of fewer blocks.
pub const PUBLISH_WORKERS_EXPECTED: u64 = 8;
/// Blocks that a target is told of before the others have their turn: a millisecond or two.
pub const PUBLISH_STEP_BLOCKS: usize = 4096;
/// Events of one batch, and its blocks: about 100 kB.
pub const PUBLISH_BATCH_EVENTS: usize = 16;
/// See [`PUBLISH_BATCH_EVENTS`].
pub const PUBLISH_BATCH_BLOCKS: usize = 1024;
/// How often it is looked who has opened what, and how the tiers are.
pub const PUBLISH_LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a tier must be unwell before it is not announced any more, and well before it is again.
pub const PUBLISH_WITHDRAW_AFTER: (Duration, Duration) =
    (Duration::from_secs(10), Duration::from_secs(30));
/// Prompts of one lookup of a router.
pub const ROUTER_PROMPTS_MAX: usize = 64;
/// Tokens, or hashes, of all prompts of a call: as many tokens as the longest prompt of a lookup has.
pub const ROUTER_TOKENS_MAX: usize = LOOKUP_HASHES_MAX * 16;
/// Engines that are compared for one prompt.
pub const ROUTER_CANDIDATES_MAX: usize = 1024;
/// Time for an answer to a router that does not say: it has better things to do than to wait longer.
pub const ROUTER_DEADLINE_DEFAULT: Duration = Duration::from_millis(500);
/// Longest time that it may ask for.
pub const ROUTER_DEADLINE_MAX: Duration = Duration::from_secs(10);
/// How long an answer is worth something: in that time, what loading costs may have halved or doubled.
pub const ROUTER_TTL: Duration = Duration::from_secs(2);
/// Loads of one call that are expected, or reported: a few sources for each candidate.
pub const ROUTER_LOADS_MAX: usize = 4096;
/// Routers that follow the tiers at a time; each may be behind by [`FOLLOWER_QUEUE_KEYS_MAX`] keys.
pub const ROUTER_WATCHERS_MAX: usize = 32;
/// Blocks in one update of theirs: 200 KiB with hashes of 32 bytes, a reset of what is there in the first.
pub const ROUTER_UPDATE_BLOCKS: usize = 4096;
/// Between two updates of what tiers cost, at least.
pub const ROUTER_TIERS_INTERVAL: Duration = Duration::from_millis(100);
/// Blocks that the filter of a node is made for at most: 320 MiB, and the index of a node of 1.6 TiB.
pub const FILTER_KEYS_MAX: u32 = 1 << 28;
/// And at least: 5 KiB, so that a node that fills does not make a new one for every block.
pub const FILTER_KEYS_MIN: u32 = 4096;
/// Bytes of a filter in one message.
pub const FILTER_PIECE_BYTES: usize = MIB;
/// Additions to its filter that a node keeps for those who ask: 1 MiB, a second at 130,000 blocks a second.
pub const FILTER_ADDITIONS_KEPT: usize = 131_072;
/// How often a member is asked what is new in its filter: what was put there is found from elsewhere this late at
/// most, and a hundred nodes that ask each other take ten thousand small calls a second of all of them together.
pub const FILTER_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes a second that filters of one member may take on average: a whole one makes for a longer pause.
pub const FILTER_BYTES_PER_SECOND: u64 = 8 << 20;
/// Longest time for a member to be reached, and for each piece of its filter to come.
pub const PEER_DEADLINE: Duration = Duration::from_secs(2);
/// A filter that is older says nothing of what its node lacks: a few questions have gone unanswered.
pub const FILTER_AGE_MAX: Duration = Duration::from_secs(5);
/// Between two attempts to reach a member, the first and the longest.
pub const PEER_RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Longest time that a lookup waits for other members, all rounds together, besides what its hashes take: what they
/// answer takes one millisecond, and an engine whose scheduler waits has lost more than twenty of them are worth.
pub const FANOUT_DEADLINE: Duration = Duration::from_millis(20);
/// What each hash of a lookup adds to that: thirty thousand are a megabyte to send and to look for, and a prompt of
/// so many blocks takes many seconds to compute.
pub const FANOUT_DEADLINE_OF_HASH: Duration = Duration::from_micros(2);
/// A member that was given less time than this is not taken for one that hangs: whoever asked was in a hurry.
pub const FANOUT_PATIENCE_MIN: Duration = Duration::from_millis(4);
/// Prefixes of a router's question that others are asked about at a time: of a batch of prompts, most are one each.
pub const ROUTER_FANOUTS_MAX: usize = 16;
/// Engines that members are told to have opened namespaces, the latest ones: a few hundred nodes' worth, and less
/// than a message may be.
pub const OPENERS_TOLD_MAX: usize = 4096;
/// How often a lookup asks others: once for what follows its own blocks, and again where one leaves off.
pub const FANOUT_ROUNDS_MAX: usize = 3;
/// Members that are asked at a time.
pub const FANOUT_ASKED_MAX: usize = 4;
/// Blocks that a filter is asked for to find who has most: a tenth of a millisecond.
pub const FANOUT_SURVEY_BLOCKS: usize = 4096;
/// Hashes that a member is asked for behind what its filter has: of what was put in the last second.
pub const FANOUT_BEYOND_BLOCKS: usize = 256;
/// Endpoints that a client is given: any of a cluster will do, so there is no use in many.
pub const CLIENT_ENDPOINTS_MAX: usize = 64;
/// How often a client follows what a server says of its home: servers may have heard differently of one another
/// for a second, and then each sends it to the next.
pub const CLIENT_MOVES_MAX: usize = 2;
/// Blocks on other members that a namespace of a client remembers the places of: those of the longest lookup, 100
/// bytes each.
pub const PLACEMENTS_MAX: usize = LOOKUP_HASHES_MAX;
/// Other members that a client keeps connections to: those which hold parts of its prompts, a few of all.
pub const HOLDERS_MAX: usize = 64;
/// Longest time to connect to one of them: they are in one network, and without it there is a miss.
pub const HOLDER_CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Longest silence of one that is read from. Cold object stores take as long; an engine had better compute.
pub const HOLDER_SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long a client should wait when a count is exhausted.
pub const RETRY_AFTER_COUNT: Duration = Duration::from_millis(500);
/// Connections of operators: a few commands, and those of a chart's hook.
pub const ADMIN_CONNECTIONS_MAX: usize = 16;
/// How often an operator who waits for a drain is told how far it is, if nothing happens meanwhile.
pub const ADMIN_PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// A drain waits 1 / this of its grace for routers to be told, at most..
pub const DRAIN_TELL_SHARE_DIVISOR: u32 = 10;
/// ..and so long at most: one that takes longer is cut off soon.
pub const DRAIN_TELL_MAX: Duration = Duration::from_secs(2);
/// A drain hands over 1 / this of dram at most: what is colder would push out what is hotter elsewhere..
pub const HANDOVER_SHARE_DIVISOR: u64 = 2;
/// ..within 1 / this of its grace, so that clients have the rest for what they lack by then.
pub const HANDOVER_TIME_DIVISOR: u32 = 2;
/// Payload that goes to a member at a time: four of these are enough for a fast network..
pub const HANDOVER_BATCH_BYTES: u64 = 8 * MIB as u64;
/// ..and the blocks of it, where they are small.
pub const HANDOVER_BATCH_BLOCKS: usize = 1024;
/// Batches on their way to one member at a time.
pub const HANDOVER_STREAMS: usize = 4;
/// Blocks that are read often and go to their second holder at a time.
pub const SECOND_BLOCKS_AT_ONCE: usize = 4096;
/// Payload that goes there in a second: a hundredth of what a fast network carries..
pub const SECOND_BYTES_PER_SECOND: u64 = 64 * MIB as u64;
/// ..and 1 / this of dram in..
pub const SECOND_SHARE_DIVISOR: u64 = 16;
/// ..so long: what is read often changes from hour to hour.
pub const SECOND_WINDOW: Duration = Duration::from_secs(600);
/// How long blocks of one get may take to come together.
pub const SECOND_GATHER: Duration = Duration::from_millis(200);
/// How long a member that did not answer is left alone.
pub const SECOND_PAUSE: Duration = Duration::from_secs(10);
/// Blocks of a chain that are gone back to find its root: 64 k tokens at 16 to a block.
pub const SECOND_CHAIN_MAX: usize = 4096;
/// Longest time for a member to answer when blocks are pushed to it.
pub const PUSH_DEADLINE: Duration = Duration::from_secs(5);
/// One column of the console's charts: short enough to see a minute, long enough that an hour is few.
pub const CONSOLE_SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Columns that are kept: an hour, 35 kB.
pub const CONSOLE_SAMPLES_MAX: usize = 360;
/// Slow loads that are kept of one tenant: what fits on a screen.
pub const SLOW_LOADS_MAX: usize = 12;
/// Tenants of which any are kept: 300 kB in all.
pub const SLOW_TENANTS_MAX: usize = 256;
/// Loads that took less are not slow on any tier.
pub const SLOW_LOAD_MIN: Duration = Duration::from_millis(1);
/// How long one is kept: a disk that was slow yesterday is another question.
pub const SLOW_LOAD_AGE_MAX: Duration = Duration::from_secs(3600);
/// Namespaces that the console shows, those with the most bytes: people do not read more.
pub const CONSOLE_NAMESPACES_MAX: usize = 200;
/// Members that it shows.
pub const CONSOLE_MEMBERS_MAX: usize = 500;
/// Members that left and are remembered, for [`SLOW_LOAD_AGE_MAX`].
pub const CONSOLE_LEFT_MAX: usize = 32;
/// Prefetches that run at a time.
pub const PREFETCHES_MAX: usize = 8;
/// Blocks that all prefetches together load at a time: an eighth of the reads that nvme takes.
pub const PREFETCH_LOADS_MAX: usize = 8;

/// The longest datagram of gossip, in bytes: what UDP carries over IPv4.
pub const GOSSIP_DATAGRAM_BYTES_MAX: usize = 65_507;
/// Nodes of a cluster, and the most that are listed: what they say of themselves fits into one datagram.
pub const MEMBERS_MAX: usize = 256;
/// Addresses whose boot is remembered for gossip: each node at its own and at the one it is reached at.
pub const GOSSIP_PEERS_MAX: usize = 2 * MEMBERS_MAX;
/// Boots whose datagrams are told from replays: every node four times over, so that restarts forget nobody.
pub const GOSSIP_BOOTS_MAX: usize = 4 * MEMBERS_MAX;
/// Names that a node gives indices to while it runs: pods that are named anew with each roll-out, for years.
pub const MEMBER_NAMES_MAX: usize = 65_536;
/// The longest text that a member says of itself, in bytes: the longest name that a setting takes, with a port.
pub const MEMBER_TEXT_BYTES_MAX: usize = 1024;
/// The longest value in which a member says where it is, in bytes: all its texts, if they are long.
pub const ABOUT_BYTES_MAX: usize = 8 * MEMBER_TEXT_BYTES_MAX;
/// The longest value in which a member says its load, in bytes: some numbers for each tier.
pub const LOAD_BYTES_MAX: usize = 1024;
/// Time between two rounds of gossip: a change is known to a hundred nodes in about a second, for a few hundred
/// kilobytes a second.
pub const GOSSIP_INTERVAL: Duration = Duration::from_millis(300);
/// Time between two looks at what a node says of its load.
pub const LOAD_INTERVAL: Duration = Duration::from_secs(1);
/// Members that are told at once that a node will go away; they tell the others.
pub const LEAVE_TOLD_AT_ONCE: usize = 8;
/// Time after which two nodes of one name are no restart: by then the one that was killed has left the list.
pub const NAME_TWICE_AFTER: Duration = Duration::from_secs(6);
/// Time between two questions to seeds by a node that is alone.
pub const SEEDS_ASK_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two resolutions of seeds while there are others to be found, and between questions to them.
pub const SEEDS_UNSETTLED_INTERVAL: Duration = Duration::from_secs(2);
/// The same once all are found.
pub const SEEDS_SETTLED_INTERVAL: Duration = Duration::from_secs(30);
/// Seeds that are asked at a time: one that answers is enough.
pub const SEEDS_ASKED_AT_A_TIME: usize = 8;
/// Addresses of seeds that are remembered: all nodes, and as many that have gone.
pub const SEED_ADDRESSES_MAX: usize = 2 * MEMBERS_MAX;
/// Names that are resolved at a time; each takes a thread while it waits.
pub const SEEDS_RESOLVED_AT_A_TIME: usize = 16;
/// For the resolution of a name: longer than a resolver takes to try its second server.
pub const RESOLVE_DEADLINE: Duration = Duration::from_secs(10);
/// Time for which an engine that has opened a namespace counts as one that is here.
pub const ENGINE_COUNTS_FOR: Duration = Duration::from_secs(600);
/// Engines that are counted: more than a node serves.
pub const ENGINES_COUNTED_MAX: usize = 4096;
const _: () = assert!(
    LOOKUP_HASHES_MAX * kvstrata_tiers::block::HASH_BYTES_MAX + MIB <= MESSAGE_BYTES_MAX,
    "the largest lookup must fit into a message"
);
const _: () = assert!(
    PUT_BLOCKS_MAX * (kvstrata_tiers::block::HASH_BYTES_MAX + 8) + MIB <= MESSAGE_BYTES_MAX,
    "the largest offer of whole blocks must fit into a message"
);
const _: () = assert!(LOOKUP_HASHES_MAX >= 65_536, "a prompt of 1 M tokens must fit");
const _: () = assert!(
    GET_MESSAGE_BYTES * 2 + GET_MESSAGE_PARTS_MAX * 64 <= MESSAGE_BYTES_MAX,
    "packed messages must fit"
);
