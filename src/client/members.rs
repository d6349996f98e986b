//! Member lists as they come.

use kvstrata_proto::v1;

use crate::members::{BulkPort, Member, Members};

impl From<v1::MemberList> for Members {
    fn from(wire: v1::MemberList) -> Self {
        let list = wire.members.into_iter().map(Member::from).collect();
        Self { epoch: wire.epoch, answering: wire.self_, list }
    }
}

impl From<v1::Member> for Member {
    fn from(wire: v1::Member) -> Self {
        let bulk = wire.bulk.map(|wire| BulkPort {
            tcp: wire.tcp,
            unix: wire.unix,
            instance: wire.instance,
        });
        Self {
            index: wire.index,
            name: wire.name,
            endpoint: wire.endpoint,
            zone: wire.zone,
            host: wire.host,
            bulk,
            draining: wire.draining,
            engines: wire.engines,
            version: wire.version,
            http: wire.http,
        }
    }
}
