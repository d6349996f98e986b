//! Merges the sources and reports everything that is wrong with them at once.
//!
//! Each value is tried alone against the defaults, so that one bad value hides no other: the bad
//! ones are reported and left out, the good ones make the configuration that is then validated.

use std::{error::Error, ffi::OsString, fmt, path::PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::Config;

/// The prefix of environment variables that are settings.
const ENV_PREFIX: &str = "KV_";
/// What the environment is called in messages.
const ENVIRONMENT: &str = "environment";

/// A configuration file that has been read.
#[derive(Debug, Clone)]
pub struct FileSource {
    /// Where it was read from, for messages.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Everything that may set a value, weakest first.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file, if one was named.
    pub file: Option<FileSource>,
    /// `KV_` variables: name and value.
    pub env: Vec<(String, String)>,
    /// Flags: dotted key and value.
    pub flags: Vec<(String, String)>,
}

/// Takes what looks like a setting from the environment of a process.
pub fn env_sources(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Vec<(String, String)> {
    variables
        .into_iter()
        .map(|(name, value)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        })
        .filter(|(name, _)| name.starts_with(ENV_PREFIX))
        .collect()
}

/// One thing that is wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The dotted key, or the name as it was given.
    pub key: String,
    /// The value given, with its source where that is known.
    pub given: String,
    /// What is allowed.
    pub allowed: String,
}

impl Problem {
    /// Makes a problem.
    pub fn new(
        key: impl Into<String>,
        given: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self { key: key.into(), given: given.to_string(), allowed: allowed.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} given; allowed: {}", self.key, self.given, self.allowed)
    }
}

/// Everything that is wrong with the configuration; never empty when returned as an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the configuration has {} problem(s):", self.0.len())?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl Error for Problems {}

/// One value from one source.
struct Setting {
    key: String,
    value: Value,
    source: &'static str,
}

/// Merges the sources over the defaults and validates the result.
///
/// # Errors
/// All problems of all sources: unknown keys, unreadable values, and values out of range.
pub fn load(sources: &Sources) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    let defaults = Config::default().to_table();
    let settings = collect(sources, &defaults, &mut problems);
    let mut merged = defaults.clone();
    for setting in settings {
        let mut alone = defaults.clone();
        set(&mut alone, &setting.key, setting.value.clone());
        match Config::deserialize(alone) {
            Ok(_) => set(&mut merged, &setting.key, setting.value),
            Err(why) => problems.push(Problem::new(
                setting.key,
                format_args!("{} ({})", setting.value, setting.source),
                why.message(),
            )),
        }
    }
    match Config::deserialize(merged) {
        Ok(config) => {
            problems.extend(config.validate());
            if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
        }
        Err(why) => {
            problems.push(Problem::new("configuration", "the merged sources", why.message()));
            Err(Problems(problems))
        }
    }
}

impl Config {
    /// All keys with their values, as a TOML table.
    #[must_use]
    pub fn to_table(&self) -> Table {
        // Plain data with string keys always has a table; an empty one would refuse every key.
        Table::try_from(self).unwrap_or_default()
    }

    /// All dotted keys with their values, in alphabetical order: what is logged at start.
    #[must_use]
    pub fn settings(&self) -> Vec<(String, Value)> {
        let mut settings = Vec::new();
        flatten("", &Value::Table(self.to_table()), &mut settings);
        settings
    }
}

fn collect(sources: &Sources, defaults: &Table, problems: &mut Vec<Problem>) -> Vec<Setting> {
    let mut settings = Vec::new();
    if let Some(file) = &sources.file {
        collect_file(file, defaults, &mut settings, problems);
    }
    let env = sources.env.iter().map(|(name, value)| {
        let bare = name.strip_prefix(ENV_PREFIX).unwrap_or(name);
        (name, bare.to_lowercase().replace("__", "."), value, ENVIRONMENT)
    });
    let flags = sources.flags.iter().map(|(key, value)| (key, key.clone(), value, "flag"));
    for (name, key, text, source) in env.chain(flags) {
        match find(defaults, &key) {
            Some(default) if !default.is_table() => {
                settings.push(Setting { key, value: typed_like(default, text), source });
            }
            // A variable that is not ours may be a secret of something else.
            _ if source == ENVIRONMENT => {
                problems.push(unknown(name, format!("an unknown key ({source})"), defaults));
            }
            _ => problems.push(unknown(name, format!("{text:?} ({source})"), defaults)),
        }
    }
    settings
}

fn collect_file(
    file: &FileSource,
    defaults: &Table,
    settings: &mut Vec<Setting>,
    problems: &mut Vec<Problem>,
) {
    let table = match file.text.parse::<Table>() {
        Ok(table) => table,
        Err(why) => {
            let given = why.to_string().trim_end().replace('\n', "\n    ");
            problems.push(Problem::new(file.path.display().to_string(), given, "TOML"));
            return;
        }
    };
    let mut leaves = Vec::new();
    flatten("", &Value::Table(table), &mut leaves);
    for (key, value) in leaves {
        match find(defaults, &key) {
            Some(default) if !default.is_table() => {
                settings.push(Setting { key, value, source: "file" });
            }
            _ => problems.push(unknown(&key, format!("{value} (file)"), defaults)),
        }
    }
}

/// The problem of a key that does not exist, with the keys that do.
fn unknown(name: &str, given: String, defaults: &Table) -> Problem {
    let mut known = Vec::new();
    flatten("", &Value::Table(defaults.clone()), &mut known);
    let known: Vec<_> = known.into_iter().map(|(key, _)| key).collect();
    Problem::new(name, given, format!("one of the known keys ({})", known.join(", ")))
}

/// Reads the text of a variable or flag as the type that the key has.
fn typed_like(default: &Value, text: &str) -> Value {
    let typed = match default {
        Value::Boolean(_) => text.parse().ok().map(Value::Boolean),
        Value::Integer(_) => text.parse().ok().map(Value::Integer),
        Value::String(_)
        | Value::Float(_)
        | Value::Datetime(_)
        | Value::Array(_)
        | Value::Table(_) => None,
    };
    typed.unwrap_or_else(|| Value::String(text.to_owned()))
}

fn flatten(prefix: &str, value: &Value, leaves: &mut Vec<(String, Value)>) {
    match value {
        Value::Table(table) => {
            for (name, inner) in table {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&key, inner, leaves);
            }
        }
        leaf => leaves.push((prefix.to_owned(), leaf.clone())),
    }
}

fn find<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((section, rest)) => find(table.get(section)?.as_table()?, rest),
    }
}

fn set(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.to_owned(), value);
        }
        Some((section, rest)) => {
            if let Some(Value::Table(inner)) = table.get_mut(section) {
                set(inner, rest, value);
            }
        }
    }
}
