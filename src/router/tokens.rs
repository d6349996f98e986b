//! Prompts as tokens: as they came, or as an engine tokenises them.
//!
//! The engine is given the very body that it will be asked to complete, by `/tokenize`, as vLLM has it: it
//! applies its own template and adds its own special tokens, which nobody else does the same way. What was
//! tokenised is remembered, so that a repeated prompt costs nothing.

use std::{sync::Arc, time::Duration};

use axum::{body::Bytes, http::Method};
use lru::LruCache;
use parking_lot::Mutex;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_128;

use super::upstream::{Unanswered, Upstream};

/// For an engine to tokenise: a prompt of half a million tokens takes about that, and a minute to prefill.
const TOKENIZE_DEADLINE: Duration = Duration::from_secs(1);
/// Tokens that are remembered, of all prompts: 16 MB.
const REMEMBERED_TOKENS_MAX: usize = 4 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Tokens {
    upstream: Upstream,
    remembered: Mutex<Remembered>,
}

#[derive(Debug)]
struct Remembered {
    prompts: LruCache<u128, Arc<[u32]>>,
    tokens: usize,
}

#[derive(Deserialize)]
struct Answer {
    tokens: Vec<u32>,
}

impl Tokens {
    /// Nothing is remembered yet.
    pub(super) fn new(upstream: Upstream) -> Self {
        let remembered = Remembered { prompts: LruCache::unbounded(), tokens: 0 };
        Self { upstream, remembered: Mutex::new(remembered) }
    }

    /// Tokens of the prompt in `body`, by the engine at `authority`.
    pub(super) async fn of(&self, authority: &str, body: &Bytes) -> Result<Arc<[u32]>, Unanswered> {
        let key = xxh3_128(body);
        if let Some(tokens) = self.remembered.lock().prompts.get(&key) {
            return Ok(Arc::clone(tokens));
        }
        let asked = (Method::POST, "/tokenize");
        let answer = self.upstream.ask(authority, asked, body.clone(), TOKENIZE_DEADLINE).await?;
        let answer: Answer = serde_json::from_slice(&answer)
            .map_err(|error| Unanswered::Unread(axum::Error::new(error)))?;
        let tokens: Arc<[u32]> = answer.tokens.into();
        self.remembered.lock().insert(key, &tokens);
        Ok(tokens)
    }
}

impl Remembered {
    fn insert(&mut self, key: u128, tokens: &Arc<[u32]>) {
        if tokens.len() > REMEMBERED_TOKENS_MAX / 4 {
            return;
        }
        if let Some(before) = self.prompts.put(key, Arc::clone(tokens)) {
            self.tokens -= before.len();
        }
        self.tokens += tokens.len();
        while self.tokens > REMEMBERED_TOKENS_MAX
            && let Some((_, oldest)) = self.prompts.pop_lru()
        {
            self.tokens -= oldest.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded_by_its_tokens() {
        let mut remembered = Remembered { prompts: LruCache::unbounded(), tokens: 0 };
        let prompt: Arc<[u32]> = vec![1; REMEMBERED_TOKENS_MAX / 4].into();
        for key in 0..10 {
            remembered.insert(key, &prompt);
            remembered.insert(key, &prompt);
        }
        assert_eq!((remembered.prompts.len(), remembered.tokens), (4, REMEMBERED_TOKENS_MAX));
        assert!(remembered.prompts.get(&9).is_some() && remembered.prompts.get(&5).is_none());
        remembered.insert(11, &vec![1; REMEMBERED_TOKENS_MAX].into());
        assert!(remembered.prompts.get(&11).is_none());
    }
}
