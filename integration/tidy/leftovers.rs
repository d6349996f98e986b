//! What must not be left behind: unfinished code, tests that do not run, notes that nobody follows,
//! panics in disguise, and paths of one machine. The words are spelled in two halves here, so that
//! this file passes its own rules.

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute,
    visit::{self, Visit},
};

use super::{
    Rule,
    source::{Finding, Source},
};

const UNFINISHED_MACROS: &[&str] = &["todo", "unimplemented", "dbg"];
const NOTES: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
const NOTED_FILES: &[&str] = &[".rs", ".py", ".sh", ".proto", ".toml", ".yaml", ".tpl"];
const MACHINE_PATHS: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/fa", "rm/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
/// Where a panic is how a failure is reported.
const PANIC_ROOMS: &[&str] = &["integration", "benches", "tiers/src/testing"];

fn unfinished(source: &Source) -> Vec<Finding> {
    fn walk(source: &Source, tokens: TokenStream, findings: &mut Vec<Finding>) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for pair in tokens.windows(2) {
            if let [TokenTree::Ident(name), TokenTree::Punct(bang)] = pair
                && bang.as_char() == '!'
                && UNFINISHED_MACROS.iter().any(|banned| name == banned)
            {
                let what = format!("`{name}!` left in the code: finish it or return an error");
                findings.push(source.finding(name.span().start().line, what));
            }
            if let [TokenTree::Punct(hash), TokenTree::Group(attribute)] = pair
                && hash.as_char() == '#'
                && mentions_ident(attribute.stream(), "ignore")
            {
                let what = "a test that is ignored checks nothing: mend it or remove it";
                findings.push(source.finding(hash.span().start().line, what));
            }
        }
        for token in tokens {
            if let TokenTree::Group(group) = token {
                walk(source, group.stream(), findings);
            }
        }
    }
    let mut findings = Vec::new();
    walk(source, source.tokens.clone(), &mut findings);
    findings
}

/// Whether `word` stands somewhere in `tokens`, outside of strings.
fn mentions_ident(tokens: TokenStream, word: &str) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == word,
        TokenTree::Group(group) => mentions_ident(group.stream(), word),
        _ => false,
    })
}

fn notes(source: &Source) -> Vec<Finding> {
    if !NOTED_FILES.iter().any(|ending| source.path.ends_with(ending)) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        for note in NOTES {
            if whole_words(line, note).any(|rest| !names_an_issue(rest)) {
                let what = format!("{note} without an issue: write {note}(#12), or do it now");
                findings.push(source.finding(index + 1, what));
            }
        }
    }
    findings
}

/// For each time that `word` stands alone in `line`: what follows it.
fn whole_words<'a>(line: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).filter_map(move |(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        let alone = !before.ends_with(part_of_word) && !after.starts_with(part_of_word);
        alone.then_some(after)
    })
}

/// Whether `rest` begins like `(#12)`.
fn names_an_issue(rest: &str) -> bool {
    let Some((number, _)) = rest.strip_prefix("(#").and_then(|rest| rest.split_once(')')) else {
        return false;
    };
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn machine_paths(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        for path in MACHINE_PATHS {
            let absolute = line.match_indices(path).any(|(at, _)| {
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-})".contains(c))
            });
            if absolute {
                let what = format!("a path of one machine, {path}...: make it relative or a flag");
                findings.push(source.finding(index + 1, what));
            }
        }
    }
    findings
}

/// Finds `.unwrap()` in what is not compiled for tests only.
struct Unwraps {
    lines: Vec<usize>,
}

impl Unwraps {
    /// Macro arguments are tokens only.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for pair in tokens.windows(2) {
            if let [TokenTree::Punct(dot), TokenTree::Ident(name)] = pair
                && dot.as_char() == '.'
                && name == "unwrap"
            {
                self.lines.push(name.span().start().line);
            }
        }
        for token in tokens {
            if let TokenTree::Group(group) = token {
                self.tokens(group.stream());
            }
        }
    }
}

