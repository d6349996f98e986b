//! Tries what the tier will need, once, and says in one line what is wrong and what to do.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Bucket, BucketError, BucketErrorKind, error::status};

/// The longest time of a probe.
const PROBE_DEADLINE: Duration = Duration::from_secs(20);
/// Where probes are made, below the path of the URL.
const PROBES: &str = "v1/probes";

/// What a store can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Whether of several writers of one name exactly one succeeds. Without it nobody can say who may
    /// write: the tier is read-only.
    pub conditional_create: bool,
}

impl Bucket {
    /// Writes, reads, lists and deletes a small object.
    ///
    /// # Errors
    /// What is wrong and what to do, in one line, with the kind of the request that failed.
    ///
    /// # Cancel safety
    /// Not safe: the small object may stay.
    pub async fn probe(&self) -> Result<Probe, BucketError> {
        let deadline = Instant::now() + PROBE_DEADLINE;
        let nonce = RandomState::new().hash_one(deadline);
        let name = format!("{PROBES}/{nonce:016x}");
        let body = Bytes::from(format!("kvstrata probe {nonce:016x}"));
        let explained = |what| move |error| self.explained(what, error);

        let conditional_create =
            self.try_creating(&name, &body, deadline).await.map_err(explained("write"))?;
        let read = self.get(&name, 0..body.len() as u64, deadline).await;
        let read = read.map_err(explained("read"))?;
        let listed = self.list(PROBES, deadline).await.map_err(explained("list"))?;
        self.delete(&name, deadline).await.map_err(explained("delete"))?;
        let wrong = |what: &str| {
            let doing = format!("use {}: {what}; is it a real object store?", self.url());
            BucketError::new(BucketErrorKind::Failed, doing)
        };
        if read != body {
            return Err(wrong("it returns other bytes than were written"));
        }
        if !listed.iter().any(|listed| listed.name == name) {
            return Err(wrong("it does not list what was just written"));
        }
        Ok(Probe { conditional_create })
    }

    /// Writes the object; says whether a second writer would have been refused.
    async fn try_creating(
        &self,
        name: &str,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<bool, BucketError> {
        match self.create(name, body.clone(), deadline).await {
            Ok(_) => {}
            Err(error) if error.kind() == BucketErrorKind::Unsupported => {
                self.put(name, vec![body.clone()], deadline).await?;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        let second = Bytes::from_static(b"kvstrata probe, second writer");
        let overwritten = self.create(name, second, deadline).await?;
        if overwritten {
            self.put(name, vec![body.clone()], deadline).await?;
        }
        Ok(!overwritten)
    }

    fn explained(&self, what: &'static str, error: BucketError) -> BucketError {
        let advice = advice(what, error.kind(), &error.to_string());
        let doing = format!("{what} in {}: {advice}", self.url());
        BucketError::new(error.kind(), doing).because(Some(Box::new(error)))
    }
}

/// What to do about a failed probe.
fn advice(what: &str, kind: BucketErrorKind, words: &str) -> String {
    let has = |texts: &[&str]| texts.iter().any(|text| words.contains(text));
    let advice = if has(&["NoSuchBucket", "ContainerNotFound", "specified bucket does not exist"]) {
        "there is no such bucket: create it, or correct object.url"
    } else if has(&["latest/api/token", "metadata.google", "Unable to load", "redential"])
        && kind != BucketErrorKind::Refused
    {
        "no credentials: set those of the provider, such as AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY, or give the pod a role"
    } else if has(&["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"]) {
        "the store does not know these credentials: correct access key, secret and region"
    } else if has(&["RequestTimeTooSkewed"]) {
        "the clocks differ: set this machine's clock"
    } else if has(&["without LOCATION", "AuthorizationHeaderMalformed", "PermanentRedirect"]) {
        "the bucket is in another region: set AWS_REGION or object.options.region"
    } else if kind == BucketErrorKind::Refused {
        return format!("not allowed: give these credentials the permission to {what} objects");
    } else if kind == BucketErrorKind::NotFound {
        "there is no such bucket or path: create the bucket, or correct object.url"
    } else if kind == BucketErrorKind::Timeout || has(&["error sending request", "dns error"]) {
        "no answer: check that the endpoint is right and can be reached from here"
    } else if status(words).is_some_and(|status| status >= 500) {
        "the store fails: try again later, or look at its own log"
    } else {
        "it does not work"
    };
    advice.to_owned()
}
