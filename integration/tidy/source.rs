//! A tracked file as the rules see it: its text, its tokens, its syntax tree, and the paths it names.

use std::{fmt, fs, path::Path, process::Command};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Something that breaks a rule.
#[derive(Debug)]
pub(super) struct Finding {
    path: String,
    /// 1-based.
    pub(super) line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// One tracked text file. Tokens and tree are empty for everything that is not Rust.
pub(super) struct Source {
    pub(super) path: String,
    pub(super) text: String,
    pub(super) tokens: TokenStream,
    pub(super) tree: syn::File,
}

impl Source {
    /// Reads a text as the file at `path`, relative to the root of the repository.
    pub(super) fn new(path: &str, text: &str) -> Self {
        let rust = if path.ends_with(".rs") { text } else { "" };
        let tokens: TokenStream =
            rust.parse().unwrap_or_else(|e| panic!("{path} is not made of Rust tokens: {e}"));
        let tree = syn::parse2(tokens.clone())
            .unwrap_or_else(|e| panic!("{path}:{} does not parse: {e}", e.span().start().line));
        Self { path: path.to_owned(), text: text.to_owned(), tokens, tree }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the file is the room's own (`src/sim.rs`) or stands in it (`src/sim/...`).
    pub(super) fn is_in(&self, room: &str) -> bool {
        let Some(rest) = self.path.strip_prefix(room) else {
            return false;
        };
        room.ends_with('/') || room.ends_with(".rs") || rest == ".rs" || rest.starts_with('/')
    }

    pub(super) fn finding(&self, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line, what: what.into() }
    }

    /// Every path that the file names, in `use`, in code and in macro arguments, with `crate`,
    /// `self` and `super` resolved.
    pub(super) fn mentions(&self) -> Vec<Mention> {
        let mut walk = Walk { mentions: Vec::new(), module: module_of(&self.path) };
        walk.stream(self.tokens.clone(), &[]);
        walk.mentions
    }
}

/// Everything that git tracks or would track, as far as it is text.
pub(super) fn tracked_files() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .expect("tidy lists files with git: install it");
    assert!(listed.status.success(), "git: {}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).expect("paths are UTF-8");
    listed
        .split_terminator('\0')
        .filter_map(|path| Some(Source::new(path, &fs::read_to_string(root.join(path)).ok()?)))
        .collect()
}

/// A path that a file names, and where.
#[derive(Debug)]
pub(super) struct Mention {
    pub(super) segments: Vec<String>,
    pub(super) line: usize,
}

impl Mention {
    /// Whether the path is `name` or begins with it, as in `std::fs` and `std::fs::File`.
    pub(super) fn begins_with(&self, name: &str) -> bool {
        let mut segments = self.segments.iter();
        name.split("::").all(|wanted| segments.next().is_some_and(|found| found == wanted))
    }
}

/// The module that a file is, with the name of its crate in front.
fn module_of(path: &str) -> Vec<String> {
    let (krate, rest) = [
        ("kvstrata_tiers", "tiers/src/"),
        ("kvstrata_proto", "proto/src/"),
        ("kvstrata", "src/"),
        ("integration", "integration/"),
    ]
    .into_iter()
    .find_map(|(krate, room)| Some((krate, path.strip_prefix(room)?)))
    .unwrap_or(("elsewhere", path));
    let inner = rest.trim_end_matches(".rs").split('/');
    let inner = inner.filter(|part| !["mod", "lib", "main"].contains(part));
    std::iter::once(krate).chain(inner).map(str::to_owned).collect()
}

/// Collects paths from tokens: macro arguments are tokens only, so the tree would miss them.
struct Walk {
    mentions: Vec<Mention>,
    module: Vec<String>,
}

impl Walk {
    /// `prefix` is what stands before the brace of `use a::b::{...}`, else empty.
    fn stream(&mut self, tokens: TokenStream, prefix: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut path = Open::after(prefix);
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Ident(ident) if ident == "mod" => {
                    self.end(&mut path);
                    at += self.inline_module(&tokens, at);
                }
                TokenTree::Ident(ident) => {
                    if !path.joined {
                        self.end(&mut path);
                        path.imported = at >= 2 && is_ident(&tokens[at - 2], "use");
                    }
                    path.segments.push(ident.to_string());
                    path.joined = false;
                    path.line = ident.span().start().line;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && is_colon(tokens.get(at)) => {
                    at += 1;
                    path.joined = true;
                }
                TokenTree::Punct(punct) if punct.as_char() == ',' && !prefix.is_empty() => {
                    self.end(&mut path);
                    path = Open::after(prefix);
                }
                TokenTree::Group(group) => {
                    let listed = path.joined && group.delimiter() == Delimiter::Brace;
                    let inner =
                        if listed { std::mem::take(&mut path).segments } else { Vec::new() };
                    self.end(&mut path);
                    self.stream(group.stream(), &inner);
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => self.end(&mut path),
            }
        }
        self.end(&mut path);
    }

