//! One bearer token: what it may look like, and that it is never shown.

use std::{fmt, str::FromStr};

use blake3::Hash;
use kvstrata_tiers::error::{Error, Result};

use crate::{
    id::random_key,
    limits::{BULK_TOKEN_BYTES_MAX, TOKEN_BYTES_MIN},
};

/// A bearer token. What is printed of it is its length.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Box<str>);

impl Token {
    /// Its text, for the one place that sends it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// A new one, of 256 random bits.
    ///
    /// # Errors
    /// `Internal` if the system has no random bytes.
    pub fn random() -> Result<Self> {
        Ok(Self(hex::encode(random_key()?).into()))
    }

    /// The one that stands for this key.
    pub(crate) fn of_key(key: &[u8; 32]) -> Self {
        Self(hex::encode(key).into())
    }

    pub(super) fn hash(&self, key: &[u8; 32]) -> Hash {
        hash(key, self.0.as_bytes())
    }
}

/// What a token is compared by. Hashes of this kind are compared in constant time.
pub(super) fn hash(key: &[u8; 32], token: &[u8]) -> Hash {
    blake3::keyed_hash(key, token)
}

impl FromStr for Token {
    type Err = Error;

    /// Takes letters, digits and `-._~+/=`, as RFC 6750 has them.
    fn from_str(text: &str) -> Result<Self> {
        let bytes = text.len();
        if !(TOKEN_BYTES_MIN..=BULK_TOKEN_BYTES_MAX).contains(&bytes) {
            return Err(Error::invalid(format!(
                "token: {bytes} characters given, {TOKEN_BYTES_MIN} to {BULK_TOKEN_BYTES_MAX} \
                 allowed (make one with `openssl rand -hex 32`)"
            )));
        }
        if !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte)) {
            let allowed = "letters, digits and -._~+/= allowed";
            return Err(Error::invalid(format!("token: another character given, {allowed}")));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} characters)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_long_enough_and_fit_into_a_header() {
        let longest = "x".repeat(BULK_TOKEN_BYTES_MAX);
        for good in
            ["0123456789abcdef0123456789abcdef", "AZaz09-._~+/=AZaz09-._~+/=AZaz09", &longest]
        {
            assert_eq!(good.parse::<Token>().unwrap().reveal(), good);
        }
        let mut short = "y".repeat(TOKEN_BYTES_MIN);
        short.pop();
        for bad in
            ["", &short, &format!("{longest}x"), &format!("{short} {short}"), &"\u{e9}".repeat(40)]
        {
            let error = bad.parse::<Token>().unwrap_err().to_string();
            assert!(error.contains("allowed") && !error.contains(&short), "{error}");
        }
    }
}
