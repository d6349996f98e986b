//! What a router wants to know of a request of OpenAI's: which model, and the prompt if it can be seen.
//! Everything else belongs to the engine, which gets the body as it came.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

/// A request, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Asked {
    /// The model, or the adapter of it.
    #[serde(default)]
    pub(super) model: String,
    /// The prompt; none of a chat.
    #[serde(default)]
    pub(super) prompt: Option<Prompt>,
    /// Keeps the prompt's blocks from being those of others.
    #[serde(default)]
    pub(super) cache_salt: Option<String>,
    /// Whether tokens are sent as they come.
    #[serde(default)]
    pub(super) stream: Option<bool>,
}

/// A prompt: of several that are given together, the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    /// To be tokenised.
    Text,
    /// The first of several texts.
    FirstText(String),
    /// Its tokens.
    Tokens(Vec<u32>),
}

/// Reads a body.
///
/// # Errors
/// It is no JSON, or not of the form that it should be.
pub(super) fn read(body: &[u8]) -> serde_json::Result<Asked> {
    serde_json::from_slice(body)
}

/// One of several prompts, or a token of the only one.
enum Item {
    Token(u32),
    Tokens(Vec<u32>),
    Text(String),
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Given;
        impl<'de> Visitor<'de> for Given {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, tokens, or several of these")
            }

            fn visit_str<E: de::Error>(self, _text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompt, A::Error> {
                let first = match items.next_element()? {
                    Some(Item::Token(token)) => {
                        let mut tokens = vec![token];
                        while let Some(token) = items.next_element()? {
                            tokens.push(token);
                        }
                        return Ok(Prompt::Tokens(tokens));
                    }
                    Some(Item::Tokens(tokens)) => Prompt::Tokens(tokens),
                    Some(Item::Text(text)) => Prompt::FirstText(text),
                    None => Prompt::Tokens(Vec::new()),
                };
                while items.next_element::<de::IgnoredAny>()?.is_some() {}
                Ok(first)
            }
        }
        deserializer.deserialize_any(Given)
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Given;
        impl<'de> Visitor<'de> for Given {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token, tokens or a text")
            }

            fn visit_u64<E: de::Error>(self, token: u64) -> Result<Item, E> {
                u32::try_from(token).map(Item::Token).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = items.next_element()? {
                    tokens.push(token);
                }
                Ok(Item::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(Given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(json: &str) -> Option<Prompt> {
        read(format!("{{\"prompt\":{json}}}").as_bytes()).unwrap().prompt
    }

    #[test]
    fn prompts_are_seen_in_all_their_forms() {
        assert_eq!(prompt("\"a\\nb\""), Some(Prompt::Text));
        assert_eq!(prompt("[1, 2, 3]"), Some(Prompt::Tokens(vec![1, 2, 3])));
        assert_eq!(prompt("[[1, 2], [3]]"), Some(Prompt::Tokens(vec![1, 2])));
        assert_eq!(prompt("[\"a\", \"b\"]"), Some(Prompt::FirstText("a".into())));
        assert_eq!(prompt("[]"), Some(Prompt::Tokens(vec![])));
        assert_eq!(prompt("null"), None);
        let chat = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,
            "cache_salt":"s","tools":null,"n":1}"#;
        let chat = read(chat).unwrap();
        assert_eq!((chat.model.as_str(), chat.prompt, chat.stream), ("m", None, Some(true)));
        assert_eq!(chat.cache_salt.as_deref(), Some("s"));
    }

    #[test]
    fn what_is_no_request_is_no_prompt() {
        for body in ["", "[1", "{\"prompt\":5}", "{\"prompt\":[-1]}", "{\"prompt\":[1,\"a\"]}"] {
            assert!(read(body.as_bytes()).is_err(), "{body}");
        }
    }
}