    /// Walks `mod name { ... }` as a module of its own; returns how many tokens that were.
    fn inline_module(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        let [TokenTree::Ident(name), TokenTree::Group(body), ..] = &tokens[at..] else {
            return 0;
        };
        self.module.push(name.to_string());
        self.stream(body.stream(), &[]);
        self.module.pop();
        2
    }

    /// Notes a path that is complete. A lone word is one only in `use`.
    fn end(&mut self, path: &mut Open) {
        let path = std::mem::take(path);
        if path.segments.len() > 1 || path.imported && !path.segments.is_empty() {
            let segments = self.resolve(path.segments);
            self.mentions.push(Mention { segments, line: path.line });
        }
    }

    fn resolve(&self, segments: Vec<String>) -> Vec<String> {
        let mut base = match segments.first().map(String::as_str) {
            Some("crate") => self.module[..1].to_vec(),
            Some("self" | "super") => self.module.clone(),
            _ => return segments,
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => drop(base.pop()),
                _ => base.push(segment),
            }
        }
        base
    }
}

/// A path that is being read.
#[derive(Default)]
struct Open {
    segments: Vec<String>,
    /// The last token was `::`.
    joined: bool,
    /// `use` stands before it.
    imported: bool,
    line: usize,
}

impl Open {
    fn after(prefix: &[String]) -> Self {
        Self { segments: prefix.to_vec(), joined: !prefix.is_empty(), imported: false, line: 0 }
    }
}

fn is_colon(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':')
}

fn is_ident(token: &TokenTree, name: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == name)
}

#[test]
fn paths_are_seen_in_use_lists_code_and_macros() {
    let text = "use a::{b::{C, D as E}, self}; use z;
        fn f(x: super::g::X) { let y = crate::h::<u8>(::i::J); println!(\"{}\", k::l(y), m) }
        mod tests { use super::n; use super::super::o; }";
    let source = Source::new("tiers/src/dram/arena.rs", text);
    let seen: Vec<String> = source.mentions().iter().map(|m| m.segments.join("::")).collect();
    for wanted in [
        "a::b::C",
        "a::b::D",
        "a::self",
        "z",
        "kvstrata_tiers::dram::g::X",
        "kvstrata_tiers::h",
        "k::l",
        "kvstrata_tiers::dram::arena::n",
        "kvstrata_tiers::dram::o",
    ] {
        assert!(seen.iter().any(|s| s == wanted), "{wanted} is not in {seen:?}");
    }
}

#[test]
fn a_room_is_a_file_or_a_folder_of_that_name() {
    for (path, room, inside) in [
        ("src/sim.rs", "src/sim", true),
        ("src/sim/node.rs", "src/sim", true),
        ("src/simple.rs", "src/sim", false),
        ("tiers/src/dram/arena.rs", "tiers/src/dram/arena.rs", true),
        ("benches/x.rs", "benches", true),
    ] {
        assert_eq!(Source::new(path, "").is_in(room), inside, "{path} in {room}");
    }
}
