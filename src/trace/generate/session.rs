//! One session and its sub-sessions: turns, growing context, compaction, forks.
//!
//! A context is a chain of *stretches*: the tool's shared prefix, the rest of its prompt, then the
//! session's own blocks. A stretch is a row of block ids that only grows; its place among all ids
//! is found when everything is generated, so a session's own blocks are consecutive in the file
//! whatever other sessions do meanwhile.

use super::{
    GenerateOptions,
    quantiles::{Chance, ONE, Quantiles},
};

/// Milliseconds in a second.
const SECOND: u64 = 1000;
/// Tokens in a block of a generated trace.
pub(super) const BLOCK_TOKENS: u64 = 64;

/// Turns of a session: most are short, a few go on all day.
const TURNS: Quantiles = Quantiles(&[
    (0, 3),
    (500_000, 9),
    (750_000, 30),
    (900_000, 120),
    (970_000, 500),
    (995_000, 1500),
    (ONE, 3000),
]);
/// Turns of a sub-session.
const SUB_TURNS: Quantiles = Quantiles(&[(0, 2), (500_000, 6), (900_000, 20), (ONE, 60)]);
/// Milliseconds between turns when a person takes part: seconds while tools run, minutes to read
/// and answer, hours to be away.
const GAP_WITH_PERSON: Quantiles = Quantiles(&[
    (0, 1_500),
    (250_000, 12 * SECOND),
    (500_000, 30 * SECOND),
    (750_000, 75 * SECOND),
    (900_000, 300 * SECOND),
    (950_000, 1_400 * SECOND),
    (978_000, 3_000 * SECOND),
    (997_500, 9_000 * SECOND),
    (ONE, 86_400 * SECOND),
]);
/// Milliseconds between turns of an agent left alone: 3,000 of them fit into a day.
const GAP_ALONE: Quantiles = Quantiles(&[
    (0, 1_500),
    (500_000, 23 * SECOND),
    (900_000, 36 * SECOND),
    (990_000, 110 * SECOND),
    (ONE, 600 * SECOND),
]);
/// Milliseconds between turns of a sub-agent, which nobody stops to read.
const GAP_SUB: Quantiles =
    Quantiles(&[(0, 1_000), (500_000, 8 * SECOND), (900_000, 20 * SECOND), (ONE, 60 * SECOND)]);
/// Tokens that tools and people add in one turn.
const ADDED: Quantiles =
    Quantiles(&[(0, 20), (500_000, 450), (900_000, 2_600), (990_000, 14_000), (ONE, 40_000)]);
/// Tokens generated in one turn.
const OUTPUT: Quantiles =
    Quantiles(&[(0, 8), (500_000, 420), (900_000, 2_300), (990_000, 8_500), (ONE, 20_000)]);
/// Tokens that a session brings along at its start: instructions, open files.
const START: Quantiles =
    Quantiles(&[(0, 500), (500_000, 9_000), (900_000, 45_000), (ONE, 110_000)]);
/// Tokens of the summary that a compaction leaves.
const SUMMARY: Quantiles = Quantiles(&[(0, 3_000), (500_000, 9_000), (ONE, 25_000)]);

/// Sessions that load whole code bases, in millionths.
const HEAVY: u32 = 80_000;
/// The first context of a heavy session, in tokens.
const HEAVY_START_TOKENS: u64 = 64_000;
/// Turns in which a heavy session goes from its first to its full context, the first included.
const HEAVY_TURNS: u64 = 5;
/// The full context of a heavy session, in hundredths of the largest allowed: 480 k of 500 k.
const HEAVY_FULL_PERCENT: u64 = 96;
/// The context at which other sessions compact, in tokens.
const LIGHT_CONTEXT_TOKENS_MAX: u64 = 200_000;
/// Sessions of this many turns and more are agents left alone, in the first part of the time.
const ALONE_TURNS: u64 = 800;
/// Turns that start a sub-session, in millionths.
const SUB_SESSION: u32 = 40_000;
/// Sub-sessions that fork the whole context of their parent, in millionths.
const SUB_INHERITS: u32 = 250_000;
/// Sub-sessions that the parent waits for, in millionths.
const SUB_AWAITED: u32 = 700_000;

