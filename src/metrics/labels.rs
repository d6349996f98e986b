//! The closed sets of label values, spelled as they appear.
//!
//! Never a key, a lease, a peer or an error text: those have no bound.

use kvstrata_tiers::{label_values, tier::Tier};

label_values! {
    /// Where a block was read from.
    TierLabel {
        /// CPU memory.
        Dram = "dram",
        /// Local flash.
        Nvme = "nvme",
        /// Object storage.
        Object = "object",
    }
}

impl From<Tier> for TierLabel {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Dram => Self::Dram,
            Tier::Nvme => Self::Nvme,
            Tier::Object => Self::Object,
        }
    }
}

label_values! {
    /// What a member answers that a lookup has asked.
    PeerAnswer {
        /// It has some of the blocks.
        Found = "found",
        /// It has none: its filter was wrong, or they have left since.
        Nothing = "nothing",
        /// Nothing came in time.
        Late = "late",
        /// It does not let this node in.
        Refused = "refused",
        /// It could not be reached, or failed.
        Failed = "failed",
    }
}

label_values! {
    /// Whose filters.
    FilterOf {
        /// That of this node.
        Own = "own",
        /// Those of the other members.
        Members = "members",
    }
}

label_values! {
    /// Why a block has no name in a hash scheme.
    UnindexedLabel {
        /// The index takes all the memory that it may.
        Full = "full",
        /// The engine's hash is of more than the block's tokens.
        Unlike = "unlike",
    }
}

label_values! {
    /// What a lookup said about a block: the decision, not a later delivery.
    Answer {
        /// In the prefix, in dram.
        Dram = "dram",
        /// In the prefix, on nvme.
        Nvme = "nvme",
        /// In the prefix, in object storage.
        Object = "object",
        /// In the prefix, its put in flight.
        Pending = "pending",
        /// Not in the prefix.
        Miss = "miss",
    }
}

label_values! {
    /// Why a get delivered no bytes for a block.
    Missed {
        /// Not here.
        Absent = "absent",
        /// Its put is in flight.
        Pending = "pending",
        /// It failed verification and was quarantined.
        Corrupt = "corrupt",
        /// The tier did not answer in time.
        Timeout = "timeout",
        /// The tier is overloaded, or dram has no room.
        Busy = "busy",
    }
}

label_values! {
    /// What became of an offered block.
    PutLabel {
        /// Readable now.
        Stored = "stored",
        /// This part is here, others are missing.
        PartStored = "part_stored",
        /// Was here.
        Duplicate = "duplicate",
        /// Was here with other bytes; the first stays.
        DuplicateDiffers = "duplicate_differs",
        /// Another put of it is in flight.
        Pending = "pending",
        /// No room without hurting others.
        Refused = "refused",
        /// The bytes did not match their checksum.
        Corrupt = "corrupt",
        /// Stored, but not on nvme, as was asked.
        NotDurable = "not_durable",
    }
}

label_values! {
    /// Why a lease ended.
    LeaseEnd {
        /// The client gave it back.
        Released = "released",
        /// Its deadline passed.
        Expired = "expired",
        /// Its session ended.
        Session = "session",
    }
}

label_values! {
    /// A call of the contract.
    Op {
        /// Open.
        Open = "open",
        /// Session.
        Session = "session",
        /// Lookup.
        Lookup = "lookup",
        /// Put.
        Put = "put",
        /// Get.
        Get = "get",
        /// Describe.
        Describe = "describe",
        /// Touch.
        Touch = "touch",
        /// Prefetch.
        Prefetch = "prefetch",
        /// Release.
        Release = "release",
        /// Renew.
        Renew = "renew",
        /// Remove.
        Remove = "remove",
        /// Stats.
        Stats = "stats",
        /// A router's lookup.
        RouterLookup = "router_lookup",
        /// A router's score.
        RouterScore = "router_score",
        /// A router that follows what is where.
        RouterWatch = "router_watch",
        /// A router that follows what loading costs.
        RouterWatchTiers = "router_watch_tiers",
        /// Loads that a router expects.
        RouterReserve = "router_reserve",
        /// The end of such.
        RouterRelease = "router_release",
        /// How long loads took.
        RouterReport = "router_report",
        /// Another node, of which blocks there may be here.
        PeerFilter = "peer_filter",
        /// Another node, of what routers are to be told of this one.
        PeerTell = "peer_tell",
        /// Which blocks there are, asked as Dynamo does.
        CheckBlocks = "check_blocks",
        /// An operator has the node leave.
        AdminDrain = "admin_drain",
        /// An operator asks how it is.
        AdminStatus = "admin_status",
    }
}

