//! What `plan` found, as tables or JSON.

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::sim::{Bill, ratio};

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
            grouped(self.requests as u64),
            self.block_tokens,
            self.block_bytes.map_or(String::new(), |bytes| format!(" ({} bytes)", grouped(bytes))),
            grouped(self.references),
            grouped(self.blocks_unique.into()),
            grouped(self.unbounded_hits),
            100.0 * ratio(self.unbounded_hits, self.references),
        );
        if self.repeats_dropped > 0 {
            let repeats = grouped(self.repeats_dropped);
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
        table.head_size(self.block_bytes);
        table.head.extend(self.policies.iter().map(|policy| (*policy).to_owned()));
        for rows in self.rows.chunks(self.policies.len().max(1)) {
            let Some(first) = rows.first() else { continue };
            let mut line = vec![first.capacity.clone(), grouped(first.blocks.into())];
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
        table.head_size(self.block_bytes);
        table.head.extend(["hits", "% of references", "written"].map(str::to_owned));
        for tier in &self.tiers {
            let mut line =
                vec![tier.tier.clone(), tier.capacity.clone(), grouped(tier.blocks.into())];
            line.extend(tier.bytes.map(gib));
            line.push(grouped(tier.hits));
            line.push(format!("{:.2}", 100.0 * tier.hit_ratio));
            line.push(format!("{:.3}", tier.insertions_per_block));
            table.lines.push(line);
        }
        let mut line = vec!["miss".to_owned(), String::new(), String::new()];
        line.extend(self.block_bytes.map(|_| String::new()));
        line.push(grouped(self.misses()));
        line.push(format!("{:.2}", 100.0 * ratio(self.misses(), self.references)));
        table.lines.push(line);
        table.render(text, "hits by tier (LRU, inclusive; written: for each distinct block)");
    }

    fn object_table(&self, text: &mut String) {
        let Some(bill) = &self.object else { return };
        let head = ["object tier", "in a month", "costs"];
        let mut table = Table::new(head);
        let lines = [
            ("writing requests", grouped(bill.puts), bill.put_cost),
            ("reading requests", grouped(bill.gets), bill.get_cost),
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

/// Right-aligned columns.
struct Table {
    head: Vec<String>,
    lines: Vec<Vec<String>>,
}

impl Table {
    fn new<const COLUMNS: usize>(head: [&str; COLUMNS]) -> Self {
        Self { head: head.map(str::to_owned).to_vec(), lines: Vec::new() }
    }

    /// Adds a column of sizes if blocks have one.
    fn head_size(&mut self, block_bytes: Option<u64>) {
        self.head.extend(block_bytes.map(|_| "GiB".to_owned()));
    }

    fn render(&self, text: &mut String, title: &str) {
        let mut widths: Vec<usize> = self.head.iter().map(String::len).collect();
        for line in &self.lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = cell.len().max(*width);
            }
        }
        text.push('\n');
        text.push_str(title);
        text.push('\n');
        for line in [&self.head].into_iter().chain(&self.lines) {
            for (width, cell) in widths.iter().zip(line) {
                text.push_str(&format!("  {cell:>width$}"));
            }
            text.push('\n');
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes are shown with one digit")]
fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1_u64 << 30) as f64)
}

/// A number with commas between thousands.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len().saturating_mul(2));
    for (at, digit) in digits.chars().enumerate() {
        let left = digits.len().saturating_sub(at);
        if at > 0 && left.is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn columns_align_right() {
        let mut table = Table::new(["a", "long"]);
        table.lines.push(vec!["12345".to_owned(), "7".to_owned()]);
        let mut text = String::new();
        table.render(&mut text, "title");
        assert_eq!(text, "\ntitle\n      a  long\n  12345     7\n");
    }
}