/// The first `blocks` blocks of a stretch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) stretch: u32,
    pub(super) blocks: u64,
}

/// A request before its blocks have ids.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) timestamp_ms: u64,
    pub(super) session: u32,
    pub(super) parent: Option<u32>,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) chain: Vec<Piece>,
}

/// The stretches of one (tool, model): what its prompts are made of.
#[derive(Debug, Clone)]
pub(super) struct Prompts {
    /// What main and sub-agents share.
    pub(super) shared: Piece,
    pub(super) main: Piece,
    pub(super) sub_agents: Vec<Piece>,
}

/// Everything generated so far.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) requests: Vec<Planned>,
    /// By stretch: how many of its blocks are used.
    pub(super) stretches: Vec<u64>,
    sessions: u32,
}

impl Output {
    /// The first `blocks` of a new stretch. Only what a request names counts as used.
    pub(super) fn new_stretch(&mut self, blocks: u64) -> Piece {
        let stretch = u32::try_from(self.stretches.len()).unwrap_or(u32::MAX);
        self.stretches.push(0);
        Piece { stretch, blocks }
    }

    fn new_session(&mut self) -> u32 {
        let session = self.sessions;
        self.sessions = session.saturating_add(1);
        session
    }

    fn emit(&mut self, request: Planned) {
        for piece in &request.chain {
            if let Some(used) = self.stretches.get_mut(piece.stretch as usize) {
                *used = piece.blocks.max(*used);
            }
        }
        self.requests.push(request);
    }
}

/// A context: what came before the session's own part, and that part in tokens.
#[derive(Debug, Clone)]
struct Context {
    before: Vec<Piece>,
    own: u32,
    own_tokens: u64,
}

impl Context {
    fn tokens(&self) -> u64 {
        let before: u64 = self.before.iter().map(|piece| piece.blocks).sum();
        before.saturating_mul(BLOCK_TOKENS).saturating_add(self.own_tokens)
    }

    /// The full blocks; a block begun is not stored by engines and is not named.
    fn chain(&self) -> Vec<Piece> {
        let own = Piece { stretch: self.own, blocks: self.own_tokens / BLOCK_TOKENS };
        self.before.iter().copied().chain([own]).filter(|piece| piece.blocks > 0).collect()
    }
}

/// How a session behaves.
#[derive(Debug)]
struct Habits {
    turns: u64,
    gap: &'static Quantiles,
    context_tokens_max: u64,
    heavy: bool,
}

/// Generates the session number `index` and its sub-sessions.
pub(super) fn run(options: &GenerateOptions, index: u32, prompts: &[Prompts], out: &mut Output) {
    // Stream 0 belongs to the prompts.
    let mut chance = Chance::new(options.seed, u64::from(index).saturating_add(1));
    let picked = usize::try_from(chance.below(prompts.len() as u64)).unwrap_or(0);
    let Some(prompts) = prompts.get(picked) else {
        return;
    };
    let habits = habits(options, &mut chance);
    let duration_ms = options.duration_ms();
    let alone = habits.turns >= ALONE_TURNS;
    let start_ms = chance.below(if alone { duration_ms / 8 } else { duration_ms });
    let own = out.new_stretch(0).stretch;
    let mut context = Context { before: vec![prompts.shared, prompts.main], own, own_tokens: 0 };
    context.own_tokens = if habits.heavy {
        HEAVY_START_TOKENS.saturating_sub(context.tokens())
    } else {
        chance.draw(&START).min(habits.context_tokens_max / 2)
    };
    let session = out.new_session();
    let mut turns = Turns { options, prompts, chance, out, session, parent: None };
    turns.run(context, &habits, start_ms);
}

fn habits(options: &GenerateOptions, chance: &mut Chance) -> Habits {
    let heavy = chance.happens(HEAVY);
    let turns = chance.draw(&TURNS).min(u64::from(options.turns_max));
    let largest = u64::from(options.context_tokens_max);
    Habits {
        turns: if heavy { turns.max(HEAVY_TURNS) } else { turns },
        gap: if turns >= ALONE_TURNS { &GAP_ALONE } else { &GAP_WITH_PERSON },
        context_tokens_max: if heavy { largest } else { largest.min(LIGHT_CONTEXT_TOKENS_MAX) },
        heavy,
    }
}