label_values! {
    /// How a call ended: a gRPC code.
    Outcome {
        /// It did what was asked; misses are data.
        Ok = "ok",
        /// The client or a drain ended it.
        Cancelled = "cancelled",
        /// Not one of ours.
        Unknown = "unknown",
        /// The request can never work as written.
        InvalidArgument = "invalid_argument",
        /// Out of time.
        DeadlineExceeded = "deadline_exceeded",
        /// The namespace is not open here.
        NotFound = "not_found",
        /// Not one of ours.
        AlreadyExists = "already_exists",
        /// Not allowed.
        PermissionDenied = "permission_denied",
        /// Over a limit.
        ResourceExhausted = "resource_exhausted",
        /// The bytes do not fit the namespace.
        FailedPrecondition = "failed_precondition",
        /// The session or lease has ended.
        Aborted = "aborted",
        /// A message was larger than allowed.
        OutOfRange = "out_of_range",
        /// Not built in or not switched on.
        Unimplemented = "unimplemented",
        /// A defect of this program.
        Internal = "internal",
        /// Starting or draining.
        Unavailable = "unavailable",
        /// Stored bytes failed verification.
        DataLoss = "data_loss",
        /// Nobody we know.
        Unauthenticated = "unauthenticated",
    }
}

label_values! {
    /// What a client comes in by.
    Door {
        /// The gRPC contract.
        Grpc = "grpc",
        /// The bulk port.
        Bulk = "bulk",
        /// The pages.
        Http = "http",
        /// The RESP listener.
        Resp = "resp",
        /// The admin listener.
        Admin = "admin",
    }
}

label_values! {
    /// Why a request was not taken for that of a tenant.
    Unproven {
        /// It showed no token.
        Missing = "missing",
        /// Its token is not one that is valid for this.
        Wrong = "wrong",
    }
}

label_values! {
    /// Files that are loaded again when they change.
    Reloaded {
        /// The tokens of clients.
        Tokens = "tokens",
        /// What tenants may have and do.
        Tenants = "tenants",
        /// Certificate, key and the CA of clients.
        Tls = "tls",
    }
}

label_values! {
    /// What became of files that have changed.
    ReloadOutcome {
        /// They are in force.
        Ok = "ok",
        /// They cannot be used; what was loaded before is in force.
        Failed = "failed",
    }
}

label_values! {
    /// A command of RESP.
    RespCommand {
        /// SET.
        Set = "set",
        /// GET and MGET.
        Get = "get",
        /// EXISTS, STRLEN, TTL and PTTL.
        Exists = "exists",
        /// DEL and UNLINK.
        Del = "del",
        /// What asks for no value.
        Other = "other",
    }
}

label_values! {
    /// Why a value of a SET was not stored.
    RespDrop {
        /// There is no room that may be taken, or the node is draining.
        Room = "room",
        /// The value is empty, or longer than a block may be.
        Length = "length",
        /// The key is too long.
        Key = "key",
        /// The command has an option that is not known here.
        Option = "option",
        /// It is the second one of two that belong together, and the first one is not here.
        Torn = "torn",
        /// The tenant has used up what it may do in a second.
        Rate = "rate",
    }
}

label_values! {
    /// What a tenant may do in a second.
    RateLabel {
        /// Requests.
        Requests = "requests",
        /// Bytes of puts and gets.
        Bytes = "bytes",
    }
}

label_values! {
    /// What became of a batch of events of an engine.
    EventBatch {
        /// It came, and was read.
        Taken = "taken",
        /// It was missed, and the engine has sent it again.
        Replayed = "replayed",
        /// It came again.
        Repeated = "repeated",
        /// It was missed, and the engine did not send it again.
        Lost = "lost",
        /// It could not be read.
        Broken = "broken",
    }
}

label_values! {
    /// How the device of a tier is.
    TierStateLabel {
        /// As usual.
        Ok = "ok",
        /// Far slower than it was.
        Degraded = "degraded",
        /// Nothing can be read.
        Down = "down",
    }
}

label_values! {
    /// A kind of router that is told where blocks are.
    RouterLabel {
        /// Dynamo.
        Dynamo = "dynamo",
        /// The endpoint picker of llm-d.
        LlmD = "llm-d",
    }
}

label_values! {
    /// What became of a datagram of gossip.
    DatagramOutcome {
        /// It was of a member and new.
        Taken = "taken",
        /// It was of a member that did not know this process, which was told.
        Answered = "answered",
        /// A member told that it is another process now.
        Learned = "learned",
        /// Longer than any of ours.
        TooLong = "too_long",
        /// Not in our form.
        Malformed = "malformed",
        /// Of a cluster with another name.
        Foreign = "foreign",
        /// Its seal is not of our key.
        Forged = "forged",
        /// It came before.
        Replayed = "replayed",
        /// This node had sent it itself.
        Own = "own",
        /// A member's, and no message of gossip: of another version.
        Unread = "unread",
    }
}

label_values! {
    /// What a router is told.
    RouterEvent {
        /// Blocks can be read from a tier.
        Stored = "stored",
        /// They no longer can.
        Removed = "removed",
    }
}

label_values! {
    /// Why a router is told everything again.
    ResyncReason {
        /// It has begun to listen.
        Subscribed = "subscribed",
        /// It has missed batches that are not kept any more.
        Missed = "missed",
    }
}

label_values! {
    /// Who tells how long a load took that was estimated.
    Judge {
        /// This node, of its own gets.
        Node = "node",
        /// A router or an engine, by a report.
        Report = "report",
    }
}

label_values! {
    /// What became of a block that was offered to another member.
    HandoverOutcome {
        /// The member has it now.
        Taken = "taken",
        /// It had it before.
        Present = "present",
        /// It did not take it.
        Refused = "refused",
    }
}
