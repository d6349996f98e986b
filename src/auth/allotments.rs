//! The tenants file: what each tenant may have of the node and do in a second.
//!
//! ```toml
//! ["team-a"]
//! dram_floor = "8GiB"          # what others leave it
//! dram_max = "32GiB"           # what it has at most
//! nvme_floor = "100GiB"
//! nvme_max = "1TiB"
//! object_max = "10TiB"
//! requests_per_second = 2000
//! bytes_per_second = "2GiB"
//! ```
//! All of it may be left out; who is not named has no quota. Names are those of the tokens file.

use std::collections::BTreeMap;

use kvstrata_tiers::{
    account::Quota,
    error::{Error, Result},
};
use serde::Deserialize;

use super::rates::RateLimits;
use crate::{config::Size, limits::TENANT_BYTES_MAX};

/// What is said of one tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allotment {
    /// The tenant.
    pub tenant: String,
    /// What it may have.
    pub quota: Quota,
    /// What it may do in a second.
    pub rates: RateLimits,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Section {
    dram_floor: Option<Size>,
    dram_max: Option<Size>,
    nvme_floor: Option<Size>,
    nvme_max: Option<Size>,
    object_max: Option<Size>,
    requests_per_second: Option<u64>,
    bytes_per_second: Option<Size>,
}

impl Section {
    fn quota(&self) -> Quota {
        let or = |given: Option<Size>, none: u64| given.map_or(none, |size| size.0);
        let none = Quota::default();
        Quota {
            dram_floor: or(self.dram_floor, none.dram_floor),
            dram_max: or(self.dram_max, none.dram_max),
            nvme_floor: or(self.nvme_floor, none.nvme_floor),
            nvme_max: or(self.nvme_max, none.nvme_max),
            object_max: or(self.object_max, none.object_max),
        }
    }

    fn rates(&self) -> RateLimits {
        let bytes = self.bytes_per_second.map(|size| size.0);
        RateLimits { requests: self.requests_per_second, bytes }
    }
}

/// All that the file says, by the names of tenants.
///
/// # Errors
/// `Invalid` with the line, or with the tenant, the field, the value and the range.
pub fn read(text: &[u8]) -> Result<Vec<Allotment>> {
    let text = str::from_utf8(text).map_err(|_bytes| Error::invalid("tenants: it is not UTF-8"))?;
    let sections: BTreeMap<String, Section> = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        Error::invalid(format!("tenants: line {line}: {}", error.message()))
    })?;
    sections.into_iter().map(|(tenant, section)| check(tenant, &section)).collect()
}

fn check(tenant: String, section: &Section) -> Result<Allotment> {
    let is_name = !tenant.is_empty() && tenant.bytes().all(|byte| byte.is_ascii_graphic());
    if tenant.len() > TENANT_BYTES_MAX || !is_name {
        return Err(Error::invalid(format!(
            "tenants: {tenant:?} given as a name, 1 to {TENANT_BYTES_MAX} characters of ASCII without white \
             space allowed"
        )));
    }
    let rates = section.rates();
    for (field, rate) in
        [("requests_per_second", rates.requests), ("bytes_per_second", rates.bytes)]
    {
        if rate == Some(0) {
            return Err(Error::invalid(format!(
                "tenant {tenant}: {field}: 0 given, 1 or more allowed; leave it out for no limit"
            )));
        }
    }
    Ok(Allotment { quota: section.quota(), rates, tenant })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_no_bound() {
        let text = "[\"team-a\"]\ndram_floor = \"1MiB\"\nnvme_max = \"2GiB\"\nbytes_per_second = \"3KiB\"\n\
                    [b]\nrequests_per_second = 7\n";
        let read = read(text.as_bytes()).unwrap();
        let none = Quota::default();
        let a = Quota { dram_floor: 1 << 20, nvme_max: 2 << 30, ..none };
        let expected = [
            ("team-a", a, RateLimits { requests: None, bytes: Some(3072) }),
            ("b", none, RateLimits { requests: Some(7), bytes: None }),
        ];
        let mut expected = expected.map(|(tenant, quota, rates)| {
            let tenant = tenant.to_owned();
            Allotment { tenant, quota, rates }
        });
        expected.sort_by(|one, other| one.tenant.cmp(&other.tenant));
        assert_eq!(read, expected);
        assert_eq!(super::read(b"# nobody\n").unwrap(), []);
    }

    #[test]
    fn what_is_wrong_is_told_by_line_or_by_tenant_and_field() {
        let table = [
            ("[a]\ndram_min = \"1MiB\"\n", "line 2: unknown field `dram_min`"),
            ("[a]\n\ndram_max = 5\n", "line 3: "),
            ("[a]\ndram_max = \"much\"\n", "a size such as 512MiB or 64GiB"),
            ("[a]\nrequests_per_second = 0\n", "tenant a: requests_per_second: 0 given, 1 or more"),
            ("[a]\nbytes_per_second = \"0B\"\n", "tenant a: bytes_per_second: 0 given, 1 or more"),
            ("[a]\nrequests_per_second = -1\n", "line 2: "),
            ("[\"a b\"]\n", "\"a b\" given as a name"),
            ("dram_max = \"1MiB\"\n", "line 1: "),
            ("[a]\n[a]\n", "line 2: "),
        ];
        for (text, told) in table {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(told), "{text:?}: {error}");
        }
        assert!(read(b"\xff").unwrap_err().to_string().contains("UTF-8"));
    }
}
