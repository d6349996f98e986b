//! How a trace is read: the flags of commands that simulate one.

use crate::trace::{ReadOptions, TimeUnit};

/// What a trace does not say of itself.
#[derive(Debug, Clone, clap::Args)]
pub struct TraceArgs {
    /// Tokens in one block, if not the format's own (512 Mooncake, 64 run-length, 16 Qwen-Bailian)
    #[arg(long)]
    pub block_tokens: Option<u32>,

    /// The timestamps are in seconds, if the format's own unit is not
    #[arg(long)]
    pub seconds: bool,

    /// Use only the first N requests
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
}

impl TraceArgs {
    /// The same for whoever reads the trace.
    pub(super) fn options(&self) -> ReadOptions {
        ReadOptions {
            block_tokens: self.block_tokens,
            time_unit: self.seconds.then_some(TimeUnit::Seconds),
            requests_max: self.requests,
        }
    }
}
