//! How a file looks: short enough to be read at one sitting, opened by its promise, `unsafe` only
//! where it is expected and explained.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::{
    Rule,
    source::{Finding, Source},
};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;
/// How far above `unsafe` its SAFETY comment may end.
const SAFETY_LINES_MAX: usize = 8;

/// The files and folders in which `unsafe` may stand.
const UNSAFE_ROOMS: &[&str] = &[
    "tiers/src/dram/arena",
    "tiers/src/nvme/uring",
    "tiers/src/nvme/aligned",
    "tiers/src/gpu",
    "tiers/src/shared",
    "tiers/src/checksum/kernel",
    "src/shm/map",
    "python/src/memory",
];

fn file_length(source: &Source) -> Vec<Finding> {
    let lines = source.text.lines().count();
    let counted = source.is_rust() || source.path.ends_with(".py");
    if !counted || lines <= FILE_LINES_MAX {
        return Vec::new();
    }
    let what = format!("{lines} lines, {FILE_LINES_MAX} allowed: one noun per file, cut it in two");
    vec![source.finding(lines, what)]
}

fn module_docs(source: &Source) -> Vec<Finding> {
    if !source.is_rust() || source.text.starts_with("//!") {
        return Vec::new();
    }
    vec![source.finding(1, "starts without `//!`: say what the file is for and what it promises")]
}

/// Measures functions, methods and provided methods, nested ones too.
struct Functions<'a> {
    source: &'a Source,
    findings: Vec<Finding>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.fn_token.span.start().line;
        let last = block.brace_token.span.close().end().line;
        let lines = last + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let name = &signature.ident;
            let what = format!(
                "fn {name} has {lines} lines, {FUNCTION_LINES_MAX} allowed: name its steps"
            );
            self.findings.push(self.source.finding(first, what));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

fn function_length(source: &Source) -> Vec<Finding> {
    let mut functions = Functions { source, findings: Vec::new() };
    functions.visit_file(&source.tree);
    functions.findings
}

/// An `unsafe` and whether it opens a block or an `impl`, which must be argued for on the spot.
struct Unsafe {
    line: usize,
    argued: bool,
}

fn unsafes(tokens: TokenStream, found: &mut Vec<Unsafe>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(ident) if ident == "unsafe" => {
                let argued = match tokens.peek() {
                    Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Brace,
                    Some(TokenTree::Ident(next)) => next == "impl",
                    _ => false,
                };
                found.push(Unsafe { line: ident.span().start().line, argued });
            }
            TokenTree::Group(group) => unsafes(group.stream(), found),
            _ => {}
        }
    }
}

fn unsafe_rooms(source: &Source) -> Vec<Finding> {
    if UNSAFE_ROOMS.iter().any(|room| source.is_in(room)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    unsafes(source.tokens.clone(), &mut found);
    let what = format!("`unsafe` outside {}: use what those offer", UNSAFE_ROOMS.join(", "));
    found.iter().map(|found| source.finding(found.line, what.clone())).collect()
}

fn unsafe_is_argued(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    unsafes(source.tokens.clone(), &mut found);
    let lines: Vec<&str> = source.text.lines().collect();
    let near = |line: usize| &lines[line.saturating_sub(SAFETY_LINES_MAX + 1)..line];
    found
        .iter()
        .filter(|found| found.argued && !near(found.line).iter().any(|l| l.contains("// SAFETY:")))
        .map(|found| {
            let what = "`unsafe` without a `// SAFETY:` comment above: say why it is sound";
            source.finding(found.line, what)
        })
        .collect()
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "file length",
        check: file_length,
        bad: &[("src/a.rs", LONG_FILE), ("python/a.py", LONG_FILE)],
        good: &[("docs/a.md", LONG_FILE), ("src/a.rs", "fn f() {}")],
    },
    Rule {
        name: "module docs",
        check: module_docs,
        bad: &[("src/a.rs", "use std::fmt;"), ("src/a.rs", "// Not a doc.\nfn f() {}")],
        good: &[("src/a.rs", "//! What it is.\n"), ("README.md", "# x")],
    },
    Rule {
        name: "function length",
        check: function_length,
        bad: &[("src/a.rs", LONG_FUNCTION), ("src/a.rs", LONG_METHOD)],
        good: &[("src/a.rs", "fn f() {}\nfn g() {}")],
    },
    Rule {
        name: "unsafe rooms",
        check: unsafe_rooms,
        bad: &[
            ("src/lease.rs", "fn f() { unsafe { g() } }"),
            ("tiers/src/dram/map.rs", "unsafe impl Send for X {}"),
            ("src/a.rs", "fn f() { vec![unsafe { g() }]; }"),
        ],
        good: &[
            ("tiers/src/dram/arena/slot.rs", "fn f() { unsafe { g() } }"),
            ("src/a.rs", "//! Not unsafe.\n#![deny(unsafe_code)]"),
        ],
    },
    Rule {
        name: "unsafe is argued",
        check: unsafe_is_argued,
        bad: &[
            ("tiers/src/dram/arena.rs", "fn f() {\n    unsafe { g() }\n}"),
            ("tiers/src/dram/arena.rs", "unsafe impl Send for X {}"),
        ],
        good: &[(
            "tiers/src/dram/arena.rs",
            "fn f() {\n    // SAFETY: it is mapped.\n    unsafe { g() }\n}\nunsafe fn h() {}",
        )],
    },
];

/// `head`, empty lines, `tail`: a text of as many lines as it has bytes to spare.
const fn spread<const BYTES: usize>(head: &[u8], tail: &[u8]) -> [u8; BYTES] {
    let mut text = [b'\n'; BYTES];
    text.split_at_mut(head.len()).0.copy_from_slice(head);
    text.split_at_mut(BYTES - tail.len()).1.copy_from_slice(tail);
    text
}

const fn ascii(text: &[u8]) -> &str {
    match str::from_utf8(text) {
        Ok(text) => text,
        Err(_) => panic!("not UTF-8"),
    }
}

const LONG_FILE: &str = ascii(&spread::<{ FILE_LINES_MAX + 1 }>(b"", b""));
const LONG_FUNCTION: &str = ascii(&spread::<{ FUNCTION_LINES_MAX + 9 }>(b"fn f() {", b"}"));
const LONG_METHOD: &str =
    ascii(&spread::<{ FUNCTION_LINES_MAX + 19 }>(b"impl X { fn f() {", b"}}"));
