//! Opens a bucket by its URL. Credentials, region and endpoint come from the environment variables
//! that the provider's own tools read, or from options of the same names.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use object_store::{
    BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    local::LocalFileSystem,
    multipart::MultipartStore,
    path::Path,
};
use url::Url;

use super::{Backend, Bucket, Parts};
use crate::{
    error::{Error, ErrorKind, Result},
    limits::MIB,
    object::{metrics::ObjectMetrics, prices::Prices},
};

/// How long making a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The suffix of buckets of S3 Express, which lists in no order.
const EXPRESS_SUFFIX: &str = "--x-s3";
/// What a URL may begin with.
pub const SCHEMES: [&str; 8] = ["s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file"];

/// Where the bucket is, and how it is asked.
#[derive(Clone)]
pub struct BucketConfig {
    /// `s3://bucket/path`, `gs://bucket/path`, `az://container/path` or `file:///directory`.
    pub url: String,
    /// Options of the provider by name, such as `endpoint`, `region`, `access_key_id`; they come
    /// before the environment. Values may be secret and are never shown.
    pub options: Vec<(String, String)>,
    /// The longest time of one request, of a part of a large object too.
    pub request_timeout: Duration,
    /// Requests under way at a time, 1 to 65536; the store may make it fewer.
    pub concurrency_max: usize,
    /// Larger objects are written in parts, if the store takes parts.
    pub multipart_above_bytes: u64,
    /// Bytes of a part; S3 wants at least 5 MiB.
    pub part_bytes: usize,
    /// What the store charges.
    pub prices: Prices,
}

impl Default for BucketConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            options: Vec::new(),
            request_timeout: Duration::from_secs(30),
            concurrency_max: 64,
            // A pack goes in one request: in parts of 8 MiB it would cost six (benches/README.md).
            multipart_above_bytes: 40 * MIB,
            part_bytes: 8 << 20,
            prices: Prices::default(),
        }
    }
}

impl BucketConfig {
    /// Requests that writing an object of so many bytes takes.
    #[must_use]
    pub fn put_requests(&self, bytes: u64) -> u64 {
        if bytes > self.multipart_above_bytes {
            // Those that begin and complete it, too.
            bytes.div_ceil(self.part_bytes as u64) + 2
        } else {
            1
        }
    }
}

impl fmt::Debug for BucketConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.options.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("BucketConfig")
            .field("url", &self.url)
            .field("options", &names)
            .field("request_timeout", &self.request_timeout)
            .field("concurrency_max", &self.concurrency_max)
            .field("multipart_above_bytes", &self.multipart_above_bytes)
            .field("part_bytes", &self.part_bytes)
            .field("prices", &self.prices)
            .finish()
    }
}

impl Bucket {
    /// Opens a bucket. Nothing is sent yet: see [`Self::probe`].
    ///
    /// # Errors
    /// `Invalid` for a URL, an option or a number that cannot work, naming it; `Unavailable` for a
    /// directory that cannot be made.
    pub fn open(config: BucketConfig, metrics: ObjectMetrics) -> Result<Arc<Self>> {
        let url = checked(&config)?;
        let backend = match url.scheme() {
            "file" => directory(&url)?,
            "s3" | "s3a" => s3(&config, &url)?,
            "gs" => gcs(&config, &url)?,
            "az" | "azure" | "abfs" | "abfss" => azure(&config, &url)?,
            other => {
                return Err(Error::invalid(format!(
                    "object.url: `{other}://` given, s3://, gs://, az:// or file:/// allowed"
                )));
            }
        };
        Ok(Self::new(backend, config, metrics))
    }
}

/// The URL, if it and the numbers can work.
fn checked(config: &BucketConfig) -> Result<Url> {
    let parsed = Url::parse(&config.url);
    let url = parsed.map_err(|error| {
        Error::invalid("object.url: not a URL like s3://bucket/path").because(error)
    })?;
    if url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(Error::invalid(
            "object.url: a password, `?` or `#` in it: give credentials and options apart",
        ));
    }
    if !(1..=65_536).contains(&config.concurrency_max) {
        let given = config.concurrency_max;
        return Err(Error::invalid(format!(
            "object.concurrency_max: {given} given, 1 to 65536 allowed"
        )));
    }
    if config.part_bytes == 0 || config.request_timeout.is_zero() {
        return Err(Error::invalid("object: a part or a timeout of 0 given, more required"));
    }
    Ok(url)
}

fn refused(url: &Url, error: object_store::Error) -> Error {
    Error::invalid(format!("object.url: open {url}")).because(error)
}

fn prefix(url: &Url) -> Result<Path> {
    Path::from_url_path(url.path().trim_matches('/'))
        .map_err(|error| Error::invalid("object.url: its path cannot be used").because(error))
}

