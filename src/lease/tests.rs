//! Leases without a store: what is held is counted, and time is paused.

use std::sync::atomic::{AtomicI64, Ordering};

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_secs(30);

/// Pins that count how many are held.
struct Counted {
    held: Arc<AtomicI64>,
    table: LeaseTable<i64>,
}

fn table(session_bytes_max: u64, total_bytes_max: u64) -> Counted {
    let held = Arc::new(AtomicI64::new(0));
    let limits = LeaseLimits {
        ttl_default: TTL,
        ttl_max: Duration::from_secs(300),
        session_bytes_max,
        total_bytes_max,
    };
    let metrics = ServerMetrics::register(&mut prometheus_client::registry::Registry::default());
    let counter = Arc::clone(&held);
    let table = LeaseTable::new(limits, metrics, move |pins: i64| {
        counter.fetch_sub(pins, Ordering::SeqCst);
    });
    Counted { held, table }
}

impl Counted {
    fn session(&self) -> SessionId {
        let session = SessionId::random().unwrap();
        self.table.begin_session(session);
        session
    }

    /// Grants what can be had of `bytes`, one pin for each byte.
    fn grant(&self, session: SessionId, bytes: u64, ttl: Duration) -> Result<Granted> {
        let reservation = self.table.reserve(session, bytes)?;
        let pins = i64::try_from(reservation.bytes()).unwrap();
        self.held.fetch_add(pins, Ordering::SeqCst);
        let bytes = reservation.bytes();
        reservation.grant(pins, 1, bytes, ttl)
    }

