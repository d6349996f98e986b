//! Every background task of the server: named, cancelled, joined.
//!
//! A task that must live as long as the server is *critical*: if it panics or ends early, the server
//! is asked to drain, because a node that only looks alive is worse than one that is gone. Shutdown
//! cancels all, waits a bounded time, and says by name who is still running.

use std::{
    collections::BTreeMap,
    future::Future,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use rustix::process::{Signal, getpid, kill_process, setpriority_process};
use tokio::runtime::Handle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, warn};

/// The nice value of work that can wait.
const LOWEST_PRIORITY: i32 = 19;

/// A handle to the tasks of one server; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    tracker: TaskTracker,
    stop: CancellationToken,
    failed: CancellationToken,
    next: AtomicU64,
    running: Mutex<BTreeMap<u64, &'static str>>,
}

/// Takes the name off the list however the task ends.
struct Running {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.running.lock().remove(&self.number);
    }
}

impl Tasks {
    /// No tasks yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancelled when tasks should end.
    #[must_use]
    pub fn stop_token(&self) -> CancellationToken {
        self.shared.stop.clone()
    }

    /// Cancelled when a critical task panicked or ended before it was asked to.
    #[must_use]
    pub fn failed_token(&self) -> CancellationToken {
        self.shared.failed.clone()
    }

    /// Starts a task whose end is no reason to stop; a panic is logged.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.enter(name);
        self.shared.tracker.spawn(async move {
            let _running = running;
            if AssertUnwindSafe(task).catch_unwind().await.is_err() {
                error!(task = name, "task panicked");
            }
        });
    }

    /// Starts a task that must run until the [stop token](Self::stop_token) is cancelled; any other
    /// end cancels the [failed token](Self::failed_token).
    pub fn spawn_critical(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let running = self.enter(name);
        self.shared.tracker.spawn(watch_critical(running, name, task));
    }

    /// Like [`spawn_critical`](Self::spawn_critical), on a thread of its own: for a task that waits
    /// for a disk, which would hold up every other task on a thread of the runtime.
    ///
    /// A thread cannot be ended from outside. Shutdown waits for it as for every task, within the
    /// grace and no longer; one that hangs then ends with the process.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn spawn_thread_critical(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let (running, tracked) = (self.enter(name), self.shared.tracker.token());
        let runtime = Handle::current();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Dropped in reverse: the name is off the list before the end is noticed.
            let _tracked = tracked;
            runtime.block_on(watch_critical(running, name, task));
        });
        if let Err(error) = thread {
            error!(task = name, %error, "critical thread not started, the node will drain");
            self.shared.failed.cancel();
        }
    }

    /// Runs work on a thread of its own that gets the processor when nobody else wants it. The work
    /// must look at the stop token between its steps.
    pub fn spawn_idle(
        &self,
        name: &'static str,
        work: impl FnOnce(CancellationToken) + Send + 'static,
    ) {
        let (running, tracked) = (self.enter(name), self.shared.tracker.token());
        let stop = self.stop_token();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Dropped in reverse: the name is off the list before the end is noticed.
            let _tracked = tracked;
            let _running = running;
            // Of this thread alone: that is what a process id of none means on Linux.
            if let Err(errno) = setpriority_process(None, LOWEST_PRIORITY) {
                warn!(task = name, %errno, "thread keeps its priority");
            }
            work(stop);
        });
        if let Err(error) = thread {
            warn!(task = name, %error, "thread not started, its work is left undone");
        }
    }

    /// Names of the tasks that run now, in the order of their start.
    #[must_use]
    pub fn running(&self) -> Vec<&'static str> {
        self.shared.running.lock().values().copied().collect()
    }

    /// Asks all tasks to end and waits for them, at most `grace`; returns the names of those that
    /// still run.
    ///
    /// # Cancel safety
    /// Safe: tasks stay cancelled.
    pub async fn shutdown(&self, grace: Duration) -> Vec<&'static str> {
        self.shared.stop.cancel();
        self.shared.tracker.close();
        if tokio::time::timeout(grace, self.shared.tracker.wait()).await.is_ok() {
            return Vec::new();
        }
        let late = self.running();
        warn!(tasks = ?late, grace_ms = grace.as_millis(), "tasks still running at shutdown");
        late
    }

    fn enter(&self, name: &'static str) -> Running {
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        self.shared.running.lock().insert(number, name);
        Running { shared: Arc::clone(&self.shared), number }
    }
}

/// Runs a critical task; its end is a failure unless it was asked to end.
async fn watch_critical(running: Running, name: &'static str, task: impl Future<Output = ()>) {
    let panicked = AssertUnwindSafe(task).catch_unwind().await.is_err();
    let shared = &running.shared;
    if panicked || !shared.stop.is_cancelled() {
        error!(task = name, panicked, "critical task ended, the node will drain");
        shared.failed.cancel();
    }
}

