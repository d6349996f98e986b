//! Hello with and without a token, and the end of one that is valid no longer.

use super::*;
use crate::metrics::{Door, TrustMetrics, Unproven};

const OURS: &str = "default-token-0123456789-0123456789";
const THEIRS: &str = "another-token-0123456789-0123456789";
const UNAUTHENTICATED: u32 = 16;
/// The code of a session that is not known.
const ABORTED: u32 = 10;

/// A stage that asks for tokens: that of the session's tenant, and that of another one.
fn asking() -> (Stage, Gate) {
    let mut stage = Stage::new();
    let gate = Gate::closed(stage.metrics().clone()).unwrap();
    gate.replace(format!("{ONLY_TENANT} {OURS}\nother {THEIRS}\n").as_bytes()).unwrap();
    Arc::get_mut(&mut stage.bulk).unwrap().gate = gate.clone();
    (stage, gate)
}

impl Stage {
    fn metrics(&self) -> &TrustMetrics {
        &self.node().metrics.trust
    }

    /// What is answered to a hello with this token, in the name of the session.
    async fn hello(&self, token: &str) -> (Peer, Header, Bytes) {
        let mut peer = self.connect();
        let (version, credit) = (VERSION, BULK_CREDIT_BYTES_MIN);
        let session = *self.session.session().id().as_bytes();
        let token = Bytes::copy_from_slice(token.as_bytes());
        peer.say(|out| Hello { version, credit, session, token }.push(out)).await;
        let (header, body) = peer.hear().await.unwrap();
        (peer, header, body)
    }

    async fn refusal(&self, token: &str) -> Refused {
        let (mut peer, header, body) = self.hello(token).await;
        assert_eq!(header.kind, Kind::Refused);
        assert!(peer.hear().await.is_none(), "the connection ends");
        Refused::read(body).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn a_hello_without_a_valid_token_is_refused_and_counted() {
    let (stage, _gate) = asking();
    for (token, reason) in
        [("", Unproven::Missing), ("wrong", Unproven::Wrong), (&OURS[1..], Unproven::Wrong)]
    {
        let before = stage.metrics().unauthenticated(Door::Bulk, reason);
        let refused = stage.refusal(token).await;
        assert_eq!(refused.code, UNAUTHENTICATED, "{}", refused.text);
        assert!(refused.text.starts_with("token: "), "{}", refused.text);
        assert_eq!(stage.metrics().unauthenticated(Door::Bulk, reason), before + 1);
    }
    let (_peer, header, _body) = stage.hello(OURS).await;
    assert_eq!(header.kind, Kind::Welcome);
}

#[tokio::test(start_paused = true)]
async fn the_session_of_another_tenant_is_one_that_never_was() {
    let (stage, _gate) = asking();
    let refused = stage.refusal(THEIRS).await;
    assert_eq!(refused.code, ABORTED, "{}", refused.text);
    let ended = crate::lease::session_ended().to_string();
    assert_eq!(refused.text, ended);
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_when_its_token_is_valid_no_longer() {
    let (stage, gate) = asking();
    let (mut peer, header, _body) = stage.hello(OURS).await;
    assert_eq!(header.kind, Kind::Welcome);
    gate.replace(format!("other {THEIRS}\n").as_bytes()).unwrap();
    let (header, body) = peer.hear().await.unwrap();
    assert_eq!((header.kind, header.request), (Kind::Refused, 0));
    assert_eq!(Refused::read(body).unwrap().code, UNAUTHENTICATED);
    assert!(peer.hear().await.is_none());
    assert_eq!(stage.refusal(OURS).await.code, UNAUTHENTICATED);
}