    fn held(&self) -> i64 {
        self.held.load(Ordering::SeqCst)
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_abandoned_leases_leave_nothing() {
    let counted = table(1 << 40, 1 << 40);
    let session = counted.session();
    let stop = CancellationToken::new();
    let tasks = crate::tasks::Tasks::new();
    let (table, token) = (counted.table.clone(), stop.clone());
    tasks.spawn("sweeper", async move { table.sweep(token).await });
    for millis in 0..10_000 {
        counted.grant(session, 4096, TTL + Duration::from_millis(millis % 7)).unwrap();
    }
    assert_eq!(counted.table.usage(), (10_000, 10_000 * 4096));
    tokio::time::sleep(TTL + Duration::from_millis(10)).await;
    assert_eq!(counted.table.usage(), (0, 0));
    assert_eq!(counted.held(), 0);
    stop.cancel();
    assert!(tasks.shutdown(Duration::from_secs(1)).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lease_outlives_its_first_deadline_and_an_ended_one_cannot_be_renewed() {
    let counted = table(100, 100);
    let session = counted.session();
    let lease = counted.grant(session, 10, TTL).unwrap();
    tokio::time::advance(TTL / 2).await;
    counted.table.renew(session, lease.id, TTL).unwrap();
    tokio::time::advance(TTL / 2).await;
    assert_eq!(counted.table.expire(Instant::now()), 0);
    counted.table.check(session, lease.id).unwrap();
    tokio::time::advance(TTL / 2).await;
    let refused = counted.table.renew(session, lease.id, TTL).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LeaseExpired, "due, though not swept yet");
    assert_eq!(counted.table.expire(Instant::now()), 1);
    assert_eq!(counted.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_sweeper_wakes_for_a_lease_that_is_due_before_all_others() {
    let counted = table(100, 100);
    let session = counted.session();
    counted.grant(session, 10, TTL).unwrap();
    let tasks = crate::tasks::Tasks::new();
    let (table, token) = (counted.table.clone(), tasks.stop_token());
    tasks.spawn("sweeper", async move { table.sweep(token).await });
    tokio::time::sleep(Duration::from_millis(1)).await;
    counted.grant(session, 10, TTL / 10).unwrap();
    tokio::time::sleep(TTL / 10 + Duration::from_millis(1)).await;
    assert_eq!(counted.table.usage(), (1, 10));
    assert!(tasks.shutdown(Duration::from_secs(1)).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn bytes_are_bounded_per_session_and_in_total() {
    let counted = table(60, 100);
    let (a, b) = (counted.session(), counted.session());
    assert_eq!(counted.grant(a, 80, TTL).unwrap().bytes, 60, "the session's bound");
    assert_eq!(counted.grant(b, 80, TTL).unwrap().bytes, 40, "the bound of all");
    assert_eq!(counted.table.reserve(a, 1).unwrap().bytes(), 0);
    counted.table.end_session(a);
    assert_eq!(counted.table.reserve(b, 80).unwrap().bytes(), 20);
    assert_eq!(counted.table.usage(), (1, 40), "a dropped reservation gives its bytes back");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_granted_to_a_session_that_ended_meanwhile() {
    let counted = table(100, 100);
    let session = counted.session();
    let reservation = counted.table.reserve(session, 10).unwrap();
    counted.table.end_session(session);
    counted.held.fetch_add(10, Ordering::SeqCst);
    let refused = reservation.grant(10, 1, 10, TTL).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LeaseExpired);
    assert_eq!((counted.held(), counted.table.usage()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn only_the_owner_ends_or_renews_a_lease() {
    let counted = table(100, 100);
    let (owner, other) = (counted.session(), counted.session());
    let lease = counted.grant(owner, 10, TTL).unwrap();
    counted.table.release(other, lease.id);
    assert!(counted.table.renew(other, lease.id, TTL).is_err());
    assert_eq!(counted.table.usage().0, 1);
    counted.table.release(owner, lease.id);
    counted.table.release(owner, lease.id);
    assert_eq!((counted.held(), counted.table.usage()), (0, (0, 0)));
}

#[test]
fn a_ttl_over_the_limit_names_field_value_and_range() {
    let counted = table(1, 1);
    let ttl = |millis| counted.table.ttl("lease.ttl_ms", Duration::from_millis(millis));
    assert_eq!(ttl(0).unwrap(), TTL);
    assert_eq!(ttl(5).unwrap(), Duration::from_millis(5));
    let refused = ttl(300_001).unwrap_err().to_string();
    assert!(refused.starts_with("lease.ttl_ms: 300001 given, 1 to 300000 allowed"), "{refused}");
}

#[derive(Debug, Clone)]
enum Step {
    Grant { session: usize, bytes: u64, ttl_ms: u64 },
    Reserve { session: usize, bytes: u64 },
    DropReservation,
    GrantReservation,
    Renew { session: usize, lease: usize },
    Release { session: usize, lease: usize },
    Pass { millis: u64 },
    End { session: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..3_usize;
    let (bytes, lease) = (0..50_u64, 0..8_usize);
    prop_oneof![
        (session.clone(), bytes.clone(), 1..100_u64)
            .prop_map(|(session, bytes, ttl_ms)| Step::Grant { session, bytes, ttl_ms }),
        (session.clone(), bytes).prop_map(|(session, bytes)| Step::Reserve { session, bytes }),
        Just(Step::DropReservation),
        Just(Step::GrantReservation),
        (session.clone(), lease.clone())
            .prop_map(|(session, lease)| Step::Renew { session, lease }),
        (session.clone(), lease).prop_map(|(session, lease)| Step::Release { session, lease }),
        (0..60_u64).prop_map(|millis| Step::Pass { millis }),
        session.prop_map(|session| Step::End { session }),
    ]
}

/// Runs the steps; after each one the bounds hold and the table knows exactly the pins held.
async fn run(steps: Vec<Step>) {
    let counted = table(100, 150);
    let mut sessions: Vec<_> = (0..3).map(|_| counted.session()).collect();
    let (mut leases, mut reservations) = (Vec::new(), Vec::new());
    for step in steps {
        match step {
            Step::Grant { session, bytes, ttl_ms } => {
                let ttl = Duration::from_millis(ttl_ms);
                leases.push(counted.grant(sessions[session], bytes, ttl).unwrap().id);
            }
            Step::Reserve { session, bytes } => {
                reservations.push(counted.table.reserve(sessions[session], bytes).unwrap());
            }
            Step::DropReservation => drop(reservations.pop()),
            Step::GrantReservation => {
                if let Some(reservation) = reservations.pop() {
                    let bytes = reservation.bytes();
                    let pins = i64::try_from(bytes).unwrap();
                    counted.held.fetch_add(pins, Ordering::SeqCst);
                    leases.extend(reservation.grant(pins, 1, bytes, TTL).ok().map(|g| g.id));
                }
            }
            Step::Renew { session, lease } => {
                if let Some(&id) = leases.get(lease) {
                    let renewed = counted.table.renew(sessions[session], id, TTL);
                    assert!(renewed.is_ok() || counted.table.check(sessions[session], id).is_err());
                }
            }
            Step::Release { session, lease } => {
                if let Some(&id) = leases.get(lease) {
                    counted.table.release(sessions[session], id);
                    assert!(counted.table.check(sessions[session], id).is_err());
                }
            }
            Step::Pass { millis } => {
                tokio::time::advance(Duration::from_millis(millis)).await;
                let _count = counted.table.expire(Instant::now());
            }
            Step::End { session } => {
                counted.table.end_session(sessions[session]);
                sessions[session] = counted.session();
            }
        }
        let (_, bytes) = counted.table.usage();
        let reserved: u64 = reservations.iter().map(Reservation::bytes).sum();
        assert_eq!(counted.held(), i64::try_from(bytes).unwrap());
        assert!(bytes + reserved <= 150);
    }
    drop(reservations);
    sessions.into_iter().for_each(|session| counted.table.end_session(session));
    assert_eq!((counted.held(), counted.table.usage()), (0, (0, 0)));
}

proptest! {
    #[test]
    fn whatever_happens_every_pin_is_accounted_for(steps in prop::collection::vec(step(), 0..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(run(steps));
    }
}
