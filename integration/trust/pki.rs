//! Certificates as tests need them: of a CA of their own, expired, for other names.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    date_time_ymd,
};

use super::Files;

/// A CA.
pub(super) struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Ca {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    /// Its certificate.
    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A certificate and its key, changed from one for this host that is valid.
    pub(super) fn issue(&self, change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Gives the files a certificate for a server, and this CA.
    pub(super) fn give(&self, files: &Files) {
        let (cert, key) = self.issue(|_params| {});
        files.write("ca", &self.pem());
        files.write("cert", &cert);
        files.write("key", &key);
    }
}

/// Makes a certificate one that has expired.
pub(super) fn expired(params: &mut CertificateParams) {
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2021, 1, 1);
}
