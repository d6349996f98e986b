//! Kill -9 while requests are under way, again and again: what was acknowledged as durable is there
//! afterwards, and what was acknowledged as removed is not.
//!
//! These take tens of kills each. A thousand are a command: see "Kills" in benches/README.md.

use crate::replay::{Ended, replay, sample};

/// The same for all tests here: several engines, so that a kill meets requests at different stages.
const COMMON: [&str; 6] = ["--block-bytes", "4KiB", "--memory", "512MiB", "--clients", "3"];

fn crash(arguments: &[&str]) -> Ended {
    replay(&sample(), &[COMMON.as_slice(), arguments].concat())
}

impl Ended {
    fn of_kills(&self, name: &str) -> u64 {
        self.number(&format!("/disturbance/{name}"))
    }

    /// Every replay with kills must pass this, however small its tiers are.
    fn assert_survived(&self, kills_min: u64) {
        assert_eq!(self.code, Some(0), "{}", self.errors);
        let kills = self.of_kills("kills");
        assert!(kills >= kills_min, "{kills} kills, at least {kills_min} wanted");
        assert!(self.of_kills("repeated_requests") > 0, "no kill met a request");
        assert!(self.of_kills("interrupted_starts") > 0, "no start was killed");
        assert!(self.of_kills("removed_checked") > 0, "nothing was removed");
        for name in ["lost_blocks", "resurrected_blocks", "audit_wrong_bytes"] {
            assert_eq!(self.of_kills(name), 0, "{name}");
        }
        assert_eq!(self.number("/wrong_bytes"), 0);
    }
}

#[test]
fn fifty_kills_lose_nothing_that_was_acknowledged() {
    // All blocks fit into the tier, and a third of them into dram.
    let tiers = ["--dram", "64MiB", "--nvme", "1GiB", "--segment-bytes", "4MiB", "--durable"];
    let kills = ["--crash-every", "1..6", "--remove-share", "0.1", "--seed", "7"];
    let ended = crash(&[tiers.as_slice(), &kills].concat());
    ended.assert_survived(50);
    let checked = ended.of_kills("durable_checked");
    assert!(checked > 40_000, "only {checked} durable blocks asked for");
    assert_eq!(ended.report["disturbance"]["all_durable_checked"], true);
    assert!(ended.number("/hits_nvme") > 0);
}

#[test]
fn kills_while_the_tier_evicts_bring_no_wrong_byte_and_nothing_back() {
    let tiers = ["--dram", "16MiB", "--nvme", "64MiB", "--segment-bytes", "1MiB"];
    let kills = ["--crash-every", "5..20", "--remove-share", "0.3", "--seed", "11"];
    let ended = crash(&[tiers.as_slice(), &kills].concat());
    ended.assert_survived(15);
    assert!(ended.number("/hits_nvme") > 0);
}

#[test]
fn a_server_without_nvme_forgets_and_serves_again_to_who_has_its_token() {
    // So often that one of the starts is met, too: one of five is, by chance.
    let kills = ["--crash-every", "5..15", "--remove-share", "0.3", "--seed", "3"];
    let ended = crash(&[["--dram", "256MiB", "--tls"].as_slice(), &kills].concat());
    ended.assert_survived(10);
    assert_eq!(ended.of_kills("durable_blocks"), 0);
}

#[test]
fn what_cannot_be_disturbed_is_refused_by_name() {
    for (arguments, named) in [
        (["--crash-every", "0"].as_slice(), "--crash-every"),
        (&["--crash-every", "9..3"], "50..400"),
        (&["--crash-every", "5", "--endpoint", "127.0.0.1:1"], "--endpoint"),
        (&["--crash-every", "5", "--remove-share", "2"], "--remove-share: 2 given, 0 to 1"),
        (&["--seed", "5"], "--crash-every"),
        (&["--segment-bytes", "1MiB"], "--nvme"),
    ] {
        let ended = crash(arguments);
        assert_eq!(ended.code, Some(64), "{arguments:?}: {}", ended.errors);
        assert!(ended.errors.contains(named), "{arguments:?}: {}", ended.errors);
    }
}
