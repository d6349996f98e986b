//! Network namespaces, one for each node, on a bridge that this process is on, too; and what goes wrong in
//! networks: packets that are dropped one way or both, links that are down, links that are slow.

use std::{
    process::{self, Command},
    sync::atomic::{AtomicU8, Ordering},
};

use crate::skipped;

/// What is on the path of `ip` and `iptables`.
const TOOLS: [&str; 3] = ["ip", "iptables", "tc"];

/// Namespaces of one test; gone when dropped.
#[derive(Debug)]
pub(crate) struct Net {
    /// What its links and namespaces are called: short, since a link's name has 15 characters.
    tag: String,
    subnet: u8,
    nodes: u8,
}

/// Nets of this process, which all have a subnet of their own.
static MADE: AtomicU8 = AtomicU8::new(0);

impl Net {
    /// Makes namespaces for so many nodes, or says that `test` cannot run here.
    pub(crate) fn make(test: &str, nodes: u8) -> Option<Self> {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        // Another run of the tests on this machine has others.
        let subnet = u8::try_from(process::id() % 200).unwrap().wrapping_add(number);
        let net = Self { tag: format!("kv{}x{number}", process::id() % 100_000), subnet, nodes };
        if let Err(why) = net.build() {
            skipped::say(test, "network namespaces", &why);
            return None;
        }
        Some(net)
    }

    fn build(&self) -> Result<(), String> {
        for tool in TOOLS {
            run(&[tool, "-V"])?;
        }
        let bridge = &self.tag;
        run(&["ip", "link", "add", bridge, "type", "bridge"])?;
        run(&["ip", "address", "add", &format!("{}/24", self.gateway()), "dev", bridge])?;
        run(&["ip", "link", "set", bridge, "up"])?;
        for node in 0..self.nodes {
            let (space, link) = (self.space(node), self.link(node));
            run(&["ip", "netns", "add", &space])?;
            run(&[
                "ip", "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &space,
            ])?;
            run(&["ip", "link", "set", &link, "master", bridge, "up"])?;
            let address = format!("{}/24", self.address(node));
            run(&["ip", "-n", &space, "address", "add", &address, "dev", "eth0"])?;
            for inner in ["eth0", "lo"] {
                run(&["ip", "-n", &space, "link", "set", inner, "up"])?;
            }
        }
        Ok(())
    }

    /// Address of this process in it.
    pub(crate) fn gateway(&self) -> String {
        format!("10.213.{}.1", self.subnet)
    }

    /// Address of a node.
    pub(crate) fn address(&self, node: u8) -> String {
        format!("10.213.{}.{}", self.subnet, 10 + node)
    }

    /// An address on the bridge at which something may stand before a node.
    pub(crate) fn address_before(&self, node: u8) -> String {
        let address = format!("10.213.{}.{}", self.subnet, 110 + node);
        must(&["ip", "address", "replace", &format!("{address}/24"), "dev", &self.tag]);
        address
    }

    /// What runs a command in the namespace of a node, and becomes it.
    pub(crate) fn wrapper(&self, node: u8) -> Vec<String> {
        ["ip", "netns", "exec", &self.space(node)].map(str::to_owned).to_vec()
    }

    /// What `from` sends does not arrive at `to` any more.
    pub(crate) fn cut(&self, from: u8, to: u8) {
        self.firewall(to, &["-A", "INPUT", "-s", &self.address(from), "-j", "DROP"]);
    }

    /// Everything arrives at `to` again.
    pub(crate) fn heal(&self, to: u8) {
        self.firewall(to, &["-F", "INPUT"]);
    }

    /// Takes the link of a node down, or up.
    pub(crate) fn set_link(&self, node: u8, up: bool) {
        must(&["ip", "link", "set", &self.link(node), if up { "up" } else { "down" }]);
    }

    /// Lets a node send no faster than this, such as `20mbit`.
    pub(crate) fn slow(&self, node: u8, rate: &str) {
        let space = self.space(node);
        let shaped = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"];
        must(
            &[
                &["ip", "netns", "exec", &space, "tc", "qdisc", "replace", "dev", "eth0"],
                &shaped[..],
            ]
            .concat(),
        );
    }

    /// Lets it send as fast as it can.
    pub(crate) fn unslow(&self, node: u8) {
        let space = self.space(node);
        must(&["ip", "netns", "exec", &space, "tc", "qdisc", "del", "dev", "eth0", "root"]);
    }

    fn firewall(&self, node: u8, rule: &[&str]) {
        let space = self.space(node);
        must(&[&["ip", "netns", "exec", &space, "iptables", "-w"], rule].concat());
    }

    fn space(&self, node: u8) -> String {
        format!("{}n{node}", self.tag)
    }

    fn link(&self, node: u8) -> String {
        format!("{}v{node}", self.tag)
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for node in 0..self.nodes {
            // What was never made cannot be deleted, which is as good.
            run(&["ip", "netns", "del", &self.space(node)]).unwrap_or_default();
            run(&["ip", "link", "del", &self.link(node)]).unwrap_or_default();
        }
        run(&["ip", "link", "del", &self.tag]).unwrap_or_default();
    }
}

fn must(command: &[&str]) {
    run(command).unwrap();
}

fn run(command: &[&str]) -> Result<(), String> {
    let done = Command::new(command[0]).args(&command[1..]).output();
    let done = done.map_err(|why| format!("{}: {why}", command[0]))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", command.join(" "), String::from_utf8_lossy(&done.stderr).trim()))
}
