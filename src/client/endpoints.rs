//! Endpoints as they are given: one, or several with commas between them.

use std::fmt;

use kvstrata_tiers::error::{Error, Result};

use crate::limits::CLIENT_ENDPOINTS_MAX;

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// `host:port`.
    pub(super) address: String,
    /// Whether it speaks TLS.
    pub(super) secure: bool,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https://" } else { "" };
        write!(f, "{scheme}{}", self.address)
    }
}

/// The servers that a text names, in its order, at least one. All of them speak TLS or none does: if one says so,
/// or the options are about TLS (`secure`), the others are meant so as well.
///
/// # Errors
/// `Invalid` for none or too many of them, and for one that asks for no TLS among those that do.
pub(super) fn targets(given: &str, secure: bool) -> Result<Vec<Target>> {
    let endpoints = || given.split(',').map(str::trim).filter(|endpoint| !endpoint.is_empty());
    let count = endpoints().count();
    if !(1..=CLIENT_ENDPOINTS_MAX).contains(&count) {
        let text = format!("endpoint: {count} given, 1 to {CLIENT_ENDPOINTS_MAX} allowed");
        return Err(Error::invalid(text));
    }
    let secure = secure || endpoints().any(|endpoint| endpoint.starts_with("https://"));
    let target = |endpoint: &str| {
        let address = match endpoint.split_once("://") {
            Some((scheme, _)) if secure && scheme != "https" => {
                return Err(Error::invalid(format!(
                    "endpoint: {scheme}:// given together with TLS of others or of the options, https:// required"
                )));
            }
            Some((_, address)) => address.trim_end_matches('/'),
            None => endpoint,
        };
        Ok(Target { address: address.to_owned(), secure })
    };
    endpoints().map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &str, secure: bool) -> Vec<String> {
        targets(given, secure).unwrap().iter().map(Target::to_string).collect()
    }

    #[test]
    fn one_or_several_are_read_in_order() {
        assert_eq!(read("a:1", false), ["a:1"]);
        assert_eq!(read("http://a:1/", false), ["a:1"]);
        assert_eq!(read(" a:1, b:2 ,,[::1]:3", false), ["a:1", "b:2", "[::1]:3"]);
        assert_eq!(read("https://a:1", false), ["https://a:1"]);
        assert_eq!(read("a:1", true), ["https://a:1"]);
    }

    #[test]
    fn tls_holds_for_all_or_for_none() {
        assert_eq!(read("a:1,https://b:2", false), ["https://a:1", "https://b:2"]);
        for (given, secure) in [("http://a:1,https://b:2", false), ("http://a:1", true)] {
            let error = targets(given, secure).unwrap_err().to_string();
            assert!(error.contains("http:// given"), "{error}");
        }
    }

    #[test]
    fn none_and_too_many_are_refused() {
        let many = vec!["a:1"; CLIENT_ENDPOINTS_MAX + 1].join(",");
        for given in ["", " , ", &many] {
            let error = targets(given, false).unwrap_err().to_string();
            assert!(error.contains("1 to 64 allowed"), "{error}");
        }
    }
}