fn directory(url: &Url) -> Result<Backend> {
    let directory = url.to_file_path().map_err(|()| {
        Error::invalid("object.url: not a directory of this machine, as in file:///var/blocks")
    })?;
    let cannot = |error: Box<dyn std::error::Error + Send + Sync>| {
        let doing = format!("make the directory of object.url, {}", directory.display());
        Error::new(ErrorKind::Unavailable, doing).because(error)
    };
    std::fs::create_dir_all(&directory).map_err(|error| cannot(error.into()))?;
    let store =
        LocalFileSystem::new_with_prefix(&directory).map_err(|error| cannot(error.into()))?;
    // A pack that a manifest names must be there after a power loss.
    let store = Arc::new(store.with_fsync(true).with_automatic_cleanup(true));
    Ok(Backend { store, in_parts: None, lists_sorted: false, prefix: Path::default() })
}

fn remote<S: ObjectStore + MultipartStore>(store: S, url: &Url) -> Result<Backend> {
    let store = Arc::new(store);
    let lists_sorted = url.host_str().is_none_or(|bucket| !bucket.ends_with(EXPRESS_SUFFIX));
    let in_parts = Some(Parts(Arc::<S>::clone(&store)));
    Ok(Backend { store, in_parts, lists_sorted, prefix: prefix(url)? })
}

fn s3(config: &BucketConfig, url: &Url) -> Result<Backend> {
    let mut builder = AmazonS3Builder::from_env().with_url(url.as_str());
    for (key, value) in client_options(config) {
        builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
    }
    for (name, value) in &config.options {
        builder = builder.with_config(key(name)?, value);
    }
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    let builder = builder
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        // Not every store has the request that deletes several.
        .with_disable_bulk_delete(true)
        .with_retry(no_retries());
    remote(builder.build().map_err(|error| refused(url, error))?, url)
}

fn gcs(config: &BucketConfig, url: &Url) -> Result<Backend> {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str());
    for (key, value) in client_options(config) {
        builder = builder.with_config(GoogleConfigKey::Client(key), value);
    }
    for (name, value) in &config.options {
        builder = builder.with_config(key(name)?, value);
    }
    let store = builder.with_retry(no_retries()).build();
    remote(store.map_err(|error| refused(url, error))?, url)
}

fn azure(config: &BucketConfig, url: &Url) -> Result<Backend> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
    for (key, value) in client_options(config) {
        builder = builder.with_config(AzureConfigKey::Client(key), value);
    }
    for (name, value) in &config.options {
        builder = builder.with_config(key(name)?, value);
    }
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    let store = builder.with_retry(no_retries()).build();
    remote(store.map_err(|error| refused(url, error))?, url)
}

/// An option by its name.
fn key<K: FromStr>(name: &str) -> Result<K> {
    name.to_ascii_lowercase().parse().map_err(|_unknown| {
        Error::invalid(format!("object.options.{name}: not an option of this kind of store"))
    })
}

fn client_options(config: &BucketConfig) -> [(ClientConfigKey, String); 4] {
    let seconds = |duration: Duration| format!("{} ms", duration.as_millis());
    [
        (ClientConfigKey::Timeout, seconds(config.request_timeout)),
        (ClientConfigKey::ConnectTimeout, seconds(CONNECT_TIMEOUT)),
        (ClientConfigKey::PoolMaxIdlePerHost, config.concurrency_max.to_string()),
        (ClientConfigKey::UserAgent, concat!("kvstrata/", env!("CARGO_PKG_VERSION")).to_owned()),
    ]
}

/// Retries are ours: see [`super::retry`].
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, backoff: BackoffConfig::default() }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn open(url: &str, options: &[(&str, &str)]) -> Result<Arc<Bucket>> {
        let options = options.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        let config = BucketConfig {
            url: url.to_owned(),
            options: options.collect(),
            ..BucketConfig::default()
        };
        Bucket::open(config, ObjectMetrics::register(&mut Registry::default()))
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        for (url, option, says) in [
            ("bucket", "", "not a URL"),
            ("ftp://bucket/path", "", "`ftp://` given"),
            ("s3://bucket/path?region=x", "", "give credentials and options apart"),
            ("s3://user:secret@bucket/", "", "give credentials and options apart"),
            ("s3://bucket/path", "colour", "object.options.colour"),
            ("az://container/path", "region", "object.options.region"),
        ] {
            let options: &[_] = if option.is_empty() { &[] } else { &[(option, "red")] };
            let error = open(url, options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url}");
            assert!(error.to_string().contains(says), "{url}: {error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn every_kind_of_store_opens() {
        let s3 = [("endpoint", "http://127.0.0.1:1"), ("region", "us-east-1")];
        let bucket = open("s3://bucket/a/b", &s3).unwrap();
        assert_eq!(bucket.prefix.as_ref(), "a/b");
        assert!(bucket.in_parts.is_some() && bucket.lists_sorted);
        let express = open("s3://bucket--use1-az4--x-s3", &s3).unwrap();
        assert!(!express.lists_sorted, "S3 Express lists in no order");
        assert!(open("gs://bucket/path", &[]).is_ok());
        assert!(open("az://container/path", &[("account_name", "a")]).is_ok());
    }

    #[test]
    fn values_of_options_are_not_shown() {
        let options = vec![("secret_access_key".to_owned(), "hidden".to_owned())];
        let config = BucketConfig { options, ..BucketConfig::default() };
        let shown = format!("{config:?}");
        assert!(shown.contains("secret_access_key") && !shown.contains("hidden"), "{shown}");
    }
}
