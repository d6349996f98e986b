//! The inventory of `unsafe` in SECURITY.md: a row for each file, made from the source. What a file counts
//! and why it may are not written twice: the reason is that of its `expect(unsafe_code)`.

use std::{fmt::Write as _, path::Path};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::source::{Source, tracked_files};

/// What stands above the table, and what below it.
const BEGIN: &str =
    "| file | blocks | impls | functions and traits | why |\n|---|---|---|---|---|\n";
const END: &str = "\n\n";

/// How often `unsafe` opens what.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    blocks: usize,
    impls: usize,
    /// Declarations: functions, traits, foreign ones.
    others: usize,
}

fn count(tokens: TokenStream, counted: &mut Count) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(ident) if ident == "unsafe" => match tokens.peek() {
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    counted.blocks += 1;
                }
                Some(TokenTree::Ident(next)) if next == "impl" => counted.impls += 1,
                _ => counted.others += 1,
            },
            TokenTree::Group(group) => count(group.stream(), counted),
            _ => {}
        }
    }
}

/// The reason that the file gives for what it is allowed.
fn reason(source: &Source) -> Option<&str> {
    let attribute = &source.text[source.text.find("unsafe_code")?..];
    let reason = &attribute[attribute.find("reason = \"")? + "reason = \"".len()..];
    Some(&reason[..reason.find('"')?])
}

/// The row of a file; none without `unsafe`.
fn row(source: &Source) -> Option<String> {
    let mut counted = Count::default();
    count(source.tokens.clone(), &mut counted);
    if counted == Count::default() {
        return None;
    }
    let Count { blocks, impls, others } = counted;
    let why = reason(source).unwrap_or("MISSING: give expect(unsafe_code) a reason");
    Some(format!("| `{}` | {blocks} | {impls} | {others} | {why} |\n", source.path))
}

#[test]
fn the_inventory_of_unsafe_is_what_the_source_has() {
    let mut rows: Vec<String> = tracked_files().iter().filter_map(row).collect();
    rows.sort();
    let table = rows.concat();
    assert!(table.lines().count() > 10 && !table.contains("MISSING"), "{table}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("SECURITY.md");
    let security = std::fs::read_to_string(path).unwrap();
    let (_, rest) = security.split_once(BEGIN).expect("SECURITY.md has the head of the table");
    let written = rest.split_once(END).map_or(rest, |(written, _)| written);
    let mut told = String::new();
    write!(told, "SECURITY.md should have this table:\n\n{BEGIN}{table}").unwrap();
    assert!(written.trim_end() == table.trim_end(), "{told}");
}

#[test]
fn each_kind_is_counted_and_words_are_not() {
    let text = "#![expect(unsafe_code, reason = \"maps\")]\n// unsafe\nunsafe impl A for B {}\n\
                unsafe fn f() { unsafe { g() } vec![unsafe { h() }]; }\nunsafe trait T {}";
    let source = Source::new("src/a.rs", text);
    assert_eq!(row(&source).unwrap(), "| `src/a.rs` | 2 | 1 | 2 | maps |\n");
    assert_eq!(row(&Source::new("src/b.rs", "//! No unsafe here.\nfn f() {}")), None);
}
