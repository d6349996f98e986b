//! Sessions without a network.

use super::*;
use crate::{auth::ONLY_TENANT, lease::LeaseLimits};

const TTL: Duration = Duration::from_secs(30);

fn tables() -> (LeaseTable<u32>, SessionTable<u32>) {
    let metrics = ServerMetrics::register(&mut prometheus_client::registry::Registry::default());
    let limits = LeaseLimits {
        ttl_default: TTL,
        ttl_max: TTL,
        session_bytes_max: 1000,
        total_bytes_max: 1000,
    };
    let leases = LeaseTable::new(limits, metrics.clone(), |_pins| {});
    (leases.clone(), SessionTable::new(leases, metrics))
}

fn anyone() -> Arc<Bearer> {
    Arc::new(Bearer::anyone())
}

#[tokio::test]
async fn the_end_of_a_session_ends_everything_it_owns() {
    let (leases, sessions) = tables();
    let (guard, _events) = sessions.open("test".to_owned(), anyone()).unwrap();
    let session = Arc::clone(guard.session());
    leases.reserve(session.id(), 10).unwrap().grant(1, 1, 10, TTL).unwrap();
    let put = session.begin_put().unwrap();
    assert_eq!((sessions.count(), leases.usage()), (1, (1, 10)));
    drop(guard);
    assert!(session.ended().is_cancelled());
    assert_eq!((sessions.count(), leases.usage()), (0, (0, 0)));
    assert_eq!(
        sessions.find(ONLY_TENANT, session.id()).unwrap_err().kind(),
        ErrorKind::LeaseExpired
    );
    assert!(leases.reserve(session.id(), 10).is_err());
    drop(put);
}

#[tokio::test]
async fn a_drain_tells_the_open_sessions_and_refuses_new_ones() {
    let (_leases, sessions) = tables();
    let (guard, mut events) = sessions.open("test".to_owned(), anyone()).unwrap();
    sessions.drain(TTL);
    assert_eq!(events.recv().await, Some(Event::Draining(TTL)));
    assert_eq!(
        sessions.open("late".to_owned(), anyone()).unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    sessions.end_all();
    assert!(guard.session().ended().is_cancelled());
    let wait = sessions.wait_none();
    drop(guard);
    wait.await;
}

#[tokio::test]
async fn puts_of_one_session_are_bounded_and_counted_down() {
    let (_leases, sessions) = tables();
    let (guard, _events) = sessions.open("test".to_owned(), anyone()).unwrap();
    let session = guard.session();
    let puts: Vec<_> = (0..PUTS_PER_SESSION_MAX).map(|_| session.begin_put().unwrap()).collect();
    let refused = session.begin_put().unwrap_err();
    assert_eq!(refused.retry_after(), Some(RETRY_AFTER_COUNT));
    drop(puts);
    session.begin_put().unwrap();
}
