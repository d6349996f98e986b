//! How far long work is, for whoever watches.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often a bar is drawn.
const DRAW_INTERVAL: Duration = Duration::from_millis(200);

/// A bar on stderr for work of `length`, drawn as `template` says; nothing when stderr is not a
/// terminal.
pub(super) fn bar(length: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(DRAW_INTERVAL);
    bar
}
