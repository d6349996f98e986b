//! The standard health service, which probes ask without a token.

use kvstrata_proto::v1::block_cache_server::SERVICE_NAME;
use tokio::sync::watch;
use tonic_health::{
    ServingStatus,
    pb::health_server::{Health, HealthServer},
    server::{HealthReporter, health_reporter},
};

/// The service's name for "the process lives", which never depends on anything.
const LIVENESS: &str = "liveness";

/// The service, and the work that tells its watchers what readiness says.
pub(crate) fn health(
    ready: watch::Receiver<bool>,
) -> (HealthServer<impl Health>, impl Future<Output = ()>) {
    let (reporter, service) = health_reporter();
    (service, follow_readiness(reporter, ready))
}

/// Tells health watchers what readiness says; liveness is always well.
async fn follow_readiness(reporter: HealthReporter, mut ready: watch::Receiver<bool>) {
    reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
    loop {
        let status = if *ready.borrow_and_update() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(SERVICE_NAME, status).await;
        if ready.changed().await.is_err() {
            return;
        }
    }
}
