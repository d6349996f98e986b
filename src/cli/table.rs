//! Tables of numbers for people.

/// Right-aligned columns.
pub(super) struct Table {
    pub(super) head: Vec<String>,
    pub(super) lines: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new<const COLUMNS: usize>(head: [&str; COLUMNS]) -> Self {
        Self { head: head.map(str::to_owned).to_vec(), lines: Vec::new() }
    }

    pub(super) fn render(&self, text: &mut String, title: &str) {
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

/// Bytes as GiB.
#[expect(clippy::cast_precision_loss, reason = "sizes are shown with one digit")]
pub(super) fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1_u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_right() {
        let mut table = Table::new(["a", "long"]);
        table.lines.push(vec!["12345".to_owned(), "7".to_owned()]);
        let mut text = String::new();
        table.render(&mut text, "title");
        assert_eq!(text, "\ntitle\n      a  long\n  12345     7\n");
    }
}