/// Starts a thread that ends this process, as SIGKILL would, unless it has ended within `limit`.
///
/// For the end of a shutdown: a thread that waits for a disk that does not answer keeps whoever
/// closes what it uses waiting too, destructors at exit among them. Nothing in here waits for it.
pub fn end_process_within(limit: Duration) {
    let last = std::thread::Builder::new().name("last resort".to_owned()).spawn(move || {
        // A channel to nobody: the one way of sleeping that cannot be woken.
        let (_never, wait) = std::sync::mpsc::channel::<()>();
        if wait.recv_timeout(limit).is_err() {
            error!(limit_ms = limit.as_millis(), "the process does not end by itself, killing it");
            if let Err(errno) = kill_process(getpid(), Signal::KILL) {
                error!(%errno, "the process cannot be killed, aborting it");
                std::process::abort();
            }
        }
    });
    if let Err(error) = last {
        warn!(%error, "nobody watches that the process ends");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shutdown_names_who_is_late() {
        let tasks = Tasks::new();
        let stop = tasks.stop_token();
        tasks.spawn("obedient", async move { stop.cancelled().await });
        tasks.spawn("deaf", std::future::pending());
        assert_eq!(tasks.running(), ["obedient", "deaf"]);
        assert_eq!(tasks.shutdown(Duration::from_secs(1)).await, ["deaf"]);
    }

    #[tokio::test]
    async fn the_panic_of_a_critical_task_is_a_failure_and_that_of_another_is_not() {
        let tasks = Tasks::new();
        tasks.spawn("optional", async { panic!("a test") });
        while !tasks.running().is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(!tasks.failed_token().is_cancelled());
        tasks.spawn_critical("needed", async { panic!("a test") });
        tasks.failed_token().cancelled().await;
    }

    #[tokio::test]
    async fn a_critical_task_that_ends_when_asked_is_no_failure() {
        let tasks = Tasks::new();
        let stop = tasks.stop_token();
        tasks.spawn_critical("sweeper", async move { stop.cancelled().await });
        assert!(tasks.shutdown(Duration::from_secs(5)).await.is_empty());
        assert!(!tasks.failed_token().is_cancelled());
    }

    #[tokio::test]
    async fn idle_work_has_the_lowest_priority_and_is_joined() {
        let tasks = Tasks::new();
        let (send, receive) = tokio::sync::oneshot::channel();
        tasks.spawn_idle("idle", move |stop| {
            let nice = rustix::process::getpriority_process(None).unwrap();
            send.send(nice).unwrap();
            while !stop.is_cancelled() {
                std::thread::yield_now();
            }
        });
        assert_eq!(receive.await.unwrap(), LOWEST_PRIORITY);
        assert_eq!(tasks.running(), ["idle"]);
        assert_eq!(rustix::process::getpriority_process(None).unwrap(), 0, "ours stays as it is");
        assert!(tasks.shutdown(Duration::from_secs(10)).await.is_empty());
        assert!(tasks.running().is_empty());
    }

    #[tokio::test]
    async fn a_critical_thread_may_block_and_is_joined() {
        let tasks = Tasks::new();
        let stop = tasks.stop_token();
        let (send, receive) = tokio::sync::oneshot::channel();
        tasks.spawn_thread_critical("writer", async move {
            send.send(std::thread::current().name().map(str::to_owned)).unwrap();
            // Timers work there, as on the runtime's own threads.
            tokio::time::sleep(Duration::from_millis(1)).await;
            stop.cancelled().await;
        });
        assert_eq!(receive.await.unwrap().as_deref(), Some("writer"));
        assert_eq!(tasks.running(), ["writer"]);
        assert!(tasks.shutdown(Duration::from_secs(10)).await.is_empty());
        assert!(!tasks.failed_token().is_cancelled());
    }

    #[tokio::test]
    async fn a_critical_thread_that_panics_or_ends_early_is_a_failure() {
        for panics in [true, false] {
            let tasks = Tasks::new();
            tasks.spawn_thread_critical("writer", async move { assert!(!panics, "a test") });
            tasks.failed_token().cancelled().await;
        }
    }

    /// Names the test below to the process that it starts.
    const HANGING: &str = "KVSTRATA_TEST_HANGS";

    #[test]
    fn a_thread_that_hangs_keeps_neither_shutdown_nor_the_process() {
        if std::env::var_os(HANGING).is_some() {
            hang();
        }
        let name = "tasks::tests::a_thread_that_hangs_keeps_neither_shutdown_nor_the_process";
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(HANGING, "yes")
            .output()
            .unwrap();
        let status = output.status;
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{status}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("late: [\"hung\"]"), "{said}");
    }

    /// What a server does at its end whose disk does not answer.
    fn hang() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (_kept, disk) = std::sync::mpsc::channel::<()>();
        let late = runtime.block_on(async move {
            let tasks = Tasks::new();
            tasks.spawn_thread_critical("hung", async move { disk.recv().unwrap_or_default() });
            tasks.shutdown(Duration::from_millis(20)).await
        });
        println!("late: {late:?}");
        end_process_within(Duration::from_millis(20));
        loop {
            std::thread::park();
        }
    }
}