/// The turns of one session or sub-session.
struct Turns<'a> {
    options: &'a GenerateOptions,
    prompts: &'a Prompts,
    chance: Chance,
    out: &'a mut Output,
    session: u32,
    parent: Option<u32>,
}

impl Turns<'_> {
    /// Runs all turns from `now_ms` on; returns when the last one was sent.
    fn run(&mut self, mut context: Context, habits: &Habits, mut now_ms: u64) -> u64 {
        let mut turns_since_start = 0;
        for turn in 0..habits.turns {
            if now_ms >= self.options.duration_ms() {
                break;
            }
            turns_since_start += 1;
            let output_tokens = self.chance.draw(&OUTPUT);
            self.out.emit(Planned {
                timestamp_ms: now_ms,
                session: self.session,
                parent: self.parent,
                input_tokens: context.tokens(),
                output_tokens,
                chain: context.chain(),
            });
            if turn.saturating_add(1) == habits.turns {
                break;
            }
            let gap = self.chance.draw(habits.gap);
            now_ms = now_ms.saturating_add(gap).max(self.sub_session(&context, now_ms));
            let added = output_tokens.saturating_add(self.added(habits, turns_since_start));
            context.own_tokens = context.own_tokens.saturating_add(added);
            if context.tokens() > habits.context_tokens_max {
                self.compact(&mut context);
                turns_since_start = 0;
            }
        }
        now_ms
    }

    /// Tokens that the turn adds beside its output.
    fn added(&mut self, habits: &Habits, turns_since_start: u64) -> u64 {
        if !habits.heavy || turns_since_start >= HEAVY_TURNS {
            return self.chance.draw(&ADDED);
        }
        let full = habits.context_tokens_max.saturating_mul(HEAVY_FULL_PERCENT) / 100;
        let step = full.saturating_sub(HEAVY_START_TOKENS) / HEAVY_TURNS.saturating_sub(1);
        self.chance.between(step.saturating_mul(95) / 100, step)
    }

    /// Replaces everything but the prompt with a summary.
    fn compact(&mut self, context: &mut Context) {
        // A fork keeps its tool's prompt, the first two pieces, and drops what it inherited.
        context.before.truncate(2);
        context.own = self.out.new_stretch(0).stretch;
        context.own_tokens = self.chance.draw(&SUMMARY);
    }

    /// Maybe starts a sub-session; returns the time until which its parent waits.
    fn sub_session(&mut self, context: &Context, now_ms: u64) -> u64 {
        if self.parent.is_some() || !self.chance.happens(SUB_SESSION) {
            return now_ms;
        }
        let own = self.out.new_stretch(0).stretch;
        let own_tokens = self.chance.draw(&ADDED);
        let inherited = context.tokens().saturating_add(own_tokens);
        let fits = inherited <= u64::from(self.options.context_tokens_max);
        let before = if self.chance.happens(SUB_INHERITS) && fits {
            context.chain()
        } else {
            let picked = self.chance.below(self.prompts.sub_agents.len() as u64);
            let prompt =
                usize::try_from(picked).ok().and_then(|at| self.prompts.sub_agents.get(at));
            [self.prompts.shared].into_iter().chain(prompt.copied()).collect()
        };
        let habits = Habits {
            turns: self.chance.draw(&SUB_TURNS),
            gap: &GAP_SUB,
            context_tokens_max: u64::from(self.options.context_tokens_max),
            heavy: false,
        };
        let awaited = self.chance.happens(SUB_AWAITED);
        let mut turns = Turns {
            options: self.options,
            prompts: self.prompts,
            chance: Chance::new(self.chance.below(u64::MAX), 0),
            session: self.out.new_session(),
            parent: Some(self.session),
            out: self.out,
        };
        let start_ms = now_ms.saturating_add(2 * SECOND);
        let end_ms = turns.run(Context { before, own, own_tokens }, &habits, start_ms);
        if awaited { end_ms.saturating_add(SECOND) } else { now_ms }
    }
}
