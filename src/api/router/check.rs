//! `/check_blocks`: the question of a Dynamo router to a cache that its workers share.
//!
//! ```text
//! {"block_hashes": [u64, ...]}  ->  {"ranges": [[start, end], ...]}
//! ```
//! The hashes are Dynamo's local ones, in the order of the prompt; ranges are of their positions, the end
//! excluded. Only a prefix can be found, because a block is named by all that is before it: there is one
//! range or none.

use kvstrata_tiers::error::Result;
use serde::{Deserialize, Serialize};

use super::RouterService;
use crate::{
    advice::{Among, Asked, Prompt},
    auth::Bearer,
    limits::LOOKUP_HASHES_MAX,
    metrics::Op,
    schemes::Scheme,
};

use super::convert::at_most;

#[derive(Debug, Deserialize)]
struct Question {
    block_hashes: Vec<u64>,
    /// Not asked by Dynamo: whose blocks, where several models are served.
    #[serde(default)]
    model: Option<String>,
}

#[derive(Debug, Serialize)]
struct Answer {
    ranges: Vec<[u32; 2]>,
}

impl RouterService {
    /// Answers in JSON which blocks the tiers have.
    ///
    /// # Errors
    /// `Invalid` for what is no such question.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn check_blocks(&self, bearer: &Bearer, body: &[u8]) -> Result<Vec<u8>> {
        self.twin(Op::CheckBlocks, body, async |question: Question| {
            let hashes = question.block_hashes;
            at_most("block_hashes", hashes.len(), 0, LOOKUP_HASHES_MAX)?;
            let among = question.model.map_or(Among::All, Among::Model);
            let asked = Asked::Hashes64 { scheme: Scheme::Dynamo, chained: false, hashes };
            let prompt = Prompt { among, block_tokens: 0, asked, total_blocks: 0 };
            let blocks = self.node.prefix_blocks(bearer, &prompt).await?;
            let ranges = if blocks > 0 { vec![[0, blocks]] } else { Vec::new() };
            Ok(Answer { ranges })
        })
        .await
    }
}
