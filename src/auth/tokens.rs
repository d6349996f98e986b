//! The tokens file: one line for each token, of which nothing but its number is ever told.
//!
//! ```text
//! # tenant   token                                                             what it may see
//! team-a     5f2c...64 hex digits, or anything of 32 characters and more
//! ops        91be...                                                           operator
//! ```
//! Words are separated by white space; a line that begins with `#` is a remark. A tenant may have
//! several tokens, which is how one is replaced: the new one is added, clients take it, the old one
//! goes.

use kvstrata_tiers::error::{Error, Result};

use super::{Bearer, token::Token};
use crate::limits::{TENANT_BYTES_MAX, TOKENS_MAX};

/// The word behind the token of who may see what concerns the whole node.
const OPERATOR: &str = "operator";

/// What a line says.
pub(super) struct Line<'a> {
    /// Counted from 1.
    pub(super) number: usize,
    pub(super) tenant: &'a str,
    pub(super) token: Token,
    pub(super) operator: bool,
}

impl Line<'_> {
    /// Whether it says of its token what `bearer` is.
    pub(super) fn is_of(&self, bearer: &Bearer) -> bool {
        bearer.tenant() == self.tenant && bearer.is_operator() == self.operator
    }
}

/// All lines that are no remarks.
///
/// # Errors
/// `Invalid` with the number of the first line that is wrong, and what is wrong with it.
pub(super) fn read(text: &[u8]) -> Result<Vec<Line<'_>>> {
    let text = str::from_utf8(text).map_err(|error| {
        let line = text.iter().take(error.valid_up_to()).filter(|byte| **byte == b'\n').count() + 1;
        problem(line, "it is not UTF-8")
    })?;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if lines.len() >= TOKENS_MAX {
            return Err(problem(number, &format!("at most {TOKENS_MAX} tokens are allowed")));
        }
        lines.push(read_line(number, line)?);
    }
    if lines.is_empty() {
        return Err(Error::invalid("tokens: no line has a token, so nobody could come in"));
    }
    Ok(lines)
}

fn read_line(number: usize, line: &str) -> Result<Line<'_>> {
    let words: Vec<_> = line.split_whitespace().collect();
    let (tenant, token, operator) = match words.as_slice() {
        [tenant, token] => (*tenant, *token, false),
        [tenant, token, OPERATOR] => (*tenant, *token, true),
        _ => {
            let wanted = "a tenant, a token and nothing else but the word operator are wanted";
            return Err(problem(number, &format!("{} words; {wanted}", words.len())));
        }
    };
    if self::tenant(tenant.as_bytes()).is_none() {
        let allowed = format!("1 to {TENANT_BYTES_MAX} characters of ASCII are allowed");
        return Err(problem(number, &format!("the tenant, of which {allowed}")));
    }
    let token = token.parse().map_err(|error| problem(number, &format!("{error}")))?;
    Ok(Line { number, tenant, token, operator })
}

/// The tenant with this name, if it may be the name of one.
pub(super) fn tenant(name: &[u8]) -> Option<&str> {
    let is_one = (1..=TENANT_BYTES_MAX).contains(&name.len());
    let is_one = is_one && name.iter().all(u8::is_ascii_graphic);
    str::from_utf8(name).ok().filter(|_name| is_one)
}

/// The error of a line.
pub(super) fn problem(number: usize, what: &str) -> Error {
    Error::invalid(format!("tokens: line {number}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn lines(text: &str) -> Vec<(usize, String, bool)> {
        let lines = read(text.as_bytes()).unwrap();
        assert!(lines.iter().all(|line| line.token.reveal() == TOKEN));
        lines.iter().map(|line| (line.number, line.tenant.to_owned(), line.operator)).collect()
    }

    #[test]
    fn remarks_and_empty_lines_are_passed_over() {
        let text = format!("# all of them\n\n a\t{TOKEN} \r\n  # b\nc {TOKEN} operator");
        let expected = [(3, "a".to_owned(), false), (5, "c".to_owned(), true)];
        assert_eq!(lines(&text), expected);
    }

    #[test]
    fn what_is_wrong_is_told_by_its_line_and_never_quoted() {
        let secret = "hunter2hunter2";
        let long = format!("{} {TOKEN}", "t".repeat(TENANT_BYTES_MAX + 1));
        let table = [
            (format!("a {TOKEN}\nb {secret}"), "line 2: token: 14 characters"),
            (format!("a {TOKEN} {secret}"), "line 1: 3 words"),
            (format!("#\n{secret}{secret}{secret}"), "line 2: 1 words"),
            (format!("\u{e4} {TOKEN}"), "line 1: the tenant"),
            (long, "line 1: the tenant"),
            ("# nobody\n".to_owned(), "nobody could come in"),
        ];
        for (text, told) in table {
            let error = read(text.as_bytes()).err().unwrap().to_string();
            assert!(error.contains(told) && !error.contains(secret), "{error}");
        }
        let error = read(b"a\nb \xff\n").err().unwrap().to_string();
        assert!(error.contains("line 2: it is not UTF-8"), "{error}");
    }
}
