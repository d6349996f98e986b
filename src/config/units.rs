//! Sizes and times as people write them, and settings that may be left to the server.
//!
//! All of them are strings in every source (file, environment, flag), so that a number without a
//! unit cannot be mistaken; all print in the form in which they are read.

use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

use bytesize::ByteSize;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes, written like `64GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// A span of time, written like `30s` or `1m 30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

/// A setting that the server derives (`auto`) unless a value is given.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Auto<T> {
    /// The server derives it, as the field's documentation says.
    #[default]
    Auto,
    /// It was given.
    Given(T),
}

impl<T> Auto<T> {
    /// The value, if one was given.
    pub fn given(&self) -> Option<&T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }
}

/// A setting that may be absent on purpose (`none`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Maybe<T> {
    /// There is none.
    #[default]
    None,
    /// It was given.
    Given(T),
}

impl<T> Maybe<T> {
    /// The value, if there is one.
    pub fn given(&self) -> Option<&T> {
        match self {
            Self::None => None,
            Self::Given(value) => Some(value),
        }
    }
}

/// What would have been accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(String);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Size {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        match text.parse::<ByteSize>() {
            Ok(size) => Ok(Self(size.as_u64())),
            Err(_why) => Err(Unreadable("a size such as 512MiB or 64GiB".to_owned())),
        }
    }
}

impl FromStr for Period {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        match humantime::parse_duration(text) {
            Ok(duration) => Ok(Self(duration)),
            Err(_why) => Err(Unreadable("a time such as 500ms, 30s or 5m".to_owned())),
        }
    }
}

/// An address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let unreadable = |_error| Unreadable("an address such as 0.0.0.0:9402".to_owned());
        text.parse().map(Self).map_err(unreadable)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Auto<T> {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(value) => Ok(Self::Given(value)),
            Err(allowed) => Err(Unreadable(format!("auto, or {allowed}"))),
        }
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Maybe<T> {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        if text == "none" {
            return Ok(Self::None);
        }
        match text.parse() {
            Ok(value) => Ok(Self::Given(value)),
            Err(allowed) => Err(Unreadable(format!("none, or {allowed}"))),
        }
    }
}

impl fmt::Display for Size {
    /// The largest unit that divides the number, so that nothing is rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (bytes, unit) in UNITS {
            if self.0 > 0 && self.0.is_multiple_of(bytes) {
                return write!(f, "{}{unit}", self.0 / bytes);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl<T: fmt::Display> fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Given(value) => value.fmt(f),
        }
    }
}

impl<T: fmt::Display> fmt::Display for Maybe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Given(value) => value.fmt(f),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<T: fmt::Display> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<T: fmt::Display> Serialize for Maybe<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Maybe<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_text(deserializer)
    }
}

pub(super) fn to_text<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(super) fn from_text<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_in_the_form_in_which_they_are_read() {
        for text in ["64GiB", "512MiB", "3KiB", "1025B", "0B", "2TiB"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        assert_eq!("1.5GiB".parse::<Size>().unwrap(), Size(3 << 29));
        assert!("many".parse::<Size>().is_err());
        assert!("-1GiB".parse::<Size>().is_err());
    }

    #[test]
    fn auto_is_a_word_and_everything_else_a_value() {
        assert_eq!("auto".parse::<Auto<Size>>().unwrap(), Auto::Auto);
        assert_eq!("1KiB".parse::<Auto<Size>>().unwrap(), Auto::Given(Size(1024)));
        let refused = "soon".parse::<Auto<Period>>().unwrap_err().to_string();
        assert_eq!(refused, "auto, or a time such as 500ms, 30s or 5m");
        assert_eq!("none".parse::<Auto<Maybe<Size>>>().unwrap(), Auto::Given(Maybe::None));
        let refused = "never".parse::<Auto<Maybe<Size>>>().unwrap_err().to_string();
        assert_eq!(refused, "auto, or none, or a size such as 512MiB or 64GiB");
    }
}
