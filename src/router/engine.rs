//! One engine: whether it answers, what it serves, how busy and how fast it is.

use std::time::Duration;

use axum::{body::Bytes, http::Method};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::{decide::Learned, slots::Slots, spec::EngineSpec, upstream::Upstream};

/// Between two questions whether it answers.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// For an answer to that.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);
/// Questions without an answer after which it is left out. A connection that is refused is enough.
const PROBES_MISSED_MAX: u32 = 2;
/// How long what it serves is believed: adapters come and go.
const MODELS_BELIEVED: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) spec: EngineSpec,
    pub(super) slots: Slots,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    up: bool,
    missed: u32,
    learned: Learned,
    /// When it was taken last, by the number of that decision.
    turn: u64,
    models: Vec<Model>,
    models_at: Option<Instant>,
}

/// What an engine serves, as it says.
#[derive(Debug, Clone, Deserialize)]
struct Model {
    id: String,
    /// Where the model is from: how it opens namespaces.
    #[serde(default)]
    root: Option<String>,
    /// The model that this is an adapter of.
    #[serde(default)]
    parent: Option<String>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

/// What a name of a request stands for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Meant {
    /// The model that namespaces are opened with.
    pub(super) model: String,
    /// The adapter; empty for none.
    pub(super) lora: String,
}

impl Engine {
    /// Not up until it has answered.
    pub(super) fn new(spec: EngineSpec) -> Self {
        Self { spec, slots: Slots::default(), state: Mutex::default() }
    }

    /// Whether requests may be sent to it.
    pub(super) fn is_up(&self) -> bool {
        self.state.lock().up
    }

    /// A request has not reached it: it is left out until it answers again.
    pub(super) fn unreached(&self) {
        let mut state = self.state.lock();
        state.missed = PROBES_MISSED_MAX;
        self.set_up(&mut state, false);
    }

    /// Whether it serves a model; `None` as long as it has not said what it does.
    pub(super) fn serves(&self, model: &str) -> Option<bool> {
        let state = self.state.lock();
        let known = !state.models.is_empty();
        known.then(|| state.models.iter().any(|served| served.id == model))
    }

    /// What a name stands for, if it serves it.
    pub(super) fn meaning(&self, name: &str) -> Option<Meant> {
        let state = self.state.lock();
        let find = |name: &str| state.models.iter().find(|model| model.id == name);
        let named = find(name)?;
        let base = named.parent.as_deref().and_then(find).unwrap_or(named);
        let lora = if named.parent.is_some() { named.id.clone() } else { String::new() };
        Some(Meant { model: base.root.clone().unwrap_or_else(|| base.id.clone()), lora })
    }

    /// When it was taken last.
    pub(super) fn turn(&self) -> u64 {
        self.state.lock().turn
    }

    /// It is taken.
    pub(super) fn take_turn(&self, turn: u64) {
        self.state.lock().turn = turn;
    }

    /// How fast it prefills.
    pub(super) fn learned(&self) -> Learned {
        self.state.lock().learned
    }

    /// A prompt, of which so many tokens were to be computed, took so long.
    pub(super) fn learn(&self, tokens: f64, ms: f64) {
        self.state.lock().learned.learn(tokens, ms);
    }

    /// Asks for ever whether it answers, and what it serves.
    pub(super) async fn watch(&self, upstream: &Upstream) {
        loop {
            let asked = (Method::GET, "/health");
            let authority = &self.spec.authority;
            match upstream.ask(authority, asked, Bytes::new(), PROBE_DEADLINE).await {
                Ok(_well) => {
                    self.learn_models(upstream).await;
                    let mut state = self.state.lock();
                    state.missed = 0;
                    self.set_up(&mut state, true);
                }
                Err(why) => {
                    debug!(engine = self.spec.name, %why, "engine does not say that it is well");
                    let mut state = self.state.lock();
                    state.missed = state.missed.saturating_add(1);
                    if state.missed >= PROBES_MISSED_MAX {
                        self.set_up(&mut state, false);
                    }
                }
            }
            sleep(PROBE_INTERVAL).await;
        }
    }

    async fn learn_models(&self, upstream: &Upstream) {
        let now = Instant::now();
        let known = {
            let state = self.state.lock();
            state.up && state.models_at.is_some_and(|at| now - at < MODELS_BELIEVED)
        };
        if known {
            return;
        }
        let asked = (Method::GET, "/v1/models");
        let answer = upstream.ask(&self.spec.authority, asked, Bytes::new(), PROBE_DEADLINE).await;
        let models = answer.ok().and_then(|body| serde_json::from_slice::<Models>(&body).ok());
        let mut state = self.state.lock();
        state.models_at = Some(now);
        // An engine that does not say it may serve anything.
        state.models = models.map(|models| models.data).unwrap_or_default();
    }

    fn set_up(&self, state: &mut State, up: bool) {
        if state.up != up {
            state.up = up;
            let Engine { spec: EngineSpec { name, authority, .. }, .. } = self;
            match up {
                true => info!(engine = name, authority, "engine answers"),
                false => warn!(engine = name, authority, "engine left out"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_known_by_what_they_are_of() {
        let engine = Engine::new("http://h:1".parse().unwrap());
        assert_eq!((engine.serves("m"), engine.meaning("m"), engine.is_up()), (None, None, false));
        let said = br#"{"object":"list","data":[
            {"id":"m","root":"/models/m","parent":null,"object":"model"},
            {"id":"a","root":"/adapters/a","parent":"m"},{"id":"b"}]}"#;
        engine.state.lock().models = serde_json::from_slice::<Models>(said).unwrap().data;
        let meant = |model: &str, lora: &str| {
            Some(Meant { model: model.to_owned(), lora: lora.to_owned() })
        };
        assert_eq!(engine.meaning("m"), meant("/models/m", ""));
        assert_eq!(engine.meaning("a"), meant("/models/m", "a"));
        assert_eq!(engine.meaning("b"), meant("b", ""));
        assert_eq!((engine.serves("a"), engine.serves("c")), (Some(true), Some(false)));
        assert_eq!(engine.meaning("c"), None);
    }
}
