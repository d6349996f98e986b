//! What `plan` found, as tables or JSON.

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::{
    cli::table::{Table, gib},
    numbers::count,
    sim::{Bill, ratio},
};

/// Everything found about one trace.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: String,
    pub(super) format: String,
    pub(super) block_tokens: u32,
    pub(super) requests: usize,
    pub(super) references: u64,
    pub(super) blocks_unique: u32,
    pub(super) repeats_dropped: u64,
    pub(super) unbounded_hits: u64,
    pub(super) model: Option<String>,
    pub(super) block_bytes: Option<u64>,
    pub(super) policies: Vec<&'static str>,
    /// By capacity, then by policy.
    pub(super) rows: Vec<Row>,
    /// Hot to cold; empty if no tiers were asked for.
    pub(super) tiers: Vec<TierRow>,
    /// What the object tier costs, if that was asked.
    pub(super) object: Option<Bill>,
}

/// One policy at one capacity.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) capacity: String,
    pub(super) blocks: u32,
    pub(super) bytes: Option<u64>,
    pub(super) policy: &'static str,
    pub(super) hits: u64,
    pub(super) hit_ratio: f64,
    /// Hits as a share of the best possible, 0 to 1.
    pub(super) share_of_opt: f64,
    pub(super) insertions: u64,
    /// Blocks written for each distinct block of the trace.
    pub(super) insertions_per_block: f64,
}

/// One tier of the hierarchy.
#[derive(Debug, Serialize)]
pub(super) struct TierRow {
    pub(super) tier: String,
    pub(super) capacity: String,
    pub(super) blocks: u32,
    pub(super) bytes: Option<u64>,
    pub(super) hits: u64,
    pub(super) hit_ratio: f64,
    pub(super) insertions: u64,
    pub(super) insertions_per_block: f64,
}

impl Report {
    /// References that no tier served.
    pub(super) fn misses(&self) -> u64 {
        self.references.saturating_sub(self.tiers.iter().map(|tier| tier.hits).sum())
    }

    /// The report as JSON, with a final line end.
    ///
    /// # Errors
    /// `Internal` if it cannot be written down.
    pub(super) fn json(&self) -> Result<String> {
        let mut text = serde_json::to_string_pretty(self).map_err(|source| {
            Error::new(ErrorKind::Internal, "write the report as JSON").because(source)
        })?;
        text.push('\n');
        Ok(text)
    }

    /// The report as tables.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "{}: {}, {} requests, blocks of {} tokens{}\n\
             {} references to {} distinct blocks; unlimited, {} hit ({:.2} %)\n",
            self.trace,
            self.format,
            count(self.requests as u64),
            self.block_tokens,
            self.block_bytes.map_or(String::new(), |bytes| format!(" ({} bytes)", count(bytes))),
            count(self.references),
            count(self.blocks_unique.into()),
            count(self.unbounded_hits),
            100.0 * ratio(self.unbounded_hits, self.references),
        );
        if self.repeats_dropped > 0 {
            let repeats = count(self.repeats_dropped);
            text += &format!("{repeats} references repeat a block of their request: not counted\n");
        }
        let percent = |share: f64| format!("{:.2}", 100.0 * share);
        self.matrix(&mut text, "hit ratio, %", &|row| percent(row.hit_ratio));
        self.matrix(&mut text, "hits as a share of OPT's, %", &|row| percent(row.share_of_opt));
        self.matrix(&mut text, "blocks written for each distinct block", &|row| {
            format!("{:.3}", row.insertions_per_block)
        });
        self.tier_table(&mut text);
        self.object_table(&mut text);
        text
    }

    /// A table with a line for each capacity and a column for each policy.
    fn matrix(&self, text: &mut String, title: &str, cell: &dyn Fn(&Row) -> String) {
        let mut table = Table::new(["capacity", "blocks"]);
        table.head.extend(self.block_bytes.map(|_| "GiB".to_owned()));
        table.head.extend(self.policies.iter().map(|policy| (*policy).to_owned()));
        for rows in self.rows.chunks(self.policies.len().max(1)) {
            let Some(first) = rows.first() else { continue };
            let mut line = vec![first.capacity.clone(), count(first.blocks.into())];
            line.extend(first.bytes.map(gib));
            line.extend(rows.iter().map(cell));
            table.lines.push(line);
        }
        table.render(text, title);
    }

    fn tier_table(&self, text: &mut String) {
        if self.tiers.is_empty() {
            return;
        }
        let mut table = Table::new(["tier", "capacity", "blocks"]);
        table.head.extend(self.block_bytes.map(|_| "GiB".to_owned()));
        table.head.extend(["hits", "% of references", "written"].map(str::to_owned));
        for tier in &self.tiers {
            let mut line =
                vec![tier.tier.clone(), tier.capacity.clone(), count(tier.blocks.into())];
            line.extend(tier.bytes.map(gib));
            line.push(count(tier.hits));
            line.push(format!("{:.2}", 100.0 * tier.hit_ratio));
            line.push(format!("{:.3}", tier.insertions_per_block));
            table.lines.push(line);
        }
        let mut line = vec!["miss".to_owned(), String::new(), String::new()];
        line.extend(self.block_bytes.map(|_| String::new()));
        line.push(count(self.misses()));
        line.push(format!("{:.2}", 100.0 * ratio(self.misses(), self.references)));
        table.lines.push(line);
        table.render(text, "hits by tier (LRU, inclusive; written: for each distinct block)");
    }

    fn object_table(&self, text: &mut String) {
        let Some(bill) = &self.object else { return };
        let head = ["object tier", "in a month", "costs"];
        let mut table = Table::new(head);
        let lines = [
            ("writing requests", count(bill.puts), bill.put_cost),
            ("reading requests", count(bill.gets), bill.get_cost),
            ("GiB written", gib(bill.written_bytes), 0.0),
            ("GiB read", gib(bill.read_bytes), 0.0),
            ("GiB stored", gib(bill.stored_bytes), bill.storage_cost),
            ("all", String::new(), bill.cost()),
        ];
        table.lines.extend(
            lines.map(|(what, much, cost)| vec![what.to_owned(), much, format!("{cost:.2}")]),
        );
        table.render(
            text,
            "what the object tier costs at this rate (blocks as they are, traffic within the region)",
        );
    }
}
