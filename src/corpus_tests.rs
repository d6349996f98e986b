//! Inputs of decoders that are kept beside them, and seeded changes of those, for tests.
//!
//! A corpus is a folder of files. What is `good-` must be read, what is `bad-` must be refused. Those that
//! are made are written again on purpose with `KVSTRATA_REWRITE_CORPUS=1`. Changes are tried for a moment,
//! or for `KVSTRATA_FUZZ_SECONDS`; `KVSTRATA_FUZZ_SEED` makes other ones.

use std::{env, fs, path::PathBuf, time::Duration};

use kvstrata_tiers::testing::Mutator;
use tokio::time::Instant;

/// Changes that every test run tries.
const ROUNDS: u64 = 20_000;
/// Changed inputs that are changed further, because they were read.
const POOL_MAX: usize = 256;

/// A folder of inputs.
pub(crate) struct Corpus {
    home: PathBuf,
}

impl Corpus {
    /// The one in this folder of `src`.
    pub(crate) fn of(room: &str) -> Self {
        let home = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src").join(room).join("corpus");
        Self { home }
    }

    /// Its inputs with their names, in order.
    pub(crate) fn files(&self) -> Vec<(String, Vec<u8>)> {
        let files = fs::read_dir(&self.home).unwrap().map(|file| file.unwrap());
        let mut files: Vec<_> = files
            .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
            .collect();
        files.sort();
        assert!(files.iter().filter(|(name, _)| name.starts_with("good-")).count() > 2);
        assert!(files.iter().filter(|(name, _)| name.starts_with("bad-")).count() > 2);
        files
    }

    /// One of its inputs.
    pub(crate) fn file(&self, name: &str) -> Vec<u8> {
        fs::read(self.home.join(name)).unwrap()
    }

    /// Writes what is made, if that is asked for.
    pub(crate) fn rewrite(&self, made: impl FnOnce() -> Vec<(&'static str, Vec<u8>)>) {
        if env::var_os("KVSTRATA_REWRITE_CORPUS").is_none() {
            return;
        }
        fs::create_dir_all(&self.home).unwrap();
        for (name, bytes) in made() {
            fs::write(self.home.join(name), bytes).unwrap();
        }
    }
}

/// Changed inputs, one after the other.
pub(crate) struct Changes {
    pub(crate) mutator: Mutator,
    pool: Vec<Vec<u8>>,
    rounds: u64,
    read: u64,
    until: Option<Instant>,
}

impl Changes {
    /// Of these inputs.
    pub(crate) fn of(pool: Vec<Vec<u8>>) -> Self {
        let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let mutator = Mutator::new(number("KVSTRATA_FUZZ_SEED").unwrap_or(1));
        let seconds = number("KVSTRATA_FUZZ_SECONDS").map(Duration::from_secs);
        let until = seconds.map(|seconds| Instant::now() + seconds);
        Self { mutator, pool, rounds: 0, read: 0, until }
    }

    /// The next one; none at the end, when some must have been read and some not.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        let over = self.until.is_none_or(|until| Instant::now() >= until);
        if self.rounds >= ROUNDS && over {
            let (rounds, read) = (self.rounds, self.read);
            println!("{rounds} inputs, {read} of them read");
            assert!(read > 100 && read < rounds, "{read} of {rounds} tells nothing");
            return None;
        }
        self.rounds += 1;
        let mut input = self.pool[self.mutator.below(self.pool.len())].clone();
        let other = self.mutator.below(self.pool.len());
        self.mutator.mutate(&mut input, &self.pool[other]);
        Some(input)
    }

    /// Takes an input that was read, to change it further.
    pub(crate) fn note_read(&mut self, input: Vec<u8>) {
        self.read += 1;
        if self.pool.len() < POOL_MAX {
            self.pool.push(input);
        } else if self.mutator.chance(10) {
            let place = self.mutator.below(POOL_MAX);
            self.pool[place] = input;
        }
    }
}
