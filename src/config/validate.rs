//! Ranges, and rules between settings.

use std::time::Duration;

use kvstrata_tiers::limits::{EXTENT_BYTES_MIN, MIB};
use tracing_subscriber::filter::LevelFilter;

use super::{Auto, Config, Period, Problem, Size};

/// The longest name of a node or zone: that of a DNS name.
const NAME_CHARS_MAX: usize = 253;
/// The longest drain: more would outlast any sensible rollout.
const DRAIN_GRACE_MAX: Duration = Duration::from_secs(600);
/// The shortest lease: less would end before the answer arrives.
const LEASE_TTL_MIN: Duration = Duration::from_millis(10);
/// The longest lease: it can be renewed, and a promise nobody renews should end.
const LEASE_TTL_MAX: Duration = Duration::from_secs(3600);
/// The least that the process can run in: fixed costs and a few blocks (tested in `budget`).
pub(crate) const MEMORY_LIMIT_MIN: u64 = 128 * MIB;
/// The smallest dram: extents enough for a few size classes.
pub(crate) const DRAM_CAPACITY_MIN: u64 = 4 * EXTENT_BYTES_MIN;

impl Config {
    /// Checks every setting and every rule between settings; empty when all is well.
    #[must_use]
    pub fn validate(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        self.check_names(&mut problems);
        self.check_listeners(&mut problems);
        self.check_admin(&mut problems);
        self.cluster.check(&mut problems);
        self.check_memory(&mut problems);
        self.check_leases(&mut problems);
        self.auth.check(&self.server, &mut problems);
        self.tls.check(&self.server, &mut problems);
        self.nvme.check(&mut problems);
        self.object.check(&self.nvme, &mut problems);
        if !self.log.level.split(',').all(is_level) {
            problems.push(Problem::new(
                "log.level",
                format_args!("{:?}", self.log.level),
                "error, warn, info, debug or trace, optionally per module (info,kvstrata=debug)",
            ));
        }
        problems
    }

    fn check_names(&self, problems: &mut Vec<Problem>) {
        let allowed = format!("1 to {NAME_CHARS_MAX} characters without white space");
        if let Auto::Given(name) = &self.node.name
            && !is_name(name)
        {
            problems.push(Problem::new("node.name", format_args!("{name:?}"), allowed.clone()));
        }
        if let Auto::Given(host) = &self.node.host
            && !is_name(host)
        {
            problems.push(Problem::new("node.host", format_args!("{host:?}"), allowed.clone()));
        }
        if !self.node.zone.is_empty() && !is_name(&self.node.zone) {
            let zone = &self.node.zone;
            problems.push(Problem::new("node.zone", format_args!("{zone:?}"), allowed));
        }
        if let Auto::Given(endpoint) = &self.node.advertise
            && !is_endpoint(endpoint)
        {
            let given = format_args!("{endpoint:?}").to_string();
            problems.push(Problem::new("node.advertise", given, "host:port, port 1 to 65535"));
        }
    }

    fn check_listeners(&self, problems: &mut Vec<Problem>) {
        let (grpc, http) = (self.server.grpc_listen, self.server.http_listen);
        if grpc == http && grpc.port() != 0 {
            let allowed = "an address other than that of server.grpc_listen, or port 0";
            problems.push(Problem::new("server.http_listen", http, allowed));
        }
        if let Some(bulk) = self.server.bulk_address()
            && [grpc, http].contains(&bulk)
            && bulk.port() != 0
        {
            let allowed = "auto, none, or an address of its own, or port 0";
            problems.push(Problem::new("server.bulk_listen", bulk, allowed));
        }
        if let Some(resp) = self.server.resp_address()
            && resp.port() != 0
            && ([grpc, http].contains(&resp) || self.server.bulk_address() == Some(resp))
        {
            let allowed = "none, or an address of its own, or port 0";
            problems.push(Problem::new("server.resp_listen", resp, allowed));
        }
        if self.server.resp_plain && self.server.resp_address().is_none() {
            let allowed = "false, or true with an address in server.resp_listen";
            problems.push(Problem::new("server.resp_plain", true, allowed));
        }
        if self.server.shared_memory && self.server.bulk_unix.given().is_none() {
            let allowed = "false, or true with a path in server.bulk_unix";
            problems.push(Problem::new("server.shared_memory", true, allowed));
        }
        let drain = self.server.drain_grace;
        if drain.0 > DRAIN_GRACE_MAX {
            let allowed = format!("0s to {}", Period(DRAIN_GRACE_MAX));
            problems.push(Problem::new("server.drain_grace", drain, allowed));
        }
    }

    fn check_memory(&self, problems: &mut Vec<Problem>) {
        let limit = self.memory.limit.given();
        let capacity = self.dram.capacity.given();
        if let Some(limit) = limit
            && limit.0 < MEMORY_LIMIT_MIN
        {
            let allowed = format!("auto, or at least {}", Size(MEMORY_LIMIT_MIN));
            problems.push(Problem::new("memory.limit", limit, allowed));
        }
        if let Some(capacity) = capacity {
            let below = limit.is_some_and(|limit| capacity >= limit);
            if capacity.0 < DRAM_CAPACITY_MIN || below {
                let least = Size(DRAM_CAPACITY_MIN);
                let allowed = format!("auto, or at least {least} and below memory.limit");
                problems.push(Problem::new("dram.capacity", capacity, allowed));
            }
        }
    }

    fn check_leases(&self, problems: &mut Vec<Problem>) {
        let (default, longest) = (self.lease.ttl_default, self.lease.ttl_max);
        let least = Period(LEASE_TTL_MIN);
        if !(LEASE_TTL_MIN..=LEASE_TTL_MAX).contains(&longest.0) {
            let allowed = format!("{least} to {}", Period(LEASE_TTL_MAX));
            problems.push(Problem::new("lease.ttl_max", longest, allowed));
        }
        if default.0 < LEASE_TTL_MIN || default > longest {
            let allowed = format!("{least} to lease.ttl_max ({longest})");
            problems.push(Problem::new("lease.ttl_default", default, allowed));
        }
        if let (Some(bytes), Some(capacity)) =
            (self.lease.session_bytes_max.given(), self.dram.capacity.given())
            && bytes > capacity
        {
            let allowed = format!("auto, or 0B to dram.capacity ({capacity})");
            problems.push(Problem::new("lease.session_bytes_max", bytes, allowed));
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().count() <= NAME_CHARS_MAX
        && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// `info` or `module=info`; a bare module would silently mean everything of it.
fn is_level(text: &str) -> bool {
    let (module, level) = text.split_once('=').unwrap_or(("all", text));
    is_name(module) && level.parse::<LevelFilter>().is_ok()
}

pub(crate) fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    is_name(host) && port.parse::<u16>().is_ok_and(|port| port != 0)
}