impl<'ast> Visit<'ast> for Unwraps {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let for_tests = match item {
            syn::Item::Fn(item) => is_for_tests(&item.attrs),
            syn::Item::Impl(item) => is_for_tests(&item.attrs),
            syn::Item::Mod(item) => is_for_tests(&item.attrs),
            syn::Item::Macro(item) => is_for_tests(&item.attrs),
            _ => false,
        };
        if !for_tests {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "unwrap" {
            self.lines.push(call.method.span().start().line);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.tokens(called.tokens.clone());
    }
}

/// `#[test]`, `#[tokio::test]`, `#[cfg(test)]`, `#[cfg(any(test, ...))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            mentions_ident(list.tokens.clone(), "test")
                && !mentions_ident(list.tokens.clone(), "not")
        }
        meta => meta.path().segments.last().is_some_and(|last| last.ident == "test"),
    })
}

fn unwraps(source: &Source) -> Vec<Finding> {
    let for_tests = PANIC_ROOMS.iter().any(|room| source.is_in(room))
        || source.path.ends_with("tests.rs")
        || source.path.contains("/tests/");
    if for_tests {
        return Vec::new();
    }
    let mut found = Unwraps { lines: Vec::new() };
    found.visit_file(&source.tree);
    let what = "`unwrap()` outside tests: return an error, or `expect` with the reason it holds";
    found.lines.iter().map(|line| source.finding(*line, what)).collect()
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "nothing unfinished",
        check: unfinished,
        bad: &[
            ("src/a.rs", concat!("fn f() { to", "do!() }")),
            ("src/a.rs", concat!("fn f() { g(unimple", "mented!(\"later\")) }")),
            ("src/a.rs", concat!("fn f() { d", "bg!(1); }")),
            ("integration/a.rs", concat!("#[test]\n#[ig", "nore]\nfn f() {}")),
            ("integration/a.rs", concat!("mod m { #[ig", "nore = \"slow\"] fn f() {} }")),
            ("integration/a.rs", concat!("#[cfg_attr(linux, ig", "nore)] fn f() {}")),
        ],
        good: &[("src/a.rs", "//! Not an ignored test.\nfn f() { ignore!(todo); let dbg = 1; }")],
    },
    Rule {
        name: "notes name an issue",
        check: notes,
        bad: &[
            ("src/a.rs", concat!("// TO", "DO later\n")),
            ("python/a.py", concat!("# FIX", "ME(12)\n")),
            ("helm/kvstrata/values.yaml", concat!("a: 1 # XX", "X\n")),
            ("src/a.rs", concat!("// TO", "DO(#12) and TO", "DO\n")),
        ],
        good: &[
            ("src/a.rs", concat!("// TO", "DO(#12): later\n")),
            ("scripts/a.sh", concat!("mktemp a.XX", "XXXX\n")),
        ],
    },
    Rule {
        name: "no machine paths",
        check: machine_paths,
        bad: &[
            ("docs/a.md", concat!("see /wo", "rk/shared\n")),
            ("src/a.rs", concat!("const P: &str = \"/ho", "me/me\";")),
            ("scripts/a.sh", concat!("\ncd /ro", "ot/x\n")),
        ],
        good: &[("docs/a.md", concat!("net", "/wo", "rk/x and ./wo", "rk/x and ../ho", "me/x\n"))],
    },
    Rule {
        name: "no unwrap",
        check: unwraps,
        bad: &[
            ("src/a.rs", "fn f() { g().unwrap(); }"),
            ("src/a.rs", "fn f() { println!(\"{}\", g().unwrap()); }"),
            ("tiers/src/a.rs", "#[cfg(not(test))] mod m { fn f() { g().unwrap(); } }"),
        ],
        good: &[
            ("src/a.rs", "#[cfg(test)] mod tests { fn f() { g().unwrap(); } }"),
            ("src/a.rs", "#[tokio::test] async fn f() { g().unwrap(); }"),
            ("src/a.rs", "fn f() { g().unwrap_or(0); }"),
            ("integration/a.rs", "fn f() { g().unwrap(); }"),
            ("src/client/assemble_tests.rs", "fn f() { g().unwrap(); }"),
        ],
    },
];
