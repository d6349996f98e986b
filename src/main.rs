//! The `kvstrata` binary: a runtime, and the command line in it.

use std::{
    io::{self, Write},
    process::ExitCode,
};

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            let told = writeln!(io::stderr().lock(), "kvstrata: start the runtime: {why}");
            return told.map_or(ExitCode::FAILURE, |()| ExitCode::FAILURE);
        }
    };
    let code = runtime.block_on(kvstrata::cli::run());
    // What is still running has been asked to end and named in the log.
    runtime.shutdown_background();
    code
}
