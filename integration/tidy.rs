//! The house rules that the compiler and clippy cannot check: who may name whom, how long files and
//! functions may be, where `unsafe` may stand, and what must not be left behind.
//!
//! A rule looks at one file and returns findings. Each rule brings snippets that break it and
//! snippets that keep it, so a rule that stopped firing fails a test of its own.
//!
//! To change a rule on purpose, change its table here and write a decision record that says why.

mod imports;
mod inventory;
mod leftovers;
mod shape;
mod source;

use source::{Finding, Source, tracked_files};

/// A path and a text to try a rule on.
type Snippet = (&'static str, &'static str);

/// One house rule.
struct Rule {
    name: &'static str,
    check: fn(&Source) -> Vec<Finding>,
    /// Each of these must be found.
    bad: &'static [Snippet],
    /// None of these may be.
    good: &'static [Snippet],
}

fn rules() -> impl Iterator<Item = &'static Rule> {
    [imports::RULES, shape::RULES, leftovers::RULES].into_iter().flatten()
}

#[test]
fn the_tree_is_tidy() {
    let mut findings = Vec::new();
    let mut rust_files = 0;
    for source in tracked_files() {
        rust_files += usize::from(source.is_rust());
        for rule in rules() {
            findings.extend((rule.check)(&source).iter().map(|f| format!("{f} [{}]", rule.name)));
        }
    }
    assert!(rust_files > 5, "tidy saw {rust_files} Rust files: is this a git checkout?");
    assert!(
        findings.is_empty(),
        "{} findings. For each: file:line, what is wrong, what to do, [rule]\n{}\n",
        findings.len(),
        findings.join("\n")
    );
}

#[test]
fn every_rule_fires_on_its_bad_snippets_and_on_nothing_else() {
    for rule in rules() {
        assert!(!rule.bad.is_empty(), "rule {} has no bad snippet", rule.name);
        for (path, text) in rule.bad {
            let found = (rule.check)(&Source::new(path, text));
            assert!(!found.is_empty(), "rule {} missed in {path}:\n{text}", rule.name);
            assert!(found.iter().all(|f| f.line > 0), "rule {} names no line", rule.name);
        }
        for (path, text) in rule.good {
            let found = (rule.check)(&Source::new(path, text));
            let said = found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
            assert!(found.is_empty(), "rule {} fired on good {path}:\n{text}\n{said}", rule.name);
        }
    }
}
