//! Starts and ends of a whole server in this process.

use super::*;

#[tokio::test]
async fn a_shutdown_while_nvme_is_recovering_ends_the_server_well() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    let any = "127.0.0.1:0".parse().unwrap();
    (config.server.grpc_listen, config.server.http_listen) = (any, any);
    config.dram.capacity = "64MiB".parse().unwrap();
    config.memory.limit = "1GiB".parse().unwrap();
    config.nvme.capacity = "64MiB".parse().unwrap();
    config.nvme.path = directory.path().join("nvme").display().to_string().parse().unwrap();
    config.identity.secret_file =
        directory.path().join("secret").display().to_string().parse().unwrap();
    let mut server = Server::bind(&config).await.unwrap();
    let mut served = false;
    // Over before anything is recovered.
    server.serve(async {}, |_addresses| served = true).await.unwrap();
    assert!(!served, "it never was ready");
}
